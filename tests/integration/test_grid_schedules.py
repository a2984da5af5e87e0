"""Planned grids with torch's schedules train as one process does: weights, losses, norms and clipping."""

from __future__ import annotations

import json
import uuid
from functools import partial

import pytest
import torch
from google.protobuf.json_format import ParseDict
from torch import nn

import shardwell
from shardwell.command.cli import main
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, plan_tensor_parallel, split_model
from shardwell.planning import DivisionOptions, PlanOptions, plan_run
from shardwell_wire.errors import RunMismatchError, UsageError
from shardwell_wire.v1 import coordinator_pb2
from tests.support import gloo, split_gpt
from tests.support.processes import run_ranks
from tests.support.split_gpt import LENGTH, loss_of

MICRO_BATCHES, BATCH, STEPS, MAX_NORM = 4, 8, 3, 0.5
gpt, batch = partial(split_gpt.gpt, 4), partial(split_gpt.batch, batch_size=BATCH)


def reference(dp: int) -> tuple[nn.Module, list[list[torch.Tensor]], list[torch.Tensor]]:
    """Returns a plain model after training, the losses of each step by dp rank, and the norms of the gradients."""
    model = gpt()
    losses: list[list[torch.Tensor]] = []
    norms: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        means, found = [], []
        for dp_rank in range(dp):
            parts = []
            for tokens, targets in zip(*(whole.chunk(MICRO_BATCHES) for whole in batch(step, dp_rank)), strict=True):
                loss = loss_of(model(tokens), targets)
                loss.backward()
                parts.append(loss.detach())
            means.append([parameter.grad / MICRO_BATCHES for parameter in model.parameters()])
            found.append(torch.stack(parts).mean())
            optimizer.zero_grad()
        for parameter, *gradients in zip(model.parameters(), *means, strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / dp
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=False))
        losses.append(found)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, norms


