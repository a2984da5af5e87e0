"""Pipeline stages that a script makes by hand: ``shardwell world`` shows them, and the run compares them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from examples.gpt import GPT
from shardwell.command.cli import main
from shardwell.parallel import (
    ModelSplit,
    PipelineSchedule,
    PipelineStage,
    SchedulePlan,
    parallelize,
    plan_tensor_parallel,
)
from shardwell_wire.errors import RunMismatchError, UnitMismatchError, UsageError
from tests.support import gloo, split_gpt
from tests.support.processes import run_ranks
from tests.support.split_gpt import loss_of

MICRO_BATCHES, BATCH, LENGTH = 2, 4, 4
gpt = partial(split_gpt.gpt, 4)


class Stage(nn.Module):
    """Some blocks of a GPT, under the names of the whole model."""

    def __init__(self, model: GPT, numbers: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in numbers})
        if 0 in numbers:
            self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        if len(model.blocks) - 1 in numbers:
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


def divide(model: GPT, cut: int = 2) -> ModelSplit:
    """Returns two stages. The second one begins at block ``cut``."""
    return ModelSplit.from_modules(model, [Stage(model, range(cut)), Stage(model, range(cut, 4))])


def worker(rank: int, address: str, run: str, sizes: tuple[int, int, int], sequence_parallel: bool) -> None:
    world = shardwell.World(*sizes)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        model = gpt()
        parallel = parallelize(
            model,
            session,
            split=divide(model),
            loss=loss_of,
            example=batch(0, 0)[0],
            micro_batches=MICRO_BATCHES,
            tp={"fused_by_head": True, "sequence_parallel": sequence_parallel},
        )
        optimizer = shardwell.optim.SGD(parallel.parameters(), lr=0.1)
        for step in session.steps(1):
            for tokens, targets in step.batches(batch):
                loss = parallel.schedule.step(tokens, target=targets)
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
    assert model["model"] == "GPT"
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


def make_parallel(session: shardwell.Session, cut: int) -> None:
    model, example = gpt(), batch(0, 0)[0]
    parallelize(model, session, split=divide(model, cut), loss=loss_of, example=example, micro_batches=MICRO_BATCHES)


def missing_worker(rank: int, address: str, run: str) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(pp=2), global_rank=rank, host="here") as session:
        make_parallel(session, 1 + rank)
        if rank == 0:
            session.steps(1)  # reports the plan, which becomes the run's
            dist.barrier()
        else:
            dist.barrier()
            refused = "first layer of stage 1: expected 'blocks.1', found 'blocks.2'; layer 'blocks"
            with pytest.raises(RunMismatchError, match=refused):
                session.steps(1)
    gloo.leave()


def test_trainers_whose_stages_leave_blocks_out_are_refused(cluster: shardwell.LocalCluster) -> None:
    run_ranks(missing_worker, cluster.address, uuid.uuid4().hex)


def overlapping_worker(rank: int, address: str, run: str) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(pp=2), global_rank=rank, host="here") as session:
        refused = torch.zeros(1)
        try:
            make_parallel(session, 2 - rank)
        except UnitMismatchError as error:
            stages = f"by pipeline stage {1 - rank}, now by stage {rank}"
            assert re.search(rf"unit 'blocks.1' was declared {stages}: .* divide the model into the same", str(error))
            refused += 1
        dist.all_reduce(refused)
        assert refused == 1, "the trainer that declares the block last"
    gloo.leave()


def test_trainers_whose_stages_overlap_are_refused(cluster: shardwell.LocalCluster) -> None:
    run_ranks(overlapping_worker, cluster.address, uuid.uuid4().hex)


def whole_worker(rank: int, address: str, run: str) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(tp=2, pp=2), global_rank=rank, host="here") as session:
        model, mesh, index = gpt(), session.replica_mesh(), session.pp_rank or 0
        plan, split = SchedulePlan(schedule="1F1B", pp=2, num_micro_batches=MICRO_BATCHES), divide(model)
        tensor_plan = plan_tensor_parallel(model, 2, fused_by_head=True, sequence_parallel=True)
        example = split.examples(batch(0, 0)[0][: BATCH // MICRO_BATCHES])[index]
        module = shardwell.auto_wrap(tensor_plan.apply(split.module(index), mesh["tp"]), session)
        stage = PipelineStage(module, index, 2, "cpu", example=example, group=mesh["pp"].get_group())
        if index == 0:
            with pytest.raises(
                UsageError, match=r"stage 0 sends a part of each sequence, but its example .* all 4 tokens"
            ):
                PipelineSchedule(plan, [stage], loss_of, context=tensor_plan.loss_context)
        else:
            PipelineSchedule(plan, [stage], loss_of, context=tensor_plan.loss_context)
    gloo.leave()


def test_examples_with_whole_sequences_are_refused_before_a_step(cluster: shardwell.LocalCluster) -> None:
    run_ranks(whole_worker, cluster.address, uuid.uuid4().hex, count=4)
