"""Building blocks of unusual models, and their training as plain and as sharded models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.module_parity import (
    Pair,
    Wrap,
    inputs,
    wrap_children,
)


def run(model: nn.Module, *shape: int, wrap: Wrap = wrap_children, requires_grad: bool = True, steps: int = 4) -> Pair:
    """Trains both models on the mean square of the output, and compares them."""

    def loss(each: nn.Module, number: int) -> torch.Tensor:
        return each(inputs(number, *shape, requires_grad=requires_grad)).square().mean()

    return Pair(model, wrap).train(loss, steps)


class Residual(nn.Module):
    """A model with units in the middle, so that inputs and outputs of units need gradients."""

    def __init__(self, *parts: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, width), nn.Linear(width, 3)
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = x + part(x)
        return self.last(x)


class Calls(nn.Module):
    """A module that calls a function with itself and the input. ``parts`` become attributes."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.function(self, x, *more)
