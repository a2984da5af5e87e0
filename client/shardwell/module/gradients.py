"""Gradients of units in this process: how they are accumulated, cut into buckets, pushed and dropped.

A unit's gradients are pushed in one piece when its backward has ended. A replica's gradients are pushed in buckets,
during the backward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from shardwell.module.flat_vector import FlatVector
from shardwell.module.mixed_precision import Precision, local_part
from shardwell.module.residency import UnitSettings
from shardwell.module.store import ParameterStore
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import UnitLayout

logger = logging.getLogger(__name__)

Gradients = Sequence[tuple[int, torch.Tensor]]
"""``(parameter index, gradient)`` by rising index."""


class LocalGradients:
    """The gradients of one unit that are not pushed: in ``parameter.grad``, or in sums of another dtype.

    Args:
        parameters: Parameters of the unit.
        precision: Dtypes of gradients and sums.
        memory: Memory of the parameters. A gradient may be a view of a parameter, if a hook or an autograd function of
            the user returns one. It is copied before the memory is released.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], precision: Precision, memory: FlatVector) -> None:
        self._parameters, self._precision, self._memory = parameters, precision, memory
        self._distributed = {
            index for index, parameter in enumerate(parameters) if getattr(parameter, "placements", None) is not None
        }
        """Indices of the parameters that are DTensors."""
        self._accumulated: dict[int, int] = {}
        """Version counters of the gradients that ``accumulate`` left in ``parameter.grad``, by parameter index."""

    def take(self, indices: Iterable[int] | None = None) -> list[tuple[int, torch.Tensor]]:
        """Removes and returns the gradients of all or some parameters, dense and in the dtypes of the servers."""
        taken = []
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(len(self._parameters)) if indices is None else indices:
                self._accumulated.pop(index, None)
                parameter = self._parameters[index]
                own = None if parameter.grad is None else _plain(parameter.grad)
                if (gradient := self._precision.finish(index, own)) is not None:
                    parameter.grad = None
                    if index in self._distributed:
                        gradient = _local(gradient, parameter)
                    # The push reads it in the background, when the unit may be freed.
                    taken.append((index, gradient.clone() if self._memory.holds(gradient) else gradient))
        return taken

    def leave_memory(self) -> None:
        """Copies the gradients that are in the parameters' memory. Called before the memory is released."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if self._memory.holds(local_part(gradient)):
                    parameter.grad = gradient.clone()

    @property
    def are_complete(self) -> bool:
        """False if the running backward has not reached a parameter with an accumulated gradient.

        The accumulated gradient must be pushed together with the new one: servers add pushes in another dtype.
        """
        sums, accumulated = self._precision.sums, self._accumulated
        if not sums and not accumulated:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [self._parameters[index].grad for index in (*sums, *accumulated)]
        return all(
            gradient is not None and accumulated.get(index) != gradient._version
            for index, gradient in zip((*sums, *accumulated), gradients, strict=True)
        )

    def accumulate(self) -> None:
        """Adds the gradients to sums in the reduce dtype, if it differs from the gradients' dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(self._parameters):
                if (gradient := parameter.grad) is None:
                    continue
                if self._precision.sums_apart and self._precision.accumulate(index, _plain(gradient)):
                    parameter.grad = None
                else:
                    self._accumulated[index] = gradient._version

    def divide(self, divisor: int) -> None:
        """Divides all gradients, also those that are summed in another dtype."""
        self.accumulate()
        self._precision.divide(divisor)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """Drops the gradients of all or some parameters."""
        self._precision.drop(indices)
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(len(self._parameters)) if indices is None else indices:
                self._accumulated.pop(index, None)
                self._parameters[index].grad = None


_GradientUnitT = TypeVar("_GradientUnitT", bound="GradientUnit")


def with_gradients(units: Iterable[_GradientUnitT]) -> list[_GradientUnitT]:
    """Returns the units that have a gradient in this process."""
    with torch._C.DisableTorchFunctionSubclass():  # once for all units, because it costs more than reading a gradient
        found = []
        for unit in units:
            gradients = unit.gradients
            for parameter in gradients._parameters:
                if parameter.grad is not None:
                    found.append(unit)
                    break
            else:
                if gradients._precision.sums:
                    found.append(unit)
        return found


class GradientUnit(Protocol):
    """The part of a unit that this module uses."""

    layout: UnitLayout
    parameters: tuple[nn.Parameter, ...]
    gradients: LocalGradients
    settings: UnitSettings
    pushed: bool
    pushes: bool
    tp_replicated: bool
    index: int

    @property
    def name(self) -> str: ...

    @property
    def is_replica(self) -> bool: ...

    def require_current(self) -> None: ...

    def end_watch(self) -> None: ...


