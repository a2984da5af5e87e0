"""Keeps running vLLM servers at the newest version of a run, over HTTP, one server after another.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "shardwell"}'
    python -m shardwell.engines.vllm_server --run gpt http://localhost:8000

Needs no vLLM in its own environment. The weights do not pass through this process.
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError

from shardwell.engines import EngineServer, follow
from shardwell.weights.reader import attach
from shardwell_wire.errors import UnavailableError
from shardwell_wire.host.variables import variables

_LOCAL = re.compile(r"(https?://)?(localhost|127\.[\d.]+|\[::1\])([:/].*)?")


class VllmServer(EngineServer):
    """A vLLM server that was started with the weight-transfer backend ``shardwell``.

    Its workers attach with the arguments ``attached`` of ``shardwell.attach``, such as a ``token_file`` of their host.
    They read a version while the server still serves, for about as long as their last read took. The pause includes
    the rest: vLLM does not tell when a read is done.
    """

    def __init__(self, url: str, attached: dict[str, Any], *, timeout_s: float = 300.0) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self._attached, self._lead_s = attached, 0.0

    def version(self) -> int:
        label = str(self._call("weight_info", timeout_s=5.0).get("weight_version"))
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
        begin = time.monotonic()
        try:
            self._call("update_weights", {"update_info": started})
            while (left_s := begin + self._lead_s - time.monotonic()) > 0:
                time.sleep(min(left_s, 1.0))
                self._call("update_weights", {"update_info": started})  # raises if the read has failed
            self._call("pause?mode=wait", {})
            paused = time.monotonic()
            self._call("update_weights", {"update_info": read})
        except BaseException:  # also Ctrl-C
            self._lead_s = time.monotonic() - begin
            for path in ("finish_weight_update", "resume"):
                with suppress(UnavailableError):
                    self._call(path, {})
            raise
        self._lead_s = self._lead_s / 2 + time.monotonic() - paused
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


def main() -> None:
    """Follows a run as a command, until SIGTERM or SIGINT: then it finishes the update that it has begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL", help="vLLM servers, such as http://localhost:8000")
    parser.add_argument("--address", help="coordinator (default: SHARDWELL_ADDRESS)")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--token-file", help="file with a reader's token, here and on the servers' hosts")
    parser.add_argument("--gather-dtype", default="float32", help="dtype in which the servers receive 32-bit weights")
    parser.add_argument("--delta-cache-bytes", type=int, default=0, help="memory of each server's host for deltas")
    attached = vars(parser.parse_args())
    urls = attached.pop("servers")
    attached["address"] = attached["address"] or variables().get("SHARDWELL_ADDRESS") or "localhost:50051"
    if any(map(_LOCAL.fullmatch, attached["address"].split(","))) and not all(map(_LOCAL.fullmatch, urls)):
        parser.error(f"--address {attached['address']} is not that of another host: name the coordinator's host")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    stop = threading.Event()
    with attach(**attached) as reader:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        follow(reader, [VllmServer(url, attached) for url in urls], stop=stop)


if __name__ == "__main__":
    main()
