"""Trainers of a run: names, epochs and leases. Pure state on an injected clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from shardwell_server.coordinator.connection import MembershipConnection
from shardwell_wire.errors import CapacityError, DuplicateError, InvalidRequestError, NotFoundError, StaleEpochError
from shardwell_wire.v1 import common_pb2, coordinator_pb2

MAX_GONE_MEMBERS = 256
"""Maximum number of gone trainers that are kept for inspection. Owners of ranks are kept in addition."""

MAX_SPARES = 1024
"""Most live trainers of a run beyond one for each of its logical ranks."""

MAX_TRANSPORTS = 4096
"""Most transports in one heartbeat. A trainer has one per shard server."""

_MAX_ADDRESS_LENGTH = 300
_MAX_UNREACHABLE, _MAX_REASON_LENGTH = 64, 300
"""Limits of a stored report: number of unreachable servers, and characters per reason."""


class MemberState(Enum):
    """Whether a trainer's lease is valid."""

    LIVE = "live"
    """The lease is valid."""
    EXPIRED = "expired"
    """The lease expired, but the trainer's work was not reassigned. The next request makes the trainer live again."""
    GONE = "gone"
    """The trainer left, or its work was reassigned after its lease expired."""


@dataclass(frozen=True, slots=True)
class TransportReport:
    """How a trainer reaches one shard server. Kept for inspection only."""

    address: str
    """host:port of the server."""
    kind: int
    """A ``TransportKind``."""
    bytes_per_s: float
    """Bandwidth measured when the transport was opened. 0: not measured."""
    corrupt_count: int = 0
    """Transfers whose bytes arrived with a wrong checksum since the trainer's process joined."""

    @classmethod
    def from_proto(cls, transports: Sequence[coordinator_pb2.TransportReport]) -> tuple[Self, ...]:
        """Decodes and checks the transports in a heartbeat.

        Raises:
            InvalidRequestError: There are too many transports, or a field is invalid.
        """
        if len(transports) > MAX_TRANSPORTS:
            raise InvalidRequestError(f"{len(transports)} transports: expected at most {MAX_TRANSPORTS}")
        for transport in transports:
            if not 0 < len(transport.address) <= _MAX_ADDRESS_LENGTH or not transport.address.isprintable():
                shown = transport.address[:_MAX_ADDRESS_LENGTH]
                raise InvalidRequestError(f"transport to {shown!r}: expected a printable host:port")
            if transport.kind not in common_pb2.TransportKind.values() or not transport.kind:
                raise InvalidRequestError(
                    f"transport to {transport.address}: kind={transport.kind} is not a TransportKind"
                )
            if not 0 <= transport.bytes_per_s < math.inf:
                raise InvalidRequestError(
                    f"transport to {transport.address}: bytes_per_s={transport.bytes_per_s}: expected at least 0"
                )
        return tuple(cls(each.address, each.kind, each.bytes_per_s, each.corrupt_count) for each in transports)

    def to_proto(self, server_id: str) -> coordinator_pb2.TransportReport:
        return coordinator_pb2.TransportReport(
            address=self.address,
            kind=common_pb2.TransportKind.ValueType(self.kind),
            bytes_per_s=round(self.bytes_per_s),
            server_id=server_id,
            corrupt_count=self.corrupt_count,
        )


@dataclass(frozen=True, slots=True)
class TrainerDevice:
    """The device that a trainer computes on."""

    name: str
    """Name in the trainer's process, such as ``cuda:1``."""
    device_id: str
    """Identifies the device in the cluster."""
    shared: bool
    """True if the trainer knows that others may use the device, too."""

    @classmethod
    def from_proto(cls, device: coordinator_pb2.TrainerDevice) -> Self:
        """Decodes and checks the device in a heartbeat.

        Raises:
            InvalidRequestError: A field is empty, too long or not printable.
        """
        for what, text in (("name", device.name), ("id", device.id)):
            if not 0 < len(text) <= _MAX_ADDRESS_LENGTH or not text.isprintable():
                raise InvalidRequestError(
                    f"device.{what}={text[:_MAX_ADDRESS_LENGTH]!r}: expected 1 to {_MAX_ADDRESS_LENGTH} printable "
                    "characters"
                )
        return cls(device.name, device.id, device.shared)

    def to_proto(self) -> coordinator_pb2.TrainerDevice:
        return coordinator_pb2.TrainerDevice(name=self.name, id=self.device_id, shared=self.shared)


