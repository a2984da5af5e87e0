"""Who takes part in a run: names, epochs and leases. Pure bookkeeping on an injected clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwell_server.coordinator.runs.transport_reports import TransportReport
from shardwell_wire.errors import DuplicateError, NotFoundError, StaleEpochError

REMEMBERED = 256
"""Trainers that are gone without a claim are shown to people, but only so many."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A shard server that a trainer waits for and cannot reach."""

    address: str
    since_s: float
    """Clock time."""
    reason: str


@dataclass(slots=True)
class Member:
    """One trainer of a run, live or remembered."""

    name: str
    host: str
    incarnation: str
    """Random per process: tells a retry from a second process of the same name."""
    epoch: int
    """Fences the membership."""
    heard_s: float
    """Clock time at which it was last heard of."""
    requested_rank: int | None = None
    live: bool = True
    lapsed: bool = False
    """Whether its lease ran out and nobody has taken its work: it is live again when it is heard of."""
    accepts_work: bool | None = None
    """Whether it computes other trainers' items; None: it has not said."""
    joined_step: int = 0
    """Committed steps when it joined; of one that joined in an earlier term, when the term began."""
    transports: tuple[TransportReport, ...] = ()
    """How it reaches shard servers, as its last heartbeat said."""
    unreachable: tuple[Unreachable, ...] = ()
    """As its last heartbeat says."""
    gone_because: str = ""
    """Why its work was taken although it was heard of."""
    rpcs_in_progress: int = 0
    """While one is in progress, the trainer is alive."""

    def silent_s(self, now: float) -> float:
        """Time since it was last heard of."""
        return 0.0 if self.rpcs_in_progress else max(0.0, now - self.heard_s)

    def __str__(self) -> str:
        return f"trainer {self.name!r}" + (f" on host {self.host}" if self.host else "")


@dataclass
class Membership:
    """The trainers of one run.

    Args:
        run: Name of the run, for messages.
    """

    run: str
    members: dict[str, Member] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    @property
    def lapsed(self) -> list[Member]:
        """Members whose lease ran out and whose work nobody has taken."""
        return [member for member in self.members.values() if member.lapsed]

    @property
    def live(self) -> dict[str, Member]:
        return {name: member for name, member in self.members.items() if member.live}

    def require(self, name: str, epoch: int) -> Member:
        """A live member by name and epoch.

        Raises:
            NotFoundError: There never was a trainer of that name.
            StaleEpochError: Its lease ran out, it left, or another process has its name now.
        """
        member = self.members.get(name)
        if member is None:
            raise NotFoundError(f"run {self.run!r} has no trainer {name!r}: join first", run=self.run, trainer=name)
        if epoch == member.epoch and member.live:
            return member
        reason = member.gone_because or "its lease ran out and its work was taken, or it left"
        if epoch != member.epoch:
            reason = f"the trainer of that name has {member.epoch}"
        raise StaleEpochError(
            f"trainer {name!r} of run {self.run!r} came with epoch {epoch}, but {reason}: join again",
            run=self.run,
            trainer=name,
            epoch=member.epoch,
        )

    def find(self, name: str, incarnation: str) -> Member | None:
        """The live or lapsed member that this process is already; by incarnation alone if it has no name."""
        for member in self.members.values():
            there = member.live or member.lapsed
            if there and member.incarnation == incarnation and name in ("", member.name):
                return member
        return None

    def check_name(self, name: str) -> None:
        """Raises DuplicateError if a live process has the name."""
        member = self.members.get(name)
        if member is not None and member.live:
            raise DuplicateError(
                f"run {self.run!r} has a live {member}: give every trainer its own name, or wait until the lease of "
                "the former one has run out",
                run=self.run,
                trainer=name,
            )

    def free_name(self) -> str:
        """A name for a trainer that has none."""
        number = len(self.members)
        while f"trainer-{number}" in self.members:
            number += 1
        return f"trainer-{number}"

    def forget(self, keep: Collection[str]) -> None:
        """Forgets the longest gone of the trainers that nothing is kept for, beyond ``REMEMBERED``."""
        gone = [name for name, at in self.members.items() if not at.live and not at.lapsed and name not in keep]
        for name in gone[: max(0, len(gone) - REMEMBERED)]:
            del self.members[name]

    def expired(self, now: float, lease_s: float) -> list[Member]:
        """The live members whose lease has run out."""
        return [member for member in self.members.values() if member.live and member.silent_s(now) > lease_s]


@contextmanager
def heard(member: Member, clock: Callable[[], float]) -> Iterator[None]:
    """An rpc of the member is in progress: renews its lease at the beginning and at the end."""
    member.rpcs_in_progress += 1
    try:
        yield
    finally:
        member.rpcs_in_progress -= 1
        member.heard_s = clock()
