"""Tiny models of Hugging Face's families, with the arguments that their forwards get by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, LENGTH, WIDTH, LAYERS = 61, 6, 16, 4

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**{**_COMMON, **options})
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return make


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4, d_ff=2 * WIDTH, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, max_position_embeddings=32,
        dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


_HEADS = {"num_key_value_heads": 2, "head_dim": 4}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _decoder("Llama", **_HEADS),
    "tied llama": _decoder("Llama", tie_word_embeddings=True, **_HEADS),
    "qwen2": _decoder("Qwen2", num_key_value_heads=2),
    "qwen3": _decoder("Qwen3", **_HEADS),
    "mistral": _decoder("Mistral", sliding_window=3, **_HEADS),
    "gemma": _decoder("Gemma", tie_word_embeddings=False, **_HEADS),
    "gemma2": _decoder("Gemma2", sliding_window=3, **_HEADS),
    "phi": _decoder("Phi"),
    "mixtral": _decoder("Mixtral", num_local_experts=4, **_HEADS),
    "gpt2": _gpt2,
    "t5": _t5,
    "bart": _bart,
}
"""Functions that make the models by the names of the families."""


def make(family: str) -> nn.Module:
    """Returns a model in training mode, with the same values on every call."""
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def inputs_of(family: str, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the positional arguments of a model's forward for a batch of tokens. [batch, LENGTH]"""
    if family in ("t5", "bart"):
        return tokens, torch.ones_like(tokens), tokens[:, 1:].contiguous()
    if family == "gpt2":
        return (tokens,)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # padding on the left
    return tokens, mask


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of 8 tokens, of which the first ones have no label."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def tiny_llama() -> transformers.LlamaForCausalLM:
    """Returns a model of 32 tokens, with the same values on every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
