"""Deltas when servers are lost: a server without the base sends whole streams, and the run gets the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell_wire import fault_points
from tests.support.cluster import events, join_options, wait_in_sync
from tests.support.reference import sha256

STEPS, FAULT_AT = 12, 5
DATA = [torch.randn(64, generator=torch.Generator().manual_seed(index)) for index in range(64)]
DELTAS = {"delta_cache_bytes": 1 << 30}


def train(
    address: str, run: str, disturb: Callable[[int], None] = lambda step: None, **options: Any
) -> tuple[str, list[dict[str, float]]]:
    """Trains two data ranks in this process; returns the hash of the weights, and the statistics after each step."""
    options = {"transports": "socket", "gather_dtype": "bfloat16", "world": shardwell.World(dp=2), **options}
    with shardwell.join(address, run=run, min_trainers=1, **join_options(**options)) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 700), nn.Tanh(), nn.Linear(700, 8))
        for index in (0, 2):
            shardwell.fully_shard(model[index], session, name=f"layer{index}")
        shardwell.fully_shard(model, session, name="rest")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-4)
        stats = []
        for step in session.steps(STEPS):
            disturb(step.number)
            for batch in step.batches(DATA, batch_size=8):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stats.append(session.stats())
        return sha256(shardwell.full_state_dict(model)), stats


def ratio(stats: list[dict[str, float]], first: int, last: int) -> float:
    """Returns the part of the bytes that were received in some steps."""
    received, whole = (
        stats[last][name] - stats[first][name] for name in ("delta_received_bytes", "delta_stream_bytes")
    )
    return received / whole


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Returns the hash of the weights of a run without deltas and without faults."""
    with shardwell.LocalCluster(num_shards=1) as cluster:
        hashed, _ = train(cluster.address, "plain")
        return hashed


@pytest.mark.timeout(170)
@pytest.mark.parametrize("backups", [0, 1], ids=["restarted", "promoted"])
def test_a_new_primary_sends_whole_streams_first(undisturbed: str, backups: int) -> None:
    with shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as cluster:
        killed: list[int] = []

        def disturb(step: int) -> None:
            if step == FAULT_AT and not killed:
                if backups:
                    wait_in_sync(cluster.address, "r")
                killed.append(cluster.shards[1].pid)
                os.kill(cluster.shards[1].pid, signal.SIGKILL)

        hashed, stats = train(cluster.address, "r", disturb, backups=backups, **DELTAS)
        assert hashed == undisturbed
        assert killed
        kinds = [event.kind for event in events(cluster.address, "r")]
        assert kinds.count("shards_promoted") == backups
        assert ratio(stats, 1, FAULT_AT - 1) < 0.6
        assert ratio(stats, STEPS - 4, STEPS - 1) < 0.6, "deltas are sent again"


@pytest.mark.timeout(170)
@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize("transports", ["socket", "grpc"])
def test_a_server_killed_while_it_sends_changes_no_bit(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str, nth: int
) -> None:
    """The trainer repeats its request. What it names as its base must not be half overwritten."""
    once = tmp_path / "happened"
    fault = fault_points.Fault(point="server.gather.middle", action="kill", nth=nth, once=str(once))
    for name, value in fault_points.environment(fault).items():
        monkeypatch.setenv(name, value)
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        hashed, stats = train(cluster.address, "r", transports=transports, **DELTAS)
        assert hashed == undisturbed
        assert once.exists()
        assert ratio(stats, STEPS - 4, STEPS - 1) < 0.6
