"""LAMB: Adam whose step is scaled, parameter by parameter, to the norm of its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class Lamb(Optimizer):
    """LAMB as published (You et al., Large Batch Optimization for Deep Learning, 2020, Algorithm 2).

    The scaling function is the identity; where the norm of the values or of the step is 0, the step is not
    scaled. Gradients are not clipped.

    Args:
        params: As in torch.
        lr: Learning rate.
        betas: Of the two moments, which are corrected for their bias.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled; part of the step that is scaled.
        maximize: Whether to ascend.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = -parameter.grad if group["maximize"] else parameter.grad
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        direction = _adam_direction(state, gradient, group)
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * _trust_ratio(parameter, direction))


def _adam_direction(state: dict[str, Any], gradient: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    beta1, beta2 = group["betas"]
    state["step"] += 1
    step = state["step"].item()
    state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    direction: torch.Tensor = (state["exp_avg"] / (1 - beta1**step)).div_(denominator)
    return direction


def _trust_ratio(parameter: torch.Tensor, direction: torch.Tensor) -> float:
    value_norm, step_norm = (torch.linalg.vector_norm(tensor).item() for tensor in (parameter, direction))
    return value_norm / step_norm if value_norm and step_norm else 1.0
