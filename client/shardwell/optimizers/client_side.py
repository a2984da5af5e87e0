"""Optimizers that run on the trainers: each data rank updates its optimizer partition of every unit.

The shard servers store the values, the mean gradient and the optimizer state. In every step, a trainer reads its
partition and stages the new values and state, which take effect when the step is committed. Any trainer can update any
partition. A trainer may keep values and state between steps, but only to avoid fetching them again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.module.torch_patches import needs_closure
from shardwell.optimizers.sharded_optimizer import GradientScaling, ShardedOptimizer
from shardwell.step.step_commit import StepUpdate
from shardwell.transport.partition_transfers import PartitionSegment
from shardwell_wire.errors import StaleEpochError, StepStateError, UsageError
from shardwell_wire.model.topology import TRAINER_PREFIX
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

_MAX_OUTDATED_UPDATES = 20
"""Limit of consecutive updates that fail because a gradient was recomputed or partitions were leased anew."""

FlatUpdate = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], Mapping[str, Any]], torch.Tensor]
"""Takes values, gradient, state and the settings of the group; returns the new values."""


@dataclass(frozen=True, slots=True)
class _Clipping:
    """How a step's gradient is clipped: by a coefficient first, then by value."""

    coefficient: float
    value: float | None


class PartitionOptimizer(ShardedOptimizer):
    """Base class of the optimizers that run on the trainers. Do not use it directly.

    Args:
        params: Sharded parameters, or parameter groups.
        defaults: Default settings of the groups.
        name: Name of the computation. Must be the same on every trainer and in every step of the run.
        keep_bytes: Bytes of values and state that may stay in this process between steps.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, name: str, keep_bytes: float) -> None:
        self.algorithm = TRAINER_PREFIX + name  # type: ignore[misc]
        self._keep_bytes, self._outdated_updates = keep_bytes, 0
        super().__init__(params, defaults)

    def _update_segment(self, unit: str, segment: PartitionSegment, groups: Sequence[int]) -> None:
        """Updates one segment of a partition in place.

        Args:
            segment: Its gradients are clipped. Only parameters in a group have a gradient; there is at least one.
            groups: Index of each parameter's group by layout index; negative for parameters in no group.
        """
        raise NotImplementedError

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        """Returns the numbers in a group's settings, which all trainers must agree on."""
        return dict(_numbers({key: value for key, value in group.items() if key != "params"}))

    def _make_update(self, scaling: GradientScaling) -> StepUpdate:
        if self._kept_parameters(self._other_optimizers()):
            name = type(self).__name__
            raise UsageError(
                f"{name}.step() would lose the gradients of another optimizer of this session: an optimizer that runs "
                f"on the trainers cannot alternate with others. Use one {name} for all parameters, or optimizers "
                "of shardwell.optim"
            )
        update = super()._make_update(scaling)
        clip_value = update.optimizer.clip_value if update.optimizer.HasField("clip_value") else None
        clipping = _Clipping(update.clip_coefficient, clip_value)
        return replace(update, update_partitions=partial(self._update_partitions, update.optimizer, clipping))

    def _update_partitions(
        self,
        optimizer: common_pb2.OptimizerStep,
        clipping: _Clipping,
        work: Sequence[coordinator_pb2.PartitionWork],
        new_state: bool,
    ) -> list[coordinator_pb2.PartitionWork]:
        """Updates and stages partitions; returns the entries of ``work`` that are staged.

        If ``new_state`` is True, the state of former steps is dropped.
        """
        groups = {unit.unit_index: unit.group_indices for unit in optimizer.units}
        names = {unit.index: unit.name for unit in self._session.units}

        def update(unit_index: int, segment: PartitionSegment) -> None:
            if new_state:
                own = groups[unit_index]
                segment.state = {index: state for index, state in segment.state.items() if own[index] < 0}
            self._update(names[unit_index], segment, groups[unit_index], clipping)

        staged = []
        for partitions in work:
            try:
                self._session.store.update_partitions(partitions, update, keep_bytes=self._keep_bytes)
            except (StaleEpochError, StepStateError) as error:
                # A rank restarted its work item, or a trainer of the replica was lost. The next commit response assigns
                # the partitions anew, or tells this trainer that it is not a member any more.
                self._outdated_updates += 1
                if self._outdated_updates > _MAX_OUTDATED_UPDATES:
                    raise
                logger.info("partitions of rank %d are not staged: %s", partitions.global_rank, error)
            else:
                self._outdated_updates = 0
                staged.append(partitions)
        return staged

    @torch.no_grad()
    def _update(self, unit: str, segment: PartitionSegment, groups: Sequence[int], clipping: _Clipping) -> None:
        """Clips the gradients of one segment and updates the segment in place."""
        segment.gradients = {index: gradient for index, gradient in segment.gradients.items() if groups[index] >= 0}
        for gradient in segment.gradients.values():
            if clipping.coefficient != 1.0:
                gradient.mul_(clipping.coefficient)
            if clipping.value is not None:
                gradient.clamp_(-clipping.value, clipping.value)
        if segment.gradients:
            self._update_segment(unit, segment, groups)


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in settings.items():
        if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            yield name, float(value)
        elif isinstance(value, (tuple, list)):
            yield from _numbers({f"{name}.{index}": entry for index, entry in enumerate(value)})


