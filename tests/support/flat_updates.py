"""A function for ``FlatClientSide`` that computes the bits of ``torch.optim.Adam(foreach=False)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

FLAT_ADAM: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def flat_adam(
    values: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
) -> torch.Tensor:
    """Adam with a state of two tensors and a number."""
    if not state:
        state.update(average=torch.zeros_like(values), square=torch.zeros_like(values), count=0)
    if group["weight_decay"]:
        gradient = gradient.add(values, alpha=group["weight_decay"])
    state["count"] += 1
    first, second = group["betas"]
    state["average"].lerp_(gradient, 1 - first)
    state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    step_size = group["lr"] / (1 - first ** state["count"])
    root = (1 - second ** state["count"]) ** 0.5
    denominator = (state["square"].sqrt() / root).add_(group["eps"])
    return values.addcdiv(state["average"], denominator, value=-step_size)
