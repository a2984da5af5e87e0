"""Keeps running vLLM servers at the newest version of a run, over HTTP, one server after another.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "shardwell"}'
    python -m shardwell.engines.vllm_server --run gpt http://localhost:8000

Needs no vLLM in its own environment. The weights do not pass through this process.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.request import Request, urlopen

from shardwell.weights.reader import Reader, attach
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError
from shardwell_wire.host.variables import variables

logger = logging.getLogger(__name__)


class VllmServer:
    """A vLLM server that was started with the weight-transfer backend ``shardwell``.

    Args:
        url: Address of the server, such as ``http://localhost:8000``.
        attached: Arguments of ``shardwell.attach`` for the server's workers, such as ``address``, ``run`` and a
            ``token_file`` of the server's host.
        timeout_s: Deadline of each request in seconds.

    Attributes:
        history: ``history`` of the last ``update``. None: none was finished, or its last one was interrupted.
    """

    history: tuple[str, int] | None = None

    def __init__(self, url: str, attached: dict[str, Any], *, timeout_s: float = 300.0) -> None:
        self.url, self._attached, self._timeout_s = url.rstrip("/"), attached, timeout_s

    def version(self) -> int:
        """Returns the version that the server serves. -1: the weights with which it was started."""
        label = self._call("weight_info")["weight_version"]
        return int(label) if label.isdecimal() else -1

    def update(self, version: int, *, lead_s: float = 0.0, history: tuple[str, int] = ("", 0)) -> None:
        """Loads a version. The call can be repeated if it fails.

        The server finishes its running requests with the former version, and then pauses until the version is loaded.
        If not all workers can read the version, the server goes on with the former version. If vLLM fails while it
        loads what they have read, the server stays paused until an update succeeds.

        Args:
            version: The version. The run has to keep it until all workers have pinned it.
            lead_s: Seconds in which the server reads the version and still serves. The pause includes the rest.
            history: The run's id and its number of rollbacks. If it is another than before, the workers attach again.

        Raises:
            UnavailableError: The server cannot be reached, or could not load the version.
        """
        if self.version() < 0 or self.history != history:
            self._call("init_weight_transfer_engine", {"init_info": self._attached})
        try:
            self._call("start_weight_update", {})
        except UnavailableError:  # perhaps an update whose caller was killed is still open
            if self._call("get_world_size")["world_size"] > 1:
                raise  # vLLM then takes old replies of its workers for new ones: it has to be started again
        reads, loads = ({"update_info": {"version": version, "background": each}} for each in (True, False))
        try:
            if lead_s > 0:
                self._call("update_weights", reads)
                time.sleep(lead_s)
            self._call("pause?mode=wait", {})
            self._call("update_weights", loads)
        except BaseException:  # also Ctrl-C
            # Ends the update in the workers that did not raise, so that they load nothing, also if only the reply of
            # the call above was lost.
            for path, body in (("update_weights", reads), ("finish_weight_update", {}), ("resume", {})):
                with suppress(UnavailableError):
                    self._call(path, body)
            raise
        self.history = None
        self._call("finish_weight_update", {"weight_version": str(version)})
        self._call("resume", {})
        self.history = history

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=self._timeout_s) as answer:
                return json.load(answer)
        except (OSError, HTTPException) as error:
            raise UnavailableError(f"{self.url}/{path} failed: {error}. The server's log has the reason") from error


def follow(reader: Reader, servers: Sequence[VllmServer], *, lead_s: float = 0.0, pause_s: float = 1.0) -> NoReturn:
    """Updates servers to each new version, or to the newest if commits are faster.

    A server that is down or fails is logged and tried again. One that was started again joins with its next update.

    Args:
        reader: Tells which version is the newest.
        servers: The servers, which are updated one after another.
        lead_s: As in ``VllmServer.update``.
        pause_s: Seconds between two looks at the run and the servers if nothing is committed.
    """
    while True:
        try:
            oldest = min([_update(server, reader, lead_s) for server in servers])
            with suppress(DeadlineError):
                reader.wait_for(oldest + 1, pause_s)
        except ShardwellError as error:
            logger.warning("the servers keep their versions: %s", error)
            time.sleep(pause_s)


def _update(server: VllmServer, reader: Reader, lead_s: float) -> int:
    """Updates a server to the version that is now the newest; returns that version."""
    run = reader._describe()
    history = run.run_id, run.rollback_count
    try:
        if server.version() != run.version or server.history != history:
            server.update(run.version, lead_s=lead_s, history=history)
            logger.info("%s serves version %d", server.url, run.version)
    except UnavailableError as error:
        logger.warning("the server was not updated: %s", error)
    return run.version


def main() -> NoReturn:
    """Runs ``follow`` as a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL", help="vLLM servers, such as http://localhost:8000")
    parser.add_argument("--address", help="coordinator (default: SHARDWELL_ADDRESS)")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--token-file", help="file with a reader's token, here and on the servers' hosts")
    parser.add_argument("--lead-s", type=float, default=0.0, help="seconds in which a server reads and still serves")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends an update as Ctrl-C does
    address = options.address or variables().get("SHARDWELL_ADDRESS") or "localhost:50051"
    attached = {"address": address, "run": options.run, "token_file": options.token_file}
    with attach(**attached) as reader:
        follow(reader, [VllmServer(url, attached) for url in options.servers], lead_s=options.lead_s)


if __name__ == "__main__":
    main()
