"""Fault tests of single copies: a copy that is still needed is not dropped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwell
from tests.support.cluster import wait_until

STEPS = 20


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def loss(trained: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(4, 64, generator=generator), torch.randn(4, 8, generator=generator)
    result: torch.Tensor = (trained(x) - y).square().mean()
    return result


def expected() -> list[torch.Tensor]:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
    for number in range(STEPS):
        loss(trained, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(trained.state_dict().values())


def plan(monkeypatch: pytest.MonkeyPatch, **fault: object) -> None:
    """Plans one fault of a server that is started later."""
    monkeypatch.setenv("SHARDWELL_TEST_FAULTS", json.dumps([fault]))


def command(address: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "shardwell", *arguments, "--address", address], check=True)


def train(cluster: shardwell.LocalCluster, *, drain_at: int | None = None, **options: object) -> list[torch.Tensor]:
    """Trains to the end; returns the weights. shard-0 is drained in a step."""
    waits = shardwell.WaitOptions(wait_limit_s=60.0)
    with shardwell.join(cluster.address, run="r", world=shardwell.World(dp=1), waits=waits, **options) as session:
        trained = model()
        shardwell.fully_shard(trained, session)
        optimizer = shardwell.optim.AdamW(trained.parameters(), lr=1e-2)
        for step in session.steps(STEPS):
            if step.number == drain_at:
                command(cluster.address, "drain", "shard-0")
            for number in step.batches(lambda number, rank: number):
                loss(trained, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(shardwell.full_state_dict(trained).values())


def check(weights: list[torch.Tensor]) -> None:
    assert len(weights) == len(expected())
    assert all(torch.equal(one, other) for one, other in zip(weights, expected(), strict=True))


def test_target_of_a_drain_is_killed_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, where = tmp_path / "killed", {"server": "shard-1"}
    plan(monkeypatch, point="server.promote.before", action="kill", where=where, once=str(killed))
    with shardwell.LocalCluster(2, lease_s=2.0, min_shard_bytes=4096) as cluster:
        check(train(cluster, drain_at=3))
    assert killed.exists()


def test_owner_is_killed_while_a_unit_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publishing, where = tmp_path / "publishing", {"server": "shard-1", "rpc": "PublishUnit"}
    plan(monkeypatch, point="server.call.executed", action="delay", delay_s=4.0, where=where, once=str(publishing))
    with shardwell.LocalCluster(2, lease_s=15.0, min_shard_bytes=4096) as cluster:

        def kill() -> None:
            wait_until(publishing.exists, "the publication")
            os.kill(cluster.shards[0].pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        check(train(cluster))
        killer.join()