def worker(rank: int, address: str, run: str, sizes: tuple[int, int, int], schedule_name: str) -> None:
    world = shardwell.World(*sizes)
    plan = SchedulePlan(schedule=schedule_name, pp=world.pp, num_micro_batches=MICRO_BATCHES)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        mesh, model = session.replica_mesh(), gpt()
        tensor_plan, split = (
            plan_tensor_parallel(model, world.tp, fused_by_head=True),
            split_model(model, plan.num_stages),
        )
        examples = split.examples(torch.zeros(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64))
        stages = []
        for index in plan.stages_of(session.pp_rank or 0):
            module = tensor_plan.apply(split.module(index), mesh["tp"])
            if world.tp > 1:
                with pytest.raises(UsageError, match="is a DTensor: split the model into stages before"):
                    split_model(module, 1)
            shardwell.auto_wrap(module, session)
            group = mesh["pp"].get_group()
            stages.append(PipelineStage(module, index, plan.num_stages, "cpu", example=examples[index], group=group))
        schedule = PipelineSchedule(plan, stages, loss_of)
        optimizer = shardwell.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
        losses, norms = [], []
        for step in session.steps(STEPS):
            for tokens, targets in step.batches(batch):
                losses.append(schedule.step(tokens, target=targets))
            norms.append(optimizer.clip_grad_norm_(MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
        expected, expected_losses, expected_norms = reference(world.dp)
        for step in range(STEPS):
            if (loss := losses[step]) is not None:
                torch.testing.assert_close(loss, expected_losses[step][session.dp_rank or 0], rtol=1e-5, atol=1e-6)
            got = torch.as_tensor(norms[step], dtype=torch.float32)
            torch.testing.assert_close(got, expected_norms[step], rtol=1e-4, atol=0)
        if rank == 0:
            compare_weights(session, expected, exact=world.tp == 1)
        PipelineSchedule(SchedulePlan(schedule=schedule_name, pp=world.pp, num_micro_batches=BATCH), stages, loss_of)
        with pytest.raises(RunMismatchError, match=rf"num_micro_batches: expected {MICRO_BATCHES}, found {BATCH}"):
            session.steps(STEPS + 1)
    gloo.leave()


def check_plan(output: str, sizes: tuple[int, int, int], schedule: str) -> None:
    """``shardwell world RUN --json`` shows how the model is divided."""
    (model,) = json.loads(output)["parallel_plan"]["models"]
    assert (model["model"], model["schedule"], model["num_micro_batches"]) == ("GPT", schedule, MICRO_BATCHES)
    assert model["micro_batch_shape"] == [str(BATCH // MICRO_BATCHES), str(LENGTH)]
    assert {stage["pp_rank"] for stage in model["stages"]} == set(range(sizes[2]))
    elements = sum(int(stage["element_count"]) for stage in model["stages"])
    assert elements == sum(parameter.numel() for parameter in gpt().parameters())
    layers = [layer for stage in model["stages"] for layer in stage["layers"] if layer["name"] == "blocks.*.mlp.0"]
    assert sum(layer["count"] for layer in layers) == 4 and {layer["kind"] for layer in layers} == {"mlp"}
    assert {layer["style"] for layer in layers} == {"column" if sizes[1] > 1 else ""}
    if sizes[1] > 1:
        sent = sum(int(each["bytes_per_step"]) for layer in layers for each in layer["collectives"])
        assert sent == 4 * BATCH * LENGTH * 12 * 4, "the gradient of the input of 4 blocks: width 12, 4 bytes each"


def example(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return gpt(), torch.zeros(batch, LENGTH, dtype=torch.int64)


def check_prediction(world: str, units: str, sizes: tuple[int, int, int], schedule: str) -> None:
    """``shardwell plan`` predicts the division and the units of the run."""
    division = DivisionOptions(schedule=schedule, num_micro_batches=MICRO_BATCHES, fused_by_head=True)
    options = PlanOptions(world=shardwell.World(*sizes))
    plan = plan_run(example, options, division=division, batch=BATCH, length=LENGTH)
    (model,) = json.loads(world)["parallel_plan"]["models"]
    assert ParseDict(model, coordinator_pb2.ModelPlan()) == plan.division.description
    found = json.loads(units)["units"]
    assert plan.num_units == len(found)
    for pp_rank, trainer in enumerate(plan.trainers):
        own = [unit for unit in found if pp_rank in unit["pp_ranks"] and not unit.get("tp_rank")]
        planned = [unit for stage in trainer.stages for unit in plan.division.stages[stage].units]
        assert sorted(int(unit["size_bytes"]) for unit in own) == sorted(unit.size_bytes for unit in planned)


def compare_weights(session: shardwell.Session, expected: nn.Module, *, exact: bool) -> None:
    """Compares what a reader of the run sees with the plain model."""
    plain = gpt()
    with shardwell.attach(session.config.address, run=session.run) as reader:
        reader.follow(plain)
    tolerance = 1e-6 if exact else 1e-5  # the norm is summed in another order
    for (name, value), other in zip(plain.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ((1, 2, 1), "1F1B"),
        ((2, 1, 2), "1F1B"),
        pytest.param((2, 2, 1), "GPipe", marks=pytest.mark.long),
        ((1, 2, 2), "Interleaved1F1B"),
        ((1, 1, 2), "ZBVZeroBubble"),
        pytest.param((2, 2, 2), "1F1B", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_grid_trains_as_one_process(
    cluster: shardwell.LocalCluster, sizes: tuple[int, int, int], schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = uuid.uuid4().hex
    run_ranks(worker, cluster.address, run, sizes, schedule, count=sizes[0] * sizes[1] * sizes[2])
    capsys.readouterr()
    assert main(["world", run, "--json", "--address", cluster.address]) == 0
    world = capsys.readouterr().out
    check_plan(world, sizes, schedule)
    assert main(["units", run, "--json", "--address", cluster.address]) == 0
    check_prediction(world, capsys.readouterr().out, sizes, schedule)
