"""Pipeline stages that a script builds by hand: ``shardwell world`` describes them, and the run compares them."""

from __future__ import annotations

import json
import uuid
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from examples.gpt import GPT
from shardwell.command.cli import main
from shardwell.grid.parallel_plan import descriptions
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, plan_tensor_parallel
from shardwell.parallel.splitting import StageExample
from shardwell_wire.errors import RunMismatchError, UsageError
from tests.support import gloo, split_gpt
from tests.support.processes import run_ranks
from tests.support.split_gpt import VOCABULARY, loss_of

MICRO_BATCHES, BATCH, LENGTH, WIDTH = 2, 4, 4, 12
gpt = partial(split_gpt.gpt, 4)


class Stage(nn.Module):
    """Half of a GPT, under the names of the whole one."""

    def __init__(self, model: GPT, index: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(at): model.blocks[at] for at in (2 * index, 2 * index + 1)})
        if index == 0:
            self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "token_embedding"):
            x = self.token_embedding(x) + self.position_embedding.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = split_gpt.batch(step, dp_rank, BATCH)
    return tokens[:, :LENGTH], targets[:, :LENGTH]


def make_schedule(session: shardwell.Session, *, sequence_parallel: bool, length: int) -> PipelineSchedule:
    """Returns the schedule of this trainer's stage, for values of a length between the stages."""
    world, mesh, model = session.world, session.replica_mesh(), gpt()
    plan = SchedulePlan(schedule="1F1B", pp=world.pp, num_micro_batches=MICRO_BATCHES)
    options: dict[str, Any] = {"fused_by_head": True, "sequence_parallel": sequence_parallel}
    tensor_plan = plan_tensor_parallel(model, world.tp, **options)
    index, rows = session.pp_rank or 0, BATCH // MICRO_BATCHES
    module = tensor_plan.apply(Stage(model, index), mesh["tp"])
    shardwell.auto_wrap(module, session)
    tokens = torch.zeros(rows, LENGTH, dtype=torch.int64)
    hidden = torch.zeros(rows, length, WIDTH, requires_grad=True)
    logits = torch.zeros(rows, LENGTH, VOCABULARY, requires_grad=True)
    example = [StageExample((tokens,), (hidden,)), StageExample((hidden,), (logits,))][index]
    stage = PipelineStage(module, index, plan.num_stages, "cpu", example=example, group=mesh["pp"].get_group())
    return PipelineSchedule(plan, [stage], loss_of, context=tensor_plan.loss_context)


def worker(rank: int, address: str, run: str, sizes: tuple[int, int, int], sequence_parallel: bool) -> None:
    world = shardwell.World(*sizes)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        length = LENGTH // world.tp if sequence_parallel else LENGTH
        schedule = make_schedule(session, sequence_parallel=sequence_parallel, length=length)
        optimizer = shardwell.optim.SGD([p for stage in schedule.stages for p in stage.submod.parameters()], lr=0.1)
        for step in session.steps(1):
            for tokens, targets in step.batches(batch):
                loss = schedule.step(tokens, target=targets)
                step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        model, (tokens, targets) = gpt(), batch(0, 0)
        parts = zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
        expected = torch.stack([loss_of(model(part), wanted) for part, wanted in parts]).mean()
        assert step.means == {"loss": pytest.approx(expected.item(), rel=0 if world.tp == 1 else 1e-6)}
    gloo.leave()


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"), [((1, 1, 2), False), ((1, 2, 2), False), ((1, 2, 2), True)], ids=str
)
def test_world_shows_stages_that_are_built_by_hand(
    cluster: shardwell.LocalCluster,
    sizes: tuple[int, int, int],
    sequence_parallel: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = uuid.uuid4().hex
    run_ranks(worker, cluster.address, run, sizes, sequence_parallel, count=sizes[1] * sizes[2])
    capsys.readouterr()
    assert main(["world", run, "--json", "--address", cluster.address]) == 0
    (model,) = json.loads(capsys.readouterr().out)["parallel_plan"]["models"]
    assert model["model"] == ("Stage" if sizes[1] == 1 else "GPT")
    assert (model["schedule"], model["num_micro_batches"]) == ("1F1B", MICRO_BATCHES)
    assert model["micro_batch_shape"] == [str(BATCH // MICRO_BATCHES), str(LENGTH)]
    names = [(stage["pp_rank"], stage["first_layer"], stage["last_layer"]) for stage in model["stages"]]
    assert names == [(0, "blocks.0", "position_embedding"), (1, "blocks.2", "head")]
    whole = gpt()
    assert sum(int(stage["element_count"]) for stage in model["stages"]) == sum(map(torch.numel, whole.parameters()))
    assert sum(int(stage["size_bytes"]) for stage in model["stages"]) == 4 * sum(map(torch.numel, whole.parameters()))
    layers = {layer["name"]: layer for stage in model["stages"] for layer in stage["layers"]}
    assert layers["blocks.*.mlp.0"]["class_name"] == "Linear" and layers["blocks.*.mlp.0"]["count"] == 2
    assert layers["blocks.*.mlp.0"].get("style", "") == ("column" if sizes[1] > 1 else "")
    assert main(["world", run, "--address", cluster.address]) == 0
    shown = capsys.readouterr().out
    assert "\n1 replica\n" in shown and "1 replicas" not in shown
    assert "position_embedding" in shown and "0 parameters" not in shown


def differing_worker(rank: int, address: str, run: str) -> None:
    world = shardwell.World(pp=2)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        schedule = make_schedule(session, sequence_parallel=False, length=LENGTH)
        session.steps(1)
        module = schedule.stages[0].submod
        if rank == 1:
            module.add_module("extra", nn.Linear(1, 1))
        del descriptions[module]  # as if the script had built the stage anew
        PipelineSchedule(schedule.plan, schedule.stages, loss_of)
        with pytest.raises(RunMismatchError, match="last layer of stage 1: expected 'head', found 'extra'"):
            session.steps(1)
    gloo.leave()


def test_replicas_with_other_stages_by_hand_are_refused(cluster: shardwell.LocalCluster) -> None:
    run_ranks(differing_worker, cluster.address, uuid.uuid4().hex)


def whole_worker(rank: int, address: str, run: str) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(tp=2, pp=2), global_rank=rank, host="here") as session:
        if session.pp_rank == 0:
            with pytest.raises(
                UsageError, match=r"stage 0 sends a part of each sequence, but its example .* all 4 tokens"
            ):
                make_schedule(session, sequence_parallel=True, length=LENGTH)
        else:
            make_schedule(session, sequence_parallel=True, length=LENGTH)
    gloo.leave()


def test_examples_with_whole_sequences_are_refused_before_a_step(cluster: shardwell.LocalCluster) -> None:
    run_ranks(whole_worker, cluster.address, uuid.uuid4().hex, count=4)
