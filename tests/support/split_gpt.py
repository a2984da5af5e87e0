"""A small GPT that tests divide over a grid, its batches, its loss and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwell
from examples.gpt import GPT, GPTConfig

LENGTH, VOCABULARY = 5, 32


def gpt(num_layers: int, *, tied: bool = False) -> GPT:
    """Returns the model, with the same values each time.

    Args:
        num_layers: Number of blocks.
        tied: Whether the head shares the embedding's weight.
    """
    torch.manual_seed(0)
    sizes = GPTConfig(vocab_size=VOCABULARY, context=LENGTH, num_layers=num_layers, num_heads=2, width=12, tied=tied)
    return GPT(sizes)


def batch(step: int, dp_rank: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and targets of a work item. Each [batch_size, LENGTH]"""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def momentum_sgd(model: nn.Module, *, lr: float, momentum: float, on_trainers: bool) -> Any:
    """Returns SGD with momentum for a sharded model, which runs on the servers or on the trainers."""
    if on_trainers:
        return shardwell.ClientSide(model.parameters(), torch.optim.SGD, lr=lr, momentum=momentum)
    return shardwell.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
