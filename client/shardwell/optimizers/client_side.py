"""Optimizers of torch, or of a user's own, that run on the trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.module.torch_patches import needs_closure
from shardwell.optimizers.partition_optimizer import PartitionOptimizer
from shardwell.transport.partitions import PartitionSegment
from shardwell_wire.errors import UsageError


class ClientSide(PartitionOptimizer):
    """Any ``torch.optim`` optimizer, or one of your own, on the trainers.

    The optimizer sees, per partition, one 1-d parameter for each part of a parameter that lies in it. One that works
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
        self._make, self._options = optimizer_class, options
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
        super().__init__(params, dict(example.defaults), name=type(example).__name__, keep_bytes=keep_bytes)

    def _update_part(self, unit: str, part: PartitionSegment, groups: Sequence[int]) -> None:
        """One step of the optimizer on one part of a partition."""
        parameters = {index: nn.Parameter(value) for index, value in part.values.items() if groups[index] >= 0}
        for index, gradient in part.gradients.items():
            parameters[index].grad = gradient
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