@dataclass(frozen=True, slots=True)
class UnreachableServer:
    """A shard server that a trainer waits for and cannot reach."""

    address: str
    since_s: float
    """Clock time of the first failed attempt."""
    reason: str


@dataclass(frozen=True, slots=True)
class ItemInProgress:
    """The work item that a trainer is computing in a loop over ``step.batches``."""

    step: int
    global_rank: int
    since_s: float
    """Clock time at which the trainer started the item."""


@dataclass(slots=True)
class Member:
    """A trainer of a run."""

    name: str
    host: str
    incarnation: str
    """Random per process. Distinguishes a retried Join from a second process of the same name."""
    epoch: int
    """Fencing number of the membership."""
    last_seen_s: float
    """Clock time of the last request."""
    requested_rank: int | None = None
    state: MemberState = MemberState.LIVE
    accepts_reassigned_work: bool | None = None
    """True if the trainer can compute work items of other trainers. None: unknown."""
    item_limit: int | None = None
    """In an asynchronous run: number of items of each data rank after which the trainer computes no more. None: not
    known."""
    joined_step: int = 0
    """Committed steps when the trainer joined. After a coordinator restart: committed steps at the restart."""
    transports: tuple[TransportReport, ...] = ()
    """Transports in the last heartbeat."""
    unreachable: tuple[UnreachableServer, ...] = ()
    """Unreachable servers in the last heartbeat."""
    in_progress: ItemInProgress | None = None
    """The item in the last heartbeat. None: the trainer computes none, or its loop cannot repeat batches."""
    behind: bool = False
    """True until the trainer asks for work of the step in flight: it joined late and builds its model, or it computes
    an item in vain that another trainer has finished. Other trainers compute its ranks' items meanwhile."""
    report: coordinator_pb2.StepReport | None = None
    """Where the time of the last steps went, as in the last heartbeat. None: no step is measured."""
    device: TrainerDevice | None = None
    """The device in the last heartbeat."""
    error: str = ""
    """With which error the trainer has left, and its ranks. Empty: it has not left, or without an error."""
    revoked_because: str = ""
    """Why the lease was revoked although the trainer was sending requests."""
    rpcs_in_progress: int = 0
    """Rpcs of the trainer that are being served. The lease cannot expire while this is above 0."""
    process: str = ""
    """Process identity, as returned by ``server_folders.own_identity``. Empty: unknown."""
    relay: str = ""
    """Id of the server that the trainer was last told to use as its relay. Empty: none. Not stored."""
    has_residuals: bool = False
    """True if the trainer has residuals of error feedback. Known from its membership stream."""
    connection: MembershipConnection = field(default_factory=MembershipConnection)

    @property
    def live(self) -> bool:
        """True if the lease is valid."""
        return self.state is MemberState.LIVE

    @property
    def expired(self) -> bool:
        """True if the lease expired and the trainer's work was not reassigned."""
        return self.state is MemberState.EXPIRED

    def silent_s(self, now: float) -> float:
        """Seconds since the last request."""
        return 0.0 if self.rpcs_in_progress else max(0.0, now - self.last_seen_s)

    def note_accepts_reassigned_work(self, accepts: bool) -> bool:
        """Records whether the trainer computes reassigned work. Returns True if this changed.

        True is final: a trainer that could compute any item once can do it again, whatever a later rpc says.
        """
        if self.accepts_reassigned_work is not None and accepts <= self.accepts_reassigned_work:
            return False
        self.accepts_reassigned_work = accepts
        return True

    def note_connections(
        self,
        transports: tuple[TransportReport, ...],
        unreachable: Iterable[coordinator_pb2.UnreachableServer],
        now: float,
    ) -> list[TransportReport]:
        """Records what a heartbeat reports about the connections to shard servers.

        Returns:
            The transports whose number of transfers with a wrong checksum has risen since the last heartbeat.
        """
        former = {transport.address: transport.corrupt_count for transport in self.transports}
        self.transports = transports
        self.unreachable = tuple(
            UnreachableServer(
                report.address[:_MAX_ADDRESS_LENGTH], now - max(0.0, report.for_s), report.reason[:_MAX_REASON_LENGTH]
            )
            for report in itertools.islice(unreachable, _MAX_UNREACHABLE)
        )
        return [transport for transport in transports if transport.corrupt_count > former.get(transport.address, 0)]

    def note_error(self, error: str, ranks: Sequence[int]) -> None:
        """Records the error with which the trainer leaves.

        Args:
            error: The error, such as ``ValueError: bad batch``.
            ranks: Logical ranks that the trainer owns.
        """
        shown = "".join(each if each.isprintable() else " " for each in error[:_MAX_REASON_LENGTH])
        rank = f" (logical rank {', '.join(map(str, ranks))})" if ranks else ""
        self.error = f"trainer {self.name!r}{rank} has left with {shown}"

    def note_in_progress(self, item: ItemInProgress | None) -> bool:
        """Records the item that a heartbeat reports. Returns True if it changed."""
        changed, self.in_progress = item != self.in_progress, item
        return changed

    def note_behind(self, behind: bool) -> bool:
        """Records whether the trainer is behind the step in flight. Returns True if this changed."""
        changed, self.behind = behind != self.behind, behind
        return changed

    @contextmanager
    def serving_rpc(self, clock: Callable[[], float]) -> Iterator[None]:
        """Keeps the lease valid while an rpc of the trainer is being served, and renews it at the end."""
        self.connection.note_request()
        self.rpcs_in_progress += 1
        try:
            yield
        finally:
            self.rpcs_in_progress -= 1
            self.last_seen_s = clock()

    def __str__(self) -> str:
        return f"trainer {self.name!r}" + (f" on host {self.host}" if self.host else "")


