"""How far this trainer is with its work items of the step in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2, coordinator_pb2


@dataclass
class ItemProgress:
    """One work item: what was pushed for it, and whether it is finished."""

    item: coordinator_pb2.WorkItem
    parts: Counter[int] = field(default_factory=Counter)
    """Pushes by unit index."""
    finished: bool = False
    written: list[coordinator_pb2.WrittenBuffer] = field(default_factory=list)
    """Buffers that the training script had changed when it began."""

    def to_proto(self) -> coordinator_pb2.FinishedItem:
        return coordinator_pb2.FinishedItem(
            global_rank=self.item.global_rank,
            epoch=self.item.epoch,
            attempt=self.item.attempt,
            units=[
                common_pb2.UnitParts(unit_index=unit, part_count=count) for unit, count in sorted(self.parts.items())
            ],
            written_buffers=self.written,
        )


class StepProgress:
    """The work items of one step that this trainer holds, and the one it computes now."""

    def __init__(self, number: int, items: Iterable[coordinator_pb2.WorkItem]) -> None:
        self.number = number
        """The step: the version that is read."""
        self.items: dict[int, ItemProgress] = {}
        """By global rank."""
        self.in_batches = False
        """Whether ``step.batches`` hands out the items; else it is a plain loop."""
        self.is_complete = False
        """Whether all trainers' items are known to be finished, this one's as they are now."""
        self._current: ItemProgress | None = None
        self.add(items)

    def add(self, items: Iterable[coordinator_pb2.WorkItem]) -> list[ItemProgress]:
        """Takes over work items; returns their progress."""
        added = [ItemProgress(item) for item in items]
        self.items.update({progress.item.global_rank: progress for progress in added})
        return added

    @property
    def unfinished(self) -> list[ItemProgress]:
        return [progress for progress in self.items.values() if not progress.finished]

    @property
    def current(self) -> ItemProgress | None:
        """The item that gradients belong to now; in a plain loop this trainer's only one."""
        if self._current is None and not self.in_batches and len(self.items) == 1:
            (only,) = self.items.values()
            return None if only.finished else only
        return self._current

    def begin(self, progress: ItemProgress) -> None:
        self.in_batches, self._current = True, progress

    def end(self) -> None:
        """The current item is computed; its gradients are all on their way."""
        if (current := self.current) is not None:
            current.finished = True
        self._current = None

    def reopen(self) -> None:
        """The gradients of finished items were dropped. In a plain loop the items are computed anew."""
        if not self.in_batches:
            for progress in self.items.values():
                progress.finished = False

    def require_current(self) -> ItemProgress:
        """The item that a gradient belongs to. Raises UsageError if there is none."""
        if (current := self.current) is not None:
            return current
        if self.in_batches:
            raise UsageError(
                f"a gradient came after the work of step {self.number} was finished: "
                "run backward inside `for batch in step.batches(...)`, before optimizer.step()"
            )
        if any(progress.finished for progress in self.items.values()):
            raise UsageError(
                f"a gradient came after the work of step {self.number} was finished, by optimizer.clip_grad_norm_() or "
                "by an optimizer.step() that raised: call optimizer.step() to commit the step, or "
                "optimizer.zero_grad() to drop its gradient and go on with another batch"
            )
        if not self.items:
            raise UsageError(
                f"a gradient came in step {self.number}, but this trainer is a spare without a logical rank: "
                "use `for batch in step.batches(...)`, which hands it work when another trainer is lost"
            )
        ranks = ", ".join(map(str, sorted(self.items)))
        raise UsageError(
            f"this trainer plays the logical ranks {ranks} in step {self.number}: "
            "use `for batch in step.batches(...)` so that each gets its own batch"
        )
