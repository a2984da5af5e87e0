"""Fault tests of SIGTERM to a shard server: its shards move to other servers while training goes on, then it exits."""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import closing
from typing import Any

import torch
from torch import nn

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import join_options, wait_until
from tests.support.reference import sha256

STEPS, STOPPED_AT = 12, 3
STOPPED = "shard-0"


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(9, 70, generator=torch.Generator().manual_seed(100 * step + rank))


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(70, 110), nn.Tanh(), nn.Linear(110, 30))


def call(address: str, rpc_name: str, request: Any) -> Any:
    with closing(CoordinatorClient(address)) as client:
        return client.call(rpc_name, request, timeout_s=20.0)


def owners(address: str, run: str) -> set[str]:
    units = call(address, "ListUnits", coordinator_pb2.ListUnitsRequest(run=run)).units
    return {shard.server_id for unit in units for shard in unit.shards}


def copied(address: str, run: str) -> bool:
    """True if every shard of the stopped server has a copy in sync."""
    units = call(address, "ListUnits", coordinator_pb2.ListUnitsRequest(run=run)).units
    return all(
        any(
            (backup.shard.start_bytes, backup.state) == (shard.start_bytes, coordinator_pb2.BACKUP_STATE_IN_SYNC)
            for backup in unit.backups
        )
        for unit in units
        for shard in unit.shards
        if shard.server_id == STOPPED
    )


def train(cluster: shardwell.LocalCluster, *, stop: bool) -> tuple[str, int]:
    """Trains two ranks; returns the hash of the weights, and the number of items that were computed."""
    run, computed = uuid.uuid4().hex, 0
    options = join_options(wait_limit_s=60)
    with shardwell.join(cluster.address, run=run, world=shardwell.World(dp=2), min_trainers=1, **options) as session:
        model = build()
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({nn.Linear}))
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
        for step in session.steps(STEPS):
            if stop and step.number == STOPPED_AT:
                assert STOPPED in owners(cluster.address, run)
                os.kill(cluster.shards[0].pid, signal.SIGTERM)
                wait_until(lambda: copied(cluster.address, run), "copies of all shards", timeout_s=30.0)
            if stop and step.number == STEPS - 1:
                assert STOPPED not in owners(cluster.address, run)
            for x in step.batches(batch):
                computed += 1
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sha256(shardwell.full_state_dict(model)), computed


def test_server_moves_its_shards_and_exits_cleanly() -> None:
    with shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as cluster:
        expected = train(cluster, stop=False)
        assert expected[1] == 2 * STEPS
        assert train(cluster, stop=True) == expected
        wait_until(lambda: cluster.shards[0].ends == [0], "clean end", timeout_s=30.0)


def test_second_signal_stops_a_server_whose_shards_cannot_move_yet() -> None:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        run = uuid.uuid4().hex
        with shardwell.join(cluster.address, run=run, **join_options(wait_limit_s=60)) as session:
            model = build()
            shardwell.fully_shard(model, session, name="all")
            pid = cluster.shards[0].pid
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: "moving" in cluster.shards[0].log_tail(), "start of the draining", timeout_s=30.0)
            assert cluster.shards[0].pid == pid and not cluster.shards[0].ends, "moves wait for a commit"
            began = time.monotonic()
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: cluster.shards[0].ends == [0], "clean end", timeout_s=60.0)
            assert time.monotonic() - began < 15.0


def test_server_with_the_only_copy_exits_soon_if_no_other_server_has_room() -> None:
    with (
        shardwell.LocalCluster(num_shards=1, min_shard_bytes=4096) as cluster,
        shardwell.join(cluster.address, run=uuid.uuid4().hex, **join_options(wait_limit_s=60)) as session,
    ):
        shardwell.fully_shard(build(), session, name="all")
        began = time.monotonic()
        cluster.shards[0].stop(20.0)
        assert cluster.shards[0].exit_code == 0 and time.monotonic() - began < 15.0
