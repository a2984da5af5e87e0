"""Fault tests of a shard server killed before the first commit: the trainer's error names it and its shards at once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
import torch

import shardwell
from shardwell_server.coordinator.servers.cluster import RESTART_WAIT_S
from shardwell_wire.errors import ConflictError
from tests.support.cluster import build_model, join_options

LIMIT_S = RESTART_WAIT_S + 40.0
"""The run waits for a new process of the server first. Far below ``wait_limit_s``, with a margin for slow machines."""


@pytest.fixture
def cluster() -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=1, lease_s=1.0) as cluster:
        yield cluster


def join(cluster: shardwell.LocalCluster, transports: str | None = None) -> shardwell.Session:
    return shardwell.join(cluster.address, run=uuid.uuid4().hex, **join_options(transports=transports))


def lost(units: str) -> str:
    return rf"server 'shard-0' at .* has ended, and its shards of {units} of this run are lost: delete the run"


def test_server_killed_between_declarations_is_reported(cluster: shardwell.LocalCluster) -> None:
    with join(cluster) as session:
        model = build_model()
        shardwell.fully_shard(model[0], session, name="first")
        cluster.shards[0].kill()
        started = time.monotonic()
        with pytest.raises(ConflictError, match=lost("unit 'first'")):
            shardwell.fully_shard(model, session, name="rest")
        assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("transports", ["shm", "socket", "grpc"])
def test_server_killed_before_the_first_step_is_reported(cluster: shardwell.LocalCluster, transports: str) -> None:
    with join(cluster, transports) as session:
        model = build_model()
        shardwell.fully_shard(model, session, name="all")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
        cluster.shards[0].kill()
        started = time.monotonic()
        with pytest.raises(ConflictError, match=lost("unit 'all'")):
            model(torch.ones(3, 17)).sum().backward()
            optimizer.step()
        assert time.monotonic() - started < LIMIT_S
