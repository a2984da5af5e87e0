"""Registry of the shard servers: state, memory and leases. Pure state on an injected clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from shardwell_server.coordinator.connection import MembershipConnection
from shardwell_server.coordinator.signals import Signal
from shardwell_server.coordinator.storage.records import ServerRecord
from shardwell_wire.errors import DuplicateError, InvalidRequestError, NotFoundError, StaleEpochError
from shardwell_wire.host.server_folders import boot_of
from shardwell_wire.model.names import check_id, check_name, is_address, nearest
from shardwell_wire.v1 import coordinator_pb2

PROMOTION_MARGIN_S = 0.5
"""Extra silence beyond the lease before the shards of a silent server get another primary, in seconds. The server stops
serving when its lease is over by its own clock."""


class ServerState(Enum):
    """State of a shard server."""

    UNCONFIRMED = coordinator_pb2.SERVER_STATE_UNCONFIRMED
    """Loaded from storage after a coordinator restart; the server sent no request since. No unit is placed on it."""
    LIVE = coordinator_pb2.SERVER_STATE_LIVE
    """The lease is valid."""
    LOST = coordinator_pb2.SERVER_STATE_LOST
    """The lease expired and the server is unreachable. It may be alive and come back with its shards."""
    ENDED = coordinator_pb2.SERVER_STATE_ENDED
    """The process has ended for certain. Its memory is gone, unless the server is restartable."""
    LEFT = coordinator_pb2.SERVER_STATE_LEFT
    """The server deregistered. Its memory is gone."""


@dataclass(slots=True)
class Server:
    """A shard server."""

    server_id: str
    address: str
    incarnation: str
    """Random per process. A new incarnation starts with empty memory."""
    epoch: int
    budget_bytes: int
    last_seen_s: float
    """Clock time of the last request."""
    process: str = ""
    """Process identity as returned by ``server_folders.own_identity``. Empty: unknown."""
    reserved_bytes: int = 0
    used_bytes: int = 0
    replicated_bytes: int = 0
    """Bytes that the process has sent to backups on other servers."""
    insecure: str = ""
    """What the server lacks although it listens on a network. Empty: nothing, or unknown since a restart."""
    shardwell_version: str = ""
    """Version of the process's software. Empty: unknown since a restart of the coordinator."""
    state: ServerState = ServerState.LIVE
    unreachable_because: str = ""
    """Why the coordinator could not reach the server. Empty: it is reachable."""
    reached: bool = False
    """True once this process has answered the coordinator at its address. No unit is placed on it before."""
    suspected: bool = False
    """True if the server's membership stream broke and did not come back. The server is then probed."""
    refused: bool = False
    """True if the server is lost because its stream broke and nothing listens at its address. Its host answers, so its
    process has almost certainly ended."""
    renewed_by_probe: bool = False
    """True if the lease was last renewed by an answered probe instead of a heartbeat."""
    connection: MembershipConnection = field(default_factory=MembershipConnection)
    restartable: bool = False
    """True if another process of this id can take up the copies of shards after this one has ended."""
    unheard: bool = False
    """True if the server was loaded from storage and sent no heartbeat since. Its process may then be a new one, whose
    registration was stored before it got the copies of its predecessor."""
    draining: bool = False
    """True if the server must hand all its shards to other servers. It gets no new shards."""
    leaving: bool = False
    """True if the server asked for its own draining, because it is about to stop."""
    relays: bool = False
    """True if the server relays for the trainers of its host."""
    owns_nothing: bool = False
    """True if the server is a relay only. It is not stored: it registers again with a restarted coordinator."""
    host: str = ""
    """Name of the host whose trainers the server relays for."""
    not_kept: dict[str, str] = field(default_factory=dict)
    """By run id: why this process does not keep the primaries of its predecessor. Empty after a restart."""

    @property
    def live(self) -> bool:
        """True if the lease is valid."""
        return self.state is ServerState.LIVE

    @property
    def usable(self) -> bool:
        """True if the lease is valid and the process was reached at its address, so that units may be placed on it."""
        return self.live and self.reached and not self.owns_nothing

    def relays_for(self, host: str, process: str) -> bool:
        """True if the server relays for trainers of a machine. Only an attempt shows whether they share memory.

        Args:
            process: Identity of the trainer's process.
        """
        if not (self.relays and self.live and self.reached) or self.leaving or self.suspected:
            return False
        own, other = boot_of(self.process), boot_of(process)
        return own == other if own and other else self.host == host

    @property
    def may_be_alive(self) -> bool:
        """True if the lease is valid, or was valid when the coordinator restarted."""
        return self.state in (ServerState.LIVE, ServerState.UNCONFIRMED)

    @property
    def ended(self) -> bool:
        """True if the process has ended for certain."""
        return self.state in (ServerState.ENDED, ServerState.LEFT)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    def note_use(self, *, reserved_bytes: int, used_bytes: int, replicated_bytes: int) -> None:
        """Records the memory and the traffic to backups that a heartbeat reported."""
        self.reserved_bytes, self.used_bytes = reserved_bytes, used_bytes
        self.replicated_bytes = replicated_bytes

    def note_process(
        self, request: coordinator_pb2.RegisterServerRequest | coordinator_pb2.HeartbeatServerRequest
    ) -> None:
        """Records what the process says of itself, which is not stored."""
        self.insecure, self.shardwell_version = request.insecure, request.shardwell_version

    def renew_lease(self, now: float, *, by_probe: bool = False) -> ServerState:
        """Starts the lease again, after a request or an answered probe. Returns the former state."""
        before = self.state
        self.last_seen_s, self.state = now, ServerState.LIVE
        if self.reached:
            self.unreachable_because = ""
        self.suspected = self.refused = False
        self.renewed_by_probe = by_probe
        return before

    def mark_reached(self) -> None:
        """Records that the process answered at its address."""
        self.reached, self.unreachable_because = True, ""

    def note_unreachable(self, reason: str) -> None:
        """Records why a probe failed."""
        self.unreachable_because, self.renewed_by_probe = reason, False

    def mark_lost(self, *, refused: bool = False) -> None:
        """Marks the server as lost: its lease expired and it is unreachable, or it refuses connections."""
        self.state, self.refused = ServerState.LOST, refused

    def mark_stopped(self, *, keeps_copies: bool) -> None:
        """Marks the server as stopped by itself. With ``keeps_copies``, its next process takes up its copies."""
        self.state = ServerState.ENDED if keeps_copies else ServerState.LEFT
        self.restartable = keeps_copies

    def to_record(self) -> ServerRecord:
        has_left = self.state is ServerState.LEFT
        return ServerRecord(
            self.server_id,
            self.address,
            self.incarnation,
            self.epoch,
            self.budget_bytes,
            self.process,
            has_left,
            self.draining,
            self.restartable,
        )

    @classmethod
    def from_record(cls, record: ServerRecord, now: float) -> Server:
        """Restores a server after a coordinator restart."""
        return cls(
            record.server_id,
            record.address,
            record.incarnation,
            record.epoch,
            record.budget_bytes,
            now,
            record.process,
            state=ServerState.LEFT if record.has_left else ServerState.UNCONFIRMED,
            draining=record.draining,
            restartable=record.restartable,
            unheard=True,
        )


