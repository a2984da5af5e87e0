"""Descriptions of divided models, which trainers report: layers by stage, styles, and bytes per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from examples.gpt import GPT, GPTConfig
from shardwell.command import inspect_tables
from shardwell.grid import parallel_plan
from shardwell.parallel import ActivationShape, SchedulePlan, plan_tensor_parallel, split_model
from shardwell.parallel.description import ModelDescription
from shardwell_wire.errors import UsageError
from shardwell_wire.model.names import MAX_PLAN_BYTES, MAX_PLAN_ROWS
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2

MICRO_BATCHES, SIZE = 4, ActivationShape(batch=2, length=8)


def divided(**options: Any) -> coordinator_pb2.ModelPlan:
    """Returns the description of a GPT with 4 blocks, in 2 stages and over 2 tensor-parallel ranks."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32, context=8, num_layers=4, num_heads=2, width=8, tied=False))
    schedule = SchedulePlan(schedule="1F1B", pp=2, num_micro_batches=MICRO_BATCHES)
    split, tensor = split_model(model, 2), plan_tensor_parallel(model, 2, fused_by_head=True, **options)
    split.examples(torch.zeros(SIZE.batch, SIZE.length, dtype=torch.int64))
    (description,) = {parallel_plan.descriptions[split.module(index)] for index in (0, 1)}
    assert isinstance(description, ModelDescription)
    tensor.note_in(description)
    schedule.note_in(description)
    sums = {phase.value: found for phase, found in tensor.collectives(SIZE).items()}
    described: dict[str, dict[str, int]] = {phase: {} for phase in sums}
    plan = description.to_proto()
    for collective in (each for stage in plan.stages for layer in stage.layers for each in layer.collectives):
        of_phase = described[collective.phase]
        of_phase[collective.operation] = of_phase.get(collective.operation, 0) + collective.bytes_per_step
    for phase, found in sums.items():
        times = 1 if phase == "gradients" else MICRO_BATCHES
        assert described[phase] == {operation: times * size for operation, size in found.items()}
    return plan


def test_rows_have_kind_style_and_bytes_per_step() -> None:
    plan = divided()
    assert (plan.model, plan.schedule, plan.num_micro_batches) == ("GPT", "1F1B", MICRO_BATCHES)
    assert list(plan.micro_batch_shape) == [SIZE.batch, SIZE.length]
    assert [stage.pp_rank for stage in plan.stages] == [0, 1]
    assert [stage.first_layer for stage in plan.stages] == ["token_embedding", "blocks.2"]
    rows = {layer.name: layer for layer in plan.stages[0].layers}
    assert rows["token_embedding"].kind == "embedding" and rows["token_embedding"].style == "vocabulary"
    up = rows["blocks.*.mlp.0"]
    assert (up.count, up.kind, up.class_name, up.style, up.part) == (2, "mlp", "Linear", "column", "rows 1/2")
    assert up.element_count == 2 * (8 * 32 + 32) and up.size_bytes == 4 * up.element_count
    (sent,) = up.collectives
    assert (sent.operation, sent.phase) == ("all_reduce", "backward")
    assert sent.bytes_per_step == 2 * MICRO_BATCHES * SIZE.batch * SIZE.length * 8 * 4
    for stage in plan.stages:
        assert stage.element_count == sum(layer.element_count for layer in stage.layers)


def test_modules_without_parameters_of_their_own_are_listed_in_one_stage() -> None:
    plan = divided(sequence_parallel=True, loss_parallel=True)
    assert plan.sequence_parallel and plan.loss_parallel
    inputs = [
        (index, layer.name)
        for index, stage in enumerate(plan.stages)
        for layer in stage.layers
        if layer.style == "input"
    ]
    assert inputs == [(0, "blocks.*")]


def test_table_of_a_plan() -> None:
    response = coordinator_pb2.DescribeWorldResponse(
        world=World(tp=2, pp=2).to_proto(),
        world_size=4,
        parallel_plan=coordinator_pb2.ParallelPlan(models=[divided()]),
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(inspect_tables.world(response))
    text = capture.get()
    assert "GPT in 2 stages, 1F1B with 4 micro-batches of 2 x 8, tensor parallelism over 2 ranks" in text
    (row,) = [line.split() for line in text.splitlines() if "blocks.*.mlp.2" in line][:1]
    assert " ".join(row) == "blocks.*.mlp.2 2 mlp 528 2.1 KiB row (columns 1/2) forward all_reduce 4.0 KiB"


def test_large_plan_is_shortened_to_the_limits() -> None:
    layers = [coordinator_pb2.PlannedLayers(name=f"{'x' * 200}{number}", count=1) for number in range(MAX_PLAN_ROWS)]
    stages = [coordinator_pb2.PlannedStage(first_layer="a", layers=layers) for _ in range(3)]
    plan = coordinator_pb2.ParallelPlan(models=[coordinator_pb2.ModelPlan(stages=stages)])
    parallel_plan._shorten(plan)
    (model,) = plan.models
    kept = [len(stage.layers) for stage in model.stages]
    assert plan.ByteSize() <= MAX_PLAN_BYTES and 3 + sum(kept) <= MAX_PLAN_ROWS
    assert kept[0] > 1000 and kept[1:] == [0, 0], "the last rows are left out"
    assert model.omitted_row_count == 3 * MAX_PLAN_ROWS - sum(kept)


def test_batch_that_micro_batches_do_not_divide_is_refused() -> None:
    plan = SchedulePlan(schedule="GPipe", pp=2, num_micro_batches=4)
    assert plan.micro_batch_size(8) == 2
    with pytest.raises(UsageError, match="a batch of 6 samples cannot be divided into 4 micro-batches of equal size"):
        plan.micro_batch_size(6)
