"""An embedding on the first pipeline stage and the head on the last share one parameter."""

from __future__ import annotations

import json
import math
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.command.cli import main
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, plan_tensor_parallel, split_model
from shardwell.planning import DivisionOptions, PlanOptions, plan_run
from tests.support import gloo, split_gpt
from tests.support.processes import run_ranks
from tests.support.split_gpt import LENGTH, loss_of, momentum_sgd

MICRO_BATCHES, BATCH, STEPS, NO_CLIPPING = 4, 8, 3, 1e9
LR, MOMENTUM = 0.1, 0.9
SHARED = "token_embedding.weight"
gpt, batch = partial(split_gpt.gpt, 2), partial(split_gpt.batch, batch_size=BATCH)


def reference(dp: int, *, fused: bool = True) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Trains in this process. Returns the parameters and the gradient norms.

    The head has a copy of the embedding's weight, so that the gradients of the two layers are summed over the
    micro-batches separately, and then added.

    Args:
        dp: Number of data ranks.
        fused: Whether torch's fused kernel updates the parameters, as on the shard servers.
    """
    model = split_gpt.gpt(2)
    model.load_state_dict(gpt(tied=True).state_dict())
    own = dict(model.named_parameters())
    head = own.pop("head.weight")
    optimizer, norms = torch.optim.SGD(own.values(), lr=LR, momentum=MOMENTUM, fused=fused), []
    for step in range(STEPS):
        means = []
        for dp_rank in range(dp):
            model.zero_grad()
            for tokens, targets in zip(*(whole.chunk(MICRO_BATCHES) for whole in batch(step, dp_rank)), strict=True):
                loss_of(model(tokens), targets).backward()
            mean = {name: parameter.grad / MICRO_BATCHES for name, parameter in model.named_parameters()}
            mean[SHARED] += mean.pop("head.weight")
            means.append(mean)
        for name, parameter in own.items():
            parameter.grad = sum((mean[name] for mean in means[1:]), means[0][name]) / dp
        squares = [parameter.grad.double().square().sum() for parameter in own.values() if parameter.grad is not None]
        norms.append(math.sqrt(sum(map(float, squares))))
        optimizer.step()
        with torch.no_grad():
            head.copy_(own[SHARED])
    return own, norms


def worker(rank: int, address: str, run: str, sizes: tuple[int, int, int], steps: int, options: dict[str, Any]) -> None:
    """Trains. With ``restarts``, the item of step 1 is computed twice. With ``on_trainers``, trainers update."""
    world, restarts = shardwell.World(*sizes), options.pop("restarts", False)
    on_trainers = options.pop("on_trainers", False)
    plan = SchedulePlan(schedule="1F1B", pp=world.pp, num_micro_batches=MICRO_BATCHES)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here", **options) as session:
        mesh, model = session.replica_mesh(), gpt(tied=True)
        tensor_plan = plan_tensor_parallel(model, world.tp, fused_by_head=True)
        split, index = split_model(model, world.pp), session.pp_rank or 0
        example = split.examples(torch.zeros(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64))[index]
        module = tensor_plan.apply(split.module(index), mesh["tp"])
        shardwell.auto_wrap(module, session)
        stage = PipelineStage(module, index, world.pp, "cpu", example=example, group=mesh["pp"].get_group())
        schedule = PipelineSchedule(plan, [stage], loss_of)
        optimizer = momentum_sgd(module, lr=LR, momentum=MOMENTUM, on_trainers=on_trainers)
        norms = []
        for step in session.steps(steps):
            for tokens, targets in step.batches(batch):
                if restarts and step.number == 1:
                    schedule.step(tokens, target=targets)
                    optimizer.zero_grad()
                schedule.step(tokens, target=targets)
            norms.append(float(optimizer.clip_grad_norm_(NO_CLIPPING)))
            optimizer.step()
            optimizer.zero_grad()
            if step.number + 1 == steps and rank == 0 and "checkpoint_dir" in options:
                session.save_checkpoint(wait=True)
        if not options:
            assert norms == pytest.approx(reference(world.dp)[1], rel=1e-6), "the shared parameter counts once"
    gloo.leave()


def train(address: str, sizes: tuple[int, int, int], *, steps: int = STEPS, **options: Any) -> str:
    """Trains with one process per rank. Returns the name of the run."""
    run = uuid.uuid4().hex
    run_ranks(worker, address, run, sizes, steps, options, count=math.prod(sizes))
    return run


def read(address: str, run: str) -> dict[str, torch.Tensor]:
    with shardwell.attach(address, run=run) as reader, reader.pin() as pinned:
        return dict(pinned.values())


@pytest.mark.parametrize("on_trainers", [False, True], ids=["optimizer on servers", "optimizer on trainers"])
@pytest.mark.parametrize(("sizes", "restarts"), [((1, 1, 2), False), ((2, 1, 2), True), ((1, 2, 2), False)], ids=str)
def test_tied_model_trains_as_one_process(
    cluster: shardwell.LocalCluster,
    sizes: tuple[int, int, int],
    restarts: bool,
    on_trainers: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {name: True for name, value in (("restarts", restarts), ("on_trainers", on_trainers)) if value}
    run = train(cluster.address, sizes, **options)
    expected, found = reference(sizes[0], fused=not on_trainers)[0], read(cluster.address, run)
    assert found.keys() == expected.keys(), "the shared parameter is stored once"
    for name, value in found.items():
        if sizes[1] == 1:
            assert torch.equal(value, expected[name]), name
        else:
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    followed = gpt(tied=True)
    with shardwell.attach(cluster.address, run=run) as reader:
        reader.follow(followed)
    assert torch.equal(followed.head.weight, found[SHARED])
    capsys.readouterr()
    assert main(["units", run, "--json", "--address", cluster.address]) == 0
    units = {unit["unit"]: unit for unit in json.loads(capsys.readouterr().out)["units"]}
    names = [SHARED] if sizes[1] == 1 else [f"{SHARED}@tp0", f"{SHARED}@tp1"]
    assert [units[name].get("pp_ranks") for name in names] == [[0, 1]] * len(names)
    assert sum(len(unit.get("pp_ranks", [])) > 1 for unit in units.values()) == len(names)
    assert planned_units(sizes) == {name.replace("@tp1", "@tp0") for name in units}, "as shardwell plan says"


def planned_units(sizes: tuple[int, int, int]) -> set[str]:
    """Returns the names of the units that a plan of the training has, without those of tensor-parallel rank 1."""
    division = DivisionOptions(num_micro_batches=MICRO_BATCHES, fused_by_head=True)
    plan = plan_run(
        lambda: (gpt(tied=True), torch.zeros(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64)),
        PlanOptions(world=shardwell.World(*sizes)),
        division=division,
        batch=BATCH,
    )
    return {unit.name for stage in plan.division.stages for unit in stage.units}


def test_lossy_pushes_of_both_stages_continue_from_a_checkpoint(
    cluster: shardwell.LocalCluster, tmp_path: Path
) -> None:
    """Each stage has residuals of its own. Without those of one stage, the weights would differ."""
    options = {"transfers": shardwell.TransferOptions(push_dtype="lowrank-1", push_error_feedback=True)}
    sizes, steps, folder = (1, 1, 2), 4, str(tmp_path)
    whole = train(cluster.address, sizes, steps=steps, **options)
    train(cluster.address, sizes, steps=2, checkpoint_dir=folder, **options)
    resumed = train(cluster.address, sizes, steps=steps, checkpoint_dir=folder, resume="latest", **options)
    expected, found = read(cluster.address, whole), read(cluster.address, resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
