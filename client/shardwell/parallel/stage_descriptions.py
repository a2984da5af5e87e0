"""Descriptions of pipeline stages that are built by hand: each trainer describes its own, and they exchange them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwell.grid.parallel_plan import descriptions
from shardwell.module.fully_shard import ShardedModule
from shardwell.parallel.description import ActivationShape, ModelDescription, StageDescription
from shardwell.parallel.transformer import Layer, LayerKind, find_blocks, list_layers


def find_description(modules: Mapping[int, nn.Module], num_stages: int) -> ModelDescription | None:
    """Returns the description of the model that a trainer's stages belong to. None: not all its stages are described.

    Args:
        modules: The trainer's stages by index.
        num_stages: Number of stages of the whole model.
    """
    found = {id(description): description for module in modules.values() if (description := descriptions.get(module))}
    described = [
        each for each in found.values() if len(each.stages) == num_stages and all(at.layers for at in each.stages)
    ]
    return described[0] if len(described) == len(found) == 1 else None


def describe_by_hand(
    modules: Mapping[int, nn.Module],
    micro_batch: ActivationShape | None,
    *,
    num_stages: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> ModelDescription:
    """Describes stages that no split has described. All trainers of the pipeline call it together.

    Args:
        modules: This trainer's stages by index, sharded or not.
        micro_batch: Size of a micro-batch, if this trainer knows it.
        num_stages: Number of stages of the whole model.
        group: Process group of the pipeline. None: the default group.
        device: Device of tensors that the group sends.
    """
    own = {
        "stages": {index: _stage_to_json(module) for index, module in modules.items()},
        "micro_batch": micro_batch and [micro_batch.batch, micro_batch.length, micro_batch.item_size],
    }
    gathered = _gather(own, group, device)
    stages = {int(index): stage for each in gathered for index, stage in each["stages"].items()}
    described = [_stage_from_json(index, stages[index]) for index in range(num_stages)]
    before = [each for module in modules.values() if (each := descriptions.get(module)) is not None]
    names = [each.class_name for each in before] or [stages[index]["class_name"] for index in range(num_stages)]
    made = ModelDescription(" and ".join(dict.fromkeys(names)), described)
    for size in (each["micro_batch"] for each in gathered if each["micro_batch"]):
        made.micro_batch = ActivationShape(batch=size[0], length=size[1], item_size=size[2])
    for each in before:  # a tensor-parallel plan has described the layers that it splits
        made.styles = {**made.styles, **each.styles}
        made.sequence_parallel, made.loss_parallel = each.sequence_parallel, each.loss_parallel
    for module in modules.values():
        descriptions[module] = made
    return made


def _gather(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Returns the values of all members of a group, in the order of their ranks. The values become JSON."""
    text = json.dumps(value).encode()
    count = dist.get_world_size(group)
    size = torch.tensor([len(text)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(count)]
    dist.all_gather(sizes, size, group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    padded = padded.to(device)
    found = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(found, padded, group)
    return [json.loads(each[: int(length)].cpu().numpy().tobytes()) for each, length in zip(found, sizes, strict=True)]


def _stage_to_json(module: nn.Module) -> dict[str, Any]:
    return {
        "class_name": _class_name(module),
        "calls": _calls(module),
        "layers": [
            [layer.name, layer.kind.value, layer.class_name, layer.num_parameters, layer.size_bytes]
            for layer in whole_layers(module)
        ],
    }


def _stage_from_json(index: int, stage: Mapping[str, Any]) -> StageDescription:
    layers = tuple(Layer(name, LayerKind(kind), *rest) for name, kind, *rest in stage["layers"])
    return StageDescription(index, tuple(stage["calls"]), layers)


def _calls(module: nn.Module) -> list[str]:
    """Returns the blocks of a stage and the layers beside them, in the stage's order."""
    blocks = find_blocks(module)
    names = []
    for layer in list_layers(module):
        block = next((block for block in blocks if f"{layer.name}.".startswith(f"{block}.")), None)
        names.append(block or layer.name)
    return list(dict.fromkeys(names))


def whole_layers(module: nn.Module) -> list[Layer]:
    """Returns the layers of a stage that may be split over tensor-parallel ranks and sharded, with whole sizes."""
    seen: set[int] = set()
    layers = []
    for layer in list_layers(module):
        part = module.get_submodule(layer.name)
        own = [parameter for parameter in part.parameters(recurse=False) if id(parameter) not in seen]
        seen.update(map(id, own))
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in own)
        num_parameters = sum(parameter.numel() for parameter in own)
        layers.append(Layer(layer.name, layer.kind, _class_name(part), num_parameters, size_bytes))
    return layers


def _class_name(module: nn.Module) -> str:
    kind = type(module)
    return (kind.__bases__[-1] if isinstance(module, ShardedModule) else kind).__name__