class Cluster:
    """All shard servers that have registered and were not forgotten.

    Args:
        stored: Stored servers. They are unconfirmed until they send a request.
        last_epoch: Highest epoch of a forgotten server.
    """

    def __init__(
        self, clock: Callable[[], float], lease_s: float, stored: Iterable[ServerRecord] = (), last_epoch: int = 0
    ) -> None:
        self._clock, self._lease_s = clock, lease_s
        self.changed = Signal()
        self._superseded: set[tuple[str, str]] = set()
        """Former processes, as (server id, incarnation). They cannot register again."""
        self.servers: dict[str, Server] = {at.server_id: Server.from_record(at, clock()) for at in stored}
        self.last_epoch = max([last_epoch, *(server.epoch for server in self.servers.values())])
        """Highest epoch that any server has had."""
        self._served_since_s = clock()
        """Clock time since which at least one server is live. If none is: since which one was."""

    @property
    def live(self) -> list[Server]:
        """The servers on which units may be placed."""
        return [server for server in self.servers.values() if server.usable]

    @property
    def unreachable(self) -> list[Server]:
        """The servers that send heartbeats but were not reached at their address yet."""
        return [
            server for server in self.servers.values() if server.live and not server.reached and not server.owns_nothing
        ]

    @property
    def unprobed(self) -> list[Server]:
        """The servers that were loaded from storage and whose first probe since has no result yet."""
        return [
            server
            for server in self.servers.values()
            if server.may_be_alive and not (server.reached or server.unreachable_because or server.owns_nothing)
        ]

    def can_place(self, wanted: int) -> bool:
        """True if at least ``wanted`` servers can take shards, and no server is unprobed. Without the second condition,
        a coordinator that has just restarted would place a whole unit on the server that answers first."""
        return len(self.staying) >= wanted and not self.unprobed

    def relay_for(
        self, host: str, process: str, *, refused: Collection[str] = (), used: Mapping[str, int] | None = None
    ) -> Server | None:
        """Returns the relay of a trainer, the same for all trainers of a run on a host. None: there is none.

        Args:
            process: Identity of the trainer's process.
            refused: Ids of servers that the trainer could not use.
            used: Number of trainers of the run by the id of their relay. Gradients are added only where trainers have
                the same relay, so one that has become better does not divide them.
        """
        used = used or {}
        relays = [
            server
            for server in self.servers.values()
            if server.server_id not in refused and server.relays_for(host, process)
        ]
        return min(
            relays,
            key=lambda server: (
                -used.get(server.server_id, 0),
                server.host != host,
                not server.owns_nothing,
                server.server_id,
            ),
            default=None,
        )

    def describe_waiting(self, wanted: int) -> str:
        """Returns what a run waits for that needs ``wanted`` servers, and what to do."""
        if len(self.staying) >= wanted and self.unprobed:
            names = ", ".join(repr(server.server_id) for server in self.unprobed)
            return f"waits until the coordinator, which has restarted, has probed the shard servers {names}"
        unreachable = "".join(f"; {describe_unreachable(server)}" for server in self.unreachable)
        return (
            f"waits for shard servers: {len(self.staying)} of {wanted} are live; start more (shardwell-server shard "
            f"--coordinator HOST:PORT), or lower --min-servers{unreachable}"
        )

    @property
    def staying(self) -> list[Server]:
        """The live servers that are not about to stop."""
        return [server for server in self.live if not server.leaving]

    def check(
        self,
        server_id: str,
        address: str,
        incarnation: str,
        budget_bytes: int,
        process: str = "",
        *,
        restartable: bool = False,
    ) -> Server:
        """Checks a registration and returns the server as it would be registered. ``register`` then registers it.

        Returns:
            A server with a new epoch, or with its current epoch if this process is already registered.

        Raises:
            InvalidRequestError: A field is missing or invalid.
            DuplicateError: A later process has the id.
        """
        check_id("server_id", server_id)
        check_name("incarnation", incarnation)
        if not is_address(address):
            raise InvalidRequestError(
                f"address is {address!r}: expected host:port, such as node0:50052: pass a host without a port to "
                "--advertise",
                server=server_id,
            )
        if not 0 < budget_bytes < 1 << 63:
            raise InvalidRequestError(f"budget_bytes is {budget_bytes}: expected 1 to 2**63 - 1", server=server_id)
        current = self.servers.get(server_id)
        if (server_id, incarnation) in self._superseded:
            replaced = current is not None and current.incarnation != incarnation
            what = "was lost and replaced by another process" if replaced else "has left the cluster"
            raise DuplicateError(
                f"server {server_id!r}: this process {what}: stop this process, and give every server its own id "
                "(--id, SHARDWELL_ID)",
                server=server_id,
            )
        if current is not None and current.incarnation == incarnation:
            return replace(
                current,
                address=address,
                budget_bytes=budget_bytes,
                last_seen_s=self._clock(),
                process=process,
                state=ServerState.LIVE,
                unreachable_because="",
                reached=False,
                suspected=False,
                refused=False,
                restartable=restartable,
                unheard=False,
            )
        # If the server cannot be stored, this epoch is skipped. It is never reused.
        self.last_epoch += 1
        return Server(
            server_id,
            address,
            incarnation,
            self.last_epoch,
            budget_bytes,
            self._clock(),
            process,
            restartable=restartable,
        )

    def register(self, server: Server) -> None:
        """Adds a server that ``check`` returned. It replaces a former process of its id."""
        former = self.servers.get(server.server_id)
        self._note_served()
        self.servers[server.server_id] = server
        if former is not None and former.incarnation != server.incarnation:
            self._superseded.add((former.server_id, former.incarnation))
            former.connection.news.notify()

    def deregister(self, server: Server, *, keeps_copies: bool = False) -> None:
        """Marks a server as stopped. Delayed requests of its process are rejected."""
        server.mark_stopped(keeps_copies=keeps_copies)
        self._superseded.add((server.server_id, server.incarnation))
        server.connection.news.notify()

    def forget(self, server: Server) -> None:
        """Removes a server that owns no shards."""
        del self.servers[server.server_id]

    def heartbeat(self, request: coordinator_pb2.HeartbeatServerRequest) -> ServerState:
        """Renews a server's lease. Returns its former state.

        Raises:
            StaleEpochError: The server is not registered, has left, or another process has its id.
        """
        server = self.require_epoch(request.server_id, request.epoch)
        server.connection.note_request()
        server.note_use(
            reserved_bytes=request.reserved_bytes,
            used_bytes=request.used_bytes,
            replicated_bytes=request.replicated_bytes,
        )
        server.unheard = False
        self._note_served()
        return server.renew_lease(self._clock())

    def require_epoch(self, server_id: str, epoch: int) -> Server:
        """Returns the server that sent a request. Raises as ``heartbeat``."""
        server = self.servers.get(server_id)
        if server is None:
            raise StaleEpochError(f"server {server_id!r} is not registered: register again", server=server_id)
        if epoch != server.epoch:
            raise StaleEpochError(
                f"server {server_id!r} sent epoch {epoch}, but the process of this id has epoch {server.epoch}: "
                "register again, or give every server its own id",
                server=server_id,
                epoch=server.epoch,
            )
        if (server_id, server.incarnation) in self._superseded or server.state is ServerState.LEFT:
            raise StaleEpochError(f"server {server_id!r} has left the cluster", server=server_id)
        return server

    def renew_lease(self, server: Server) -> ServerState:
        """Renews the lease of a server that answered a probe. Returns its former state."""
        self._note_served()
        return server.renew_lease(self._clock(), by_probe=True)

    def _note_served(self) -> None:
        """Call before a server becomes live."""
        if not self.live:
            self._served_since_s = self._clock()

    def renew_all(self) -> None:
        """Starts every lease again, after the coordinator could not receive heartbeats."""
        for server in self.servers.values():
            if server.may_be_alive:
                server.last_seen_s = self._clock()

    def note_free(self, server_id: str, free_bytes: int) -> None:
        """Records the free memory that a server reported in an answer. It may have left since."""
        if (server := self.servers.get(server_id)) is not None:
            server.reserved_bytes = max(0, server.budget_bytes - free_bytes)

    def require(self, server_id: str) -> Server:
        """Returns a server by id. Raises NotFoundError if it is not registered."""
        if server_id not in self.servers:
            others = f"the servers are {nearest(server_id, self.servers)}" if self.servers else "no server is"
            raise NotFoundError(f"server {server_id!r} is not registered: {others}", server=server_id)
        return self.servers[server_id]

    def lease_expired(self, server: Server) -> bool:
        """True if a server that may be alive has been silent for longer than its lease."""
        return server.may_be_alive and self.silent_s(server) > self._lease_s

    def has_restarted(self, server_id: str, incarnation: str) -> bool:
        """True if another process has the server's id now. The memory of the former process is gone."""
        server = self.servers.get(server_id)
        return server is None or server.incarnation != incarnation

    def is_gone(self, process: tuple[str, str]) -> bool:
        """True if a server process, given as (server id, incarnation), serves nothing any more.

        It has ended, nothing listens at its address, or it is unreachable and has been silent for so long that it has
        stopped serving by itself.
        """
        server_id, incarnation = process
        server = self.servers.get(server_id)
        if server is None or server.incarnation != incarnation or server.ended:
            return True
        silent = self.silent_s(server) > self._lease_s + PROMOTION_MARGIN_S
        return server.state is ServerState.LOST and (server.refused or silent)

    def may_return(self, process: tuple[str, str]) -> bool:
        """True if a server process, given as (server id, incarnation), may still be alive, with its memory."""
        server_id, incarnation = process
        server = self.servers.get(server_id)
        return server is not None and server.incarnation == incarnation and not server.ended

    def awaits_restart(self, process: tuple[str, str]) -> bool:
        """True if a server process, given as (server id, incarnation), has ended or is unreachable, and the next
        process of its id can take up its copies."""
        server_id, incarnation = process
        server = self.servers.get(server_id)
        if server is None or not server.restartable:
            return False
        if server.incarnation != incarnation:
            return server.unheard
        return server.state in (ServerState.ENDED, ServerState.LOST)

    def may_have_copies(self, process: tuple[str, str]) -> bool:
        """True if the copies of a server process, given as (server id, incarnation), may come back: with the process,
        or with the next one of its id. False: its memory is known to be gone."""
        return self.may_return(process) or self.awaits_restart(process)

    def restart_awaited_s(self, process: tuple[str, str]) -> float:
        """Returns for how many seconds the restart of a server process has been awaited while other servers are live.

        Servers that are all stopped and started again have this time from the first that is live.
        """
        server = self.servers.get(process[0])
        since_s = self._served_since_s if server is None else max(self._served_since_s, server.last_seen_s)
        return self._clock() - since_s

    def silent_s(self, server: Server) -> float:
        """Returns the seconds since the server's last request."""
        return self._clock() - server.last_seen_s


def describe_unreachable(server: Server) -> str:
    """Returns why a server that sends heartbeats gets no units, and what to do."""
    reason = server.unreachable_because or "it is being probed"
    return (
        f"server {server.server_id!r} at {server.address} gets no units: {reason}. Start it with --advertise HOST, the "
        "host by which the coordinator and the trainers reach it"
    )
