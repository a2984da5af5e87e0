"""A forward that reads a weight of another unit, and modules that run outside of the sharded module around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwell.module.fully_shard import fully_shard
from shardwell.wrapping.auto_wrap import auto_wrap, unwrap
from shardwell_wire.errors import FreedParameterError
from tests.support.module_parity import Pair, Sharded, wrap_whole

TOKENS = torch.tensor([[1, 2, 3, 1]])


class Tied(nn.Module):
    """A language model whose head is the weight of the embedding, as in Whisper."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.wte, self.blocks = nn.Embedding(50, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.run(tokens)
        return checkpoint(self.run, tokens, use_reentrant=self.reentrant)

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        return x @ self.wte.weight.t()


class Outer(nn.Module):
    """A model in which the reading module is inside the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Tied(), nn.Parameter(torch.ones(50))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens) * self.scale


def _wrap(model: Any, session: Any) -> None:
    tied = getattr(model, "inner", model)
    for part in (tied.wte, *tied.blocks):
        fully_shard(part, session)
    fully_shard(model, session)


def _wrap_both(model: Any, session: Any) -> None:
    _wrap(model.inner, session)
    fully_shard(model, session)


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(TOKENS + number).square().mean()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], None]]] = {
    "parent": (Tied, _wrap),
    "grandparent": (Outer, _wrap),
    "nested units": (Outer, _wrap_both),
    "checkpoint": (lambda: Tied(reentrant=False), _wrap),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_reads_of_a_childs_weight(case: str, dtype: torch.dtype) -> None:
    make, wrap = CASES[case]
    torch.manual_seed(0)
    pair = Pair(make().to(dtype), wrap, prefetch_bytes=0).train(_loss)
    # The gradients of both uses are pushed together, in the first step too.
    assert pair.sharded.store.pushes["Embedding-0"] == 4
    assert not pair.sharded.units.passes.running


def test_reads_in_evaluation_free_the_unit_again() -> None:
    torch.manual_seed(0)
    plain = Tied()
    sharded = Sharded(copy.deepcopy(plain), _wrap, prefetch_bytes=0)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(sharded.model(TOKENS), plain(TOKENS))
    assert sharded.units.live_bytes == 0


def test_module_runs_without_the_sharded_module_around_it() -> None:
    """As ``generate`` of a PEFT model, which calls the model inside."""
    torch.manual_seed(0)
    plain = Outer()
    sharded = Sharded(copy.deepcopy(plain), wrap_whole)
    inner: Any = sharded.model.inner
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(inner(TOKENS), plain.inner(TOKENS))
    assert sharded.units.live_bytes == 0
    pair = Pair(copy.deepcopy(plain), wrap_whole)
    pair.backward(lambda model, number: _loss(model.inner, number), 0)  # type: ignore[arg-type]
    pair.step()
    pair.train(_loss)


def test_writes_and_reads_outside_of_forwards_are_refused() -> None:
    class Writing(Tied):
        def run(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.wte.weight.mul_(2)
            return super().run(tokens)

    sharded = Sharded(Writing(), _wrap)
    with pytest.raises(FreedParameterError, match="mul_ needs the values"):
        sharded.model(TOKENS)
    with pytest.raises(FreedParameterError, match="unit 'Embedding-0' is freed"):
        sharded.model.wte.weight.sum()  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["parent", "grandparent"])
def test_unwrapped_model_gathers_nothing(case: str) -> None:
    make, wrap = CASES[case]
    sharded = Sharded(make(), wrap)
    expected = sharded.model(TOKENS)
    unwrap(sharded.model)
    assert torch.equal(sharded.model(TOKENS), expected)
    assert not any(part._forward_hooks or "forward" in vars(part) for part in sharded.model.modules())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "rwkv": lambda: transformers.RwkvForCausalLM(
        transformers.RwkvConfig(
            vocab_size=32, hidden_size=8, attention_hidden_size=8, num_hidden_layers=2, context_length=16,
            rescale_every=1,
        )
    ),
    "reformer": lambda: transformers.ReformerModelWithLMHead(
        transformers.ReformerConfig(
            vocab_size=32, hidden_size=16, num_attention_heads=2, attention_head_size=8, feed_forward_size=16,
            attn_layers=["local", "local"], local_attn_chunk_length=2, local_num_chunks_before=1,
            axial_pos_embds=False, max_position_embeddings=32, is_decoder=True, hidden_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0,
        )
    ),
    "perceiver": lambda: transformers.PerceiverForMaskedLM(
        transformers.PerceiverConfig(
            vocab_size=32, d_model=16, d_latents=16, num_latents=4, num_self_attends_per_block=2,
            num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=4, qk_channels=16,
            v_channels=16,
        )
    ),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_mel_bins=4, max_source_positions=4,
            max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    ),
}  # fmt: skip
"""Models of Transformers whose modules read each other's weights, or run outside of a forward."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    def loss(model: Any, number: int) -> torch.Tensor:
        tokens = (TOKENS + number) % 31
        match name:
            case "perceiver":
                arguments = {"inputs": tokens, "labels": tokens}
            case "whisper":
                arguments = {"input_features": torch.ones(1, 4, 8), "labels": tokens}
            case _:
                arguments = {"input_ids": tokens, "labels": tokens}
        value: torch.Tensor = model(**arguments).loss
        return value

    torch.manual_seed(0)
    Pair(MODELS[name](), auto_wrap, prefetch_bytes=0).train(loss, steps=2)


@pytest.mark.filterwarnings("ignore")
def test_rwkv_is_evaluated_without_rescaling() -> None:
    torch.manual_seed(0)
    plain: Any = MODELS["rwkv"]().eval()
    wrapped: Any = Sharded(copy.deepcopy(plain), auto_wrap).model
    by_hand: Any = Sharded(copy.deepcopy(plain), _wrap_rwkv_blocks).model
    with pytest.raises(FreedParameterError, match=r"set model\.config\.rescale_every = 0"):
        by_hand(input_ids=TOKENS)
    plain.config.rescale_every = by_hand.config.rescale_every = 0
    for model in (wrapped, by_hand):
        assert torch.equal(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits)


def _wrap_rwkv_blocks(model: Any, session: Any) -> None:
    for block in model.rwkv.blocks:
        fully_shard(block, session)
    fully_shard(model, session)
