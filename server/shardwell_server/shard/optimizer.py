"""Where the optimizer is applied, to the parts of parameters in a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwell_server.hyperparameters import algorithm_of
from shardwell_server.shard.algorithms.engines import Engine, make_engine, torch_settings
from shardwell_server.shard.averages import Averages
from shardwell_wire.v1 import common_pb2

_AVERAGE = "ema"
"""Name of the moving average among the state."""


class ShardOptimizer:
    """The optimizer of one shard and its state.

    A parameter without a gradient is skipped, as torch does: its state does not advance.

    Args:
        values: The parts of parameters in the shard: of their own shape where they are whole, else
            [numel].
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._parameters = [nn.Parameter(value) for value in values]
        self._algorithms: list[str | None] = [None] * len(self._parameters)
        self._engines: dict[str, Engine] = {}
        self._step_counts = [0] * len(self._parameters)
        self.averages = Averages([parameter.data for parameter in self._parameters])
        self.state_names: list[str] = []
        """Names of the state's tensors, such as ``exp_avg``, after the last step."""
        self.size_bytes = 0
        """What the state takes, after the last step."""

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[torch.Tensor | None],
        optimizer: common_pb2.OptimizerStep,
        group_of: Sequence[int],
        clip_coefficient: float,
    ) -> None:
        """Updates the parameters in place.

        Args:
            gradients: One per part; None: no rank had one. They are changed when clipped. [numel]
            optimizer: The step's.
            group_of: The group of each part; -1: not optimised.
            clip_coefficient: What gradients are multiplied by first.
        """
        optimised = [group >= 0 for group in group_of]
        self.averages.before_update(optimised)
        self._update(gradients, optimizer, group_of, clip_coefficient)
        if optimizer.HasField("ema_decay"):
            self.averages.after_update(optimised, optimizer.ema_decay)
        self._take_stock()

    def _update(
        self,
        gradients: Sequence[torch.Tensor | None],
        optimizer: common_pb2.OptimizerStep,
        group_of: Sequence[int],
        clip_coefficient: float,
    ) -> None:
        members: list[list[nn.Parameter]] = [[] for _ in optimizer.groups]
        names = [algorithm_of(optimizer, group) for group in range(len(optimizer.groups))]
        for number, (parameter, gradient, group) in enumerate(zip(self._parameters, gradients, group_of, strict=True)):
            if gradient is None or group < 0:
                continue
            clipped = gradient.mul_(clip_coefficient) if clip_coefficient != 1.0 else gradient
            if optimizer.HasField("clip_value"):
                clipped.clamp_(-optimizer.clip_value, optimizer.clip_value)
            parameter.grad = clipped.view_as(parameter)
            members[group].append(parameter)
            self._begin(number, names[group])
            self._step_counts[number] += 1
        settings = [torch_settings(group.hyperparameters) for group in optimizer.groups]
        for algorithm in dict.fromkeys(names):
            groups = [
                (own, chosen) for name, own, chosen in zip(names, settings, members, strict=True) if name == algorithm
            ]
            self._engine(algorithm).step(groups)
        for parameter in self._parameters:
            parameter.grad = None

    def _begin(self, number: int, algorithm: str) -> None:
        """A parameter that was left out for a step may come back under another algorithm: it begins anew then."""
        former = self._algorithms[number]
        if former not in (None, algorithm):
            self._engines[former].forget(self._parameters[number])
            self._step_counts[number] = 0
        self._algorithms[number] = algorithm

    def _engine(self, algorithm: str) -> Engine:
        if algorithm not in self._engines:
            self._engines[algorithm] = make_engine(algorithm)
        return self._engines[algorithm]

    def _take_stock(self) -> None:
        tensors = [tensor for engine in self._engines.values() for tensor in engine.tensors()]
        names = {name for name, _ in tensors if name != "step"}
        self.state_names = sorted(names | {_AVERAGE} if self.averages.begun else names)
        self.size_bytes = sum(value.nbytes for _, value in tensors) + self.averages.size_bytes

    def state(self, part: int) -> Mapping[str, Any]:
        """The state of one part's parameter; empty before its first update."""
        algorithm, average = self._algorithms[part], self.averages[part]
        own = {} if algorithm is None else self._engines[algorithm].state(self._parameters[part])
        return own if average is None else {**own, _AVERAGE: average}

    def steps_of(self, part: int) -> int:
        """Updates that a part has seen."""
        return self._step_counts[part]
