"""The shard servers: who is there, how much room each has, who was lost. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from shardwell_server.coordinator.placement import Candidate
from shardwell_server.coordinator.records import ServerRecord
from shardwell_server.coordinator.waiting import Signal
from shardwell_wire.errors import (
    DuplicateError,
    InvalidRequestError,
    NotFoundError,
    StaleEpochError,
)


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
    reserved_bytes: int = 0
    used_bytes: int = 0
    live: bool = True
    ended: bool = False
    """While it is not live: whether it is known to run no more."""

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    def to_record(self) -> ServerRecord:
        return ServerRecord(self.server_id, self.address, self.incarnation, self.epoch, self.budget_bytes)


class Cluster:
    """All shard servers that were ever registered.

    Args:
        clock: Monotonic seconds.
        lease_s: A server that is silent for longer is lost.
        stored: From an earlier term; they are taken to be live for one lease.
    """

    def __init__(self, clock: Callable[[], float], lease_s: float, stored: Iterable[ServerRecord] = ()) -> None:
        self._clock, self._lease_s = clock, lease_s
        self.changed = Signal()
        self._superseded: set[tuple[str, str]] = set()
        self.servers: dict[str, Server] = {
            at.server_id: Server(at.server_id, at.address, at.incarnation, at.epoch, at.budget_bytes, clock())
            for at in stored
        }
        self._last_epoch = max((server.epoch for server in self.servers.values()), default=0)

    @property
    def live(self) -> list[Server]:
        return [server for server in self.servers.values() if server.live]

    def check(self, server_id: str, address: str, incarnation: str, budget_bytes: int) -> Server:
        """What a server process is to be registered as; changes nothing yet.

        Returns:
            Under the epoch it has, if this process is registered already.

        Raises:
            InvalidRequestError: A field is missing or impossible.
            DuplicateError: A later process has the id.
        """
        for name, value in (("server_id", server_id), ("incarnation", incarnation)):
            if not value or len(value) > 200 or not value.isprintable():
                raise InvalidRequestError(f"{name} is {value[:200]!r}: expected 1 to 200 printable characters")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidRequestError(f"address is {address!r}: expected host:port", server=server_id)
        if not 0 < budget_bytes < 1 << 63:
            raise InvalidRequestError(f"budget_bytes is {budget_bytes}: expected 1 to 2**63 - 1", server=server_id)
        if (server_id, incarnation) in self._superseded:
            raise DuplicateError(
                f"server {server_id!r}: this process was lost, and another one has the id since: end this one, and "
                "give every server its own id (--id, SHARDWELL_ID)",
                server=server_id,
            )
        former = self.servers.get(server_id)
        if former is not None and former.incarnation == incarnation:
            return replace(former, address=address, budget_bytes=budget_bytes, heard_s=self._clock(), live=True)
        self._last_epoch += 1
        return Server(server_id, address, incarnation, self._last_epoch, budget_bytes, self._clock())

    def register(self, server: Server) -> None:
        """Takes in a server that was checked; it takes the place of another process of its id."""
        former = self.servers.get(server.server_id)
        self.servers[server.server_id] = server
        if former is not None and former.incarnation != server.incarnation:
            self._superseded.add((former.server_id, former.incarnation))

    def heartbeat(self, server_id: str, epoch: int, reserved_bytes: int, used_bytes: int) -> bool:
        """Renews a lease; returns whether the server had been lost.

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
        returned = not server.live
        server.heard_s, server.live = self._clock(), True
        server.reserved_bytes, server.used_bytes = reserved_bytes, used_bytes
        return returned

    def require(self, server_id: str) -> Server:
        """Raises NotFoundError if no server has the id."""
        if server_id not in self.servers:
            raise NotFoundError(f"server {server_id!r} is not known: register first", server=server_id)
        return self.servers[server_id]

    def expire(self) -> list[Server]:
        """Marks the servers whose lease has run out as lost; returns them."""
        lost = [server for server in self.live if self.silent_s(server) > self._lease_s]
        for server in lost:
            server.live = server.ended = False
        return lost

    def renew_all(self) -> None:
        """Begins every lease anew: the coordinator itself was not listening."""
        for server in self.live:
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