def tell(members: Iterable[Member]) -> None:
    """Makes the membership streams of trainers send the committed step, the placement and notices, if they changed."""
    for member in members:
        member.connection.news.notify()


@dataclass
class Members:
    """The trainers of a run, including gone ones."""

    run: str
    by_name: dict[str, Member] = field(default_factory=dict)
    waiting_for_work: dict[str, None] = field(default_factory=dict)
    """Names of trainers that wait for any work item, in order of arrival."""
    returning: dict[str, Member] = field(default_factory=dict)
    """Former memberships of trainers that a rollback ended and that have not joined again, by name."""
    _live: dict[str, Member] | None = field(default=None, init=False, repr=False)
    _expired: list[Member] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.by_name.values())

    @property
    def live(self) -> Mapping[str, Member]:
        """Members with a valid lease, by name. A later change of a member makes a new mapping."""
        if self._live is None:
            self._live = {member.name: member for member in self if member.live}
        return self._live

    @property
    def expired(self) -> Sequence[Member]:
        """Members whose lease expired and whose work was not reassigned."""
        if self._expired is None:
            self._expired = [member for member in self if member.expired]
        return self._expired

    def _forget_states(self) -> None:
        self._live = self._expired = None

    @property
    def requested_ranks(self) -> set[int]:
        """Ranks that live members requested when they joined."""
        return {member.requested_rank for member in self if member.live and member.requested_rank is not None}

    def require(self, name: str, epoch: int) -> Member:
        """Returns a live member.

        Raises:
            NotFoundError: The run never had a trainer of this name.
            StaleEpochError: The lease was revoked, the trainer left, or another process has the name now.
        """
        member = self.by_name.get(name)
        if member is None:
            raise NotFoundError(f"run {self.run!r} has no trainer {name!r}: join first", run=self.run, trainer=name)
        if epoch == member.epoch and member.live:
            return member
        reason = member.revoked_because or "its lease expired and its work was reassigned, or it left"
        if epoch != member.epoch:
            reason = f"the trainer of this name has epoch {member.epoch}"
        raise StaleEpochError(
            f"trainer {name!r} of run {self.run!r} sent epoch {epoch}, but {reason}: join again",
            run=self.run,
            trainer=name,
            epoch=member.epoch,
        )

    def find(self, name: str, incarnation: str) -> Member | None:
        """Returns the membership that a process already has. An empty name matches any name."""
        for member in self:
            if member.state is not MemberState.GONE and member.incarnation == incarnation and name in ("", member.name):
                return member
        return None

    def check_name(self, name: str) -> None:
        """Raises DuplicateError if a live trainer has the name."""
        member = self.by_name.get(name)
        if member is not None and member.live:
            raise DuplicateError(
                f"run {self.run!r} has a live {member}: give every trainer its own name, or wait until the lease of "
                "that trainer expires",
                run=self.run,
                trainer=name,
            )

    def check_count(self, world_size: int) -> None:
        """Raises CapacityError if the run has too many live trainers for one more."""
        count, limit = len(self.live), world_size + MAX_SPARES
        if count >= limit:
            raise CapacityError(
                f"run {self.run!r} has {count} live trainers, expected at most {limit}: {world_size} with a logical "
                f"rank each, and {MAX_SPARES} spares",
                run=self.run,
            )

    def free_name(self) -> str:
        """Returns an unused name for a trainer that joins without one."""
        number = len(self.by_name)
        while f"trainer-{number}" in self.by_name:
            number += 1
        return f"trainer-{number}"

    def add(self, member: Member) -> None:
        """Adds a member. It replaces a former member of its name and becomes the newest."""
        former = self.by_name.pop(member.name, None)
        self.by_name[member.name] = member
        self._forget_states()
        if former is not None:
            former.connection.news.notify()

    def note_device(self, member: Member, device: TrainerDevice | None) -> str:
        """Records the device that a heartbeat reports, unless another trainer uses it.

        Returns:
            Name of a live trainer with the same device, if one of the two does not share it. Empty: there is none.
        """
        if device is None or device == member.device:
            member.device = device
            return ""
        others = ((at.name, at.device) for at in self.live.values() if at is not member and at.device is not None)
        for name, used in others:
            if used.device_id == device.device_id and not (used.shared and device.shared):
                member.device = None
                return name
        member.device = device
        return ""

    def error_of(self, name: str) -> str:
        """Returns the error with which a trainer has left, see ``Member.error``. Empty: it has left with none."""
        member = self.by_name.get(name)
        return "" if member is None else member.error

    def give_up(self, names: Iterable[str]) -> None:
        """Expects trainers no longer."""
        for name in names:
            self.returning.pop(name, None)

    def remove(self, member: Member) -> None:
        """Removes a member."""
        del self.by_name[member.name]
        self._forget_states()
        member.connection.news.notify()

    def is_current(self, member: Member) -> bool:
        """True if a membership has not ended: it is live, or its lease expired and was not revoked."""
        return member.state is not MemberState.GONE and self.by_name.get(member.name) is member

    def set_state(self, member: Member, state: MemberState) -> None:
        """Changes a member's state. Only live members stay in ``waiting_for_work``."""
        member.state = state
        self._forget_states()
        if state is MemberState.GONE:
            member.connection.news.notify()
        if state is not MemberState.LIVE:
            self.waiting_for_work.pop(member.name, None)

    def prune(self, keep: Collection[str]) -> None:
        """Removes the oldest gone members beyond ``MAX_GONE_MEMBERS``, except those named in ``keep``."""
        gone = [member for member in self if member.state is MemberState.GONE and member.name not in keep]
        for member in gone[: max(0, len(gone) - MAX_GONE_MEMBERS)]:
            self.remove(member)

    def silent(self, now: float, lease_s: float) -> list[Member]:
        """Returns the live members that have been silent for longer than their lease."""
        return [member for member in self if member.live and member.silent_s(now) > lease_s]