class GradientPushes:
    """Pushes the gradients of all units to the store.

    Args:
        store: Receives the gradients.
    """

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._buckets: dict[GradientUnit, GradientBuckets] = {}
        self._pushed = False
        """True if a gradient was pushed for the current work item."""
        self.coverage = GradientCoverage()

    def follow_strategy(self, unit: GradientUnit) -> None:
        """Starts or stops to push a unit's gradients in buckets, according to its settings."""
        if (buckets := self._buckets.pop(unit, None)) is not None:
            buckets.remove()
        if unit.is_replica and unit.settings.replica.push_during_backward:
            self._buckets[unit] = GradientBuckets(unit, partial(self._bucket_bytes, unit), partial(self.push, unit))

    def after_backward(self, unit: GradientUnit, *, whole: bool) -> None:
        """Pushes or accumulates the gradients of a unit whose backward has ended.

        Args:
            unit: The unit.
            whole: True if the whole backward has ended. Otherwise some replicas do not push yet, nor do units whose
                gradients are not complete.
        """
        if not unit.settings.requires_gradient_sync:
            unit.gradients.accumulate()
        elif whole or (
            unit.gradients.are_complete and (not unit.is_replica or unit.settings.replica.push_during_backward)
        ):
            self.push(unit)

    def push(self, unit: GradientUnit, indices: Sequence[int] | None = None) -> None:
        """Pushes the local gradients of a unit, or of some of its parameters.

        If another tensor-parallel rank pushes the unit, they are dropped. They are taken first all the same, because
        that may sum them over the ranks.
        """
        if indices is None and unit in self._buckets:
            self._buckets[unit].clear()
        for bucket in _cut(unit.gradients.take(indices), self._bucket_bytes(unit) if indices is None else None):
            self._pushed = unit.pushed = True
            self.coverage.note(unit, [index for index, _ in bucket])
            if unit.tp_replicated:
                self._store.compare(unit.index, bucket)
            if unit.pushes:
                unit.require_current()  # gradients that were set by hand exist without a forward
                self._store.push(unit.index, bucket)

    def finish_item(self, units: Iterable[GradientUnit]) -> None:
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

    def withdraw(self, units: Iterable[GradientUnit]) -> None:
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

    def _bucket_bytes(self, unit: GradientUnit) -> int | None:
        """Returns the size of a unit's buckets; None if all gradients are pushed together when the backward ends."""
        # A push through shared memory is a synchronous copy, and each push needs a buffer of the unit's size.
        in_buckets = unit.is_replica and unit.settings.requires_gradient_sync
        return unit.settings.replica.bucket_bytes if in_buckets and self._store.streams_gradients(unit.index) else None


class GradientBuckets:
    """Collects a unit's gradients in the order in which a backward completes them.

    The order of earlier steps is not used, so an unused parameter delays no other parameter. A gradient is pushed when
    a later gradient is complete, or with the rest of the unit: by then the user's own hooks on the gradient have run.

    Args:
        unit: A unit whose gradients are pushed in buckets.
        bucket_bytes: Returns the size of a bucket; None while gradients wait for the rest of the unit.
        push: Pushes the gradients of the parameters with these indices.
    """

    def __init__(
        self, unit: GradientUnit, bucket_bytes: Callable[[], int | None], push: Callable[[Sequence[int]], None]
    ) -> None:
        self._sizes = [specification.size_bytes for specification in unit.layout.parameters]
        self._bucket_bytes, self._push = bucket_bytes, push
        self._complete: dict[int, None] = {}
        # Weak: the garbage collector does not see torch's reference to a hook, so a cycle would keep the model alive.
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
        limit_bytes = self._bucket_bytes()
        if limit_bytes is None:
            return
        if sum(self._sizes[complete] for complete in self._complete) >= limit_bytes:
            indices = sorted(self._complete)
            self._complete.clear()
            self._push(indices)
        self._complete[index] = None


class GradientCoverage:
    """Tracks which parameters of replicas got a gradient, for ``find_unused_parameters`` and ``static_graph``."""

    def __init__(self) -> None:
        self._used: dict[GradientUnit, set[int]] = {}
        """Parameters with a gradient in the current work item."""
        self._first: dict[GradientUnit, frozenset[int]] = {}
        """Parameters with a gradient in the first work item, for units with a static graph."""
        self._logged: dict[GradientUnit, frozenset[int]] = {}

    def note(self, unit: GradientUnit, indices: Iterable[int]) -> None:
        """Records that parameters of a unit got a gradient."""
        self._used.setdefault(unit, set()).update(indices)

    def drop(self) -> None:
        """Forgets the current work item."""
        self._used.clear()

    def end_item(self, units: Iterable[GradientUnit]) -> UsageError | None:
        """Checks the work item at its end, unless it has no gradients.

        Returns:
            The error to raise if the graph of a unit was declared static and has changed.
        """
        error = None
        for unit in units if self._used else ():
            options, used = unit.settings.replica, frozenset(self._used.get(unit, ()))
            if options.find_unused_parameters:
                self._log_unused(unit, used)
            if options.static_graph and (changed := used ^ self._first.setdefault(unit, used)):
                error = _not_static(unit, changed, used)
        self._used.clear()
        return error

    def _log_unused(self, unit: GradientUnit, used: frozenset[int]) -> None:
        names = [
            parameter.name
            for index, parameter in enumerate(unit.layout.parameters)
            if index not in used and unit.parameters[index].requires_grad
        ]
        if names and self._logged.get(unit) != used:
            logger.warning("unit %r: %d parameters got no gradient: %s", unit.name, len(names), ", ".join(names))
        self._logged[unit] = used


def _not_static(unit: GradientUnit, changed: frozenset[int], used: frozenset[int]) -> UsageError:
    changes = ", ".join(
        f"{unit.layout.parameters[index].name!r} {'got a' if index in used else 'got no'} gradient"
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


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient without a graph, dense and contiguous, whose memory has its values."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_neg():  # of the imaginary part of a complex number, as autograd may return it
        gradient = gradient.resolve_neg()
    # A torch operation without effect still costs time, because it releases the interpreter lock.
    return gradient if gradient.is_contiguous() else gradient.contiguous()


def _local(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the part of a DTensor's gradient that this process stores."""
    # A DTensor's gradient may be a partial sum, such as a norm's gradient under sequence parallelism. The sum is
    # reduced after the cast: autograd uses this order for a parameter that is cast in the forward.
    local: torch.Tensor = cast(Any, gradient).redistribute(placements=cast(Any, parameter).placements).to_local()
    return _plain(local)
