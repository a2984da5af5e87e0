"""Keeps running vLLM servers at the newest version of a run, over HTTP, one server after another.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "shardwell"}'
    python -m shardwell.engines.vllm_server --run gpt http://localhost:8000

Needs no vLLM in its own environment. The weights do not pass through this process.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn
from urllib.error import HTTPError

from shardwell.engines import EngineServer, follow
from shardwell.weights.reader import attach
from shardwell_wire.errors import UnavailableError
from shardwell_wire.host.variables import variables


class VllmServer(EngineServer):
    """A vLLM server that was started with the weight-transfer backend ``shardwell``.

    Its workers attach with the arguments ``attached`` of ``shardwell.attach``, such as a ``token_file`` of their host.
    For ``lead_s`` seconds, they read a version while the server still serves. The pause includes the rest.
    """

    def __init__(self, url: str, attached: dict[str, Any], *, timeout_s: float = 300.0, lead_s: float = 0.0) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self._attached, self._lead_s = attached, lead_s

    def version(self) -> int:
        label = self._call("weight_info")["weight_version"]
        return int(label) if label.isdecimal() else -1

    def update(self, version: int, history: str = "") -> None:
        """See ``EngineServer.update``. Running requests finish with the former version, then the server pauses.

        If not all workers can read the version, the server goes on with the former version. If vLLM fails while it
        loads what they have read, the server stays paused until an update succeeds.
        """
        if self.version() < 0 or self.history != history:
            self._attach()
        self.history = None
        started, read, loaded = ({"version": version, "until": until} for until in ("started", "read", "loaded"))
        self._call("start_weight_update", {})
        try:
            if self._lead_s > 0:
                self._call("update_weights", {"update_info": started})
                time.sleep(self._lead_s)
            self._call("pause?mode=wait", {})
            self._call("update_weights", {"update_info": read})
        except BaseException:  # also Ctrl-C
            for path in ("finish_weight_update", "resume"):
                with suppress(UnavailableError):
                    self._call(path, {})
            raise
        self._call("update_weights", {"update_info": loaded})
        self._call("finish_weight_update", {"weight_version": str(version)})
        self._call("resume", {})
        self.history = history

    def _attach(self) -> None:
        body = {"init_info": self._attached}
        try:
            self._call("init_weight_transfer_engine", body)
        except UnavailableError as error:
            if not isinstance(error.__cause__, HTTPError):
                raise
            with suppress(UnavailableError):  # ends the update of a caller that was killed
                self._call("finish_weight_update", {})
            self._call("init_weight_transfer_engine", body)


def main() -> NoReturn:
    """Follows a run as a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL", help="vLLM servers, such as http://localhost:8000")
    parser.add_argument("--address", help="coordinator (default: SHARDWELL_ADDRESS)")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--token-file", help="file with a reader's token, here and on the servers' hosts")
    parser.add_argument("--gather-dtype", default="float32", help="dtype in which the servers receive 32-bit weights")
    parser.add_argument("--delta-cache-bytes", type=int, default=0, help="memory of each server's host for deltas")
    parser.add_argument("--lead-s", type=float, default=0.0, help="seconds in which a server reads and still serves")
    attached = vars(parser.parse_args())
    urls, lead_s = attached.pop("servers"), attached.pop("lead_s")
    attached["address"] = attached["address"] or variables().get("SHARDWELL_ADDRESS") or "localhost:50051"
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends an update as Ctrl-C does
    with attach(**attached) as reader:
        follow(reader, [VllmServer(url, attached, lead_s=lead_s) for url in urls])


if __name__ == "__main__":
    main()
