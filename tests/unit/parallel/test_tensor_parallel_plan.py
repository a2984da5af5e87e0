"""Plans of tensor parallelism: recognised layers, bytes, and errors before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from examples.gpt import GPT, GPTConfig
from shardwell.parallel import plan_tensor_parallel
from shardwell.parallel.description import ActivationShape, CollectivePhase
from shardwell.parallel.outline import LayerKind, list_layers
from shardwell_wire.errors import UsageError


def gpt(**sizes: Any) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**{"vocab_size": 60, "context": 8, "num_layers": 2, "num_heads": 4, "width": 16, **sizes}))


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.n_heads = num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).unflatten(-1, (self.n_heads, -1)) for part in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        return self.wo(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12, num_heads: int = 4) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, num_heads), LlamaMLP(width, hidden)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_gpt_layers_are_split_by_columns_and_rows() -> None:
    plan = plan_tensor_parallel(gpt(), 2, fused_by_head=True)
    styles = {layer.name: layer.style for layer in plan.layers}
    assert styles == {
        "token_embedding": "vocabulary",
        "blocks.0.qkv": "column",
        "blocks.0.projection": "row",
        "blocks.0.mlp.0": "column",
        "blocks.0.mlp.2": "row",
        "blocks.1.qkv": "column",
        "blocks.1.projection": "row",
        "blocks.1.mlp.0": "column",
        "blocks.1.mlp.2": "row",
        "head": "vocabulary",
    }
    assert list(plan.styles) == list(styles)
    assert plan.heads == [("blocks.0", "num_heads"), ("blocks.1", "num_heads")]
    assert {layer.part for layer in plan.layers} == {"rows 1/2", "columns 1/2"}


def test_layers_of_llama_are_found_by_name_and_size_in_any_order() -> None:
    plan = plan_tensor_parallel(Blocks(LlamaBlock(), LlamaBlock()), 4, example=torch.zeros(2, 8, 8))
    styles = {layer.name.removeprefix("layers.0."): layer.style for layer in plan.layers[:7]}
    assert styles == {
        "attention.wq": "column",
        "attention.wk": "column",
        "attention.wv": "column",
        "attention.wo": "row",
        "feed_forward.w1": "column",
        "feed_forward.w3": "column",
        "feed_forward.w2": "row",
    }


def test_bytes_follow_the_shape_of_the_micro_batch() -> None:
    plan = plan_tensor_parallel(gpt(), 2, fused_by_head=True)
    activation = 3 * 5 * 16 * 2
    got = plan.collectives(ActivationShape(batch=3, length=5, item_size=2))
    assert got[CollectivePhase.FORWARD] == {"all_reduce": 5 * activation, "all_gather": 3 * 5 * 60 * 2}
    assert got[CollectivePhase.BACKWARD] == {"all_reduce": 5 * activation}
    assert got[CollectivePhase.GRADIENTS] == {}
    assert f"forward all_reduce {activation} B" in plan.describe(ActivationShape(batch=3, length=5, item_size=2))


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        ({"num_heads": 4}, 8, r"tp=8 does not divide the 4 heads of block 'blocks.0'"),
        (
            {"vocab_size": 61},
            2,
            r"tp=2 does not divide the vocabulary of 61 entries of 'token_embedding': pad it to 62",
        ),
        ({}, 0, r"tp=0\): expected at least 1"),
    ],
)
def test_sizes_that_tp_does_not_divide_are_named(sizes: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_tensor_parallel(gpt(**sizes), tp, fused_by_head=True)


def test_hidden_size_that_tp_does_not_divide_is_named() -> None:
    with pytest.raises(UsageError, match=r"the hidden size 13 of the MLP of block 'layers.0'"):
        plan_tensor_parallel(Blocks(LlamaBlock(hidden=13), LlamaBlock()), 4)


def test_fused_projection_with_all_queries_first_is_refused() -> None:
    with pytest.raises(UsageError, match=r"blocks.0.qkv computes query, key and value in one layer"):
        plan_tensor_parallel(gpt(), 2)


def test_blocks_with_unknown_layers_are_named() -> None:
    mixture = LlamaBlock()
    mixture.expert = nn.Linear(12, 8)
    with pytest.raises(UsageError, match=r"block 'layers.1' has, beside its attention, .*layers.1.expert \(12 -> 8\)"):
        plan_tensor_parallel(Blocks(LlamaBlock(), mixture), 2)
    with pytest.raises(UsageError, match="Linear has no repeated blocks"):
        plan_tensor_parallel(nn.Linear(2, 2), 2)


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(UsageError, match="loss_parallel=True needs a head"):
        plan_tensor_parallel(gpt(), 2, fused_by_head=True, vocabulary=False, loss_parallel=True)
    with pytest.raises(UsageError, match="0 norms after its blocks"):
        plan_tensor_parallel(Blocks(LlamaBlock(), LlamaBlock()), 2, sequence_parallel=True)


def test_kinds_of_layers() -> None:
    model = gpt()
    kinds = {layer.name: layer.kind for layer in list_layers(model)}
    assert kinds["token_embedding"] is kinds["position_embedding"] is LayerKind.EMBEDDING
    assert kinds["blocks.0.qkv"] is kinds["blocks.1.projection"] is LayerKind.ATTENTION
    assert kinds["blocks.0.mlp.0"] is kinds["blocks.0.mlp.2"] is LayerKind.MLP
    assert kinds["blocks.0.mlp_norm"] is kinds["norm"] is LayerKind.NORM
    assert "head" not in kinds, "a tied weight counts once"
    assert sum(layer.num_parameters for layer in list_layers(model)) == sum(map(torch.numel, model.parameters()))
