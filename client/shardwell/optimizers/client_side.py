"""Optimizers that run on the trainers: each data rank updates its slice of every unit and writes it back by value.

Values, mean gradient and the optimizer's state of a slice come from the servers and go back to them in every step, and
take effect when it is committed. So any trainer can update any slice; what one may have kept from the step before only
saves fetching it again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.data_plane.slice_client import SlicePart
from shardwell.module.guards import needs_closure
from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell.session.step_end import StepUpdate
from shardwell_wire.errors import StepStateError, UsageError
from shardwell_wire.slices import TRAINER_PREFIX
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

_MAX_VOID_COUNT = 20
"""Gradients that become void under one's hands, one after the other, before that is taken for an error."""


@dataclass(frozen=True, slots=True)
class _Clipping:
    """How a step's gradient is clipped: by a coefficient, then by value."""

    coefficient: float
    value: float | None


class ClientSide(ShardedOptimizer):
    """Any ``torch.optim`` optimizer, or one of your own, on the trainers.

    The optimizer sees, per slice, one 1-d parameter for each part of a parameter that lies in it. One that works
    element by element computes the bits that it would compute on whole parameters; one that looks at a whole
    parameter (LAMB, Muon, Adafactor) does not. ``optimizer_class`` must be the same on every trainer.

    Args:
        params: As of torch's optimizers: sharded parameters, or groups of them.
        optimizer_class: Takes groups and ``options``, as torch's optimizers do; its ``step`` needs no closure.
        keep_bytes: How much values and state may stay here from step to step where a server is not on this host, so
            that a step fetches the gradient only. Without shared memory all of it is ``1 / dp`` of the model's values
            and state. 0: nothing stays.
        **options: Its hyper-parameters, by name.

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
        self._make, self._options, self._keep_bytes, self._void_count = optimizer_class, options, keep_bytes, 0
        # torch's optimizers fill in their defaults themselves.
        example = optimizer_class([nn.Parameter(torch.zeros(0))], **options)
        if isinstance(example, torch.optim.SparseAdam):
            raise UsageError(
                "ClientSide(SparseAdam): SparseAdam takes sparse gradients only, but the mean gradient of all trainers "
                "is dense: use shardwell.optim.Adam, which leaves parameters without a gradient alone"
            )
        if needs_closure(type(example)):
            raise UsageError(
                f"{type(example).__name__}.step needs a closure, which evaluates the model several times in a step: "
                "ClientSide runs optimizers that need the gradient only"
            )
        self.algorithm = TRAINER_PREFIX + type(example).__name__  # type: ignore[misc]
        super().__init__(params, dict(example.defaults))

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        """The numbers among a group's settings: trainers must agree on them."""
        return dict(_numbers({key: value for key, value in group.items() if key != "params"}))

    def _make_update(self) -> StepUpdate:
        if self._kept_parameters():
            raise UsageError(
                "ClientSide.step() would lose the gradients of another optimizer of this session: an optimizer that "
                "runs on the trainers does not take turns with others. Use one ClientSide for all parameters, or "
                "optimizers of shardwell.optim"
            )
        update, clip_value = super()._make_update(), self._scaling.clip_value
        clipping = _Clipping(update.clip_coefficient, clip_value)
        return replace(update, update_slices=lambda work: self._update_slices(update.optimizer, work, clipping))

    def _update_slices(
        self,
        optimizer: common_pb2.OptimizerStep,
        work: Sequence[coordinator_pb2.SliceWork],
        clipping: _Clipping,
    ) -> list[coordinator_pb2.SliceWork]:
        """Updates and stages slices; returns those that are staged."""
        groups = {unit.unit_index: unit.group_indices for unit in optimizer.units}

        def update(unit_index: int, part: SlicePart) -> None:
            self._update(part, groups[unit_index], clipping)

        staged = []
        for slices in work:
            try:
                self._session.store.update_slices(slices, update, keep_bytes=self._keep_bytes)
            except StepStateError as error:  # a rank has begun its work anew: the commit says what to do now
                self._void_count += 1
                if self._void_count > _MAX_VOID_COUNT:
                    raise
                logger.info("slices of rank %d are not staged: %s", slices.dp_rank, error)
            else:
                self._void_count = 0
                staged.append(slices)
        return staged

    @torch.no_grad()
    def _update(self, part: SlicePart, groups: Sequence[int], clipping: _Clipping) -> None:
        """One step of the optimizer on one part of a slice, in place."""
        parameters = {index: nn.Parameter(value) for index, value in part.values.items() if groups[index] >= 0}
        part.gradients = {index: gradient for index, gradient in part.gradients.items() if index in parameters}
        if not part.gradients:
            return
        for index, gradient in part.gradients.items():
            clipped = gradient.mul_(clipping.coefficient) if clipping.coefficient != 1.0 else gradient
            if clipping.value is not None:
                clipped.clamp_(-clipping.value, clipping.value)
            parameters[index].grad = clipped
        inner = self._make(list(self._inner_groups(parameters, groups)), **self._options)
        left = {index: state for index, state in part.state.items() if index not in parameters}
        for index, parameter in parameters.items():
            if index in part.state:
                inner.state[parameter] = part.state[index]
        inner.step()
        part.values.update({index: value.detach().contiguous() for index, value in parameters.items()})
        # In the order of the layout; that of parameters which are in no group now stays as it is.
        found = {index: dict(inner.state[value]) for index, value in parameters.items() if value in inner.state}
        part.state = dict(sorted((found | left).items()))

    def _inner_groups(self, parameters: Mapping[int, nn.Parameter], groups: Sequence[int]) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self.param_groups):
            members = [parameter for index, parameter in parameters.items() if groups[index] == number]
            if members:
                yield {**group, "params": members}


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in settings.items():
        if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            yield name, float(value)
        elif isinstance(value, (tuple, list)):
            yield from _numbers({f"{name}.{index}": entry for index, entry in enumerate(value)})
