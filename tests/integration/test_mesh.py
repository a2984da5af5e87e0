"""``session.device_mesh()``: a torch.distributed mesh over the run's ranks, in the run's order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

import pytest

import shardwell
from tests.support.processes import ROOT


@pytest.mark.parametrize("order", ["dp,tp,pp", "pp,tp,dp"])
def test_mesh_groups_equal_the_groups_of_the_world(cluster: shardwell.LocalCluster, order: str) -> None:
    world = shardwell.World(2, 2, 1, tuple(order.split(",")))
    command = [
        sys.executable,
        "-m",
        "tests.support.mesh_member",
        cluster.address,
        uuid.uuid4().hex,
        "2",
        "2",
        "1",
        order,
    ]
    members = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(world.size)
    ]
    try:
        outputs = [member.communicate(timeout=90) for member in members]
    finally:
        for member in members:
            if member.poll() is None:
                member.kill()
                member.communicate()
    assert [member.returncode for member in members] == [0] * world.size, outputs
    found = {said["rank"]: said for said in (json.loads(output) for output, _ in outputs)}
    assert sorted(found) == list(range(world.size))
    for rank, said in found.items():
        at = world.coordinates(rank)
        assert said["place"] == [at.dp_rank, at.tp_rank, at.pp_rank]
        assert said["axes"] == list(world.order)
        assert said["sums"] == {axis: float(sum(world.group(rank, axis))) for axis in world.order}


def test_mesh_requires_one_trainer_per_rank(cluster: shardwell.LocalCluster) -> None:
    with (
        shardwell.join(cluster.address, run=uuid.uuid4().hex, world=shardwell.World(dp=2), min_trainers=1) as session,
        pytest.raises(shardwell.UsageError, match="plays 2 of World"),
    ):
        session.device_mesh()
