"""Work items of a step: one per logical rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from shardwell_wire.v1 import common_pb2, coordinator_pb2


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
class WorkItem:
    """The part of a step that belongs to one logical rank."""

    global_rank: int
    dp_rank: int
    trainer: str
    """Trainer that the item is leased to. If the item is vacant or finished: the trainer that had it last."""
    epoch: int
    attempt: int = 0
    state: WorkState = WorkState.LEASED
    since_s: float = 0.0
    """Clock time of the last change of state."""
    trainer_lost: bool = False
    """True if the trainer was lost after it finished the item."""
    fenced: bool = True
    """True if every server rejects pushes under older epochs and attempts of this rank."""
    parts: dict[int, int] = field(default_factory=dict)
    """Number of pushed parts by unit index. Empty until the item is finished."""
    written_buffers: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums, by unit and layout index, of buffers that the training script changed before the item started."""
    reset_id: str = ""
    """Id of the request that started the current attempt."""
    last_attempt: int = 0
    """Highest attempt of the item and its copies. No number is given twice."""
    copy: WorkCopy | None = None
    """The copy that another trainer computes. None: there is none."""
    is_copy: bool = False
    """True if ``trainer`` computed a copy, which has won or has become the only one."""

    def to_proto(self) -> coordinator_pb2.WorkItem:
        return coordinator_pb2.WorkItem(
            global_rank=self.global_rank,
            dp_rank=self.dp_rank,
            epoch=self.epoch,
            attempt=self.attempt,
            copy=self.is_copy,
        )

    def copy_to_proto(self) -> coordinator_pb2.WorkItem:
        """Returns the copy, for the trainer that computes it."""
        assert self.copy is not None
        return coordinator_pb2.WorkItem(
            global_rank=self.global_rank,
            dp_rank=self.dp_rank,
            epoch=self.copy.epoch,
            attempt=self.copy.attempt,
            copy=True,
        )

    @property
    def key(self) -> tuple[str, int, int]:
        """Trainer, epoch and attempt, which identify the computation of the item."""
        return self.trainer, self.epoch, self.attempt

    def next_attempt(self) -> int:
        """Returns a new attempt number."""
        self.last_attempt = max(self.last_attempt, self.attempt) + 1
        return self.last_attempt

    def to_finished_proto(self) -> coordinator_pb2.FinishedItem:
        """Returns the item as its trainer reported it finished."""
        units = [common_pb2.UnitParts(unit_index=unit, part_count=count) for unit, count in sorted(self.parts.items())]
        return coordinator_pb2.FinishedItem(
            global_rank=self.global_rank, epoch=self.epoch, attempt=self.attempt, units=units
        )


def sum_of_attempts(items: Mapping[int, WorkItem]) -> int:
    """Returns the sum of the attempts of all items, which rises whenever the gradient of their step changes."""
    return sum(item.attempt for item in items.values())
