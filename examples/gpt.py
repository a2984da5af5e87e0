"""A small GPT in plain PyTorch, without Shardwell: pre-norm blocks, learned positions, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model."""

    vocab_size: int
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    tied: bool = True
    """Whether the head uses the weight of the token embedding."""


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a norm before and a residual path around."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, x: Tensor) -> Tensor:
        # By head, so that tensor parallelism can split the rows of the projection.
        heads = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1))
        query, key, value = heads.permute(3, 0, 2, 1, 4)  # each [batch, num_heads, length, head_size]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    """Maps tokens to logits for the next token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        # Larger than usual, so that a short training learns more than token frequencies.
        nn.init.normal_(self.token_embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocab_size]
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, num_tokens: int, *, temperature: float = 0.7) -> Tensor:
    """Appends sampled tokens to a prompt. [length] -> [length + num_tokens]"""
    for _ in range(num_tokens):
        logits = model(tokens[None, -model.config.context :])[0, -1]
        probabilities = (logits / temperature).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)])
    return tokens
