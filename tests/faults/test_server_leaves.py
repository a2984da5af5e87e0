"""Fault tests of units without values: they are placed again after a server stops, and after a coordinator restarts.

A server that stops afterwards, and whose shards no other server takes, keeps them for its next process.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
import torch

import shardwell
from shardwell.data_plane.shard import RemoteUnit
from shardwell.module.parameter_store import InitialValues
from shardwell.store.run_units import UnitDeclarations
from tests.support.cluster import build_model


def test_unit_is_placed_again_after_a_server_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=5.0) as cluster:
        initialize, stopped = UnitDeclarations._initialize, []

        def stop_a_server_first(self: UnitDeclarations, unit: RemoteUnit, values: InitialValues, epoch: int) -> None:
            if not stopped:
                stopped.append([shard.server.address for shard in unit.shards])
                cluster.shards[0].stop(20.0)
            initialize(self, unit, values, epoch)

        monkeypatch.setattr(UnitDeclarations, "_initialize", stop_a_server_first)
        with shardwell.join(
            cluster.address,
            run=uuid.uuid4().hex,
            transfers=shardwell.TransferOptions(transports="grpc"),
            waits=shardwell.WaitOptions(wait_limit_s=60),
        ) as session:
            model = build_model()
            shardwell.fully_shard(model, session, name="all")
            optimizer = shardwell.optim.SGD(model.parameters(), lr=0.01)
            numbers = []
            for step in session.steps(2):
                numbers.append(step.number)
                if step.number == 1 and len(stopped) == 1:
                    assert cluster.shards[0].address in stopped[0]
                    stopped.append([cluster.shards[1].address])
                    cluster.shards[1].stop(20.0)
                    cluster.shards[1].restart(time.monotonic() + 60.0)  # it takes up what the stop has left
                for x in step.batches(lambda step, rank: torch.ones(3, 17)):
                    model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert set(numbers) == {0, 1} and stopped[1:] == [[cluster.shards[1].address]]


def test_initial_values_are_sent_again_when_a_restarted_coordinator_places_the_unit_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=5.0) as cluster:
        initialize, uploads = UnitDeclarations._initialize, list[tuple[list[str], int]]()

        def restart_first(self: UnitDeclarations, unit: RemoteUnit, values: InitialValues, lease: Any) -> None:
            uploads.append(([shard.server.address for shard in unit.shards], lease.epoch))
            if len(uploads) == 1:
                cluster.restart_coordinator()
                self._declare(unit.layout, 0)  # as another trainer does
            initialize(self, unit, values, lease)

        monkeypatch.setattr(UnitDeclarations, "_initialize", restart_first)
        with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
            model = build_model()
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            shardwell.fully_shard(model, session, name="all")
            (servers, former), (again, epoch) = uploads
            assert sorted(again) == sorted(servers) and epoch > former
            saved = shardwell.full_state_dict(model)
            assert all(torch.equal(saved[name], value) for name, value in expected.items())
