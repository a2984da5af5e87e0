"""Pushes of gradients: when they are sent, in one piece or in buckets, and how they are withdrawn.

A unit's gradients are pushed in one piece when its backward has ended. A replica's gradients are pushed in buckets,
during the backward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter

import torch

from shardwell.module.parameter_store import GradientStore
from shardwell.module.strategy import ShardingStrategy
from shardwell.module.unit import Gradients, Unit
from shardwell_wire.errors import UsageError

logger = logging.getLogger(__name__)

_INDEX = itemgetter(0)
"""Returns the parameter index of an entry of ``Gradients``."""


class GradientPushes:
    """Pushes the gradients of all units to the store.

    Args:
        store: Receives the gradients.
    """

    def __init__(self, store: GradientStore) -> None:
        self._store = store
        self._buckets: dict[Unit, GradientBuckets] = {}
        self._pushed = False
        """True if a gradient was pushed for the current work item."""
        self.coverage = GradientCoverage()

    def follow_strategy(self, unit: Unit) -> None:
        """Starts or stops to push a unit's gradients in buckets, according to its settings."""
        if (buckets := self._buckets.pop(unit, None)) is not None:
            buckets.remove()
        if unit.is_replica and unit.settings.replica.push_during_backward:
            self._buckets[unit] = GradientBuckets(unit, self)

    def after_backward(self, unit: Unit, *, whole: bool) -> None:
        """Pushes or accumulates the gradients of a unit whose backward has ended.

        Args:
            unit: The unit.
            whole: True if the whole backward has ended. Otherwise some replicas do not push yet, nor do units whose
                gradients are not complete.
        """
        if not unit.settings.requires_gradient_sync:
            unit.gradients.accumulate()
            return
        if not whole:
            settings = unit.settings
            if settings.strategy is ShardingStrategy.NO_SHARD and not settings.replica.push_during_backward:
                return
            if not unit.gradients.are_complete():
                return
        self.push(unit)

    def push(self, unit: Unit, indices: Sequence[int] | None = None) -> None:
        """Pushes the local gradients of a unit, or of some of its parameters.

        If another tensor-parallel rank pushes the unit, they are dropped. They are taken first all the same, because
        that may sum them over the ranks.
        """
        gradients = unit.gradients.take(indices)
        if unit.settings.strategy is ShardingStrategy.NO_SHARD:
            if indices is None and unit in self._buckets:
                self._buckets[unit].clear()
            parts = _cut(gradients, self.bucket_bytes(unit) if indices is None else None)
        else:
            parts = [gradients] if gradients else []
        for part in parts:
            self._pushed = unit.pushed = True
            self.coverage.used.setdefault(unit, set()).update(map(_INDEX, part))
            if unit.tp_replicated:
                self._store.compare(unit.index, part)
            if unit.pushes:
                if not unit.is_current:
                    unit.require_current()  # gradients that were set by hand exist without a forward
                self._store.push(unit.index, part)

    def finish_item(self, units: Iterable[Unit]) -> None:
        """Pushes all gradients that are left when the work item ends."""
        units = list(units)
        for unit in units:
            unit.end_watch()
        for unit in with_gradients(units):
            self.push(unit)
        for buckets in self._buckets.values():
            buckets.clear()

    def end_item(self) -> None:
        """Ends the work item: ``withdraw`` no longer applies to its gradients."""
        self._pushed = False

    def withdraw(self, units: Iterable[Unit]) -> None:
        """Drops the gradients of the current work item, in this process and on the servers."""
        self.coverage.drop()
        units = list(units)
        for unit in with_gradients(units):
            unit.gradients.drop()
        for unit in units:
            unit.pushed = False
        for buckets in self._buckets.values():
            buckets.clear()
        if self._pushed:
            self._store.discard()
            self._pushed = False

    def bucket_bytes(self, unit: Unit) -> int | None:
        """Returns the size of a unit's buckets; None if all gradients are pushed together when the backward ends."""
        # A push through shared memory is a synchronous copy, and each push needs a buffer of the unit's size.
        in_buckets = unit.is_replica and unit.settings.requires_gradient_sync
        return unit.settings.replica.bucket_bytes if in_buckets and self._store.streams_gradients(unit.index) else None


def with_gradients(units: Iterable[Unit]) -> list[Unit]:
    """Returns the units that have a gradient in this process."""
    with torch._C.DisableTorchFunctionSubclass():  # once for all units, because it costs more than reading a gradient
        found = []
        for unit in units:
            for parameter in unit.parameters:
                if parameter.grad is not None:
                    found.append(unit)
                    break
            else:
                if unit.gradients.hidden:
                    found.append(unit)
        return found


