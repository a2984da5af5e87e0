"""Which gradients are pushed, and when: a unit's in one piece when its backward is over, or a replica's in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shardwell.module.gradient_buckets import GradientBuckets, cut
from shardwell.module.gradient_coverage import GradientCoverage

if TYPE_CHECKING:
    from shardwell.module.store import ParameterStore
    from shardwell.module.unit import Unit


class GradientPushes:
    """Hands the gradients of all units to the store.

    Args:
        store: Takes them.
    """

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._buckets: dict[Unit, GradientBuckets] = {}
        self._pushed = False
        """Whether something was pushed for the current work item."""
        self.coverage = GradientCoverage()

    def follow_strategy(self, unit: Unit) -> None:
        """Pushes a unit's gradients in buckets from now on, or not, as its settings say."""
        if (buckets := self._buckets.pop(unit, None)) is not None:
            buckets.remove()
        if unit.is_replica and unit.settings.replica.push_during_backward:
            self._buckets[unit] = GradientBuckets(unit, partial(self._bucket_bytes, unit), partial(self.push, unit))

    def after_backward(self, unit: Unit, *, is_over: bool) -> None:
        """A backward of the unit is over: its gradients are pushed, put by, or wait.

        Args:
            unit: The unit.
            is_over: Whether the whole backward is, for those that wait for that.
        """
        if not unit.settings.requires_gradient_sync:
            unit.gradients.put_by()
        elif is_over or not unit.is_replica or unit.settings.replica.push_during_backward:
            self.push(unit)

    def push(self, unit: Unit, indices: Sequence[int] | None = None) -> None:
        """Pushes the local gradients of a unit, or of some of its parameters."""
        if indices is None and unit in self._buckets:
            self._buckets[unit].clear()
        for bucket in cut(unit.gradients.take(indices), self._bucket_bytes(unit) if indices is None else None):
            unit.require_current()  # there are gradients without a forward: set by hand
            self._pushed = unit.pushed = True
            self.coverage.note(unit, [index for index, _ in bucket])
            self._store.push(unit.index, bucket)

    def end_item(self) -> None:
        """The work item is finished: what was pushed for it is not withdrawn with the next one's."""
        self._pushed = False

    def withdraw(self, units: Iterable[Unit]) -> None:
        """Drops the gradients of the current work item, here and on the servers."""
        self.coverage.drop()
        for unit in units:
            unit.gradients.drop()
            unit.pushed = False
        for buckets in self._buckets.values():
            buckets.clear()
        if self._pushed:
            self._store.discard()
            self._pushed = False

    def _bucket_bytes(self, unit: Unit) -> int | None:
        """How many bytes of gradients are pushed at once; None: all that the unit has when its backward is over."""
        # What goes through shared memory hides behind nothing, and takes a gradient buffer of the unit's size for
        # each push.
        in_buckets = unit.is_replica and unit.settings.requires_gradient_sync
        return unit.settings.replica.bucket_bytes if in_buckets and self._store.streams_gradients(unit.index) else None
