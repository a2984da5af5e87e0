"""The performance monitor measures the bubble of a pipeline."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwell
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, split_model
from tests.support import gloo
from tests.support.processes import run_ranks

MICRO_BATCHES, BATCH, STEPS = 4, 8, 3
SLOW_S = 0.2


def pause(*_: Any) -> None:
    time.sleep(SLOW_S)


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    pause()
    return functional.mse_loss(output, target)


def worker(rank: int, address: str, run: str, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    plan = SchedulePlan(schedule="1F1B", pp=2, num_micro_batches=MICRO_BATCHES)
    torch.manual_seed(0)
    split = split_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)), 2)
    examples = split.examples(torch.zeros(BATCH // MICRO_BATCHES, 6))
    with shardwell.join(address, run=f"{run}-{rank}") as session:
        module = split.module(rank)
        shardwell.fully_shard(module, session)
        optimizer = shardwell.optim.SGD(module.parameters(), lr=0.1)
        stage = PipelineStage(module, rank, 2, "cpu", example=examples[rank])
        if rank == 1:
            module.register_forward_pre_hook(pause)
        schedule = PipelineSchedule(plan, [stage], slow_loss)
        for step in session.steps(STEPS):
            for x in step.batches(lambda number, _: torch.full((BATCH, 6), float(number))):
                schedule.step(x, target=torch.zeros(BATCH, 3))
            optimizer.step()
            optimizer.zero_grad()
        report = session.report()
    found = {bottleneck.kind: bottleneck.severity for bottleneck in report.bottlenecks}
    if rank == 0:
        assert found[shardwell.StepPart.PIPELINE_BUBBLE] >= shardwell.Severity.HIGH, str(report)
    else:
        assert report.parts[shardwell.StepPart.COMPUTE] >= 2 * MICRO_BATCHES * SLOW_S, str(report)
    gloo.leave()


def test_trainer_that_waits_for_a_slow_stage_has_a_bubble(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    run_ranks(worker, cluster.address, uuid.uuid4().hex, str(tmp_path / "store"), count=2)
