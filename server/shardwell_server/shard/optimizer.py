"""Where the optimizer is applied: torch's fused CPU kernels on the parts of parameters in a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        values: The parts of parameters in the shard. Each [numel].
    """

    def __init__(self, algorithm: str, values: Sequence[torch.Tensor]) -> None:
        self.algorithm = algorithm
        self._parameters = [nn.Parameter(value) for value in values]
        self._torch = _CLASSES[algorithm](self._parameters or [nn.Parameter(torch.zeros(0))], fused=True)
        self._step_counts = [0] * len(self._parameters)
        self.state_names: list[str] = []
        """Names of the state's tensors, such as ``exp_avg``, after the last step."""
        self.size_bytes = 0
        """What the state takes, after the last step."""
        self._template = {key: value for key, value in self._torch.param_groups[0].items() if key != "params"}

    def check_algorithm(self, algorithm: str) -> None:
        """Raises ConflictError if the state is another algorithm's."""
        if algorithm != self.algorithm:
            raise ConflictError(
                f"the run's optimizer is {self.algorithm} and cannot become {algorithm}: start another run"
            )

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
        self._add_missing_state(settings, members)
        # Taken together before the first call: it gives parameters their buffers.
        for fused, together in list(self._split(members)):
            way = self._template if fused else {**self._template, "fused": False, "foreach": False}
            self._torch.param_groups = [
                {**way, **own, "params": chosen} for own, chosen in zip(settings, together, strict=True)
            ]
            self._torch.step()
        for number, parameter in enumerate(self._parameters):
            self._step_counts[number] += parameter.grad is not None
            parameter.grad = None
        self._take_stock()

    def _add_missing_state(
        self, settings: Sequence[Mapping[str, Any]], members: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        """Where amsgrad is switched on later torch misses its maxima, in the middle of a step."""
        for own, chosen in zip(settings, members, strict=True):
            for parameter in chosen if own.get("amsgrad") else ():
                state = self._torch.state.get(parameter)
                if state and "max_exp_avg_sq" not in state:
                    state["max_exp_avg_sq"] = torch.zeros_like(parameter)

    def _split(self, members: list[list[nn.Parameter]]) -> Iterator[tuple[bool, list[list[nn.Parameter]]]]:
        """Which parameters may share one call of torch's optimizer, and whether by its fused kernels.

        Fused SGD refuses groups in which only some parameters have a momentum buffer yet. For 16-bit
        parameters it leaves all but the last few elements as they are (torch 2.13, CPU), so those go
        through the plain loop.
        """
        if self.algorithm != "sgd":
            yield True, members
            return
        for fused in (True, False):
            for with_buffer in (True, False):
                yield (
                    fused,
                    [
                        [p for p in group if (p.element_size() > 2, self._has_buffer(p)) == (fused, with_buffer)]
                        for group in members
                    ],
                )

    def _has_buffer(self, parameter: nn.Parameter) -> bool:
        return self._torch.state.get(parameter, {}).get("momentum_buffer") is not None

    def _take_stock(self) -> None:
        tensors = [
            (name, value)
            for state in self._torch.state.values()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        ]
        self.state_names = sorted({name for name, _ in tensors if name != "step"})
        self.size_bytes = sum(value.nbytes for _, value in tensors)

    def state(self, part: int) -> Mapping[str, Any]:
        """The state of one part's parameter; empty before its first update."""
        state: Mapping[str, Any] = self._torch.state.get(self._parameters[part], {})
        return state

    def steps_of(self, part: int) -> int:
        """Updates that a part has seen."""
        return self._step_counts[part]


def _torch_settings(hyperparameters: Mapping[str, float]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        name: bool(value) if name in FLAGS else value
        for name, value in hyperparameters.items()
        if name not in ("beta1", "beta2")
    }
    if "beta1" in hyperparameters:
        settings["betas"] = (hyperparameters["beta1"], hyperparameters["beta2"])
    return settings
