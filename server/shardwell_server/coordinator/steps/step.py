"""The step in flight, and its work items: one per dp rank, computed by the trainers of one replica together.

``WorkState`` has the states of an item and ``_NEXT_STATES`` their transitions. All changes of a step and its items are
methods of ``Step``, and run on the event loop, without locks. docs/architecture.md has the table of what the trainers,
the coordinator and the servers have in each state. A vacant item is leased only after every server has fenced its
former trainers.

Note: [Sums of items]
    The trainers of a node may add their gradients before they push them. The sum is the contribution of all their data
    ranks, and the servers drop it when one of the ranks starts another attempt. The other items then have to be
    computed again, too. A trainer therefore reports the data ranks in its sums when it has finished its item. An item
    can only be finished while all these ranks are at its attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shardwell_server.coordinator.steps.proposals import PreparedGradients, Proposals, StepProposal
from shardwell_wire.errors import (
    ConflictError,
    InvalidRequestError,
    ShardwellError,
    StaleEpochError,
    StepRestartedError,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2


class WorkState(Enum):
    """State of a work item. The step is committed when all its items are finished; an item then ends."""

    VACANT = auto()
    """No trainer computes it."""
    LEASED = auto()
    """The trainers of a replica compute it, for the first time or again."""
    TWINNED = auto()
    """It is late: its trainer computes it, and another one computes its twin item. See Note: [Twin items]."""
    FINISHED = auto()
    """All its trainers have reported that every server has acknowledged their contributions."""
    ORPHANED = auto()
    """It is finished, and one of its trainers was lost since. The contributions count."""

    def to_proto(self) -> coordinator_pb2.WorkState.ValueType:
        """Returns the state for messages, which name neither twin items nor lost trainers."""
        if self is WorkState.VACANT:
            return coordinator_pb2.WORK_STATE_VACANT
        return coordinator_pb2.WORK_STATE_FINISHED if self.is_finished else coordinator_pb2.WORK_STATE_LEASED

    @property
    def is_leased(self) -> bool:
        """True if trainers compute the item."""
        return self in (WorkState.LEASED, WorkState.TWINNED)

    @property
    def is_finished(self) -> bool:
        """True if the contributions of the item are complete."""
        return self in (WorkState.FINISHED, WorkState.ORPHANED)


_NEXT_STATES = {
    WorkState.VACANT: {WorkState.LEASED, WorkState.VACANT},
    WorkState.LEASED: {WorkState.TWINNED, WorkState.FINISHED, WorkState.VACANT, WorkState.LEASED},
    WorkState.TWINNED: {WorkState.LEASED},
    WorkState.FINISHED: {WorkState.ORPHANED, WorkState.LEASED},
    WorkState.ORPHANED: {WorkState.LEASED, WorkState.VACANT},
}
"""The states that may follow each state. A state that follows itself starts another attempt, or has new epochs."""


@dataclass(frozen=True, slots=True)
class TwinItem:
    """The second run of a late work item, which another trainer computes. See Note: [Twin items] in ``work.py``."""

    trainer: str
    epoch: int
    attempt: int
    since_s: float

    @property
    def key(self) -> tuple[str, int, int]:
        """Trainer, epoch and attempt, which identify the computation."""
        return self.trainer, self.epoch, self.attempt


@dataclass(frozen=True, slots=True)
class ItemReport:
    """What a trainer reported about its finished part of a work item."""

    parts: dict[int, int] = field(default_factory=dict)
    """Number of pushed parts by unit index."""
    summed: frozenset[int] = frozenset()
    """Data ranks to whose gradients the trainer's were added before they were pushed. See Note: [Sums of items]."""
    written_buffers: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums, by unit and layout index, of buffers that the training script changed before the item started."""
    gradient_checksums: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums, by unit and layout index, of gradients that the other tensor-parallel ranks compute, too."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the training script has logged, by name."""
    data_position: str = ""
    """Where the data rank's streams of samples continue. Empty: where they continued before."""
    gradient_sample: int = 0
    """Checksum of some values of each gradient. 0: there is none."""


NO_REPORT = ItemReport()
"""Stands for the report of a member that has not finished."""


