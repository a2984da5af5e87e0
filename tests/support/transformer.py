"""A small transformer with tied embeddings, odd sizes, dropout and checkpointing."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS = 131, 35, 5, 73, 17, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.dropout(self.proj(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Returns the loss of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``.

    Attributes:
        on_backward: Called when the backward reaches the output of the second block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.on_backward: Callable[[], None] | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False)
            if number == 1 and (hook := self.on_backward) is not None and x.requires_grad:
                x.register_hook(lambda _gradient: hook())
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build() -> Transformer:
    """Returns a model with the same weights on every call."""
    torch.manual_seed(1234)
    return Transformer()


def batch(step: int, dp_rank: int) -> torch.Tensor:
    """Returns the token ids of (step, dp_rank). [3, LENGTH]"""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
