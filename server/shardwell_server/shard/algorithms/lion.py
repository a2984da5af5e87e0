"""Lion: one moment, and steps of one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class Lion(Optimizer):
    """Lion as published (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, Algorithm 2).

    Args:
        params: As in torch.
        lr: Size of each element's step.
        betas: Of the moment as the step sees it, and as it is kept.
        weight_decay: Decoupled.
        maximize: Whether to ascend.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

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
        beta1, beta2 = group["betas"]
        gradient = -parameter.grad if group["maximize"] else parameter.grad
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        direction = state["exp_avg"] * beta1 + gradient * (1 - beta1)
        parameter.add_(direction.sign_(), alpha=-group["lr"])
        state["exp_avg"].mul_(beta2).add_(gradient, alpha=1 - beta2)
