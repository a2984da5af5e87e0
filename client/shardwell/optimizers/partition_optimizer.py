"""What optimizers that run on the trainers share: each data rank updates its partition of every unit.

The shard servers hold the values, the mean gradient and the optimizer's state. In every step a trainer reads its
partition
of them and stages the new values and state, which take effect when the step is committed. Any trainer can update any
partition. What a trainer keeps from the step before only saves fetching it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell.session.step_commit import StepUpdate
from shardwell.transport.partitions import PartitionSegment
from shardwell_wire.errors import StepStateError, UsageError
from shardwell_wire.partitions import TRAINER_PREFIX
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

_MAX_VOID_COUNT = 20
"""Gradients that become void under one's hands, one after the other, before that is taken for an error."""


@dataclass(frozen=True, slots=True)
class _Clipping:
    """How a step's gradient is clipped: by a coefficient, then by value."""

    coefficient: float
    value: float | None


class PartitionOptimizer(ShardedOptimizer):
    """Base of the optimizers that run on the trainers; not to be used itself.

    Args:
        params: Sharded parameters, or groups of them.
        defaults: The settings that a group need not have.
        name: What runs here. It must be the same on every trainer, and in every step of the run.
        keep_bytes: How many bytes of values and state may stay here from step to step.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, name: str, keep_bytes: float) -> None:
        self.algorithm = TRAINER_PREFIX + name  # type: ignore[misc]
        self._keep_bytes, self._void_count = keep_bytes, 0
        super().__init__(params, defaults)

    def _update_part(self, unit: str, part: PartitionSegment, groups: Sequence[int]) -> None:
        """Updates one part of a partition in place.

        Args:
            unit: Names the unit in errors.
            part: Its gradients are clipped. Those of parameters in no group are left out; there is at least one.
            groups: The index of each parameter's group by layout index; negative for those in no group.
        """
        raise NotImplementedError

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        """The numbers among a group's settings: trainers must agree on them."""
        return dict(_numbers({key: value for key, value in group.items() if key != "params"}))

    def _make_update(self) -> StepUpdate:
        if self._kept_parameters():
            name = type(self).__name__
            raise UsageError(
                f"{name}.step() would lose the gradients of another optimizer of this session: an optimizer that runs "
                f"on the trainers does not take turns with others. Use one {name} for all parameters, or optimizers "
                "of shardwell.optim"
            )
        update, clip_value = super()._make_update(), self._scaling.clip_value
        clipping = _Clipping(update.clip_coefficient, clip_value)
        return replace(update, update_partitions=lambda work: self._update_partitions(update.optimizer, work, clipping))

    def _update_partitions(
        self,
        optimizer: common_pb2.OptimizerStep,
        work: Sequence[coordinator_pb2.PartitionWork],
        clipping: _Clipping,
    ) -> list[coordinator_pb2.PartitionWork]:
        """Updates and stages partitions; returns those that are staged."""
        groups = {unit.unit_index: unit.group_indices for unit in optimizer.units}
        names = {unit.index: unit.name for unit in self._session.units}

        def update(unit_index: int, part: PartitionSegment) -> None:
            self._update(names[unit_index], part, groups[unit_index], clipping)

        staged = []
        for partitions in work:
            try:
                self._session.store.update_partitions(partitions, update, keep_bytes=self._keep_bytes)
            except StepStateError as error:  # a rank has begun its work anew: the commit says what to do now
                self._void_count += 1
                if self._void_count > _MAX_VOID_COUNT:
                    raise
                logger.info("partitions of rank %d are not staged: %s", partitions.dp_rank, error)
            else:
                self._void_count = 0
                staged.append(partitions)
        return staged

    @torch.no_grad()
    def _update(self, unit: str, part: PartitionSegment, groups: Sequence[int], clipping: _Clipping) -> None:
        """Clips the gradients of one part of a partition and updates it, in place."""
        part.gradients = {index: gradient for index, gradient in part.gradients.items() if groups[index] >= 0}
        for gradient in part.gradients.values():
            if clipping.coefficient != 1.0:
                gradient.mul_(clipping.coefficient)
            if clipping.value is not None:
                gradient.clamp_(-clipping.value, clipping.value)
        if part.gradients:
            self._update_part(unit, part, groups)


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in settings.items():
        if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            yield name, float(value)
        elif isinstance(value, (tuple, list)):
            yield from _numbers({f"{name}.{index}": entry for index, entry in enumerate(value)})
