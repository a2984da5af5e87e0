"""The shard servers: who is there, how much room each has, who was lost. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from shardwell_server.coordinator.placement.ranges import Candidate
from shardwell_server.coordinator.storage.records import ServerRecord
from shardwell_server.coordinator.waiting import Signal
from shardwell_wire.errors import (
    DuplicateError,
    InvalidRequestError,
    NotFoundError,
    StaleEpochError,
)
from shardwell_wire.names import check_id, check_name
from shardwell_wire.v1 import coordinator_pb2


class ServerState(Enum):
    """Whether a shard server takes part in the cluster."""

    UNCONFIRMED = coordinator_pb2.SERVER_STATE_UNCONFIRMED
    """Remembered from an earlier term and not heard of in this one. Nothing is placed on it."""
    LIVE = coordinator_pb2.SERVER_STATE_LIVE
    """Its lease holds."""
    LOST = coordinator_pb2.SERVER_STATE_LOST
    """Its lease ran out and it cannot be reached. It may be alive; then it comes back with its shards."""
    ENDED = coordinator_pb2.SERVER_STATE_ENDED
    """Its process is known to run no more: its memory is gone."""
    LEFT = coordinator_pb2.SERVER_STATE_LEFT
    """It was told to stop and said so: its memory is gone."""


@dataclass(slots=True)
class Server:
    """One shard server, live or remembered."""

    server_id: str
    address: str
    incarnation: str
    """Random per process: with a new one, the memory is empty."""
    epoch: int
    budget_bytes: int
    heard_s: float
    """Clock time at which it was last heard of."""
    process: str = ""
    """What ``process_identity`` says of it. Empty: not known."""
    reserved_bytes: int = 0
    used_bytes: int = 0
    state: ServerState = ServerState.LIVE
    silence: str = ""
    """Why it cannot be reached, while it is lost."""

    @property
    def live(self) -> bool:
        """Whether its lease holds."""
        return self.state is ServerState.LIVE

    @property
    def may_be_alive(self) -> bool:
        """Whether its lease holds, or held when the coordinator was restarted."""
        return self.state in (ServerState.LIVE, ServerState.UNCONFIRMED)

    @property
    def ended(self) -> bool:
        """Whether it is known to run no more."""
        return self.state in (ServerState.ENDED, ServerState.LEFT)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    def to_record(self) -> ServerRecord:
        left = self.state is ServerState.LEFT
        return ServerRecord(
            self.server_id, self.address, self.incarnation, self.epoch, self.budget_bytes, self.process, left
        )

    @classmethod
    def from_record(cls, record: ServerRecord, now: float) -> Server:
        """A server of an earlier term."""
        return cls(
            record.server_id,
            record.address,
            record.incarnation,
            record.epoch,
            record.budget_bytes,
            now,
            record.process,
            state=ServerState.LEFT if record.left else ServerState.UNCONFIRMED,
        )


class Cluster:
    """All shard servers that were ever registered.

    Args:
        clock: Monotonic seconds.
        lease_s: A server that is silent for longer is lost.
        stored: From an earlier term; they are unconfirmed until they are heard of.
        last_epoch: No server that is not in ``stored`` had a higher one.
    """

    def __init__(
        self, clock: Callable[[], float], lease_s: float, stored: Iterable[ServerRecord] = (), last_epoch: int = 0
    ) -> None:
        self._clock, self._lease_s = clock, lease_s
        self.changed = Signal()
        self._superseded: set[tuple[str, str]] = set()
        self.servers: dict[str, Server] = {at.server_id: Server.from_record(at, clock()) for at in stored}
        self.last_epoch = max([last_epoch, *(server.epoch for server in self.servers.values())])
        """No server ever had a higher one."""

    @property
    def live(self) -> list[Server]:
        return [server for server in self.servers.values() if server.live]

    def check(self, server_id: str, address: str, incarnation: str, budget_bytes: int, process: str = "") -> Server:
        """What a server process is to be registered as; changes nothing yet.

        Returns:
            Under the epoch it has, if this process is registered already.

        Raises:
            InvalidRequestError: A field is missing or impossible.
            DuplicateError: A later process has the id.
        """
        check_id("server_id", server_id)
        check_name("incarnation", incarnation)
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidRequestError(f"address is {address!r}: expected host:port", server=server_id)
        if not 0 < budget_bytes < 1 << 63:
            raise InvalidRequestError(f"budget_bytes is {budget_bytes}: expected 1 to 2**63 - 1", server=server_id)
        if (server_id, incarnation) in self._superseded:
            present = self.servers.get(server_id)
            replaced = present is not None and present.incarnation != incarnation
            happened = "was lost, and another one has the id since" if replaced else "has left the cluster"
            raise DuplicateError(
                f"server {server_id!r}: this process {happened}: end this one, and give every server its own id "
                "(--id, SHARDWELL_ID)",
                server=server_id,
            )
        former = self.servers.get(server_id)
        if former is not None and former.incarnation == incarnation:
            return replace(
                former,
                address=address,
                budget_bytes=budget_bytes,
                heard_s=self._clock(),
                process=process,
                state=ServerState.LIVE,
                silence="",
            )
        self.last_epoch += 1
        return Server(server_id, address, incarnation, self.last_epoch, budget_bytes, self._clock(), process)

    def register(self, server: Server) -> None:
        """Takes in a server that was checked; it takes the place of another process of its id."""
        former = self.servers.get(server.server_id)
        self.servers[server.server_id] = server
        if former is not None and former.incarnation != server.incarnation:
            self._superseded.add((former.server_id, former.incarnation))

    def leave(self, server: Server) -> None:
        """A server is about to end; a late retry of its registration is refused."""
        server.state = ServerState.LEFT
        self._superseded.add((server.server_id, server.incarnation))

    def forget(self, server: Server) -> None:
        """Removes a server that nothing refers to."""
        del self.servers[server.server_id]

    def heartbeat(self, server_id: str, epoch: int, reserved_bytes: int, used_bytes: int) -> ServerState:
        """Renews a lease; returns the state that the server had.

        Raises:
            StaleEpochError: It is not registered, or another process has its id now.
        """
        server = self.servers.get(server_id)
        if server is None:
            raise StaleEpochError(f"server {server_id!r} is not known here: register again", server=server_id)
        if epoch != server.epoch:
            raise StaleEpochError(
                f"server {server_id!r} came with epoch {epoch}, but the process of that id has {server.epoch}: "
                "register again, or give every server its own id",
                server=server_id,
                epoch=server.epoch,
            )
        if server.state is ServerState.LEFT:
            raise StaleEpochError(f"server {server_id!r} has left the cluster", server=server_id)
        server.reserved_bytes, server.used_bytes = reserved_bytes, used_bytes
        return self.renew(server)

    def renew(self, server: Server) -> ServerState:
        """A server is alive: begins its lease anew; returns the state that it had."""
        former = server.state
        server.heard_s, server.state, server.silence = self._clock(), ServerState.LIVE, ""
        return former

    def require(self, server_id: str) -> Server:
        """Raises NotFoundError if no server has the id."""
        if server_id not in self.servers:
            raise NotFoundError(f"server {server_id!r} is not known: register first", server=server_id)
        return self.servers[server_id]

    def is_silent(self, server: Server) -> bool:
        """Whether a server that may be alive was not heard of for its lease."""
        return server.may_be_alive and self.silent_s(server) > self._lease_s

    def renew_all(self) -> None:
        """Begins every lease anew: the coordinator itself was not listening."""
        for server in self.servers.values():
            if server.may_be_alive:
                server.heard_s = self._clock()

    def candidates(self) -> list[Candidate]:
        """The servers on which a unit may be placed."""
        return [Candidate(server.server_id, server.free_bytes) for server in self.live]

    def has_restarted(self, server_id: str, incarnation: str) -> bool:
        """Whether the server of an id is another process by now: that one's memory is gone."""
        server = self.servers.get(server_id)
        return server is None or server.incarnation != incarnation

    def silent_s(self, server: Server) -> float:
        """Seconds since a server was last heard of."""
        return self._clock() - server.heard_s
