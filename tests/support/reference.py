"""Plain PyTorch training that computes ranks one after another and sums gradients in the run's order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from shardwell.seeds import derive_seed
from tests.support import transformer

ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
"""Optimizer settings that the parity tests use on both sides."""


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int, int], Any],
    *,
    dp: int,
    steps: int,
    seed: int = 0,
    first: int = 0,
    groups: Sequence[int] = (),
) -> list[float]:
    """Trains the steps ``[first, steps)`` in place. Returns the losses by step, then rank.

    ``groups`` are the reduction groups. Empty: gradients are added in rank order.
    """
    losses = []
    for step in range(first, steps):
        gradients: dict[nn.Parameter, list[torch.Tensor | None]] = {}
        for dp_rank in range(dp):
            torch.manual_seed(derive_seed(seed, step, dp_rank))
            loss = model(batch(step, dp_rank))
            loss.backward()
            losses.append(loss.item())
            for parameter in model.parameters():
                gradients.setdefault(parameter, []).append(parameter.grad)
                parameter.grad = None
        for parameter, terms in gradients.items():
            sums = terms
            for size in groups or (dp,):
                sums = [_sum(sums[start : start + size]) for start in range(0, len(sums), size)]
            parameter.grad = None if sums[0] is None else sums[0] / dp
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _sum(terms: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def sha256(state: Mapping[str, torch.Tensor]) -> str:
    """Returns a hash of the names, shapes and bits of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute with one thread while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
@one_thread()
def undisturbed_sha256(*, dp: int, steps: int, groups: tuple[int, ...] = ()) -> str:
    """Returns the weights of the small transformer after a run without failures."""
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    train_plain(model, optimizer, transformer.batch, dp=dp, steps=steps, groups=groups)
    return sha256(model.state_dict())
