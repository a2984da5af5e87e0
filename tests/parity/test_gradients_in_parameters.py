"""Gradients that are views of a parameter have the values that the parameter had in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwell.module.fully_shard import ShardedModule
from tests.support.module_parity import Pair, inputs, wrap_children


class HalfSquare(torch.autograd.Function):
    """Adds half of the squares of the weights. Their gradient is a view of the weights, or a copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, copies: bool) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.copies = copies
        return x + 0.5 * weight.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient, weight.detach().clone() if ctx.copies else weight.detach(), None


class Penalty(nn.Module):
    copies = False

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(5, 5), nn.Parameter(torch.randn(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HalfSquare.apply(self.linear(x), self.weight, self.copies)  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Penalty(), Penalty(), Penalty())


def loss(model: nn.Module, number: int) -> torch.Tensor:
    result: torch.Tensor = model(inputs(number, 4, 5)).mean()
    return result


def pair(prefetch_bytes: int) -> Pair:
    found = Pair(model(), wrap_children, prefetch_bytes=prefetch_bytes)
    for penalty in found.plain.children():
        penalty.copies = True
    return found


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
def test_views_of_parameters_are_pushed_with_the_values_of_the_backward(prefetch_bytes: int) -> None:
    pair(prefetch_bytes).train(loss)


def test_views_of_parameters_keep_their_values_while_their_unit_is_freed() -> None:
    both = pair(0)
    assert isinstance(both.sharded.model, ShardedModule)
    for number in range(2):
        with both.sharded.model.no_sync():
            both.backward(loss, 2 * number)
        both.backward(loss, 2 * number + 1)
        both.step()
    both.compare()
