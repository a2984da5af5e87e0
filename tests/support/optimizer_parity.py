"""Compares training with an optimizer on the servers and with a plain optimizer, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwell

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]

STEPS = 6
MAX_NORM = 0.5
"""Smaller than the norm of the model's gradients, so that clipping has an effect."""


class OddModel(nn.Module):
    """A model with awkward shapes (primes, a scalar, no elements), and a parameter that rarely has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.wide, self.tall = nn.Linear(101, 41), nn.Linear(41, 67)
        self.empty = nn.Parameter(torch.empty(0))
        self.rare = nn.Parameter(torch.randn(3001))

    def forward(self, x: torch.Tensor, use_rare: bool) -> torch.Tensor:
        out = self.tall(torch.tanh(self.wide(x)) * self.scale)
        loss = (out - 1.0).square().mean() * 4.0 + self.empty.sum()
        return loss + self.rare.square().mean() if use_rare else loss


def two_groups(model: nn.Module, **second: Any) -> Groups:
    """Returns two parameter groups: matrices, and all other parameters with other settings."""
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return [{"params": [p for p in model.parameters() if p.ndim == 2]}, {"params": others, **second}]


def compare(
    session: shardwell.Session,
    make: Make,
    make_plain: Make,
    groups: Callable[[nn.Module], Groups] = two_groups,
    *,
    always_rare: bool = False,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trains with clipping, an LR scheduler and a change of settings. Raises unless all bits are equal.

    Args:
        session: Session of a new run.
        make: Creates the optimizer on the servers.
        make_plain: Creates the plain optimizer.
        groups: The parameter groups.
        always_rare: Whether every parameter has a gradient in every step.
        **options: Arguments of ``fully_shard``.

    Returns:
        The plain model and its optimizer.
    """
    plain, model = OddModel(), shardwell.fully_shard(OddModel(), session, name="odd", **options)
    expected, optimizer = make_plain(groups(plain)), make(groups(model))
    assert isinstance(optimizer, shardwell.optim.ShardedOptimizer)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (expected, optimizer)]
    for step in session.steps(STEPS):
        x = torch.randn(5, 101, generator=torch.Generator().manual_seed(step.number))
        losses = [each(x, use_rare=always_rare or step.number % 3 == 1) for each in (plain, model)]
        assert torch.equal(*losses), f"step {step.number}"
        for loss in losses:
            loss.backward()
        if step.number % 2:
            clip_alike(plain, optimizer)
        if step.number == 3:
            for each in (expected, optimizer):
                each.param_groups[1]["weight_decay"] = 0.03
        for each, scheduler in zip((expected, optimizer), schedulers, strict=True):
            each.step()
            each.zero_grad()
            scheduler.step()
    compare_weights(model, plain)
    return plain, expected


def clip_alike(plain: nn.Module, optimizer: shardwell.optim.ShardedOptimizer) -> None:
    """Clips on the servers, and scales the plain gradients by the same factor."""
    norm = optimizer.clip_grad_norm_(MAX_NORM).item()
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    assert math.isclose(norm, torch.nn.utils.get_total_norm(gradients).item(), rel_tol=1e-5)
    assert norm > MAX_NORM
    for gradient in gradients:
        gradient.mul_(MAX_NORM / (norm + 1e-6))


def compare_weights(model: nn.Module, plain: nn.Module) -> None:
    """Raises unless the committed weights equal the plain model's bit for bit, and have changed."""
    got, start = shardwell.full_state_dict(model), OddModel().state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(got[name], value), f"{name} differs by {(got[name] - value).abs().max()}"
        assert not value.numel() or not torch.equal(value, start[name]), f"{name} did not move"
