"""Where the optimizer is applied, to the parts of parameters in a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwell_server.hyperparameters import algorithm_of
from shardwell_server.shard.arithmetic.algorithms.engines import ENGINES, Part, State, torch_settings
from shardwell_server.shard.arithmetic.averages import Averages
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
        self._values = list(values)
        self._states: list[State] = [{} for _ in values]
        self._algorithms: list[str | None] = [None] * len(values)
        self._step_counts = [0] * len(values)
        self._tensor_count = -1
        self.averages = Averages(self._values)
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
        members: list[list[Part]] = [[] for _ in optimizer.groups]
        names = [algorithm_of(optimizer, group) for group in range(len(optimizer.groups))]
        for number, (values, gradient, group) in enumerate(zip(self._values, gradients, group_of, strict=True)):
            if gradient is None or group < 0:
                continue
            clipped = gradient.mul_(clip_coefficient) if clip_coefficient != 1.0 else gradient
            if optimizer.HasField("clip_value"):
                # torch refuses a bound that the dtype does not have, which clips nothing.
                bound = min(optimizer.clip_value, torch.finfo(clipped.dtype).max)
                clipped.clamp_(-bound, bound)
            self._begin(number, names[group])
            self._step_counts[number] += 1
            members[group].append(Part(values, clipped.view_as(values), self._states[number]))
        for name, chosen, parts in zip(names, optimizer.groups, members, strict=True):
            if parts:
                ENGINES[name].update(parts, torch_settings(chosen.hyperparameters))

    def _begin(self, number: int, algorithm: str) -> None:
        """A parameter that was left out for a step may come back under another algorithm: it begins anew then."""
        if self._algorithms[number] not in (None, algorithm):
            self._states[number] = {}
            self._step_counts[number] = 0
            self._tensor_count = -1
        self._algorithms[number] = algorithm

    def _take_stock(self) -> None:
        tensor_count = sum(map(len, self._states)) + self.averages.count
        if tensor_count == self._tensor_count:
            return  # state only ever grows, but for a parameter that begins anew
        self._tensor_count = tensor_count
        names = {name for state in self._states for name in state if name != "step"}
        self.state_names = sorted(names | {_AVERAGE} if self.averages.begun else names)
        self.size_bytes = sum(value.nbytes for state in self._states for value in state.values())
        self.size_bytes += self.averages.size_bytes

    def state(self, part: int) -> Mapping[str, torch.Tensor]:
        """The state of one part's parameter; empty before its first update."""
        own, average = self._states[part], self.averages[part]
        return own if average is None else {**own, _AVERAGE: average}

    def steps_of(self, part: int) -> int:
        """Updates that a part has seen."""
        return self._step_counts[part]
