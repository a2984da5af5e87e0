"""Pipeline stages on shard servers: two replicas of two stages train as one process does."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwell
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, split_model
from tests.support import gloo, split_gpt
from tests.support.processes import run_ranks
from tests.support.split_gpt import LENGTH, loss_of

DP, PP, MICRO_BATCHES, BATCH, STEPS = 2, 2, 4, 8, 3
gpt, batch = partial(split_gpt.gpt, 4), partial(split_gpt.batch, batch_size=BATCH)


def reference() -> tuple[nn.Module, list[torch.Tensor]]:
    """Returns a plain model trained in one process, and the mean loss of dp rank 0 in each step."""
    model, losses = gpt(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        means: list[list[torch.Tensor]] = []
        for dp_rank in range(DP):
            found = []
            for tokens, targets in zip(*(whole.chunk(MICRO_BATCHES) for whole in batch(step, dp_rank)), strict=True):
                loss = loss_of(model(tokens), targets)
                loss.backward()
                found.append(loss.detach())
            means.append([parameter.grad / MICRO_BATCHES for parameter in model.parameters()])  # type: ignore[operator]
            optimizer.zero_grad()
            if dp_rank == 0:
                losses.append(torch.stack(found).mean())
        for parameter, *gradients in zip(model.parameters(), *means, strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / DP
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def worker(rank: int, address: str, run: str, path: str) -> None:
    dp_rank, pp_rank = divmod(rank, PP)
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}{dp_rank}", PP), rank=pp_rank, world_size=PP)
    plan = SchedulePlan(schedule="1F1B", pp=PP, num_micro_batches=MICRO_BATCHES)
    split = split_model(gpt(), plan.num_stages)
    examples = split.examples(torch.zeros(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64))
    with shardwell.join(
        address, run=f"{run}-{pp_rank}", world=shardwell.World(dp=DP), global_rank=dp_rank, host="here"
    ) as session:
        module = split.module(pp_rank)
        shardwell.auto_wrap(module, session)
        optimizer = shardwell.optim.SGD(module.parameters(), lr=0.1)
        stage = PipelineStage(module, pp_rank, PP, "cpu", example=examples[pp_rank])
        schedule, losses = PipelineSchedule(plan, [stage], loss_of), []
        for step in session.steps(STEPS):
            for tokens, targets in step.batches(batch):
                losses.append(schedule.step(tokens, target=targets))
            optimizer.step()
            optimizer.zero_grad()
        stats, units = session.stats(), len(session.units)
        state = shardwell.full_state_dict(module)
    assert stats["push_count"] == units * STEPS, "one push per unit and step"
    expected, expected_losses = reference()
    assert pp_rank == 0 or dp_rank != 0 or losses == expected_losses
    whole = expected.state_dict()
    for name, value in state.items():
        assert torch.equal(value, whole[name]), name
    gloo.leave()


def test_two_replicas_of_two_stages_train_as_one_process(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    run_ranks(worker, cluster.address, uuid.uuid4().hex, str(tmp_path / "store"), count=DP * PP)
