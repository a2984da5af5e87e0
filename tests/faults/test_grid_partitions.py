"""Trainers of a grid die while they update optimizer partitions: the step is committed with the same bits."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

import shardwell
from tests.faults.test_lost_replica_member import LEASE_S, STEPS, Grid, state_of
from tests.support.cluster import cluster_fixture

AT_STEP = 2
OPTIMIZER = ("--client-side", "Adam")
World = tuple[int, int, int]


cluster = cluster_fixture(num_shards=2, lease_s=LEASE_S)


@pytest.fixture(scope="module")
def undisturbed(cluster: shardwell.LocalCluster) -> dict[World, list[dict[str, Any]]]:
    """The final state of every rank by world, without losses."""
    states = {}
    for world in ((2, 1, 2), (1, 2, 1)):
        with ExitStack() as stack:
            grid = Grid(cluster, stack, world)
            trainers = [grid.start(rank, *OPTIMIZER) for rank in range(world[0] * world[1] * world[2])]
            states[world] = [state_of(trainer.finish()) for trainer in trainers]
        assert len({state["sha256"] for state in states[world]}) == 1
    return states


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_another_replica_updates_the_partitions_of_a_lost_one(
    cluster: shardwell.LocalCluster, undisturbed: dict[World, list[dict[str, Any]]], lost_rank: int
) -> None:
    with ExitStack() as stack:
        grid = Grid(cluster, stack, (2, 1, 2))
        lost = grid.start(lost_rank, *OPTIMIZER, "--kill-in-update", AT_STEP)
        others = [grid.start(rank, *OPTIMIZER) for rank in range(4) if rank != lost_rank]
        assert lost.finish()["returncode"] == -9
        survivor, *helpers = others
        ended = survivor.finish()
        results = [helper.finish() for helper in helpers]
    assert ended["returncode"] == 1 and "ReplicaLostError" in ended["stderr"], ended
    assert [state_of(result) for result in results] == undisturbed[2, 1, 2][2:]
    # The step was committed without a gradient computed again: the helpers computed the later items of both replicas.
    assert [len(result["losses"]) for result in results] == [STEPS + STEPS - AT_STEP - 1] * 2, results


def test_only_replica_goes_on_after_a_loss_in_the_update(
    cluster: shardwell.LocalCluster, undisturbed: dict[World, list[dict[str, Any]]]
) -> None:
    with ExitStack() as stack:
        grid = Grid(cluster, stack, (1, 2, 1))
        survivor = grid.start(0, *OPTIMIZER, "--in-process")
        lost = grid.start(1, *OPTIMIZER, "--kill-in-update", AT_STEP)
        assert lost.finish()["returncode"] == -9
        results = [trainer.finish() for trainer in (survivor, grid.start(1, *OPTIMIZER))]
    assert [state_of(result) for result in results] == undisturbed[1, 2, 1]
    assert [result["state"]["models"] for result in results] == [2, 1]
