"""Divides a model of shapes over tensor and pipeline ranks, as a training script would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from shardwell.module.unit import Unit
from shardwell.parallel.description import ModelDescription, StageDescription, describe_model
from shardwell.parallel.schedules import SchedulePlan
from shardwell.parallel.splitting import micro_batch_of, split_model
from shardwell.parallel.tensor import TensorParallelPlan, plan_tensor_parallel
from shardwell.parallel.transformer import list_layers
from shardwell.planning.activations import SavedActivations
from shardwell.planning.plan_model import ShapeMode, ShapeModel, record_activations
from shardwell.planning.plan_options import DivisionOptions
from shardwell_wire.errors import UsageError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2


@dataclass(slots=True)
class PlannedStage:
    """One pipeline stage in one tensor-parallel rank, or the whole model."""

    module: nn.Module
    arguments: tuple[Any, ...] = ()
    """Arguments of the call with one micro-batch."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    saved: SavedActivations | None = None
    """What autograd saves in the forward of one micro-batch. None: unknown."""
    received_bytes: int = 0
    """Activations of one micro-batch that the stage receives from other stages."""
    sent_bytes: int = 0
    """Activations of one micro-batch that the stage sends to other stages."""
    output_bytes: int = 0
    """What the forward of one micro-batch returns. Kept until the backward."""
    units: Sequence[Unit] = ()
    """In the order in which ``auto_wrap`` makes them, the root unit last. Set by ``DryRun``."""


@dataclass(frozen=True, slots=True)
class Division:
    """A model that is divided over tensor and pipeline ranks."""

    stages: tuple[PlannedStage, ...]
    mode: ShapeMode
    """The mode in which the model was built."""
    tensor_plan: TensorParallelPlan
    schedule: SchedulePlan | None = None
    """None: the model is one stage, and a step has one forward and one backward."""
    description: coordinator_pb2.ModelPlan | None = None
    """Layers, styles and collectives. None: the model is not divided."""
    unknown: str = ""
    """Why the activations are unknown; empty if they are known."""


def divide(shapes: ShapeModel, world: World, options: DivisionOptions) -> Division:
    """Divides a model over a world.

    Args:
        shapes: The model. Its example call is that of one micro-batch.
        world: The grid of logical ranks.
        options: How to divide.

    Raises:
        UsageError: The model cannot be divided in this way; the message says why.
        TiedParameterError: Two stages of one trainer share a parameter.
    """
    schedule = options.schedule_plan(world)
    tensor_plan = plan_tensor_parallel(
        shapes.module,
        world.tp,
        vocabulary=options.vocabulary,
        sequence_parallel=options.sequence_parallel,
        loss_parallel=options.loss_parallel,
        fused_by_head=options.fused_by_head,
    )
    if schedule is None:
        saved, unknown = record_activations(shapes)
        return Division(
            (PlannedStage(shapes.module, shapes.arguments, shapes.keywords, saved),),
            shapes.mode,
            tensor_plan,
            description=_describe_undivided(shapes, tensor_plan) if world.tp > 1 else None,
            unknown=unknown,
        )
    return _divide_into_stages(shapes, schedule, tensor_plan, options.split_by)


def _divide_into_stages(
    shapes: ShapeModel, schedule: SchedulePlan, tensor_plan: TensorParallelPlan, by: Literal["layers", "cost"]
) -> Division:
    if shapes.keywords:
        raise UsageError(
            f"the example call passes {', '.join(shapes.keywords)} by keyword, but a pipeline schedule passes the "
            "inputs of the first stage by position: use a function (module:callable) that returns (model, (inputs...))"
        )
    split = split_model(shapes.module, schedule.num_stages, by=by)
    holders = schedule.holders
    for tie in split.ties:
        tie.check_holders(holders)
    modules = [split.module(index) for index in range(schedule.num_stages)]
    if shapes.arguments:
        split.examples(*shapes.arguments)
    # With sequence parallelism, each rank sends its part of the sequence.
    parts = tensor_plan.tp if tensor_plan.sequence_parallel else 1
    stages: list[PlannedStage] = []
    unknown, values = "", shapes.arguments
    for module in modules:
        received = values if stages else ()
        saved, reason = record_activations(replace(shapes, module=module, arguments=values), received=received)
        unknown = unknown or reason
        outputs = () if saved is None else saved.outputs
        stages.append(
            PlannedStage(
                module,
                values,
                saved=saved,
                received_bytes=_size_bytes(received) // parts,
                sent_bytes=_size_bytes(outputs) // parts if module is not modules[-1] else 0,
                output_bytes=_size_bytes(outputs) // parts,
            )
        )
        values = tuple(value.detach().requires_grad_(value.requires_grad) for value in outputs)
    description = describe_model(modules[0], type(shapes.module).__name__, split.stages)
    schedule.note_in(description)
    tensor_plan.note_in(description)
    return Division(tuple(stages), shapes.mode, tensor_plan, schedule, description.to_proto(), unknown)


def _describe_undivided(shapes: ShapeModel, tensor_plan: TensorParallelPlan) -> coordinator_pb2.ModelPlan:
    model = shapes.module
    description = ModelDescription(type(model).__name__, (StageDescription(0, (), tuple(list_layers(model))),))
    tensor_plan.note_in(description)
    description.note_schedule("", 1, {0: 0})
    inputs = [value for value in (*shapes.arguments, *shapes.keywords.values()) if isinstance(value, torch.Tensor)]
    description.micro_batch = micro_batch_of(inputs, model.parameters())
    return description.to_proto()


def _size_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
