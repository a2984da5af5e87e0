"""Which shard servers this trainer cannot reach, so that the coordinator can name them and give its work to another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.server_guard import ServerGuard
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

_INTERVAL_S = 1.0
_DOUBT_S = 2.0
"""A server is probed when an operation on it has taken this long. Most that do wait for other trainers."""
_PROBE_TIMEOUT_S = 2.0


class Reachability:
    """Probes servers on which an operation takes long, from a background thread.

    Args:
        guards: The guards of the servers that are in use.
        credentials: What calls to the cluster carry.
    """

    def __init__(self, guards: Callable[[], Iterable[ServerGuard]], credentials: Credentials) -> None:
        self._guards, self._credentials = guards, credentials
        self._clients: dict[str, ShardClient] = {}
        self._unreachable: dict[str, tuple[float, str]] = {}
        """By address: since when, by ``time.monotonic``, and why."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardwell-reachability", daemon=True)
        self._thread.start()

    def report(self) -> list[coordinator_pb2.UnreachableServer]:
        """The servers that could not be reached at the last probe."""
        now = time.monotonic()
        return [
            coordinator_pb2.UnreachableServer(address=address, for_s=now - since, reason=reason)
            for address, (since, reason) in list(self._unreachable.items())
        ]

    def close(self) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join(timeout=2 * _PROBE_TIMEOUT_S)

    def _watch(self) -> None:
        try:
            while not self._stop.wait(_INTERVAL_S):
                for guard in list(self._guards()):
                    self._look(guard)
        finally:
            for client in self._clients.values():
                client.close()

    def _look(self, guard: ServerGuard) -> None:
        since = guard.waiting_since
        if since is None or time.monotonic() - since < _DOUBT_S or self._stop.is_set():
            self._unreachable.pop(guard.address, None)
            return
        try:
            if guard.address not in self._clients:
                self._clients[guard.address] = ShardClient(guard.address, credentials=self._credentials)
            self._clients[guard.address].call(
                "DescribeServer", shard_pb2.DescribeServerRequest(), timeout_s=_PROBE_TIMEOUT_S
            )
        except (UnavailableError, DeadlineError) as error:
            first, _ = self._unreachable.get(guard.address, (since, ""))
            self._unreachable[guard.address] = (first, str(error))
        except ShardwellError:
            self._unreachable.pop(guard.address, None)  # it has answered
        else:
            self._unreachable.pop(guard.address, None)
