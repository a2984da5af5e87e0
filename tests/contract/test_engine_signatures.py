"""Everything that ``shardwell.engines`` uses of the installed engines still exists, with the same arguments."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

import pytest

_TRANSFER = "vllm.distributed.weight_transfer"
_MODELS = "vllm.model_executor.model_loader.reload"
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
}
"""Names by module, and the arguments that are used of each."""


def moved(path: str, arguments: str) -> str:
    """Returns a sentence that says what has moved, or nothing."""
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError) as error:
        return f"{path} is gone ({error}): shardwell.engines has to use what replaces it"
    known = inspect.signature(found).parameters if arguments else {}
    lacking = [name for name in arguments.split() if name not in known]
    return f"{path}({', '.join(known)}) has no argument {', '.join(lacking)} any more" if lacking else ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.engines] if path.startswith("vllm") else []) for path in NEEDED]
)
def test_engine_has_what_its_adapter_uses(path: str) -> None:
    sentence = moved(path, NEEDED[path])
    assert not sentence, sentence


def test_what_has_moved_is_named() -> None:
    assert "json:gone is gone" in moved("json:gone", "")
    assert "json:loads(s, cls" in moved("json:loads", "s text")
    assert moved("json:loads", "s text").endswith("has no argument text any more")
