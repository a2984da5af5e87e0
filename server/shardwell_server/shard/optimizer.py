"""Where the optimizer is applied: torch's fused CPU kernels on the parts of parameters in a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwell_server.hyperparameters import FLAGS
from shardwell_wire.errors import ConflictError
from shardwell_wire.v1 import common_pb2

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class ShardOptimizer:
    """The optimizer of one shard and its state.

    A parameter without a gradient is skipped, as torch does: its state does not advance.

    Args:
        algorithm: ``sgd``, ``adam`` or ``adamw``.
        values: The parts of parameters in the shard; replaced by ``rebind``. Each [numel].
    """

    def __init__(self, algorithm: str, values: Sequence[torch.Tensor]) -> None:
        self.algorithm = algorithm
        self._parameters = [nn.Parameter(value) for value in values]
        self._torch = _CLASSES[algorithm](self._parameters or [nn.Parameter(torch.zeros(0))], fused=True)
        self._template = {key: value for key, value in self._torch.param_groups[0].items() if key != "params"}

    def check_algorithm(self, algorithm: str) -> None:
        """Raises ConflictError if the state is another algorithm's."""
        if algorithm != self.algorithm:
            raise ConflictError(
                f"the run's optimizer is {self.algorithm} and cannot become {algorithm}: start another run"
            )

    def rebind(self, values: Sequence[torch.Tensor]) -> None:
        """Has the parameters lie elsewhere; the state stays."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: Sequence[common_pb2.ParameterGroup],
        group_of: Sequence[int],
        clip_coefficient: float,
    ) -> None:
        """Updates the parameters in place.

        Args:
            gradients: One per part; None: no rank had one. They are changed when clipped.
            groups: The step's parameter groups.
            group_of: The group of each part; -1: not optimised.
            clip_coefficient: What gradients are multiplied by first.
        """
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        for parameter, gradient, group in zip(self._parameters, gradients, group_of, strict=True):
            if gradient is None or group < 0:
                continue
            parameter.grad = gradient.mul_(clip_coefficient) if clip_coefficient != 1.0 else gradient
            members[group].append(parameter)
        settings = [_torch_settings(group.hyperparameters) for group in groups]
        for part in self._split(members):
            self._torch.param_groups = [
                {**self._template, **own, "params": chosen} for own, chosen in zip(settings, part, strict=True)
            ]
            self._torch.step()
        for parameter in self._parameters:
            parameter.grad = None

    def _split(self, members: list[list[nn.Parameter]]) -> list[list[list[nn.Parameter]]]:
        """Fused SGD refuses groups in which only some parameters have a momentum buffer yet."""
        if self.algorithm != "sgd":
            return [members]

        def has_buffer(parameter: nn.Parameter) -> bool:
            return self._torch.state.get(parameter, {}).get("momentum_buffer") is not None

        return [[[p for p in group if has_buffer(p) is wanted] for group in members] for wanted in (True, False)]

    @property
    def state_names(self) -> list[str]:
        """Names of the state's tensors, such as ``exp_avg``."""
        names = {
            name
            for state in self._torch.state.values()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name != "step"
        }
        return sorted(names)

    def state(self, part: int) -> Mapping[str, Any]:
        """The state of one part's parameter; empty before its first update."""
        state: Mapping[str, Any] = self._torch.state.get(self._parameters[part], {})
        return state

    def steps_of(self, part: int) -> int:
        """Updates that a part's state has seen."""
        return int(self.state(part).get("step", 0))

    @property
    def size_bytes(self) -> int:
        return sum(
            value.nbytes
            for state in self._torch.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def _torch_settings(hyperparameters: Mapping[str, float]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        name: bool(value) if name in FLAGS else value
        for name, value in hyperparameters.items()
        if name not in ("beta1", "beta2")
    }
    if "beta1" in hyperparameters:
        settings["betas"] = (hyperparameters["beta1"], hyperparameters["beta2"])
    return settings
