"""Fault tests of buffers: every trainer has rank 0's buffers, and no death changes them."""

from __future__ import annotations

import time
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.data_plane.shard import RemoteUnit
from shardwell.store.run_units import UnitDeclarations
from shardwell_wire.model.layout import UnitLayout
from tests.support.buffer_trainer import plain_state, state_hash
from tests.support.cluster import cluster_fixture, wait_until
from tests.support.processes import TrainerProcess

STEPS = 4


class BufferTrainer(TrainerProcess):
    module = "tests.support.buffer_trainer"


cluster = cluster_fixture(num_shards=2, lease_s=1.5)


@cache
def plain_hash(*, write: bool = False) -> str:
    return state_hash(plain_state(2, STEPS, write=write))


@pytest.mark.parametrize(("point", "step"), [("item ended", 1), ("work finished", 1), ("item ended", 0)])
def test_buffers_of_rank_0_survive_the_death_of_its_trainer(
    cluster: shardwell.LocalCluster, point: str, step: int
) -> None:
    run = uuid.uuid4().hex
    with (
        BufferTrainer(cluster.address, run, "--rank", 0, "--kill", point, "--kill-step", step) as killed,
        BufferTrainer(cluster.address, run, "--rank", 1) as survivor,
    ):
        assert killed.finish()["returncode"] == -9
        result = survivor.finish()
    assert result.get("sha256") == plain_hash(), result


def test_all_trainers_get_rank_0s_initial_buffers_even_a_late_one(
    cluster: shardwell.LocalCluster,
) -> None:
    run = uuid.uuid4().hex
    with (
        BufferTrainer(cluster.address, run, "--rank", 0) as first,
        BufferTrainer(
            cluster.address, run, "--rank", 1, "--constants-seed", 1, "--kill", "in item", "--kill-step", 1
        ) as lost,
    ):
        assert lost.finish()["returncode"] == -9
        with BufferTrainer(cluster.address, run, "--constants-seed", 2) as late:
            results = [first.finish(), late.finish()]
    assert [result.get("sha256") for result in results] == [plain_hash()] * 2, results


def test_differing_writes_before_the_batches_are_rejected(cluster: shardwell.LocalCluster) -> None:
    run = uuid.uuid4().hex
    with (
        BufferTrainer(cluster.address, run, "--rank", 0, "--write", 1.0) as first,
        BufferTrainer(cluster.address, run, "--rank", 1, "--write", 2.0) as second,
    ):
        results = [first.finish(), second.finish()]
    (error,) = [result["stderr"] for result in results if result["returncode"]]
    assert "ConflictError: buffer 'temperature' had different values when rank" in error
    (survivor,) = [result for result in results if not result["returncode"]]
    assert "sha256" in survivor, "the other trainers continue"


def test_writes_before_the_batches_survive_a_coordinator_restart(tmp_path: Path) -> None:
    run = uuid.uuid4().hex
    with (
        shardwell.LocalCluster(num_shards=1, state_dir=tmp_path) as cluster,
        BufferTrainer(cluster.address, run, "--rank", 0, "--write", 1.0) as first,
        BufferTrainer(cluster.address, run, "--rank", 1, "--write", 1.0) as second,
    ):
        for step in (0, 2):
            first.wait_for_step(step)
            cluster.restart_coordinator()
        results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [plain_hash(write=True)] * 2, results


def test_shards_of_buffers_may_move_while_a_trainer_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection to a former process of their server is closed before the trainer's units contain the buffers."""
    connect, units, run = UnitDeclarations._connect, list[RemoteUnit](), uuid.uuid4().hex

    def train(address: str, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        with shardwell.join(address, run=run) as session:
            shardwell.auto_wrap(model, session)
            optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
            for step in session.steps(steps):
                for x in step.batches(lambda step, rank: torch.randn(4, 8)):
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return shardwell.full_state_dict(model)

    with shardwell.LocalCluster(num_shards=1) as cluster:

        def restart_server(self: UnitDeclarations, layout: UnitLayout, *arguments: Any) -> RemoteUnit:
            unit = connect(self, layout, *arguments)
            if layout.holds_buffers and not units:
                units.append(unit)
                former = next(shard.server for shard in unit.shards if shard.size_bytes)
                server = next(each for each in cluster.shards if each.address == former.address)
                server.restart(time.monotonic() + 60.0)
                wait_until(former.closed.is_set, "the end of the connection to the former process")
            return unit

        before = train(cluster.address, 2)
        monkeypatch.setattr(UnitDeclarations, "_connect", restart_server)
        after = train(cluster.address, 2)
        assert units and all(torch.equal(value, after[name]) for name, value in before.items())
        assert train(cluster.address, 3)["1.num_batches_tracked"] == 3
