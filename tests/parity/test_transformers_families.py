"""Tiny models of many families of Transformers, of every kind that the library has, against plain ones.

Each trains for two steps, evaluates, generates, is saved with ``save_pretrained`` and loaded again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardwell
from benchmarks.families import FAMILIES
from shardwell.wrapping.auto_wrap import auto_wrap
from tests.support.in_memory_store import fused_adamw
from tests.support.module_parity import Sharded

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]

TOKENS = torch.arange(2, 18).view(1, 16)
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)}
SOUND = torch.linspace(-1, 1, 400).sin()[None]

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = _SIZES | {"vocab_size": 64, "max_position_embeddings": 64}
_IMAGE = _SIZES | {"image_size": 32, "patch_size": 8}
_SEQ2SEQ = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
_SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}
_SPECIAL |= {"forced_eos_token_id": None}
_SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_WHISPER = _SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32} | _SPECIAL
_REFORMER = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
_REFORMER |= {"feed_forward_size": 32, "attn_layers": ["local", "local"], "local_attn_chunk_length": 8}
_REFORMER |= {
    "local_num_chunks_before": 1,
    "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
    "axial_pos_embds": False,
    "max_position_embeddings": 64,
    "is_decoder": True,
}
_PERCEIVER = {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_self_attends_per_block": 2, "vocab_size": 64}
_PERCEIVER |= {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "max_position_embeddings": 16}
_SPEECH = _SIZES | {"vocab_size": 64, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (5, 4)}
_SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0}
_RWKV = {"vocab_size": 64, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 32}

MORE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ, TEXT),
    "clip": ("CLIPConfig", "CLIPModel", {"text_config": _TEXT, "vision_config": _IMAGE}, TEXT | PIXELS),
    "convnext": (
        "ConvNextConfig",
        "ConvNextModel",
        {"depths": [2, 2], "hidden_sizes": [8, 16], "num_stages": 2},
        PIXELS,
    ),
    "dinov2": ("Dinov2Config", "Dinov2Model", _IMAGE, PIXELS),
    "mamba": ("MambaConfig", "MambaForCausalLM", _TEXT | {"state_size": 4}, TEXT),
    "marian": ("MarianConfig", "MarianMTModel", _SEQ2SEQ | _SPECIAL, TEXT),
    "perceiver": ("PerceiverConfig", "PerceiverForMaskedLM", _PERCEIVER, TEXT),
    "reformer": ("ReformerConfig", "ReformerModelWithLMHead", _REFORMER, TEXT),
    "resnet": ("ResNetConfig", "ResNetModel", {"depths": [2, 2], "hidden_sizes": [8, 16], "embedding_size": 8}, PIXELS),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", _RWKV, TEXT),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", _IMAGE, PIXELS),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5, TEXT),
    "vit": ("ViTConfig", "ViTForImageClassification", _IMAGE, PIXELS | {"labels": torch.tensor([1])}),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", _SPEECH, {"input_values": SOUND, "labels": TOKENS[:, :3]}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        _WHISPER,
        {"input_features": torch.linspace(-1, 1, 256).view(1, 8, 32), "labels": TOKENS},
    ),
    "xlm-roberta": (
        "XLMRobertaConfig",
        "XLMRobertaForSequenceClassification",
        _TEXT,
        TEXT | {"labels": torch.tensor([1])},
    ),
}


def _cases() -> dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]]:
    return {**{name: (*entry, TEXT) for name, entry in FAMILIES.items()}, **MORE}


CASES = _cases()


def _make(family: str) -> Any:
    config, model, options, _ = CASES[family]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).train()


def _loss(outputs: Any) -> torch.Tensor:
    loss = getattr(outputs, "loss", None)
    return outputs[0].float().square().mean() if loss is None else loss


@pytest.mark.parametrize("family", CASES)
def test_family_computes_what_the_plain_model_does(family: str, tmp_path: Path) -> None:
    inputs = CASES[family][3]
    plain, sharded = _make(family), Sharded(_make(family), auto_wrap)
    model: Any = sharded.model
    optimizer = fused_adamw(list(plain.parameters()))
    for number in range(2):
        losses = []
        for each in (plain, model):
            torch.manual_seed(number)
            losses.append(_loss(each(**inputs)))
            losses[-1].backward()
        assert torch.equal(losses[0], losses[1])
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    plain.eval(), model.eval()
    with torch.no_grad():
        for each in (plain, model):
            torch.manual_seed(0)
            losses.append(_loss(each(**inputs)))
    assert torch.equal(losses[-1], losses[-2])
    if plain.can_generate():
        prompt = {key: value for key, value in inputs.items() if key != "labels"}
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
        assert torch.equal(model.generate(**prompt, **options), plain.generate(**prompt, **options))
    model.save_pretrained(tmp_path, state_dict=dict(shardwell.full_state_dict(model)))
    loaded = type(plain).from_pretrained(tmp_path)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
