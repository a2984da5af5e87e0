"""Log messages of trainers without work: spares and finished runs."""

from __future__ import annotations

import pytest
import torch

import shardwell
from shardwell.session import session as session_module
from tests.support.cluster import build_model, small_run


def test_spare_logs_that_it_has_no_rank(
    cluster: shardwell.LocalCluster, run_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_run(cluster.address, run_name):
        monkeypatch.setattr(session_module, "_trainer_of", lambda run_id: None)  # as in another process
        with shardwell.join(cluster.address, run=run_name, trainer="more") as spare:
            assert spare.global_rank is None
    (warning,) = [record.getMessage() for record in caplog.records if "spare" in record.getMessage()]
    assert warning.startswith(
        f"trainer 'more' is a spare: each of the 1 logical ranks of run '{run_name}' has a trainer"
    )


def test_join_of_a_finished_run_logs_that_it_is_finished(
    cluster: shardwell.LocalCluster, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with small_run(cluster.address, run_name, steps=2):
        assert "has committed" not in caplog.text
    with shardwell.join(cluster.address, run=run_name) as session:
        shardwell.fully_shard((model := build_model())[0], session, name="first")
        shardwell.fully_shard(model, session, name="rest")
        assert list(session.steps(2)) == []
    assert f"run '{run_name}' has committed 2 steps, so steps(2) has none left to train" in caplog.text


def test_step_names_the_ranks_that_it_computes(cluster: shardwell.LocalCluster, run_name: str) -> None:
    world = shardwell.World(dp=2)
    with shardwell.join(cluster.address, run=run_name, world=world, min_trainers=1) as session:
        shardwell.fully_shard(model := build_model(), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        for step in session.steps(1):
            assert step.global_ranks == []
            for x in step.batches(lambda step, dp_rank: torch.ones(1, 17)):
                model(x).sum().backward()
            assert step.global_ranks == [0, 1]
            optimizer.step()
            optimizer.zero_grad()
