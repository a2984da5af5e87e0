"""Connections of this trainer to the shard servers of its run, and probes of the servers that do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell.transport.selector import ServerConnection
from shardwell.transport.server_guard import ServerGuard
from shardwell.transport.shard_client import ShardClient
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

_PROBE_INTERVAL_S = 1.0
_PROBE_AFTER_S = 2.0
"""Seconds an operation on a server takes before the server is probed. Most slow operations wait for other trainers."""
_PROBE_TIMEOUT_S = 2.0


class ShardServers:
    """Connects to shard servers on first use.

    Args:
        membership: The membership of this trainer.
        config: Options of the trainer.
    """

    def __init__(self, membership: Membership, config: JoinConfig) -> None:
        self._membership, self._config = membership, config
        self._connections: dict[str, ServerConnection] = {}
        self._guards: dict[str, ServerGuard] = {}
        self._probe = ReachabilityProbe(lambda: list(self._guards.values()), membership.credentials)

    @property
    def received_bytes(self) -> int:
        """Bytes received from all servers, in wire dtypes."""
        return sum(server.counter.received_bytes for server in self._connections.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all servers, in wire dtypes."""
        return sum(server.counter.sent_bytes for server in self._connections.values())

    def describe(self) -> list[dict[str, Any]]:
        """Returns each server's transport and its statistics; see ``Session.transports``."""
        return [server.describe() for server in self._connections.values()]

    def transport_reports(self) -> list[coordinator_pb2.TransportReport]:
        """Returns the transports for a heartbeat. Thread-safe."""
        return [
            coordinator_pb2.TransportReport(
                address=server.address, kind=server.transport.kind, bytes_per_s=server.bytes_per_s
            )
            for server in list(self._connections.values())
        ]

    def unreachable(self) -> list[coordinator_pb2.UnreachableServer]:
        """Returns the servers that did not answer the last probe, for a heartbeat. Thread-safe."""
        return self._probe.report()

    def shards(
        self, wire: Wire, layout: UnitLayout, declared: coordinator_pb2.DeclareUnitResponse
    ) -> tuple[RemoteShard, ...]:
        """Returns the shards of a declared unit, connected to the servers that own them."""
        run = self._membership.identity
        return tuple(
            RemoteShard(run, layout, self._connect(shard.address), shard.start_bytes, shard.stop_bytes, wire)
            for shard in declared.shards
        )

    def _connect(self, address: str) -> ServerConnection:
        if address not in self._connections:
            membership, config = self._membership, self._config
            guard = self._guards[address] = ServerGuard(address, membership.ask, config.waits.wait_limit_s)
            self._connections[address] = guard.run(
                "connecting",
                lambda: ServerConnection(
                    address,
                    membership.identity,
                    transports=config.transfers.transport_names,
                    chunk_bytes=config.transfers.chunk_bytes,
                    check=membership.check,
                    credentials=membership.credentials,
                    guard=guard,
                ),
                repeat=False,
            )
        return self._connections[address]

    def release_gradient_buffers(self, dp_rank: int | None = None) -> None:
        """Releases the shared gradient buffers of a dp rank for reuse; None: of all dp ranks."""
        for server in self._connections.values():
            server.release(dp_rank)

    def free_gradient_buffers(self) -> None:
        """Frees the memory of the shared gradient buffers, which the next owner of the ranks needs."""
        for server in self._connections.values():
            server.free_memory()

    def disconnect(self) -> None:
        """Closes the connections: transfers in flight fail with the error that ended the membership. Thread-safe."""
        for server in list(self._connections.values()):
            server.close()

    def stop_probes(self) -> None:
        """Stops the thread that probes servers."""
        self._probe.close()


class ReachabilityProbe:
    """Probes servers on which an operation takes long, in a background thread.

    The coordinator can then name an unreachable server and lease this trainer's work to another trainer.

    Args:
        guards: Returns the guards of the servers in use.
        credentials: Sent with every rpc.
    """

    def __init__(self, guards: Callable[[], Iterable[ServerGuard]], credentials: Credentials) -> None:
        self._guards, self._credentials = guards, credentials
        self._clients: dict[str, ShardClient] = {}
        self._unreachable: dict[str, tuple[float, str]] = {}
        """Start of the outage, by ``time.monotonic``, and its reason, by address."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwell-reachability", daemon=True)
        self._thread.start()

    def report(self) -> list[coordinator_pb2.UnreachableServer]:
        """Returns the servers that did not answer the last probe. Thread-safe."""
        now = time.monotonic()
        return [
            coordinator_pb2.UnreachableServer(address=address, for_s=now - since, reason=reason)
            for address, (since, reason) in list(self._unreachable.items())
        ]

    def close(self) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join(timeout=2 * _PROBE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._stop.wait(_PROBE_INTERVAL_S):
                for guard in list(self._guards()):
                    self._probe(guard)
        finally:
            for client in self._clients.values():
                client.close()

    def _probe(self, guard: ServerGuard) -> None:
        since = guard.waiting_since
        if since is None or time.monotonic() - since < _PROBE_AFTER_S or self._stop.is_set():
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
            self._unreachable.pop(guard.address, None)  # the server has answered
        else:
            self._unreachable.pop(guard.address, None)
