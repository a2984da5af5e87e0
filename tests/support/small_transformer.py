"""A small transformer with one peculiarity per variant, for plans of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, HIDDEN = 62, 16, 4, 20
HEAD_SIZE = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant, self.num_heads, self.fixed = variant, HEADS, HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if variant in {"head norms", "shared norm"}:
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD_SIZE), nn.LayerNorm(HEAD_SIZE)
        elif variant == "norms over heads":
            self.q_norm = nn.RMSNorm(WIDTH)
        elif variant == "norm of each head":
            self.q_norms = nn.ModuleList(nn.LayerNorm(HEAD_SIZE) for _ in range(HEADS))
        elif variant == "scale":
            self.scale = nn.Parameter(torch.ones(1))
        elif variant == "scale of each head":
            self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.variant == "norms over heads":
            query = self.q_norm(query)
        elif self.variant == "plain norm over heads":
            query = functional.rms_norm(query, (query.shape[-1],))
        num_heads = self.fixed if self.variant == "fixed heads" else self.num_heads
        query, key, value = (part.unflatten(-1, (num_heads, -1)) for part in (query, key, value))
        if self.variant in {"head norms", "shared norm"}:
            query, key = self.q_norm(query), self.k_norm(key)
        elif self.variant == "norm of each head":
            parts = [norm(part) for norm, part in zip(self.q_norms, query.unbind(-2), strict=False)]
            query = torch.stack(parts, dim=-2)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        scores = query @ key.transpose(-1, -2)
        if self.variant == "slopes":
            scores = scores + torch.arange(1, num_heads + 1).view(-1, 1, 1) * torch.arange(scores.shape[-1])
        elif self.variant in {"scale", "scale of each head"}:
            scores = scores * self.scale
        elif self.variant == "gate":
            scores = scores * x.mean(-1).sigmoid()[:, None, None]
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act = nn.PReLU() if variant == "learned activation" else nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(variant), MLP(variant)
        self.after = Scale() if variant == "scaled branches" else nn.Identity()
        if variant == "norms after":
            self.norm3 = nn.RMSNorm(WIDTH)
        if variant == "scaled stream":
            self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.variant == "post-norm":
            x = self.norm1(x + self.attn(x))
            return self.norm2(x + self.mlp(x))
        if self.variant == "shared norm":
            x = x + self.attn.q_norm(x.unflatten(-1, (HEADS, -1))).flatten(-2)
        x = x + self.after(self.attn(self.norm1(x)))
        if self.variant == "pooled":
            x = x + x.mean(1, keepdim=True)
        elif self.variant == "scaled stream":
            x = x * self.gamma
        x = x + self.after(self.mlp(self.norm2(x)))
        return self.norm3(x) if self.variant == "norms after" else x


class Transformer(nn.Module):
    """Maps tokens to logits. [batch, length] -> [batch, length, VOCABULARY]

    Args:
        variant: What is peculiar; see the classes above.
    """

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.variant = variant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(variant) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if variant == "bias outside":
            self.bias = self.head.bias

    def forward(self, tokens: torch.Tensor, *required: Any) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.variant == "two inputs":
            x = x + required[0]
        elif self.variant == "values":
            x = x * 2 if bool(tokens.sum() > 3) else x
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.variant == "last token":
            x = x[:, [-1]]
        if self.variant == "weight outside":
            return functional.linear(x, self.embedding.weight) + 0 * self.head(x)
        return self.head(x)  # type: ignore[no-any-return]
