"""How far this trainer is with its work items of the step in flight."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2, coordinator_pb2

ParameterIndices = dict[int, set[int]]
"""Indices of parameters by unit index."""


@dataclass
class ItemProgress:
    """One work item: what was pushed for it, and whether it is finished."""

    item: coordinator_pb2.WorkItem
    parts: Counter[int] = field(default_factory=Counter)
    """Pushes by unit index."""
    pushed: ParameterIndices = field(default_factory=lambda: defaultdict(set))
    """Parameters that had a gradient in any of them, by unit index."""
    to_drop: ParameterIndices = field(default_factory=lambda: defaultdict(set))
    """Parameters whose gradients so far are dropped with the next push of the unit, by unit index."""
    dropped: ParameterIndices = field(default_factory=lambda: defaultdict(set))
    """Parameters whose gradients of earlier steps are dropped in this item, by unit index."""
    finished: bool = False
    written: list[coordinator_pb2.WrittenBuffer] = field(default_factory=list)
    """Buffers that the training script had changed when it began."""

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """The item begins without the earlier gradients of some parameters, or goes on without those so far."""
        indices = set(parameter_indices)
        self.to_drop[unit_index] |= indices
        self.dropped[unit_index] |= indices

    def begin_attempt(self, item: coordinator_pb2.WorkItem) -> None:
        """Nothing that was pushed counts any more."""
        self.item.CopyFrom(item)
        self.parts.clear()
        self.pushed.clear()
        self.to_drop = defaultdict(set, {unit: set(indices) for unit, indices in self.dropped.items()})

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
        self.dropped_for_all: ParameterIndices = defaultdict(set)
        """Parameters whose gradients of earlier steps are dropped in every item, by unit index."""
        self.dropped_late: ParameterIndices = defaultdict(set)
        """Parameters whose gradients are dropped by the commit, by unit index: the items were finished already."""
        self._current: ItemProgress | None = None
        self.add(items)

    def add(self, items: Iterable[coordinator_pb2.WorkItem]) -> list[ItemProgress]:
        """Takes over work items; returns their progress."""
        added = [ItemProgress(item) for item in items]
        for progress in added:
            for unit_index, indices in self.dropped_for_all.items():
                progress.drop(unit_index, indices)
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

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """Drops the gradients of some parameters: of the current item, or between items of all."""
        if self.current is not None:
            self.current.drop(unit_index, parameter_indices)
        elif any(progress.finished for progress in self.items.values()):
            self.dropped_late[unit_index].update(parameter_indices)
        else:
            self.dropped_for_all[unit_index].update(parameter_indices)
            for progress in self.items.values():
                progress.drop(unit_index, parameter_indices)

    @property
    def all_dropped(self) -> bool:
        """Whether every gradient that was pushed for the finished items is dropped by the commit."""
        return all(
            indices <= self.dropped_late.get(unit_index, set())
            for progress in self.items.values()
            for unit_index, indices in progress.pushed.items()
        )

    def begin(self, progress: ItemProgress) -> None:
        self.in_batches, self._current = True, progress

    def enter(self, progress: ItemProgress) -> None:
        """Makes an item the current one, in a plain loop."""
        self._current = progress

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
                for unit_index, indices in self.dropped_late.items():
                    progress.drop(unit_index, indices)
            self.dropped_late.clear()

    def require_current(self, spare_hint: str = "") -> ItemProgress:
        """The item that a gradient belongs to.

        Args:
            spare_hint: What a trainer that is a spare may do.

        Raises:
            UsageError: There is none.
        """
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
                + (spare_hint or "use `for batch in step.batches(...)`, which hands it the work of lost trainers")
            )
        ranks = ", ".join(map(str, sorted(self.items)))
        raise UsageError(
            f"this trainer plays the logical ranks {ranks} in step {self.number}: "
            "use `for batch in step.batches(...)` so that each gets its own batch"
        )
