"""Batches of small fetches that a shard server does not finish: the trainer fetches again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwell
from shardwell_wire import fault_points
from tests.support.cluster import join_options
from tests.support.reference import sha256

STEPS, UNITS = 6, 8
DATA = [torch.randn(16, generator=torch.Generator().manual_seed(index)) for index in range(16)]


def train(cluster: shardwell.LocalCluster, transports: str) -> str:
    """Trains units that are all fetched in batches; returns the hash of the weights."""
    with shardwell.join(cluster.address, run="r", **join_options(transports=transports)) as session:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(UNITS)))
        for index, layer in enumerate(model):
            shardwell.fully_shard(layer, session, name=f"layer{index}")
        shardwell.fully_shard(model, session, name="rest")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
        for step in session.steps(STEPS):
            for batch in step.batches(DATA, batch_size=4):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sha256(shardwell.full_state_dict(model))


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Returns the hash of the weights of a run without faults."""
    with shardwell.LocalCluster(num_shards=1) as cluster:
        return train(cluster, "grpc")


@pytest.mark.timeout(170)
@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("transports", ["socket", "grpc"])
def test_a_batch_that_ends_in_the_middle_changes_no_bit(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str, action: str
) -> None:
    """With sockets, the units have all their bytes then, and the end of the stream is missing."""
    once = tmp_path / "happened"
    fault = fault_points.Fault(
        point="server.gather.middle",
        action=action,
        nth=4,
        where={"response": "GatherBatchResponse"},
        once=str(once),
    )
    for name, value in fault_points.environment(fault).items():
        monkeypatch.setenv(name, value)
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=512) as cluster:
        assert train(cluster, transports) == undisturbed
        assert once.exists()
