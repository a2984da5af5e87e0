"""Copies of late work items: when an item is late, and which one an idle trainer should copy.

Note: [Copies of late items]
    A trainer that waits for the others may compute a copy of an item that is late. The copy has its own epoch and
    attempt, and the servers keep its contribution apart. The first of the two trainers that reports the finished item
    wins: the item takes the winner's epoch and attempt, which the manifest of ``PrepareStep`` names. Both compute the
    same bits. Pushes of the other trainer are dropped, and its report has no effect.

    An item can only be copied while its trainer says that it computes this item. A trainer that evaluates the model
    between two steps has not started its item, and relies on the run to wait for it. Both trainers must yield batches
    by ``step.batches``, because the trainer that loses goes on without an error only there.

    The loser computes its item to the end, in vain. Meanwhile the run does not wait for it: another trainer's proposal
    is committed, and its ranks are leased to others.

    The time during which servers make the version that the items need does not count: all trainers wait for it.

    Only items with one member are copied: a replica of several trainers computes no copies.

    At most one item of a run is copied at a time: servers have memory for few contributions beyond those of all ranks.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.work_items import WorkItem, WorkState

_KEPT_TIMES, _LEAST_TIMES = 64, 3
_LATE_FACTOR, _LATE_MARGIN_S = 2.0, 0.5
"""An item is late after this multiple of the median time, plus this many seconds."""


@dataclass(slots=True)
class WorkTimes:
    """Times that trainers took for one work item each, in recent steps."""

    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))

    def add(self, seconds: float) -> None:
        """Adds the time of one item."""
        self._seconds.append(seconds)

    @property
    def late_after_s(self) -> float | None:
        """Time after which an item is late. None: too few times are known."""
        if len(self._seconds) < _LEAST_TIMES:
            return None
        return _LATE_FACTOR * statistics.median(self._seconds) + _LATE_MARGIN_S


def next_late_item(
    step: Step,
    members: Mapping[str, Member],
    late_after_s: float | None,
    updated_s: float | None,
    *,
    excluding: Collection[str] = (),
) -> tuple[WorkItem, float] | None:
    """Returns the item that will be late first or is late already, and the clock time at which it is late.

    Args:
        step: The step in flight.
        members: The trainers of the run, by name.
        late_after_s: See ``WorkTimes.late_after_s``.
        updated_s: Clock time since which the servers have the step's version. None: not all of them have it.
        excluding: Trainers whose items are not considered.

    Returns:
        None if no item can be copied.
    """
    if late_after_s is None or updated_s is None or step.copied is not None or len(step.items[0].members) > 1:
        return None
    found: list[tuple[float, int]] = []
    for item in step.unfinished:
        trainer = item.first_trainer
        member = members.get(trainer)
        if member is None or item.state is not WorkState.LEASED or not item.fenced or trainer in excluding:
            continue
        progress = member.in_progress
        if progress is not None and member.accepts_reassigned_work and progress.is_item(step.number, item.first_rank):
            found.append((max(progress.since_s, updated_s) + late_after_s, item.dp_rank))
    if not found:
        return None
    late_s, dp_rank = min(found)
    return step.items[dp_rank], late_s
