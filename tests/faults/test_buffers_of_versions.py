"""Each version has the buffers of its step, although a server applies updates late and a trainer is ahead of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shardwell
from shardwell_wire import fault_points
from tests.support.background_training import BackgroundTraining

STEPS, LATE_S = 8, 0.1


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(40, 40), nn.BatchNorm1d(40))


class Training(BackgroundTraining):
    model, units, width = Model, {nn.Linear}, 40


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[shardwell.LocalCluster]:
    """Yields a cluster of three servers. The server that gets the buffers applies each update late."""
    faults = [
        fault_points.Fault(
            point="server.update.before", action="delay", nth=nth, where={"server": "shard-2"}, delay_s=LATE_S
        )
        for nth in range(1, 4 * STEPS)
    ]
    for name, value in fault_points.environment(*faults).items():
        monkeypatch.setenv(name, value)
    with shardwell.LocalCluster(num_shards=3, min_shard_bytes=1 << 20) as made:
        monkeypatch.delenv(fault_points.VARIABLE)
        yield made


def test_a_trainer_does_not_change_the_buffers_of_the_step_that_is_committed(cluster: shardwell.LocalCluster) -> None:
    """It does not gather buffers, so it pushes those of the next step before the server has applied the last one."""
    training = Training(cluster.address, keep_versions=STEPS)
    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        training.wait_for(STEPS)
        newest = training.pause()
        with reader.pin(newest) as pinned:
            owners = {name: {shard.server_id for shard in unit.shards} for name, unit in pinned.units.items()}
        late = owners.pop("buffers:0")
        others = set().union(*owners.values())
        assert late == {"shard-2"} and "shard-2" not in others, "otherwise the trainer waits for the server"
        for version in range(newest - STEPS + 1, newest + 1):
            _, values = reader.read(version)
            expected = training.states[version]
            assert not [name for name in values if not torch.equal(values[name], expected[name])], version
        training.resume()
