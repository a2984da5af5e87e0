"""Trains a plain model and a sharded copy of it, and compares the bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwell.module.fully_shard import ShardedModule, fully_shard
from shardwell.module.units import Units
from shardwell.weights.state_dict import full_state_dict
from tests.support.in_memory_store import InMemoryStore, MakeOptimizer, fused_adamw

Wrap = Callable[[nn.Module, Any], None]
Loss = Callable[[nn.Module, int], torch.Tensor]

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 131, 20, 4, 3, 7
"""Odd sizes, so that parameters and shards end in the middle of blocks."""


class Sharded:
    """A sharded model, its units and the store that takes the place of servers."""

    def __init__(
        self,
        model: nn.Module,
        wrap: Wrap,
        *,
        store: InMemoryStore | None = None,
        prefetch_bytes: int = 1 << 30,
        **options: Any,
    ) -> None:
        self.store = store or InMemoryStore()
        self.units = Units(self.store, prefetch_bytes=prefetch_bytes, **options)
        self.session = SimpleNamespace(units=self.units)
        self.model = model
        wrap(model, self.session)

    def step(self) -> None:
        """Does the work of ``optimizer.step()`` and ``optimizer.zero_grad()`` in a plain loop with one rank."""
        self.units.finish_item()
        self.store.step()
        self.units.invalidate()
        self.units.zero_grad()
        assert self.units.live_bytes == 0

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the committed values under torch's names."""
        return full_state_dict(self.model)

    def unit_bytes(self) -> dict[str, int]:
        """Returns the size of every unit's flat vector."""
        return {unit.name: unit.layout.size_bytes for unit in self.units}


class Pair:
    """A plain model with its optimizer, and a sharded copy of it."""

    def __init__(
        self, model: nn.Module, wrap: Wrap, *, make_optimizer: MakeOptimizer = fused_adamw, **options: Any
    ) -> None:
        options.setdefault("store", InMemoryStore(make_optimizer=make_optimizer))
        self.plain = model
        self.sharded = Sharded(copy.deepcopy(model), wrap, **options)
        self.optimizer = make_optimizer(list(self.plain.parameters()))

    def backward(self, loss: Loss, number: int) -> None:
        """Runs one forward and backward of both models, with the same random numbers."""
        losses = []
        for model in (self.plain, self.sharded.model):
            torch.manual_seed(number)
            value = loss(model, number)
            value.backward()
            losses.append(value.detach())
        assert torch.equal(losses[0], losses[1]), f"losses differ: {losses[0].item()!r}, sharded {losses[1].item()!r}"

    def step(self) -> None:
        """Takes one optimizer step of both models."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sharded.step()

    def train(self, loss: Loss, steps: int = 4) -> Pair:
        """Trains for some steps of one backward each, then compares."""
        for number in range(steps):
            self.backward(loss, number)
            self.step()
        self.compare()
        return self

    def compare(self) -> None:
        """Raises unless both states have the same names in the same order and the same bits."""
        expected, got = self.plain.state_dict(), self.sharded.state()
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert torch.equal(value, got[name]), f"{name} differs by {(value - got[name]).abs().max()}"
            assert got[name].dtype is value.dtype


def wrap_children(model: nn.Module, session: Any) -> None:
    """Makes a unit for every child that has a forward, and one for the rest."""
    for child in model.children():
        parts = list(child) if isinstance(child, nn.ModuleList) else [child]
        for part in parts:
            if not isinstance(part, ShardedModule):
                fully_shard(part, session)
    fully_shard(model, session)


def wrap_blocks(model: nn.Module, session: Any) -> None:
    """Makes a unit for every block, and one for the rest."""
    for block in model.blocks:
        fully_shard(block, session)
    fully_shard(model, session)


def wrap_whole(model: nn.Module, session: Any) -> None:
    """Makes one unit of the whole model."""
    fully_shard(model, session)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.dropout(self.proj(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A GPT with tied embedding and head. ``recompute`` is None or ``checkpoint``'s ``use_reentrant``."""

    def __init__(self, recompute: bool | None = None, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x))


def gpt(recompute: bool | None = None, layers: int = LAYERS) -> Gpt:
    """Returns a model with the same weights every time."""
    torch.manual_seed(0)
    return Gpt(recompute, layers)


def gpt_loss(model: nn.Module, number: int) -> torch.Tensor:
    """Returns the loss on batch ``number``."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def inputs(number: int, *shape: int, requires_grad: bool = False) -> torch.Tensor:
    """Returns random numbers for batch ``number``."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(shape, generator=generator).requires_grad_(requires_grad)


def layers(*widths: int) -> nn.Sequential:
    """Returns linear layers with the same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(widths)))


def squared_loss(model: nn.Module, number: int) -> torch.Tensor:
    """Returns the mean of the squared outputs for batch ``number``, with 7 inputs."""
    result: torch.Tensor = model(inputs(number, 4, 7)).square().mean()
    return result
