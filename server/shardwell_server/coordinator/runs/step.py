"""The work items of one step: who computes which logical rank, and how far that is.

A work item is vacant, leased or finished. A vacant item is offered only once its former holder is
fenced on every server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shardwell_server.coordinator.runs.partition_book import PartitionBook
from shardwell_server.coordinator.runs.proposals import StepProposal
from shardwell_wire.errors import InvalidRequestError, ShardwellError, StaleEpochError, StepStateError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


class WorkState(Enum):
    """How far a work item is."""

    VACANT = coordinator_pb2.WORK_STATE_VACANT
    """Nobody computes it."""
    LEASED = coordinator_pb2.WORK_STATE_LEASED
    """Its holder computes it."""
    FINISHED = coordinator_pb2.WORK_STATE_FINISHED
    """Its contributions are acknowledged by every server."""


@dataclass(slots=True)
class Item:
    """One logical rank's part of the step."""

    global_rank: int
    dp_rank: int
    holder: str
    """Trainer that computes or has computed it; of a vacant one, the trainer that did last."""
    epoch: int
    attempt: int = 0
    state: WorkState = WorkState.LEASED
    since_s: float = 0.0
    """Clock time of the last change of state."""
    orphaned: bool = False
    """Whether its holder was lost after it was finished."""
    fenced: bool = True
    """Whether every server refuses former holders."""
    parts: dict[int, int] = field(default_factory=dict)
    """Pushes by unit index, once finished."""
    written: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksum by unit and index of each buffer that the training script had changed when the item began."""
    reset_id: str = ""
    """Request that began the present attempt."""

    def to_proto(self) -> coordinator_pb2.WorkItem:
        return coordinator_pb2.WorkItem(
            global_rank=self.global_rank, dp_rank=self.dp_rank, epoch=self.epoch, attempt=self.attempt
        )


@dataclass(frozen=True, slots=True)
class OtherNorm:
    """The norm of the step's gradients, of another type than Euclidean."""

    norm_type: float
    value: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the servers said about the step's gradients."""

    grad_norm: float
    other_norm: OtherNorm | None = None
    """The last that was asked for; None: none was."""
    norms: tuple[shard_pb2.UnitNorm, ...] = ()
    """What they were computed from, by unit and server."""
    ready_for: bytes | None = None
    """``allocation_key`` of the optimizer for which every server has memory; None: of none yet."""
    buffers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By unit index: layout indices of the buffers that the update will change."""

    def has(self, norm_type: float) -> bool:
        """Whether the norm of a type is known, beside the Euclidean one; 0: none is wanted."""
        return not norm_type or (self.other_norm is not None and self.other_norm.norm_type == norm_type)


@dataclass
class Step:
    """The step in flight.

    Args:
        number: The version that is read.
        items: By global rank, all of them.
        started_s: Clock time at which the step began.
    """

    number: int
    items: dict[int, Item]
    started_s: float
    generation: int = 0
    """Rises when finished work is begun anew: what was prepared before is void."""
    finished_s: float | None = None
    """Clock time since which every item is finished."""
    recorded: bool = False
    """Whether the finished items are durable, so that trainers may be told."""
    step_proposals: dict[str, StepProposal] = field(default_factory=dict)
    """Hyper-parameters by trainer."""
    prepared: Prepared | None = None
    failure: ShardwellError | None = None
    """Why the step cannot be prepared as its contributions are."""
    skipped: bool = False
    """Whether a gradient is not finite, and the step goes on without any."""
    partitions: PartitionBook = field(default_factory=PartitionBook)
    """Who updates which partition, if the optimizer runs on the trainers."""

    def __post_init__(self) -> None:
        self._given: dict[str, dict[int, Item]] = {}
        for item in self.items.values():
            self._given.setdefault(item.holder, {})[item.global_rank] = item

    @property
    def all_finished(self) -> bool:
        return self.finished_s is not None

    @property
    def attempts(self) -> int:
        """Sum of all items' attempts. Rises whenever the gradient changes, also over restarts of the coordinator."""
        return sum(item.attempt for item in self.items.values())

    @property
    def unfinished(self) -> list[Item]:
        return [item for item in self.items.values() if item.state is not WorkState.FINISHED]

    @property
    def offered(self) -> list[Item]:
        """Vacant items that may be leased."""
        return [item for item in self.items.values() if item.state is WorkState.VACANT and item.fenced]

    def held_by(self, trainer: str) -> list[Item]:
        """The items that a trainer has yet to compute."""
        return [item for item in self.played_by(trainer) if item.state is WorkState.LEASED]

    def played_by(self, trainer: str) -> list[Item]:
        """The items that a trainer computes or has computed last."""
        return [item for item in self._given.get(trainer, {}).values() if item.holder == trainer]

    def waiting_for(self) -> list[str]:
        """One line per unfinished item, for trainers that wait."""
        lines = {
            WorkState.LEASED: "trainer {!r} computes it",
            WorkState.VACANT: "vacant, since trainer {!r} is gone",
        }
        return [f"rank {item.global_rank}: {lines[item.state].format(item.holder)}" for item in self.unfinished]

    def check_finished(
        self, trainer: str, reports: Sequence[coordinator_pb2.FinishedItem], unit_count: int
    ) -> list[tuple[Item, dict[int, int]]]:
        """The reported items that were not known to be finished, with their parts. Changes nothing.

        Raises:
            InvalidRequestError: A report is malformed.
            StaleEpochError: An item went to another trainer or was begun anew.
            StepStateError: An item was never the trainer's, or was finished with other parts.
        """
        news = []
        if len({report.global_rank for report in reports}) != len(reports):
            raise InvalidRequestError(f"a rank is reported twice: {[report.global_rank for report in reports]}")
        for report in reports:
            item, parts = self._item_of(report.global_rank), _parts(report, unit_count)
            where = f"rank {item.global_rank} of step {self.number}"
            if report.epoch < item.epoch or (report.epoch == item.epoch and report.attempt < item.attempt):
                raise StaleEpochError(
                    f"{where} was finished under epoch {report.epoch}, attempt {report.attempt}, but is now held by "
                    f"trainer {item.holder!r} under epoch {item.epoch}, attempt {item.attempt}",
                    global_rank=item.global_rank,
                    epoch=item.epoch,
                )
            if (report.epoch, report.attempt, trainer) != (item.epoch, item.attempt, item.holder):
                raise StepStateError(
                    f"trainer {trainer!r} reports {where} under epoch {report.epoch}, attempt {report.attempt}, "
                    f"which it does not hold: it was leased to {item.holder!r} under epoch {item.epoch}, "
                    f"attempt {item.attempt}",
                    global_rank=item.global_rank,
                )
            if item.state is WorkState.FINISHED and item.parts != parts:
                raise StepStateError(f"{where} was finished before with parts {item.parts}, now with {parts}")
            if item.state is not WorkState.FINISHED:
                news.append((item, parts))
        return news

    def finish(self, news: Sequence[tuple[Item, dict[int, int]]], now: float) -> bool:
        """Marks items as finished; they come from ``check_finished``. Returns whether those were the last."""
        for item, parts in news:
            item.state, item.parts, item.since_s = WorkState.FINISHED, parts, now
        if self.finished_s is not None or any(item.state is not WorkState.FINISHED for item in self.items.values()):
            return False
        self.finished_s = now
        return True

    def lease(self, item: Item, trainer: str, epoch: int, now: float) -> None:
        """Gives a vacant item to a trainer."""
        item.holder, item.epoch, item.state, item.since_s = trainer, epoch, WorkState.LEASED, now
        self._given.setdefault(trainer, {})[item.global_rank] = item

    def vacate(self, item: Item, epoch: int, now: float) -> None:
        """Takes an item from a holder that is gone. A finished one stays finished; both must be fenced.

        The next holder of an unfinished one may compute it from another batch. So it begins a new attempt, and the
        servers drop what the former holder pushed: one attempt is one trainer's.
        """
        item.epoch, item.fenced = epoch, False
        if item.state is WorkState.LEASED:
            item.state, item.since_s, item.attempt = WorkState.VACANT, now, item.attempt + 1
        item.orphaned = item.state is WorkState.FINISHED

    def reset(self, item: Item, request_id: str, now: float) -> None:
        """Begins an item anew under a higher attempt. What was prepared or handed in is void."""
        item.attempt += 1
        item.state, item.since_s, item.reset_id = WorkState.LEASED, now, request_id
        item.parts, item.written = {}, {}
        self.generation += 1
        self.finished_s, self.recorded = None, False
        self.prepared = self.failure = None
        self.skipped = False
        self.step_proposals.clear()
        self.partitions = PartitionBook()

    def _item_of(self, global_rank: int) -> Item:
        if global_rank not in self.items:
            raise InvalidRequestError(f"there is no rank {global_rank}: the run has {len(self.items)}")
        return self.items[global_rank]


def _parts(report: coordinator_pb2.FinishedItem, unit_count: int) -> dict[int, int]:
    indices = [unit.unit_index for unit in report.units]
    if len(set(indices)) != len(indices):
        raise InvalidRequestError(f"rank {report.global_rank} names a unit index twice: {indices}")
    parts: dict[int, int] = {}
    for unit in report.units:
        if unit.unit_index >= unit_count:
            raise InvalidRequestError(
                f"rank {report.global_rank} names unit index {unit.unit_index}: the run has {unit_count} units"
            )
        if unit.part_count:
            parts[unit.unit_index] = unit.part_count
    return parts
