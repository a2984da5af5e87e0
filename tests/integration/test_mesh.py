"""``session.device_mesh()``: a torch.distributed mesh over the run's ranks, in the run's order."""

from __future__ import annotations

import uuid

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.grid.replica import reachable_address
from tests.support import gloo
from tests.support.processes import run_ranks


def worker(_: int, address: str, run: str, order: str, host: str) -> None:
    world = shardwell.World(2, 2, 1, tuple(order.split(",")))
    waits = shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, host=host, waits=waits) as session:
        mesh, rank = session.device_mesh(), session.global_rank
        assert rank is not None
        at = world.coordinates(rank)
        assert (session.dp_rank, session.tp_rank, session.pp_rank) == (at.dp_rank, at.tp_rank, at.pp_rank)
        assert mesh.mesh_dim_names == world.order
        for axis in world.order:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=mesh.get_group(axis))
            assert total.item() == sum(world.group(rank, axis)), axis
        ranks = torch.tensor(1 << rank)
        dist.all_reduce(ranks)
        assert ranks.item() == (1 << world.size) - 1, "each rank is there once"
    gloo.leave()


@pytest.mark.parametrize(("order", "host"), [("dp,tp,pp", "127.0.0.1"), ("pp,tp,dp", "a label")])
def test_mesh_groups_equal_the_groups_of_the_world(cluster: shardwell.LocalCluster, order: str, host: str) -> None:
    run_ranks(worker, cluster.address, uuid.uuid4().hex, order, host, count=4)


def replica_worker(rank: int, address: str, run: str) -> None:
    waits = shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=shardwell.World(dp=2), global_rank=rank, waits=waits) as session:
        session.replica_mesh()
        with pytest.raises(
            shardwell.UsageError, match=r"with 1 processes.*needs a default process group of all 2 logical"
        ):
            session.device_mesh()
    gloo.leave()


def test_mesh_of_the_run_needs_another_group_than_that_of_a_replica(cluster: shardwell.LocalCluster) -> None:
    run_ranks(replica_worker, cluster.address, uuid.uuid4().hex)


def test_address_towards_the_coordinator_stands_for_a_host_that_is_a_label() -> None:
    assert reachable_address("a label", "127.0.0.1:50051") == "127.0.0.1"
    assert reachable_address("127.0.0.1", "192.0.2.1:1") == "127.0.0.1"
    with pytest.raises(
        shardwell.UsageError, match=r"host 'a label' is no address of this machine.*pass join\(host=ADDRESS\)"
    ):
        reachable_address("a label", "no port")


def test_mesh_requires_one_trainer_per_rank(cluster: shardwell.LocalCluster) -> None:
    with (
        shardwell.join(cluster.address, run=uuid.uuid4().hex, world=shardwell.World(dp=2), min_trainers=1) as session,
        pytest.raises(shardwell.UsageError, match="plays 2 of World"),
    ):
        session.device_mesh()