class ClientSide(PartitionOptimizer):
    """Runs any ``torch.optim`` optimizer, or one of your own, on the trainers.

    For each partition, the optimizer gets one 1-d parameter for every part of a parameter in the partition. An
    optimizer that works element by element computes the same bits as on whole parameters. An optimizer that needs
    whole parameters (LAMB, Muon, Adafactor) does not. ``optimizer_class`` must be the same on every trainer.

    Args:
        params: Sharded parameters, or parameter groups, as in torch.
        optimizer_class: Called with parameter groups and ``options``, as torch's optimizers. Its ``step`` must not
            need a closure.
        keep_bytes: Bytes of values and state of servers on other hosts that may stay in this process between steps. A
            step then fetches the gradient only. Without shared memory, a trainer that keeps its whole partition needs
            ``1 / dp`` of the model's values and state. 0: nothing stays.
        **options: Hyper-parameters, by name.

    Raises:
        UsageError: A parameter is not sharded, or the optimizer's step needs a closure.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        *,
        keep_bytes: float = math.inf,
        **options: Any,
    ) -> None:
        self._make, self._options = optimizer_class, options
        # torch's optimizers complete the defaults in their constructors.
        example = optimizer_class([nn.Parameter(torch.zeros(0))], **options)
        if isinstance(example, torch.optim.SparseAdam):
            raise UsageError(
                "ClientSide(SparseAdam): SparseAdam takes sparse gradients only, but the mean gradient of all trainers "
                "is dense: use shardwell.optim.Adam, which does not update parameters without a gradient"
            )
        if needs_closure(type(example)):
            raise UsageError(
                f"{type(example).__name__}.step needs a closure, which evaluates the model several times in a step: "
                "ClientSide supports only optimizers that need nothing but the gradient"
            )
        super().__init__(params, dict(example.defaults), name=type(example).__name__, keep_bytes=keep_bytes)

    def _update_segment(self, unit: str, segment: PartitionSegment, groups: Sequence[int]) -> None:
        """Takes one step of the optimizer on one segment of a partition."""
        parameters = {index: nn.Parameter(value) for index, value in segment.values.items() if groups[index] >= 0}
        for index, gradient in segment.gradients.items():
            parameters[index].grad = gradient
        inner = self._make(list(self._inner_groups(parameters, groups)), **self._options)
        others = {index: state for index, state in segment.state.items() if index not in parameters}
        for index, parameter in parameters.items():
            if index in segment.state:
                inner.state[parameter] = segment.state[index]
        inner.step()
        segment.values.update({index: value.detach().contiguous() for index, value in parameters.items()})
        # In layout order. The state of parameters in no group does not change.
        updated = {index: dict(inner.state[value]) for index, value in parameters.items() if value in inner.state}
        segment.state = dict(sorted((updated | others).items()))

    def _inner_groups(self, parameters: Mapping[int, nn.Parameter], groups: Sequence[int]) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self.param_groups):
            members = [parameter for index, parameter in parameters.items() if groups[index] == number]
            if members:
                yield {**group, "params": members}


class FlatClientSide(PartitionOptimizer):
    """Updates this rank's partition of the mean gradient with a function of flat tensors, on the trainer.

    In each step, ``update(values, gradient, state, group)`` is called for every segment of the partition: once per unit
    and shard server, and separately for parameters with different groups, dtypes, or numbers in the state. The flat
    tensors contain the parameters that have a gradient, one after the other. All trainers must use the same function.

    Args:
        params: Sharded parameters, or parameter groups, as in torch.
        update: Returns the new values, a tensor with the shape and dtype of ``values``. Called without gradient
            tracking, with

            - ``values``: a copy of the current values. [numel]
            - ``gradient``: a copy of their mean gradient, clipped. [numel]
            - ``state``: what ``update`` stored in ``state`` in the previous step; empty at first. May hold tensors of
              shape [numel] and Python numbers, by name. The shard servers store it.
            - ``group``: the settings of the parameter group, such as ``group["lr"]``. Read-only.
        keep_bytes: See ``ClientSide``.
        **options: Default settings of the groups, by name.

    Raises:
        UsageError: A parameter is not sharded, or ``update`` is not a function. Also raised by ``step`` if ``update``
            returns anything but a tensor of the right shape and dtype; no parameter changes then.
    """

    def __init__(self, params: ParamsT, update: FlatUpdate, *, keep_bytes: float = math.inf, **options: Any) -> None:
        if not callable(update) or isinstance(update, type):
            raise UsageError(
                f"FlatClientSide(update={update!r}): expected a function update(values, gradient, state, group); "
                "use ClientSide for a class of optimizers"
            )
        self._function, self._name = update, getattr(update, "__name__", type(update).__name__)
        super().__init__(params, options, name=f"flat/{self._name}", keep_bytes=keep_bytes)

    def _update_segment(self, unit: str, segment: PartitionSegment, groups: Sequence[int]) -> None:
        """Calls the function for the parameters of a segment that have a gradient."""
        for members in _uniform_sets(segment, groups):
            settings = self.param_groups[groups[members[0]]]
            group = MappingProxyType({name: value for name, value in settings.items() if name != "params"})
            # The tensors are copied, because the function may keep or return any of them, whichever transport is used.
            values = torch.cat([segment.values[index] for index in members])
            gradient = torch.cat([segment.gradients[index] for index in members])
            state = _flat_state(segment, members)
            size, dtype, what = values.numel(), values.dtype, f"update {self._name!r} of unit {unit!r}"
            returned = self._function(values, gradient, state, group)
            _check(returned, size, dtype, f"{what} returned", unit)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    _check(value, size, value.dtype, f"{what} left in state[{name!r}]", unit)
            _scatter(segment, members, returned, state)
        segment.state = dict(sorted(segment.state.items()))  # in layout order


def _uniform_sets(segment: PartitionSegment, groups: Sequence[int]) -> list[list[int]]:
    """Groups the parameters with a gradient into sets that one flat tensor and one state can represent."""
    sets: dict[Any, list[int]] = {}
    for index, gradient in segment.gradients.items():
        state = tuple(
            (name, str(value.dtype) if isinstance(value, torch.Tensor) else repr(value))
            for name, value in segment.state.get(index, {}).items()
        )
        sets.setdefault((groups[index], gradient.dtype, state), []).append(index)
    return list(sets.values())


def _flat_state(segment: PartitionSegment, members: Sequence[int]) -> dict[str, Any]:
    return {
        name: torch.cat([segment.state[index][name] for index in members]) if isinstance(value, torch.Tensor) else value
        for name, value in segment.state.get(members[0], {}).items()
    }


def _check(value: object, size: int, dtype: torch.dtype, what: str, unit: str) -> None:
    """Raises UsageError unless ``value`` is a flat tensor of the given size and dtype."""
    expected = f"a {dtype} tensor of shape [{size}]"
    got = (
        f"a {value.dtype} tensor of shape {list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
    if got != expected:
        raise UsageError(f"{what} {got}: expected {expected}, like values", unit=unit, expected=expected, actual=got)


def _scatter(segment: PartitionSegment, members: Sequence[int], values: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Copies flat values and state to the parameters. The copies do not share memory with the function's tensors."""
    start = 0
    for index in members:
        stop = start + segment.values[index].numel()
        segment.values[index].copy_(values[start:stop])
        former = segment.state.get(index, {})
        segment.state[index] = {
            name: _copy(value[start:stop], former.get(name)) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        start = stop


def _copy(piece: torch.Tensor, target: Any) -> torch.Tensor:
    """Returns a copy on the CPU: in ``target``, such as shared memory, if that is a tensor that fits."""
    if isinstance(target, torch.Tensor) and (target.shape, target.dtype) == (piece.shape, piece.dtype):
        return target.copy_(piece)
    return piece.detach().to("cpu", copy=True)
