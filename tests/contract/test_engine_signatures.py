"""Everything that ``shardwell.engines`` uses of the installed engines still exists, with the same arguments."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import MagicMock

import pytest

_TRANSFER = "vllm.distributed.weight_transfer"
_MODELS = "vllm.model_executor.model_loader.reload"
_LOADER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.update_weights_from_tensor"
NEEDED = {
    "transformers:AutoModelForCausalLM.from_config": "",
    "transformers:MODEL_FOR_CAUSAL_LM_MAPPING.__contains__": "",
    "transformers:GenerationMixin.generate": "inputs",
    f"{_TRANSFER}.factory:WeightTransferEngineFactory.register_engine": "name module_path_or_cls class_name",
    f"{_TRANSFER}.factory:WeightTransferEngineFactory._registry": "",
    f"{_TRANSFER}.base:WeightTransferEngine.__init__": "self config vllm_config device model",
    f"{_TRANSFER}.base:WeightTransferEngine.init_transfer_engine": "self init_info",
    f"{_TRANSFER}.base:WeightTransferEngine.start_weight_update": "self",
    f"{_TRANSFER}.base:WeightTransferEngine.update_weights": "self update_info",
    f"{_TRANSFER}.base:WeightTransferEngine.receive_weights": "self update_info",
    f"{_TRANSFER}.base:WeightTransferEngine.finish_weight_update": "self",
    f"{_TRANSFER}.base:WeightTransferEngine.shutdown": "self",
    f"{_TRANSFER}.base:WeightTransferEngine.parse_init_info": "self init_dict",
    f"{_TRANSFER}.base:WeightTransferEngine.parse_update_info": "self update_dict",
    f"{_TRANSFER}.base:WeightTransferEngine.supports_draft_weight_update": "",
    f"{_TRANSFER}.base:WeightTransferInitInfo": "",
    f"{_TRANSFER}.base:WeightTransferUpdateInfo": "",
    "vllm.distributed.parallel_state:get_world_group": "",
    "vllm.config:ParallelConfig.distributed_executor_backend": "",
    f"{_MODELS}:initialize_layerwise_reload": "model",
    f"{_MODELS}:finalize_layerwise_reload": "args kwargs",
    f"{_MODELS}.layerwise:finalize_layerwise_processing": "model model_config",
    "vllm:LLM.init_weight_transfer_engine": "self request",
    "vllm:LLM.start_weight_update": "self",
    "vllm:LLM.update_weights": "self request",
    "vllm:LLM.finish_weight_update": "self weight_version",
    "vllm:LLM.reset_prefix_cache": "self",
    "vllm.entrypoints.rl.online.api_router:pause_generation": "mode",
    "vllm.entrypoints.rl.online.api_router:resume_generation": "",
    "vllm.entrypoints.rl.online.api_router:init_weight_transfer_engine": "init_info",
    "vllm.entrypoints.rl.online.api_router:start_weight_update": "",
    "vllm.entrypoints.rl.online.api_router:update_weights": "update_info",
    "vllm.entrypoints.rl.online.api_router:finish_weight_update": "weight_version",
    "vllm.entrypoints.rl.online.api_router:weight_info": "",
    "sglang.srt.entrypoints.engine:Engine.begin_weight_update": "self",
    "sglang.srt.entrypoints.engine:Engine.update_weights_from_tensor": "self named_tensors",
    "sglang.srt.entrypoints.engine:Engine.end_weight_update": "self",
    "sglang.srt.entrypoints.http_server:update_weights_from_disk": "obj",
    "sglang.srt.managers.io_struct:UpdateWeightFromDiskReqInput": "model_path weight_version",
    "sglang.srt.models.llama:LlamaForCausalLM.load_weights": "self weights",
    "sglang.srt.arg_groups.fields.model:Model": "custom_weight_loader",
    f"{_LOADER}": "named_tensors load_format",
}
"""Names by module, and the arguments or fields that are used of each. docs/serving.md uses those of SGLang."""


def parameters(path: str) -> list[str]:
    """Returns the names of the arguments of a function that can be imported."""
    found = resolve_name(path)
    return list(inspect.signature(found).parameters) if callable(found) else []


def written(path: str) -> ast.AST:
    """Returns a function or a class from the source of its module, which is not imported."""
    module, _, names = path.partition(":")
    package = find_spec(module.partition(".")[0])
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    found: ast.AST = ast.parse(file.read_text())
    for name in names.split("."):
        inside = {getattr(node, "name", ""): node for node in ast.iter_child_nodes(found)}
        if name not in inside:
            raise AttributeError(f"{file} has no {name}")
        found = inside[name]
    return found


def written_parameters(path: str) -> list[str]:
    """Returns the names of the arguments of a function, or of the fields of a class, from the source of its module."""
    found = written(path)
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
    return [
        node.target.id for node in ast.walk(found) if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")
    ]


def moved(path: str, arguments: str) -> str:
    """Returns a sentence that says what has moved, or nothing."""
    try:  # SGLang cannot be imported without CUDA
        known = written_parameters(path) if path.startswith(("sglang", "tests")) else parameters(path)
    except (ImportError, AttributeError, OSError) as error:
        return f"{path} is gone ({error}): shardwell.engines has to use what replaces it"
    lacking = [name for name in arguments.split() if name not in known]
    return f"{path}({', '.join(known)}) has no argument {', '.join(lacking)} any more" if lacking else ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.engines] if path.startswith(("vllm", "sglang")) else []) for path in NEEDED],
)
def test_engine_has_what_its_adapter_uses(path: str) -> None:
    sentence = moved(path, NEEDED[path])
    assert not sentence, sentence


def test_what_has_moved_is_named() -> None:
    assert "json:gone is gone" in moved("json:gone", "")
    assert "gone.json:loads is gone (No module named 'gone')" in moved("gone.json:loads", "")
    assert "json:loads(s, cls" in moved("json:loads", "s text")
    assert moved("json:loads", "s text").endswith("has no argument text any more")
    own = "tests.contract.test_engine_signatures"  # read, not imported
    assert not moved(f"{own}:moved", "path arguments")
    assert moved(f"{own}:moved", "path gone") == f"{own}:moved(path, arguments) has no argument gone any more"
    assert f"{own}:renamed is gone" in moved(f"{own}:renamed", "")
    assert "tests.contract.renamed:moved is gone" in moved("tests.contract.renamed:moved", "")


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("renamed", [path for path in NEEDED if path.startswith("vllm:LLM.")])
def test_planted_rename_in_vllm_is_named(renamed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = renamed.rsplit(".", 1)
    monkeypatch.delattr(resolve_name(owner.replace(":LLM", ".entrypoints.rl.offline:RLOfflineMixin")), name, False)
    monkeypatch.delattr(resolve_name(owner), name, False)
    assert moved(renamed, NEEDED[renamed]).startswith(
        f"{renamed} is gone (type object 'LLM' has no attribute '{name}')"
    )


@pytest.mark.engines
def test_sglang_calls_a_custom_loader_with_the_model_and_the_tensors() -> None:
    function = written(_LOADER)
    assert isinstance(function, ast.FunctionDef)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    code = compile(ast.fix_missing_locations(ast.Module([future, function], [])), _LOADER, "exec")

    def load(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) > 1:
            raise ValueError("planted")

    calls, updater = list[object](), MagicMock(custom_weight_loaders=["package.load"])
    names: dict[str, Any] = {
        "_unsupported_derived_weight_cache_error": lambda model: None,
        "monkey_patch_torch_reductions": lambda: None,
        "torch": MagicMock(),
        "get_parallel": MagicMock(),
        "_unwrap_tensor": lambda tensor, tp_rank, device: tensor,
        "dynamic_import": {"package.load": load}.__getitem__,
    }
    exec(code, names)
    update, tensors = names["update_weights_from_tensor"], [("w", 1)]
    assert update(updater, tensors, load_format="package.load") == (True, "Success")
    assert calls == [(updater.get_model(), tensors)]
    with pytest.raises(ValueError, match="planted"):  # which ends SGLang's scheduler
        update(updater, tensors, load_format="package.load")
