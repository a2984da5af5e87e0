"""Work items of a step: one per dp rank, computed by the trainers of one replica together.

Note: [Sums of items]
    The trainers of a node may add their gradients before they push them. The sum is the contribution of all their data
    ranks, and the servers drop it when one of the ranks starts another attempt. The other items then have to be
    computed again, too. A trainer therefore reports the data ranks in its sums when it has finished its item. An item
    can only be finished while all these ranks are at its attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2


class WorkState(Enum):
    """State of a work item."""

    VACANT = coordinator_pb2.WORK_STATE_VACANT
    """No trainer computes it."""
    LEASED = coordinator_pb2.WORK_STATE_LEASED
    """A trainer computes it."""
    FINISHED = coordinator_pb2.WORK_STATE_FINISHED
    """Every server has acknowledged its contributions."""


@dataclass(frozen=True, slots=True)
class WorkCopy:
    """A copy of a late work item, which another trainer computes. See Note: [Copies of late items] in ``copies.py``."""

    trainer: str
    epoch: int
    attempt: int
    since_s: float

    @property
    def key(self) -> tuple[str, int, int]:
        """Trainer, epoch and attempt, which identify the computation of the copy."""
        return self.trainer, self.epoch, self.attempt


@dataclass(slots=True)
class MemberWork:
    """What one member of a replica computes of a work item: the part of one logical rank."""

    global_rank: int
    trainer: str
    """Trainer that computes it. If the item is vacant or finished: the trainer that had it last."""
    finished: bool = False
    """True if the trainer reported that every server has acknowledged its contributions."""
    parts: dict[int, int] = field(default_factory=dict)
    """Number of pushed parts by unit index. Empty until the trainer has finished."""
    written_buffers: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums, by unit and layout index, of buffers that the training script changed before the item started."""
    summed: frozenset[int] = frozenset()
    """Data ranks to whose gradients the trainer's were added before they were pushed. See Note: [Sums of items]."""
    gradient_checksums: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums, by unit and layout index, of gradients that the other tensor-parallel ranks compute, too."""

    def finish(self, work: FinishedWork, written_buffers: dict[tuple[int, int], int]) -> None:
        """Records what the trainer reported."""
        self.finished, self.parts, self.written_buffers = True, work.parts, written_buffers
        self.summed = work.summed

    def restart(self) -> None:
        """Drops what the trainer reported: the item is computed again."""
        self.finished, self.parts, self.written_buffers = False, {}, {}
        self.summed = frozenset()
        self.gradient_checksums = {}

    def note_gradients(self, checksums: dict[tuple[int, int], int]) -> None:
        """Records the checksums of gradients that the trainer reported with the finished item."""
        self.gradient_checksums = checksums


@dataclass(slots=True)
class WorkItem:
    """The part of a step that belongs to one dp rank.

    The item has one epoch and one attempt. They are leased, fenced and begun anew for all members together.
    """

    dp_rank: int
    members: dict[int, MemberWork]
    """The members by global rank, ordered by tp rank and pp rank. There is one for each (tp, pp) coordinate."""
    epoch: int
    attempt: int = 0
    number: int = 0
    """Number of committed items of the dp rank, which determines the batch. In a synchronous run, the step."""
    state: WorkState = WorkState.LEASED
    since_s: float = 0.0
    """Clock time of the last change of state."""
    trainer_lost: bool = False
    """True if a trainer was lost after the item was finished."""
    fenced: bool = True
    """True if every server rejects pushes under older epochs and attempts of this dp rank."""
    reset_id: str = ""
    """Id of the request that started the current attempt."""
    last_attempt: int = 0
    """Highest attempt of the item and its copies. No number is given twice."""
    copy: WorkCopy | None = None
    """The copy that another trainer computes. None: there is none. Only items with one member are copied."""
    lost_rank: int | None = None
    """Global rank of the member whose trainer was lost last in this step. None: none was lost."""
    lost_trainer: str = ""
    """That trainer."""
    is_copy: bool = False
    """True if the trainer computed a copy, which has won or has become the only one."""

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers of the members, in their order."""
        return tuple(member.trainer for member in self.members.values())

    @property
    def first_rank(self) -> int:
        """Global rank of the member with tp rank 0 and pp rank 0."""
        return next(iter(self.members))

    @property
    def first_trainer(self) -> str:
        """The trainer of the member with tp rank 0 and pp rank 0."""
        return self.members[self.first_rank].trainer

    def member_of(self, trainer: str) -> MemberWork | None:
        """Returns the member that a trainer plays. No trainer plays two members of one item."""
        return next((member for member in self.members.values() if member.trainer == trainer), None)

    def note_lost(self, trainer: str) -> None:
        """Records that the trainer of a member was lost."""
        if (member := self.member_of(trainer)) is not None:
            self.lost_rank, self.lost_trainer = member.global_rank, trainer

    def parts(self, world: World) -> dict[tuple[int, int], int]:
        """Returns the number of pushed parts by unit index and pipeline rank, of all members."""
        found: dict[tuple[int, int], int] = {}
        for member in self.members.values():
            pp_rank = world.coordinates(member.global_rank).pp_rank
            for unit, count in member.parts.items():
                key = unit, pp_rank
                found[key] = max(count, found.get(key, 0))
        return found

    @property
    def summed(self) -> frozenset[int]:
        """Data ranks to whose gradients those of a finished item were added. See Note: [Sums of items]."""
        return frozenset[int]().union(*(member.summed for member in self.members.values()))

    @property
    def unfinished(self) -> list[MemberWork]:
        """The members that have not finished."""
        return [member for member in self.members.values() if not member.finished]

    def assign(self, trainers: Sequence[str]) -> None:
        """Replaces the trainers, given in the order of the members. Drops what former trainers reported."""
        for member, trainer in zip(self.members.values(), trainers, strict=True):
            member.trainer = trainer
            member.restart()

    def to_proto(self, global_rank: int | None = None, replica_epoch: int = 0) -> coordinator_pb2.WorkItem:
        """Returns the item for the trainer of one member. None: the first member."""
        return coordinator_pb2.WorkItem(
            global_rank=self.first_rank if global_rank is None else global_rank,
            dp_rank=self.dp_rank,
            epoch=self.epoch,
            attempt=self.attempt,
            copy=self.is_copy,
            replica_epoch=replica_epoch,
            number=self.number,
        )

    def copy_to_proto(self) -> coordinator_pb2.WorkItem:
        """Returns the copy, for the trainer that computes it."""
        assert self.copy is not None
        return coordinator_pb2.WorkItem(
            global_rank=self.first_rank,
            dp_rank=self.dp_rank,
            epoch=self.copy.epoch,
            attempt=self.copy.attempt,
            copy=True,
            number=self.number,
        )

    def next_attempt(self) -> int:
        """Returns a new attempt number."""
        self.last_attempt = max(self.last_attempt, self.attempt) + 1
        return self.last_attempt

    def __str__(self) -> str:
        if len(self.members) == 1:
            return f"rank {self.first_rank}"
        return f"dp rank {self.dp_rank} (ranks {', '.join(map(str, self.members))})"


@dataclass(frozen=True, slots=True)
class FinishedWork:
    """A report that one member has finished a work item."""

    item: WorkItem
    member: MemberWork
    parts: dict[int, int]
    """Number of pushed parts by unit index."""
    summed: frozenset[int] = frozenset()
    """Data ranks to whose gradients the item's were added before they were pushed."""


def new_members(global_ranks: Iterable[int], trainers: Iterable[str]) -> dict[int, MemberWork]:
    """Returns the members of an item.

    Args:
        global_ranks: Their global ranks, ordered by tp rank and pp rank.
        trainers: Their trainers, in the same order.
    """
    return {rank: MemberWork(rank, trainer) for rank, trainer in zip(global_ranks, trainers, strict=True)}


def sum_of_attempts(items: Mapping[int, WorkItem]) -> int:
    """Returns the sum of the attempts of all items, which rises whenever the gradient of their step changes."""
    return sum(item.attempt for item in items.values())
