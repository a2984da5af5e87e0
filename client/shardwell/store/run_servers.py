"""Connections to the shard servers of a run, and moves of this trainer's shards to the servers that own them now.

Note: [Moved shards]
    The coordinator raises the run's placement whenever a shard gets another server process: a backup was promoted, a
    server was restarted or drained, or the run was rolled back. Trainers learn the placement from every answer of the
    coordinator and from the membership stream. A thread of this trainer then asks for the present owners and connects
    to them. Operations that a move has broken wait for this thread and are repeated at the new owner
    (``Resending.run``). Nothing else in the trainer depends on where a shard is.

    The thread then maps shards again that were read in place. It first waits for the transfer that fills the shard's
    copy on this host. Such a transfer therefore waits only until the shard is connected, not until it is mapped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.membership.membership import Membership
from shardwell.options import JoinConfig
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.resending import ResendPolicy
from shardwell.transport.server_connection import OPEN_TIMEOUT_S, ConnectOptions, ServerConnection
from shardwell_wire.connection.channel import backoff
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

_LIST_AGAIN_S = 0.5
"""How long a server that cannot be reached is retried before the owners are listed again."""

ConnectShards = Callable[[coordinator_pb2.ListUnitsResponse, bool], None]
"""``(units, anew)``: connects all shards to their owners; ``anew``: through new connections."""

MapShards = Callable[[bool], None]
"""``(anew)``: maps the shards that have moved; ``anew``: without waiting for the versions that were read."""


class ShardRelocations(ResendPolicy):
    """Applies the moves of a run's shards in a background thread. See Note: [Moved shards]. Thread-safe.

    A trainer's ``ResendPolicy``: operations that failed wait for the moves.

    Args:
        membership: The membership of this trainer.
        limit_s: How long ``settle`` waits, and how long a server may be unavailable.
    """

    asks = True

    def __init__(self, membership: Membership, limit_s: float) -> None:
        super().__init__(limit_s)
        self._membership = membership
        self._connect: ConnectShards | None = None
        self._map: MapShards | None = None
        self._changed = threading.Condition()
        """Protects the next fields."""
        self._requests = 0
        self._connected = self._mapped = (membership.joined.placement, 0)
        """The placement and the number of requests that are served."""
        self._anew = False
        self._error: ShardwellError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._listed, self._listed_s = 0, 0.0
        """Placement and time of the last list of owners. Used in the thread only."""

    def attach(self, connect: ConnectShards, map_shards: MapShards) -> None:
        """Sets the functions that move the shards, which are called in the background thread from now on."""
        self._connect, self._map = connect, map_shards
        self._membership.when_news, self._membership.when_lapsed = self.wake, self.refresh

    def wake(self) -> None:
        """Called when the coordinator has reported another placement. Returns at once."""
        with self._changed:
            if self._is_pending() and not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="shardwell-relocation", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def refresh(self) -> None:
        """Starts to connect to all owners anew, which ends the transfers in flight. Returns at once."""
        with self._changed:
            self._requests += 1
            self._anew = True
        self.wake()

    def recheck(self) -> None:
        """Starts to compare all shards with their owners. Returns at once."""
        with self._changed:
            self._requests += 1
        self.wake()

    def try_settle(self, limit_s: float) -> None:
        """Waits for a limited time until all shards are connected to their owners."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_pending(), min(limit_s, self.wait_limit_s))

    def settle(self, *, mapped: bool = True) -> None:
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            settled = self._changed.wait_for(lambda: self._closed or not self._is_pending(mapped), self.wait_limit_s)
            error = self._error
        self._membership.check()
        if not settled:
            raise UnavailableError(
                f"shards of run {self._membership.run!r} have other servers now, and this trainer could not reach them "
                f"for {self.wait_limit_s:.0f} s: {error}. Check the network between this host and the shard servers"
            ) from error

    def ask(self) -> None:
        """See ``ResendPolicy``. The thread that moves shards then lists their owners again."""
        self._membership.ask()
        self.check()

    def check(self) -> None:
        """See ``ResendPolicy``.

        Raises:
            UnavailableError: This is the thread that moves shards, and the list of owners may be out of date.
        """
        self._membership.check()
        if threading.current_thread() is self._thread and (
            self._membership.placement > self._listed or time.monotonic() - self._listed_s > _LIST_AGAIN_S
        ):
            raise UnavailableError("a server does not answer, and its shards may have moved to another server")

    def require_valid(self) -> None:
        self._membership.require_valid()

    def close(self) -> None:
        """Stops the thread and all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_pending(self, mapped: bool = True) -> bool:
        placement, requests = self._mapped if mapped else self._connected
        return self._membership.placement > placement or self._requests > requests

    def _run(self) -> None:
        pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_pending())
                if self._closed:
                    return
                # A request that arrives while the units are listed is not served by this list, which may be older than
                # its cause.
                requests, anew, self._anew = self._requests, self._anew, False
            started = time.monotonic()
            try:
                units = self._membership.list_units()
                self._listed, self._listed_s = units.placement, time.monotonic()
                assert self._connect is not None and self._map is not None
                self._connect(units, anew)
                with self._changed:
                    self._connected = (units.placement, requests)
                    self._changed.notify_all()
                self._map(anew)
            except (ShardwellError, OSError) as error:
                logger.info("shards have moved, and cannot be reached yet: %s", error)
                with self._changed:
                    self._anew = self._anew or anew
                    self._error = error if isinstance(error, ShardwellError) else UnavailableError(str(error))
                    self._changed.wait_for(lambda: self._closed, next(pauses))
                continue
            pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            logger.info("placement %d of the shards applied in %.3f s", units.placement, time.monotonic() - started)
            with self._changed:
                self._mapped, self._error = self._connected, None
                self._changed.notify_all()


_PROBE_INTERVAL_S = 1.0
_PROBE_AFTER_S = 2.0
"""Seconds an operation on a server takes before the server is probed. Most slow operations wait for other trainers."""
_PROBE_TIMEOUT_S = 2.0

ServerKey = tuple[str, str]
"""Address and incarnation of a server process."""


class ShardServers:
    """Connects to shard servers on first use.

    Args:
        membership: The membership of this trainer.
        config: Options of the trainer.
    """

    def __init__(self, membership: Membership, config: JoinConfig) -> None:
        self._membership = membership
        self.relocations = ShardRelocations(membership, config.waits.wait_limit_s)
        """Moves shards to their present owners."""
        self._connections: dict[ServerKey, ServerConnection] = {}
        self._opening: tuple[str, float] | None = None
        """Address of the server that is being connected to, and since when."""
        self._options = ConnectOptions(
            config.transfers.transport_names, config.transfers.chunk_bytes, membership.credentials
        )
        self._connecting = threading.Lock()
        self._former_received_bytes = self._former_sent_bytes = 0
        self._former_moved: dict[str, tuple[int, int]] = {}
        """Bytes that closed connections have moved; see ``moved_bytes``."""
        self.probe = ReachabilityProbe(self._in_use, membership.credentials)
        membership.reports.transports, membership.reports.unreachable = self.transport_reports, self.probe.report
        membership.when_ended = self.disconnect

    @property
    def received_bytes(self) -> int:
        """Bytes received from all servers, in wire dtypes."""
        return self._former_received_bytes + sum(at.counter.received_bytes for at in self._present)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all servers, in wire dtypes."""
        return self._former_sent_bytes + sum(at.counter.sent_bytes for at in self._present)

    @property
    def corrupt_transfers(self) -> dict[str, int]:
        """Transfers whose bytes arrived with a wrong checksum, by the servers' addresses."""
        return self.relocations.corrupt.by_server()

    def moved_bytes(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes received and sent over each transport so far, in wire dtypes, by its name.

        The transport ``shm`` counts gradients that were copied to shared memory and weights that were copied from it.
        """
        return _add_moved_bytes(self._former_moved, list(self._connections.values()))

    def describe(self) -> list[dict[str, Any]]:
        """Returns each server's transport and its statistics; see ``Session.transports``."""
        return [server.describe() for server in self._present]

    def transport_reports(self) -> list[coordinator_pb2.TransportReport]:
        """Returns the transports for a heartbeat. Thread-safe."""
        corrupt = self.corrupt_transfers
        return [
            coordinator_pb2.TransportReport(
                address=server.address,
                kind=server.transport.kind,
                bytes_per_s=server.bytes_per_s,
                corrupt_count=corrupt.get(server.address, 0),
            )
            for server in self._present
        ]

    @property
    def _present(self) -> list[ServerConnection]:
        """All connections. Thread-safe."""
        return list(self._connections.values())

    def _in_use(self) -> list[tuple[str, float | None]]:
        """Returns each server's address, and since when an operation at it waits. Thread-safe."""
        opening = self._opening
        used = [(server.address, server.waiting_since) for server in self._present]
        return used if opening is None else [*used, opening]

    def shard(self, wire: Wire, layout: UnitLayout, shard: common_pb2.ShardRange) -> RemoteShard:
        """Returns one shard of a unit, connected to the server that owns it. Thread-safe."""
        server = self.connect(shard)
        return RemoteShard(self._membership.identity, layout, server, shard.start_bytes, shard.stop_bytes, wire)

    def connect(self, shard: common_pb2.ShardRange, *, open_timeout_s: float = OPEN_TIMEOUT_S) -> ServerConnection:
        """Returns the connection to the server process that owns a shard. Thread-safe.

        Args:
            shard: The shard.
            open_timeout_s: Deadline for opening a transport, if the trainer waits for servers that long.
        """
        open_timeout_s = min(open_timeout_s, self.relocations.wait_limit_s)
        key: ServerKey = shard.address, shard.incarnation
        with self._connecting:
            if key not in self._connections:
                self._opening = shard.address, time.monotonic()
                try:
                    self._connections[key] = ServerConnection(
                        shard.address,
                        self._membership.identity,
                        replace(self._options, open_timeout_s=open_timeout_s),
                        self.relocations,
                        shard.server_id,
                    )
                finally:
                    self._opening = None
            return self._connections[key]

    def forget(self) -> list[ServerConnection]:
        """Forgets all connections, so that ``connect`` opens new ones; returns the forgotten ones."""
        with self._connecting:
            former = self._present
            self._connections.clear()
        return former

    def are_open(self, shards: Iterable[RemoteShard]) -> bool:
        """Returns whether the connections to the servers of all shards are open."""
        return all(shard.server in self._present for shard in shards)

    def retire(self, former: Collection[ServerConnection]) -> None:
        """Closes connections through which no shard is reached any more. Transfers in flight fail."""
        with self._connecting:
            for key in [key for key, server in self._connections.items() if server in former]:
                del self._connections[key]
        for server in former:
            self._former_received_bytes += server.counter.received_bytes
            self._former_sent_bytes += server.counter.sent_bytes
            server.close()
        self._former_moved = _add_moved_bytes(self._former_moved, former)

    def release_gradient_buffers(self, dp_rank: int | None = None) -> None:
        """Releases the shared gradient buffers of a dp rank for reuse; None: of all dp ranks."""
        for server in list(self._connections.values()):
            if (shared := server.transports.shared) is not None:
                shared.release(dp_rank)

    def free_gradient_buffers(self, kept: int, of: int) -> None:
        """Frees the memory of shared buffers, which the next owner of the ranks needs.

        Args:
            kept: Number of ranks whose buffers this trainer keeps.
            of: Number of ranks that it has buffers for.
        """
        for server in self._present:
            server.free_memory(kept, of)

    def disconnect(self) -> None:
        """Closes the connections: transfers in flight fail with the error that ended the membership. Thread-safe."""
        self.relocations.close()
        for server in self._present:
            server.close()


class ReachabilityProbe:
    """Probes servers on which an operation takes long, in a background thread.

    The coordinator can then name an unreachable server and lease this trainer's work to another trainer.

    Args:
        in_use: Returns the address of each server in use, and since when an operation at it waits.
        credentials: Sent with every rpc.
    """

    def __init__(self, in_use: Callable[[], Iterable[tuple[str, float | None]]], credentials: Credentials) -> None:
        self._in_use, self._credentials = in_use, credentials
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
                servers = list(self._in_use())
                for address in self._unreachable.keys() - {address for address, _ in servers}:
                    self._unreachable.pop(address)  # a former server
                for address, since in servers:
                    self._probe(address, since)
        finally:
            for client in self._clients.values():
                client.close()

    def _probe(self, address: str, since: float | None) -> None:
        if since is None or time.monotonic() - since < _PROBE_AFTER_S or self._stop.is_set():
            self._unreachable.pop(address, None)
            return
        try:
            if address not in self._clients:
                self._clients[address] = ShardClient(address, credentials=self._credentials)
            self._clients[address].call("DescribeServer", shard_pb2.DescribeServerRequest(), timeout_s=_PROBE_TIMEOUT_S)
        except (UnavailableError, DeadlineError) as error:
            first, _ = self._unreachable.get(address, (since, ""))
            self._unreachable[address] = (first, str(error))
        except ShardwellError:
            self._unreachable.pop(address, None)  # the server has answered
        else:
            self._unreachable.pop(address, None)


def _add_moved_bytes(
    former: Mapping[str, tuple[int, int]], servers: Iterable[ServerConnection]
) -> dict[str, tuple[int, int]]:
    """Returns bytes received and sent by the name of the transport: former ones, and those of connections."""
    total = dict(former)
    for server in servers:
        stream, shared = server.transports.stream, server.transports.shared
        for transport, counter in ((stream, server.counter), (shared, server.shared_counter)):
            if transport is not None and (counter.received_bytes or counter.sent_bytes):
                received, sent = total.get(transport.name, (0, 0))
                total[transport.name] = received + counter.received_bytes, sent + counter.sent_bytes
    return total
