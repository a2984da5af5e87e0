"""Fault tests of the coordinator: after SIGKILL it restarts, and the result has equal bits."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.step.step_commit import StepCommitter
from tests.support import transformer
from tests.support.processes import TrainerProcess
from tests.support.reference import ADAMW, sha256, train_plain

STEPS = 12


def expected_hash(dp: int) -> str:
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    train_plain(model, optimizer, transformer.batch, dp=dp, steps=STEPS)
    return sha256(model.state_dict())


def test_sigkill_of_the_coordinator_keeps_the_result(tmp_path: Path) -> None:
    run = uuid.uuid4().hex
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, state_dir=tmp_path) as cluster:
        options = ("--dp", 2, "--steps", STEPS)
        with (
            TrainerProcess(cluster.address, run, *options) as first,
            TrainerProcess(cluster.address, run, *options) as second,
        ):
            for step in (2, 5):
                first.wait_for_step(step)
                cluster.restart_coordinator()
            results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [expected_hash(2)] * 2, results
    assert all([step for step, _ in result["losses"]] == list(range(STEPS)) for result in results)


def test_spare_trainer_takes_over_a_lost_rank() -> None:
    run = uuid.uuid4().hex
    with shardwell.LocalCluster(num_shards=1, lease_s=1.5) as cluster:
        options = ("--dp", 1, "--steps", STEPS)
        with TrainerProcess(cluster.address, run, *options, "--trainer", "player", "--kill-at-step", 5) as player:
            player.wait_for_step(1)
            with TrainerProcess(cluster.address, run, *options, "--trainer", "spare") as spare:
                assert player.finish()["returncode"] == -9
                result = spare.finish()
    assert result.get("sha256") == expected_hash(1), result
    assert result["losses"][-1][0] == STEPS - 1


@pytest.mark.parametrize("plain_loop", [False, True])
def test_death_after_the_work_is_finished_repeats_no_work(tmp_path: Path, plain_loop: bool) -> None:
    """The trainer reports its finished work again before it asks for the norm, and before it proposes the step."""
    batch, computed = torch.ones(2, 3), []
    with (
        shardwell.LocalCluster(num_shards=1, state_dir=tmp_path) as cluster,
        shardwell.join(cluster.address, run=uuid.uuid4().hex, world=shardwell.World(dp=1)) as session,
    ):
        model = shardwell.fully_shard(torch.nn.Linear(3, 3), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        for step in session.steps(4):
            for _ in [batch] if plain_loop else step.batches(lambda *_: batch):
                computed.append(step.number)
                model(batch).sum().backward()
            if not plain_loop and step.number == 1:
                cluster.restart_coordinator()
            assert math.isfinite(optimizer.clip_grad_norm_(1.0))
            if step.number == 2:
                cluster.restart_coordinator()
            optimizer.step()
            optimizer.zero_grad()
    assert computed == [0, 1, 2, 3]


@pytest.mark.parametrize("plain_loop", [False, True])
def test_death_after_the_work_is_reported_again_repeats_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_loop: bool
) -> None:
    batch, computed, deaths = torch.ones(2, 3), [], [0]
    finish_work = StepCommitter.finish_work

    with (
        shardwell.LocalCluster(num_shards=1, state_dir=tmp_path) as cluster,
        shardwell.join(cluster.address, run=uuid.uuid4().hex, world=shardwell.World(dp=1)) as session,
    ):

        def die_after_report(*arguments: Any, **options: Any) -> Any:
            response = finish_work(*arguments, **options)
            if session.step == 1 and deaths[0] < 2:
                deaths[0] += 1
                cluster.restart_coordinator()
            return response

        monkeypatch.setattr(StepCommitter, "finish_work", die_after_report)
        model = shardwell.fully_shard(torch.nn.Linear(3, 3), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        for step in session.steps(3):
            for _ in [batch] if plain_loop else step.batches(lambda *_: batch):
                computed.append(step.number)
                model(batch).sum().backward()
            optimizer.step()
            assert not optimizer.repeats
            optimizer.zero_grad()
    assert (computed, deaths) == ([0, 1, 2], [2])
