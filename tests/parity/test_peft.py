"""All methods of PEFT train, generate and are saved as in a plain model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file
from torch import nn

import shardwell
from shardwell.wrapping.auto_wrap import auto_wrap
from shardwell_wire.errors import UsageError
from tests.support.in_memory_store import fused_adamw
from tests.support.module_parity import Sharded

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.tensor([[1, 2, 3, 4]])

PROMPTS = {"prompt_tuning", "prefix_tuning", "prefix_projection", "p_tuning", "adaption_prompt", "cartridge"}
MULTITASK = {"multitask_prompt_tuning", "poly"}
LEFT_OUT = {
    "adamss": "needs scikit-learn",
    "cpt": "writes its parameter in each forward: see below",
    "xlora": "mixes adapters that were saved before: see below",
}


def _config(name: str, **options: Any) -> Callable[[], peft.PeftConfig]:
    """Returns a maker of the configuration of a method, with small sizes where the method has any."""
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, name.upper())]
    known = inspect.signature(kind).parameters
    small = {"r": 2, "target_modules": ["q_proj"], "num_virtual_tokens": 2}
    defaults = {key: value for key, value in small.items() if key in known}
    return partial(kind, **{**defaults, "task_type": "CAUSAL_LM", **options})


OPTIONS: dict[str, dict[str, Any]] = {
    "adalora": {"r": 8, "init_r": 2, "target_r": 1, "total_step": 10},
    "adaption_prompt": {"target_modules": None, "adapter_len": 2, "adapter_layers": 1},
    "boft": {"boft_block_size": 2},
    "c3a": {"block_size": 4},
    "fourierft": {"n_frequency": 4},
    "gralora": {"gralora_k": 2},
    "ia3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "ln_tuning": {"target_modules": ["input_layernorm"]},
    "multitask_prompt_tuning": {"num_tasks": 1},
    "oft": {"r": 0, "oft_block_size": 4},
    "p_tuning": {"encoder_hidden_size": 8},
    "poly": {"n_tasks": 2, "n_skills": 2, "n_splits": 1},
    "road": {"group_size": 4},
    "shadow": {"target_modules": None},
    "shira": {"r": 1},
    "supertuning": {"sparsity": 0.5},
    "trainable_tokens": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "vblora": {"num_vectors": 4, "vector_length": 4, "topk": 2},
    "waveft": {"n_frequency": 4},
}

METHODS = {
    **{
        name: _config(name, **OPTIONS.get(name, {})) for kind in peft.PeftType if (name := kind.lower()) not in LEFT_OUT
    },
    "prefix_projection": _config("prefix_tuning", prefix_projection=True, encoder_hidden_size=8),
    "dora": _config("lora", use_dora=True),
    "modules_to_save": _config("lora", use_rslora=True, modules_to_save=["lm_head"]),
    "embedding": _config("lora", target_modules=["q_proj", "embed_tokens"]),
    "target_parameters": _config("lora", target_modules=[], target_parameters=["q_proj.weight"]),
    "token_indices": _config("lora", trainable_token_indices=[1, 2]),
}


def _model(config: Callable[[], peft.PeftConfig], *, use_cache: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(vocab_size=32, use_cache=use_cache, **sizes)
    return peft.get_peft_model(transformers.LlamaForCausalLM(llama), config(), **options).train()


def _train(plain: Any, sharded: Sharded, **arguments: Any) -> None:
    """Takes two steps of both models, and compares losses and values."""
    optimizer = fused_adamw([parameter for parameter in plain.parameters() if parameter.requires_grad])
    for number in range(2):
        losses = []
        for model in (plain, sharded.model):
            torch.manual_seed(number)
            losses.append(model(input_ids=TOKENS, labels=TOKENS, **arguments).loss)
            losses[-1].backward()
        assert torch.equal(losses[0], losses[1])
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    got = sharded.state()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, got[name]), name


def _saved(model: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder, **options)
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_method_computes_what_the_plain_model_does(method: str, tmp_path: Path) -> None:
    arguments = {"task_ids": torch.tensor([0])} if method in MULTITASK else {}
    plain, sharded = _model(METHODS[method]), Sharded(_model(METHODS[method]), auto_wrap)
    model: Any = sharded.model
    _train(plain, sharded, **arguments)
    plain.eval(), model.eval()
    if method == "cartridge":  # PEFT reads two parameters in its own methods
        shardwell.register_forward_method(model, "generate")
    if method not in PROMPTS | {"multitask_prompt_tuning"}:
        assert str(model.get_model_status()) == str(plain.get_model_status())
    if not arguments:
        options = {"input_ids": TOKENS, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(**options), plain.generate(**options))
    with plain.disable_adapter(), model.disable_adapter(), torch.no_grad():
        expected, got = (each(input_ids=TOKENS, **arguments).logits for each in (plain, model))
    assert torch.equal(got, expected)
    assert "FreedParameter" not in repr(model)
    if method in {"multitask_prompt_tuning", "cartridge"}:
        model.unshard()
    full = shardwell.full_state_dict(model)
    expected, got = _saved(plain, tmp_path / "plain"), _saved(model, tmp_path / "sharded", state_dict=dict(full))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_method_that_writes_its_parameters_is_refused() -> None:
    config = _config("cpt", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 1])
    sharded = Sharded(_model(config), auto_wrap)
    with pytest.raises(UsageError, match=r"delta_embedding.weight.*written in place"):
        sharded.model(input_ids=TOKENS, labels=TOKENS).loss.backward()


def test_saved_adapters_are_mixed(tmp_path: Path) -> None:
    adapters = {name: str(tmp_path / name) for name in ("0", "1")}
    for folder in adapters.values():
        saved = _model(METHODS["lora"])
        for parameter in saved.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        saved.save_pretrained(folder)
    config = _config("xlora", hidden_size=8, xlora_depth=1, adapters=adapters)
    plain, sharded = (_model(config, use_cache=False) for _ in range(2))
    _train(plain, Sharded(sharded, auto_wrap))


def test_one_of_two_adapters_is_trained() -> None:
    """As in DPO with a frozen adapter as the reference model."""

    def make() -> Any:
        model = _model(METHODS["lora"], adapter_name="old")
        model.add_adapter("new", METHODS["embedding"]())
        model.set_adapter("new")
        return model

    plain, sharded = make(), Sharded(make(), auto_wrap)
    _train(plain, sharded)
    model: Any = sharded.model
    for adapter in ("old", "new"):
        outputs = []
        for each in (plain, model):
            each.set_adapter(adapter)
            outputs.append(each(input_ids=TOKENS).logits)
        assert torch.equal(outputs[0], outputs[1]), adapter


def test_left_out_methods_exist() -> None:
    assert LEFT_OUT.keys() < {kind.lower() for kind in peft.PeftType}
