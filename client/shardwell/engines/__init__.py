"""Inference engines that follow the committed weights of a run: see docs/serving.md.

``LiveModel`` is a plain model, such as one of Transformers. ``load_weights`` fills any engine with a method of that
name. ``shardwell.engines.vllm`` is vLLM's backend, and ``shardwell.engines.vllm_server`` updates running servers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch

from shardwell.engines.live_model import LiveModel
from shardwell.weights.reader import Reader
from shardwell.weights.weight_files import Rename, listed
from shardwell_wire.errors import UsageError

__all__ = ["LiveModel", "load_weights", "register_vllm"]

logger = logging.getLogger(__name__)


def load_weights(
    reader: Reader,
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    version: int | str | None = None,
    *,
    rename: Rename | None = None,
) -> int:
    """Loads a version of a run into an engine that takes an iterator of names and tensors.

    >>> version = shardwell.engines.load_weights(reader, engine_model.load_weights)

    The whole version is in CPU memory before ``load`` is called. If it cannot be read, the engine is not touched.

    Args:
        reader: Reads the run.
        load: Loads pairs of names and CPU tensors, such as ``load_weights`` of a model in vLLM or SGLang. Called once.
            A tied parameter has its first name only, as in checkpoints of Hugging Face.
        version: The version or the name of a published one. Default: the newest.
        rename: Maps the names that ``Reader.read`` returns to those that ``load`` expects, or to None to skip a tensor.

    Returns:
        The version that was loaded.

    Raises:
        VersionGoneError: The version is not kept any more, or no version stayed readable until it was read.
        UnavailableError: A shard server could not be reached for the reader's timeout.
    """
    number, tensors = reader.read(version)
    pairs = ((name if rename is None else rename(name), value) for name, value in tensors.items())
    load((name, value) for name, value in pairs if name is not None)
    return number


def refuse_other_model(tensors: Mapping[str, torch.Tensor], config: Any) -> None:
    """Raises UsageError if tensors are not those of a causal language model of Transformers, by names and shapes.

    An engine that finds this out while it loads has lost its former weights. Models of other kinds are not checked.

    Args:
        tensors: Tensors by name. Of a tied parameter, one name is enough.
        config: The model's config of Transformers.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))  # which sets config.dtype
    shapes, ties = dict[str, torch.Size](), dict[int, list[str]]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        shapes[name] = tensor.shape
        ties.setdefault(id(tensor), []).append(name)
    unknown = [repr(name) for name, tensor in tensors.items() if shapes.get(name) != tensor.shape]
    lacking = [repr(names[0]) for names in ties.values() if not tensors.keys() & set(names)]
    problems = [
        *([f"the model has no {listed(unknown)} of these shapes"] if unknown else []),
        *([f"the run lacks {listed(lacking)}"] if lacking else []),
    ]
    if problems:
        raise UsageError(
            f"the run does not fit the engine's model {type(model).__name__}, which keeps its weights: "
            f"{'; '.join(problems)}"
        )


def register_vllm() -> None:
    """Registers the backend ``shardwell`` in vLLM, which calls this in each of its processes. Harmless to repeat."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        if "shardwell" not in Factory._registry:
            Factory.register_engine("shardwell", "shardwell.engines.vllm", "ShardwellEngine")
    except (ImportError, AttributeError, TypeError) as error:  # vLLM also has to start if nothing uses the backend
        logger.warning("this version of vLLM cannot use the weight-transfer backend 'shardwell': %s", error)
