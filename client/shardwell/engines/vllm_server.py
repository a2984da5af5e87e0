"""Keeps running vLLM servers at the newest version of a run, over HTTP, one server after another.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "shardwell"}'
    python -m shardwell.engines.vllm_server --run gpt http://localhost:8000

Needs no vLLM in its own environment. The weights do not pass through this process.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError

from shardwell.engines import EngineServer, run_command
from shardwell_wire.errors import UnavailableError


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


if __name__ == "__main__":
    run_command(VllmServer, __doc__)