class GradientBuckets:
    """Collects a unit's gradients in the order in which a backward completes them.

    The order of earlier steps is not used, so an unused parameter delays no other parameter. A gradient is pushed when
    a later gradient is complete, or with the rest of the unit: by then the user's own hooks on the gradient have run.

    Args:
        unit: A unit whose gradients are pushed in buckets.
        pushes: Pushes the buckets.
    """

    def __init__(self, unit: Unit, pushes: GradientPushes) -> None:
        self._unit, self._pushes = unit, pushes
        self._sizes = [specification.size_bytes for specification in unit.layout.parameters]
        self._complete: dict[int, None] = {}
        # The reference is weak: the garbage collector does not see torch's reference to a hook, so a cycle would keep
        # the model alive.
        completed: weakref.ref[Callable[[int], None]] = weakref.WeakMethod(self._completed)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call_weak, completed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(unit.parameters)
            if parameter.requires_grad
        ]

    def clear(self) -> None:
        """Empties the bucket: its gradients are pushed with the rest of the unit, or dropped."""
        self._complete.clear()

    def remove(self) -> None:
        """Removes the hooks."""
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def _completed(self, index: int) -> None:
        limit_bytes = self._pushes.bucket_bytes(self._unit)
        if limit_bytes is None:  # the gradients wait for the rest of the unit
            return
        if sum(self._sizes[complete] for complete in self._complete) >= limit_bytes:
            indices = sorted(self._complete)
            self._complete.clear()
            self._pushes.push(self._unit, indices)
        self._complete[index] = None


class GradientCoverage:
    """Tracks which parameters of replicas got a gradient, for ``find_unused_parameters`` and ``static_graph``.

    Attributes:
        used: Parameters with a gradient in the current work item, of all units.
    """

    def __init__(self) -> None:
        self.used: dict[Unit, set[int]] = {}
        self._first: dict[Unit, frozenset[int]] = {}
        """Parameters with a gradient in the first work item, for units with a static graph."""
        self._logged: dict[Unit, frozenset[int]] = {}

    def drop(self) -> None:
        """Forgets the current work item."""
        self.used.clear()

    def end_item(self, units: Iterable[Unit]) -> UsageError | None:
        """Checks the work item at its end, unless it has no gradients.

        Returns:
            The error to raise if the graph of a unit was declared static and has changed.
        """
        error = None
        for unit in units if self.used else ():
            options, used = unit.settings.replica, frozenset(self.used.get(unit, ()))
            if options.find_unused_parameters:
                self._log_unused(unit, used)
            if options.static_graph and (changed := used ^ self._first.setdefault(unit, used)):
                error = _not_static(unit, changed, used)
        self.used.clear()
        return error

    def _log_unused(self, unit: Unit, used: frozenset[int]) -> None:
        names = [
            parameter.shown_name
            for index, parameter in enumerate(unit.layout.parameters)
            if index not in used and unit.parameters[index].requires_grad
        ]
        if names and self._logged.get(unit) != used:
            logger.warning("unit %r: %d parameters got no gradient: %s", unit.name, len(names), ", ".join(names))
        self._logged[unit] = used


def _not_static(unit: Unit, changed: frozenset[int], used: frozenset[int]) -> UsageError:
    changes = ", ".join(
        f"{unit.layout.parameters[index].shown_name!r} {'got a' if index in used else 'got no'} gradient"
        for index in sorted(changed)
    )
    return UsageError(
        f"unit {unit.name!r} was declared with ReplicaOptions(static_graph=True), but its gradients differ from those "
        f"of the first work item: {changes}. Call optimizer.zero_grad() to drop this work item's gradients, or leave "
        "static_graph out",
        unit=unit.name,
    )


def _call_weak(method: weakref.ref[Callable[[int], None]], index: int, parameter: torch.Tensor) -> None:
    if (call := method()) is not None:
        call(index)


def _cut(gradients: Gradients, bucket_bytes: int | None) -> list[Gradients]:
    """Cuts gradients into buckets of at least ``bucket_bytes``; the last may be smaller. None: one bucket."""
    if bucket_bytes is None:
        return [gradients] if gradients else []
    buckets, bucket = list[Gradients](), list[tuple[int, torch.Tensor]]()
    for index, gradient in gradients:
        bucket.append((index, gradient))
        if sum(tensor.nbytes for _, tensor in bucket) >= bucket_bytes:
            buckets.append(bucket)
            bucket = []
    return [*buckets, bucket] if bucket else buckets
