"""Fault tests of shards that get other servers: training goes on at the new owners, over every transport, to the same
bits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire import fault_points
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import join_options, wait_in_sync
from tests.support.reference import sha256

STEPS, LOST_AT = 6, 2

Disturb = Callable[[], None]


@pytest.fixture
def cluster() -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=2.0) as running:
        yield running


class Net(nn.Module):
    """Has dropout, batch statistics, and a hook in the middle of its backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.last = nn.Linear(70, 110), nn.BatchNorm1d(110), nn.Linear(110, 30)
        self.on_backward: Disturb | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        if (hook := self.on_backward) is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: hook())
        loss: torch.Tensor = self.last(hidden).square().mean()
        return loss


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(9, 70, generator=torch.Generator().manual_seed(100 * step + rank))


def call(address: str, rpc_name: str, request: Any) -> Any:
    with closing(CoordinatorClient(address)) as client:
        return client.call(rpc_name, request, timeout_s=20.0)


def train(
    cluster: shardwell.LocalCluster,
    at: str,
    disturb: Callable[[shardwell.LocalCluster, str], None],
    *,
    backups: int = 1,
    **options: Any,
) -> str:
    """Trains two ranks in this process and disturbs step ``LOST_AT``; returns the hash of weights and buffers."""
    run = uuid.uuid4().hex
    pending = [disturb]

    def once(*_: Any) -> None:
        if pending and session.step == LOST_AT:
            pending.pop()(cluster, run)

    with ExitStack() as stack:
        world = shardwell.World(dp=2)
        session = stack.enter_context(
            shardwell.join(
                cluster.address, run=run, world=world, min_trainers=1, **join_options(wait_limit_s=60, **options)
            )
        )
        model = Net()
        shardwell.fully_shard(model.first, session, name="first")
        shardwell.fully_shard(model, session, name="rest")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
        if backups:
            call(cluster.address, "SetBackups", coordinator_pb2.SetBackupsRequest(run=run, backups=backups))
        if at.startswith("client."):
            stack.enter_context(fault_points.armed(at, once, nth=LOST_AT + 1))
        for step in session.steps(STEPS):
            if backups and pending and step.number == LOST_AT:
                wait_in_sync(cluster.address, run)
            if at == "before batches":
                once()
            for number, x in enumerate(step.batches(batch)):
                model.on_backward = once if at == f"backward {number}" else None
                model(x).backward()
            if at == "after batches":
                once()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert session.step == STEPS and not pending
        return sha256({**shardwell.full_state_dict(model), **dict(model.named_buffers())})


@pytest.fixture(scope="module")
def undisturbed(cluster_of_one: shardwell.LocalCluster) -> str:
    return train(cluster_of_one, "before batches", lambda *_: None, backups=0)


def kill_first(cluster: shardwell.LocalCluster, run: str) -> None:
    cluster.shards[0].kill()


@pytest.mark.parametrize(
    "transports, at",
    [
        ("shm", "before batches"),
        ("shm", "backward 1"),
        ("shm", "client.commit.before"),
        ("socket", "backward 0"),
        ("socket", "after batches"),
        ("grpc", "backward 1"),
        ("grpc", "client.commit.before"),
    ],
)
def test_killed_primary_is_replaced_by_its_backup(
    cluster: shardwell.LocalCluster, undisturbed: str, transports: str, at: str
) -> None:
    assert train(cluster, at, kill_first, transports=transports) == undisturbed