@dataclass(slots=True)
class MemberWork:
    """What one member of a replica computes of a work item: the part of one logical rank."""

    global_rank: int
    trainer: str
    """Trainer that computes it. If the item is vacant or finished: the trainer that had it last."""
    report: ItemReport = NO_REPORT
    """What the trainer has reported. ``NO_REPORT``: not finished, or the item is computed again."""

    @property
    def finished(self) -> bool:
        """True if the trainer reported that every server has acknowledged its contributions."""
        return self.report is not NO_REPORT


@dataclass(slots=True)
class WorkItem:
    """The part of a step that belongs to one dp rank.

    The item has one epoch and one attempt. They are leased, fenced and begun anew for all members together.
    """

    dp_rank: int
    members: dict[int, MemberWork]
    """The members by global rank, ordered by cp, tp and pp rank. There is one for each (cp, tp, pp)."""
    epoch: int
    attempt: int = 0
    number: int = 0
    """Number of committed items of the dp rank, which determines the batch. In a synchronous run, the step."""
    state: WorkState = WorkState.LEASED
    since_s: float = 0.0
    """Clock time of the last change of state."""
    fenced: bool = True
    """True if every server rejects pushes under older epochs and attempts of this dp rank."""
    reset_id: str = ""
    """Id of the request that started the current attempt."""
    last_attempt: int = 0
    """Highest attempt of the item and its twins. No number is given twice."""
    twin: TwinItem | None = None
    """The twin item that another trainer computes. Set in the state TWINNED. Only items with one member have twins."""
    lost_rank: int | None = None
    """Global rank of the member whose trainer was lost last in this step. None: none was lost."""
    lost_trainer: str = ""
    """That trainer."""
    is_twin: bool = False
    """True if the trainer computed the twin item, which has won or has become the only one."""
    refused: tuple[int, int, str] | None = None
    """Epoch, attempt and message of the attempt whose gradients differ between tensor-parallel ranks."""

    def enter(self, state: WorkState, now: float) -> None:
        """Changes the state at clock time ``now``. All changes of state go through here."""
        assert state in _NEXT_STATES[self.state], (self.state, state)
        self.state, self.since_s = state, now

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers of the members, in their order."""
        return tuple(member.trainer for member in self.members.values())

    @property
    def first_rank(self) -> int:
        """Global rank of the member with cp rank 0, tp rank 0 and pp rank 0."""
        return next(iter(self.members))

    @property
    def first_trainer(self) -> str:
        """The trainer of the member with cp rank 0, tp rank 0 and pp rank 0."""
        return self.members[self.first_rank].trainer

    def require_same_gradients(self) -> None:
        """Raises ConflictError if tensor-parallel ranks reported different gradients of the current attempt."""
        if self.refused is not None and self.refused[:2] == (self.epoch, self.attempt):
            raise ConflictError(self.refused[2])

    def member_of(self, trainer: str) -> MemberWork | None:
        """Returns the member that a trainer plays. No trainer plays two members of one item."""
        return next((member for member in self.members.values() if member.trainer == trainer), None)

    def note_lost(self, trainer: str) -> None:
        """Records that the trainer of a member was lost."""
        if (member := self.member_of(trainer)) is not None:
            self.lost_rank, self.lost_trainer = member.global_rank, trainer

    def parts(self, world: World) -> dict[tuple[int, int, int], int]:
        """Returns the number of pushed parts by unit index, context-parallel rank and pipeline rank, of all members."""
        found: dict[tuple[int, int, int], int] = {}
        for member in self.members.values():
            at = world.coordinates(member.global_rank)
            for unit, count in member.report.parts.items():
                key = unit, at.cp_rank, at.pp_rank
                found[key] = max(count, found.get(key, 0))
        return found

    @property
    def summed(self) -> frozenset[int]:
        """Data ranks to whose gradients those of a finished item were added. See Note: [Sums of items]."""
        return frozenset[int]().union(*(member.report.summed for member in self.members.values()))

    @property
    def data_position(self) -> str:
        """Where the data rank's streams of samples continue after the item. Empty: where they continued before."""
        return next(filter(None, (member.report.data_position for member in self.members.values())), "")

    @property
    def unfinished(self) -> list[MemberWork]:
        """The members that have not finished."""
        return [member for member in self.members.values() if not member.finished]

    def assign(self, trainers: Sequence[str]) -> None:
        """Replaces the trainers, given in the order of the members. Drops what former trainers reported."""
        for member, trainer in zip(self.members.values(), trainers, strict=True):
            member.trainer, member.report = trainer, NO_REPORT

    def to_proto(self, global_rank: int | None = None, replica_epoch: int = 0) -> coordinator_pb2.WorkItem:
        """Returns the item for the trainer of one member. None: the first member."""
        return coordinator_pb2.WorkItem(
            global_rank=self.first_rank if global_rank is None else global_rank,
            dp_rank=self.dp_rank,
            epoch=self.epoch,
            attempt=self.attempt,
            copy=self.is_twin,
            replica_epoch=replica_epoch,
            number=self.number,
        )

    def twin_to_proto(self) -> coordinator_pb2.WorkItem:
        """Returns the twin item, for the trainer that computes it."""
        assert self.twin is not None
        return coordinator_pb2.WorkItem(
            global_rank=self.first_rank,
            dp_rank=self.dp_rank,
            epoch=self.twin.epoch,
            attempt=self.twin.attempt,
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
    report: ItemReport


def new_members(global_ranks: Iterable[int], trainers: Iterable[str]) -> dict[int, MemberWork]:
    """Returns the members of an item.

    Args:
        global_ranks: Their global ranks, ordered by cp, tp and pp rank.
        trainers: Their trainers, in the same order.
    """
    return {rank: MemberWork(rank, trainer) for rank, trainer in zip(global_ranks, trainers, strict=True)}


def sum_of_attempts(items: Mapping[int, WorkItem]) -> int:
    """Returns the sum of the attempts of all items, which rises whenever the gradient of their step changes."""
    return sum(item.attempt for item in items.values())


class PartitionAssignments:
    """Which trainers update the optimizer partitions of a step, and which partitions are staged.

    Each trainer updates the partitions of the logical ranks whose work it finished. All inputs of an update are on the
    servers, so any trainer that has the same units can update them. The partitions of a trainer that is gone go to the
    next trainer of the same cp, tp and pp rank that asks to commit, once the former trainer is fenced. If one trainer
    of a replica is gone, the servers reject the leases of all of them, so their partitions are assigned anew, too.

    Args:
        items: All work items of the step, by dp rank.
    """

    def __init__(self, items: Mapping[int, WorkItem]) -> None:
        self._items = items
        self._places = {rank: (item, position) for item in items.values() for position, rank in enumerate(item.members)}
        """Work item of each global rank, and the rank's position in the replica."""
        self._staged: dict[int, int] = {}
        """``Step.attempts`` when each global rank's partitions were last staged."""
        self._substitutes: dict[int, tuple[str, int]] = {}
        """Trainers that update the partitions of ranks whose own trainer is gone, and the epochs of their leases."""

    def clear(self) -> None:
        """Invalidates everything that was staged, because the gradient changes."""
        self._staged.clear()
        self._substitutes.clear()

    @property
    def all_staged(self) -> bool:
        """True if the partitions of every rank are staged."""
        return not self._unstaged()

    def note(self, reports: Iterable[coordinator_pb2.PartitionWork]) -> bool:
        """Records staged partitions. Ignores reports of former leases and attempts. Returns True if any was new."""
        any_new, attempts = False, sum_of_attempts(self._items)
        for report in reports:
            rank = report.global_rank
            if rank not in self._places or (report.epoch, report.attempts) != (self._epoch(rank), attempts):
                continue
            any_new = any_new or self._staged.get(rank) != attempts
            self._staged[rank] = attempts
        return any_new

    def assign(
        self, trainer: str, position: int | None, live: Collection[str], next_epoch: Callable[[], int]
    ) -> list[coordinator_pb2.PartitionWork]:
        """Returns the partitions that a trainer must stage now, including partitions of gone trainers.

        Args:
            trainer: Name of the trainer, which has proposed the step.
            position: Its position in its replica. None: it owns no rank.
            next_epoch: Returns a new epoch.
        """
        work, attempts = [], sum_of_attempts(self._items)
        for rank in self._unstaged():
            item, place = self._places[rank]
            if self._trainer(rank, live) is None and item.fenced and place == position:
                self._substitutes[rank] = trainer, next_epoch()
            if self._trainer(rank, live) == trainer:
                work.append(coordinator_pb2.PartitionWork(global_rank=rank, epoch=self._epoch(rank), attempts=attempts))
        return work

    def waiting_for(self, live: Collection[str]) -> list[str]:
        """Returns one line per rank whose partitions are not staged."""
        lines = []
        for rank in self._unstaged():
            item, _ = self._places[rank]
            trainer = self._trainer(rank, live)
            if trainer is not None:
                status = f"trainer {trainer!r} is updating them"
            elif item.members[rank].trainer in live and len(item.members) > 1:
                status = f"trainer {item.lost_trainer!r} of the same replica is gone"
            else:
                status = f"trainer {item.members[rank].trainer!r} is gone"
            lines.append(f"optimizer partitions of rank {rank}: {status}")
        return lines

    def _unstaged(self) -> list[int]:
        attempts = sum_of_attempts(self._items)
        return [rank for rank in self._places if self._staged.get(rank) != attempts]

    def _epoch(self, rank: int) -> int:
        """Returns the epoch of the lease on a rank's partitions."""
        if (substitute := self._substitutes.get(rank)) is not None:
            return substitute[1]
        return self._places[rank][0].epoch

    def _trainer(self, rank: int, live: Collection[str]) -> str | None:
        """Returns the live trainer that updates a rank's partitions. None: they must be assigned anew."""
        item, _ = self._places[rank]
        if (substitute := self._substitutes.get(rank)) is not None:
            return substitute[0] if substitute[0] in live else None
        trainer = item.members[rank].trainer
        return None if item.state is WorkState.ORPHANED or trainer not in live else trainer


@dataclass
class Step:
    """The step in flight.

    Args:
        number: Number of the step, which is also the version of every unit that it reads.
        items: All work items, by dp rank.
        started_s: Clock time at which the step started.
        restored: Whether a former coordinator started the step. How long its items took is then not known.
    """

    number: int
    items: dict[int, WorkItem]
    started_s: float
    restored: bool = False
    generation: int = 0
    """Rises when an item is reset. Everything prepared in an earlier generation is invalid."""
    finished_s: float | None = None
    """Clock time at which the last item was finished. None: an item is unfinished."""
    last_finished: coordinator_pb2.LastFinishedItem | None = None
    """The item that was finished last, if all are finished. None: one replica finished all, or the coordinator has
    restarted."""
    proposals: Proposals = field(default_factory=Proposals)
    prepared: PreparedGradients | None = None
    failure: ShardwellError | None = None
    """Why the step cannot be prepared with its current contributions."""
    skipped: bool = False
    """True if a gradient is not finite and the step will change no parameter."""
    recording: bool = False
    """True while the step's commit record is being written."""

    counted: set[int] = field(default_factory=set)
    """With several optimizers: indices of the units whose gradients count for the norms of this step."""
    kept: set[int] = field(default_factory=set)
    """With several optimizers: indices of the units whose gradients another optimizer will use."""

    def __post_init__(self) -> None:
        self._items_by_trainer: dict[str, dict[int, WorkItem]] = {}
        self._item_by_rank: dict[int, WorkItem] = {}
        self._has_sums = False
        """True if the gradients of an item were added to others. See Note: [Sums of items]."""
        for item in self.items.values():
            self._item_by_rank.update(dict.fromkeys(item.members, item))
            self._note_trainers(item)
        self.partitions = PartitionAssignments(self.items)

    def _note_trainers(self, item: WorkItem) -> None:
        for trainer in item.trainers:
            self._items_by_trainer.setdefault(trainer, {})[item.dp_rank] = item

    @property
    def is_vacant(self) -> bool:
        """True if no trainer computes an item or has finished one."""
        return all(item.state is WorkState.VACANT for item in self.items.values())

    def read_version(self, number: int) -> None:
        """Makes unfinished items read a later version. Drops what was prepared and proposed."""
        assert not self.all_finished and number >= self.number
        self.number = number
        self.generation += 1
        self.prepared = self.failure = None
        self.proposals.clear()

    @property
    def all_finished(self) -> bool:
        """True if every item is finished."""
        return self.finished_s is not None

    @property
    def attempts(self) -> int:
        """Sum of the attempts of all items. Rises whenever the gradient changes, also across coordinator restarts."""
        return sum_of_attempts(self.items)

    @property
    def unfinished(self) -> list[WorkItem]:
        return [item for item in self.items.values() if not item.state.is_finished]

    @property
    def unfenced(self) -> list[WorkItem]:
        """Items whose former trainers may still push to a server."""
        return [item for item in self.items.values() if not item.fenced]

    @property
    def leasable(self) -> list[WorkItem]:
        """Vacant items that may be leased."""
        return [item for item in self.items.values() if item.state is WorkState.VACANT and item.fenced]

    def leased_to(self, trainer: str) -> list[WorkItem]:
        """Returns the items of which a trainer still has to compute its part."""
        items = [item for item in self._items_by_trainer.get(trainer, {}).values() if item.state.is_leased]
        found = [(item, item.member_of(trainer)) for item in items]
        return [item for item, member in found if member is not None and not member.finished]

    def items_of(self, trainer: str) -> list[WorkItem]:
        """Returns the items of which this trainer is or was the last one to compute a part."""
        return [item for item in self._items_by_trainer.get(trainer, {}).values() if item.member_of(trainer)]

    @property
    def twinned(self) -> WorkItem | None:
        """The item of which a trainer computes the twin."""
        return next((item for item in self.items.values() if item.twin is not None), None)

    def twinned_by(self, trainer: str) -> WorkItem | None:
        """Returns the item of which a trainer computes the twin."""
        item = self.twinned
        return item if item is not None and item.twin is not None and item.twin.trainer == trainer else None

    def waiting_for(self) -> list[str]:
        """Returns one line per unfinished rank or vacant item, for trainers that wait."""
        lines = []
        for item in self.unfinished:
            if item.state is WorkState.VACANT:
                gone = f"trainer {item.first_trainer!r}" if len(item.members) == 1 else "a trainer of its replica"
                if len(item.members) > 1 and item.lost_rank is not None:
                    gone = f"trainer {item.lost_trainer!r} (rank {item.lost_rank}) of its replica"
                lines.append(f"{item}: vacant, because {gone} is gone")
                continue
            twin = f", and trainer {item.twin.trainer!r} its twin item" if item.twin is not None else ""
            lines += [f"rank {at.global_rank}: trainer {at.trainer!r} is computing it{twin}" for at in item.unfinished]
        return lines

    def _find_last_finished(self) -> coordinator_pb2.LastFinishedItem | None:
        if not self.items or self.restored:
            return None
        last = max(self.items.values(), key=lambda item: item.since_s)
        others = [item.since_s for item in self.items.values() if item.trainers != last.trainers]
        if not others or max(others) == last.since_s:
            return None
        return coordinator_pb2.LastFinishedItem(
            global_rank=last.first_rank, trainer=last.first_trainer, late_s=last.since_s - max(others)
        )

    # Work items

    def finish(self, finished: Sequence[FinishedWork], now: float, *, trainer: str = "") -> bool:
        """Marks ranks, and items all of whose ranks are finished. Returns True if these were the last unfinished ones.

        A twin item wins if its trainer finished the item. Otherwise it has lost. An item whose gradients were
        added to those of an attempt that is over starts another attempt, and must be fenced.

        Args:
            finished: Result of ``check_reports`` in ``reports.py``.
            now: Clock time.
        """
        for work in finished:
            item = work.item
            if item.twin is not None:
                self._end_twin(item, wins=item.twin.trainer == trainer)
            work.member.report = work.report
            self._has_sums = self._has_sums or bool(work.report.summed)
            if not item.unfinished:
                item.enter(WorkState.FINISHED, now)
                self._restart_outdated_sums(now)
        if self.finished_s is not None or not all(item.state.is_finished for item in self.items.values()):
            return False
        self.finished_s, self.last_finished = now, self._find_last_finished()
        return True

    def lease(self, item: WorkItem, trainers: Sequence[str], epoch: int, now: float) -> None:
        """Leases a vacant item to the trainers of a replica, given in the order of the item's members."""
        item.assign(trainers)
        item.epoch = epoch
        item.enter(WorkState.LEASED, now)
        self._note_trainers(item)

    def revoke(self, item: WorkItem, epoch: int, now: float) -> None:
        """Revokes an item from the trainers of a replica of which one is gone. They must then be fenced.

        A finished item stays finished. An unfinished item becomes vacant and starts a new attempt: the next trainers
        may compute it from other batches, so the servers must drop the parts that the former ones pushed. All parts of
        one attempt come from one replica. If another trainer computes the twin item, that trainer gets the item.
        """
        if item.state is WorkState.ORPHANED:
            return  # the whole replica is fenced. Another epoch would end the leases of those who update its partitions
        item.fenced = False
        if item.state is WorkState.TWINNED:
            self._end_twin(item, wins=True)
        elif item.state.is_finished:
            item.epoch = epoch
            item.enter(WorkState.ORPHANED, item.since_s)
        else:
            item.epoch = epoch
            self._begin_attempt(item)
            item.enter(WorkState.VACANT, now)
        self._restart_outdated_sums(now)

    def _restart_outdated_sums(self, now: float) -> None:
        """Starts a new attempt of finished items whose sums the servers drop. See Note: [Sums of items]."""
        if not self._has_sums:
            return
        for item in self.items.values():
            others = (self.items[rank] for rank in item.summed)
            if item.state.is_finished and any(other.attempt != item.attempt for other in others):
                self._restart_item(item, now)  # its own sums are reported by the items in them

    def _restart_item(self, item: WorkItem, now: float) -> None:
        """Starts a new attempt of an item for its trainers. If one of them is gone, the item becomes vacant."""
        is_leased = item.state.is_leased or item.state is WorkState.FINISHED
        self._begin_attempt(item)
        item.enter(WorkState.LEASED if is_leased else WorkState.VACANT, now)
        item.reset_id, item.fenced = "", False
        self._forget_results()

    def reset(self, item: WorkItem, request_id: str, now: float) -> None:
        """Starts a new attempt of an item, for all its members.

        Invalidates what was prepared, proposed or staged in the step.
        """
        self._begin_attempt(item)
        item.enter(WorkState.LEASED, now)
        item.reset_id = request_id
        self._forget_results()
        self._restart_outdated_sums(now)

    def _begin_attempt(self, item: WorkItem) -> None:
        """Gives an item its next attempt. Ends a twin item, and drops what trainers have reported."""
        if item.twin is not None:
            self._end_twin(item, wins=False)
        item.attempt, item.is_twin = item.next_attempt(), False
        for member in item.members.values():
            member.report = NO_REPORT

    def _forget_results(self) -> None:
        """Invalidates what was prepared, proposed or staged, because the gradient changes."""
        self.generation += 1
        self.finished_s = None
        self.prepared = self.failure = None
        self.skipped = False
        self.proposals.clear()
        self.partitions.clear()

    def start_twin(self, item: WorkItem, trainer: str, epoch: int, now: float) -> None:
        """Lets a trainer compute the twin of an item that another trainer computes."""
        item.twin = TwinItem(trainer, epoch, item.next_attempt(), now)
        item.enter(WorkState.TWINNED, item.since_s)

    def drop_twin(self, trainer: str) -> None:
        """Ends the twin item that a trainer computes: it gave up, or is gone."""
        if (item := self.twinned_by(trainer)) is not None:
            self._end_twin(item, wins=False)

    def _end_twin(self, item: WorkItem, *, wins: bool) -> None:
        """Ends the twin item. If it wins, its trainer gets the item."""
        twin, item.twin = item.twin, None
        assert twin is not None
        item.enter(WorkState.LEASED, twin.since_s if wins else item.since_s)
        if wins:
            item.assign([twin.trainer])
            item.epoch, item.attempt, item.is_twin = twin.epoch, twin.attempt, True
            self._note_trainers(item)

    def restart(self, now: float) -> None:
        """Starts a new attempt of every item, because a shard server was lost with contributions.

        A trainer keeps its items and computes them again. Finished items of lost trainers become vacant. Every item
        must be fenced: servers may still have contributions of the former attempts.
        """
        for item in self.items.values():
            self._restart_item(item, now)

    def item_of(self, global_rank: int) -> WorkItem:
        """Returns the item that a rank belongs to. Raises InvalidRequestError if the run has no such rank."""
        if global_rank not in self._item_by_rank:
            raise InvalidRequestError(f"rank {global_rank} does not exist: the run has {len(self._item_by_rank)} ranks")
        return self._item_by_rank[global_rank]

    def require_leased(self, trainer: str, global_rank: int, epoch: int) -> WorkItem:
        """Returns the item of a rank that a trainer computes or has finished. Raises StaleEpochError if the trainer
        lost the item."""
        item = self.item_of(global_rank)
        owner = item.members[global_rank].trainer
        if epoch != item.epoch or owner != trainer or item.state is WorkState.VACANT:
            raise self._lost_item(trainer, global_rank, epoch)
        return item

    def _lost_item(self, trainer: str, global_rank: int, epoch: int) -> StaleEpochError:
        """Returns the error of a trainer that lost an item, possibly because another one of its replica was lost."""
        item = self.item_of(global_rank)
        now = f"{item.members[global_rank].trainer!r} has epoch {item.epoch}"
        facts: dict[str, object] = {"step": self.number, "global_rank": global_rank, "epoch": item.epoch}
        if item.lost_rank is not None and item.lost_trainer != trainer:
            new = ", ".join(map(repr, item.trainers))
            now = (
                f"trainer {item.lost_trainer!r} (rank {item.lost_rank}) of its replica was lost, so {item} "
                + ("waits for a complete replica" if item.state is WorkState.VACANT else f"was leased anew, to {new}")
                + f", under epoch {item.epoch}, attempt {item.attempt}"
            )
            facts |= {
                "dp_rank": item.dp_rank,
                "attempt": item.attempt,
                "lost_trainer": item.lost_trainer,
                "lost_rank": item.lost_rank,
            }
        return StaleEpochError(
            f"trainer {trainer!r} no longer has rank {global_rank} of step {self.number} under epoch {epoch}: {now}",
            **facts,
        )

    # Preparation

    def note_counted(self, counted: Iterable[int], kept: Iterable[int]) -> bool:
        """Records which units of one trainer count for the norms, and which do not. Returns True if that is new.

        Trainers of a grid know their own units only.
        """
        before = (set(self.counted), set(self.kept))
        self.counted = (self.counted - set(kept)) | set(counted)
        self.kept = (self.kept - set(counted)) | set(kept)
        return before != (self.counted, self.kept)

    def uncounted(self, layouts: Sequence[UnitLayout]) -> list[str]:
        """Returns the names of the units of parameters that no trainer has named to ``note_counted``."""
        known = self.counted | self.kept
        return [layout.unit for index, layout in enumerate(layouts) if index not in known and not layout.holds_buffers]

    def skip(self) -> None:
        """Continues the step without a gradient, after a gradient was not finite."""
        self.skipped, self.failure = True, None

    def check_ready(self, proposal: StepProposal) -> None:
        """Raises StepRestartedError if the trainer's work is not finished, or if it clips by an outdated norm."""
        trainer = proposal.trainer
        self.require_finished(trainer)
        if proposal.norm_attempts is not None and proposal.norm_attempts != self.attempts:
            raise StepRestartedError(
                f"trainer {trainer!r} clips step {self.number} by an outdated gradient norm, because a rank has reset "
                "its work since: call clip_grad_norm_ again"
            )

    def require_finished(self, trainer: str) -> None:
        """Raises StepRestartedError if a trainer must still compute an item, such as one that was restarted."""
        if items := self.leased_to(trainer):
            played = (item.member_of(trainer) for item in items)
            ranks = ", ".join(str(member.global_rank) for member in played if member is not None)
            raise StepRestartedError(
                f"trainer {trainer!r} proposes step {self.number}, but has not finished the work of rank {ranks}: "
                "finish it first",
                ranks=ranks,
            )
