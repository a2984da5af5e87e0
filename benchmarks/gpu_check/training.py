"""A small model, and its training on one device and on shard servers, which checks compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwell


class Net(nn.Module):
    """Blocks with odd sizes and norms, an embedding and a head.

    Args:
        tied: Whether the head uses the embedding's weight.
        frozen: Whether the first block is frozen.
        unused: Whether there is a block without a use.
        checkpointed: Whether the backward computes the blocks again.
        dropout: Probability of dropout.
    """

    def __init__(
        self,
        *,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        checkpointed: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(61, 33)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 33), nn.Dropout(dropout))
            for _ in range(4)
        )
        self.unused = nn.Linear(33, 33) if unused else None
        self.head = nn.Linear(33, 61, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


def tokens_of(step: int, *, batch: int = 8, length: int = 16, vocabulary: int = 61) -> torch.Tensor:
    """Returns the tokens of a step. [batch, length + 1]"""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(vocabulary, (batch, length + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of the next tokens, computed in float32."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Trained:
    """Losses and final weights of a training."""

    losses: Sequence[torch.Tensor]
    weights: dict[str, torch.Tensor]

    def difference(self, other: Trained) -> str:
        """Returns what differs. Empty: every bit is equal."""
        for step, (ours, theirs) in enumerate(zip(self.losses, other.losses, strict=True)):
            if not torch.equal(ours, theirs):
                return f"loss of step {step}: {ours.item()!r}, not {theirs.item()!r}"
        for name, value in other.weights.items():
            if not torch.equal(self.weights[name], value):
                return f"{name}: up to {(self.weights[name] - value).abs().max().item():.1e} off"
        return ""


def train_plain(model: nn.Module, device: torch.device, *, steps: int = 4, backwards: int = 1) -> Trained:
    """Trains a resident model with SGD, whose bits are those of the servers' SGD if the rate is a power of two."""
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        for number in range(backwards):
            loss = loss_of(model, tokens_of(100 * number + step).to(device)) / backwards
            loss.backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: value.detach().cpu() for name, value in model.state_dict().items()})


def train_sharded(
    address: str,
    run: str,
    model: Any,
    device: torch.device,
    *,
    steps: int = 4,
    backwards: int = 1,
    transfers: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Trained:
    """Trains the same model on shard servers.

    Args:
        address: The cluster.
        run: Name of the run.
        model: The model.
        device: The device to compute on.
        steps: Number of steps.
        backwards: Backwards of each step.
        transfers: Arguments of ``TransferOptions``.
        options: Arguments of ``fully_shard``.
    """
    model.to(device)
    options = options or {}
    with shardwell.join(address, run=run, transfers=shardwell.TransferOptions(**(transfers or {}))) as session:
        for block in model.blocks:
            shardwell.fully_shard(block, session, **options)
        shardwell.fully_shard(model, session, **options)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(steps):
            torch.manual_seed(step)
            for number in range(backwards):
                loss = loss_of(model, tokens_of(100 * number + step).to(device)) / backwards
                loss.backward()
                losses.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        return Trained(losses, {name: value.cpu() for name, value in shardwell.full_state_dict(model).items()})
