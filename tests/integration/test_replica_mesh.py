"""``session.replica_mesh()``: one process group per replica, formed again when its trainers change."""

from __future__ import annotations

import gc
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardwell
from shardwell_wire.errors import StaleEpochError
from shardwell_wire.v1 import coordinator_pb2
from tests.support import gloo
from tests.support.cluster import wait_until
from tests.support.processes import run_ranks

WORLD = shardwell.World(dp=2, tp=1, pp=2)


def join(address: str, run: str, rank: int) -> shardwell.Session:
    return shardwell.join(
        address,
        run=run,
        world=WORLD,
        global_rank=rank,
        host="no address",
        waits=shardwell.WaitOptions(wait_limit_s=60),
    )


def check(session: shardwell.Session) -> None:
    mesh = session.replica_mesh()
    assert mesh.mesh_dim_names == ("tp", "pp") and tuple(mesh.shape) == (1, 2)
    assert dist.get_world_size() == 2
    assert session.replica_mesh() is mesh
    assert session.global_rank is not None
    total = torch.tensor(float(session.global_rank))
    dist.all_reduce(total, group=mesh["pp"].get_group())
    assert total.item() == sum(WORLD.group(session.global_rank, "pp")), "only the own replica adds"
    assert mesh.get_local_rank("pp") == session.pp_rank
    replica = session._replica
    replica.require_same_item(coordinator_pb2.WorkItem(dp_rank=1, attempt=2))
    with pytest.raises(shardwell.ReplicaLostError, match=r"do not start the same work item: dp rank 1, attempt \d"):
        replica.require_same_item(coordinator_pb2.WorkItem(dp_rank=1, attempt=session.pp_rank))


def check_store(session: shardwell.Session) -> None:
    """Torch keeps only the C++ half of the group's store, and makes other groups through it later."""
    gc.collect()
    store, rank = dist.distributed_c10d._get_default_store(), session.pp_rank or 0
    store.set(f"key{rank}", f"value {rank}")
    store.wait([f"key{other}" for other in range(2)])
    assert store.get(f"key{1 - rank}") == f"value {1 - rank}".encode()
    assert store.check(["key0", "key1"]) and not store.check(["none"])
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    other = DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("cp", "ep"))
    dist.all_reduce(total, group=other["cp"].get_group())
    assert total.item() == 2.0


class EndedStore(dist.Store):
    """A store of a replica that has lost a trainer."""

    def set(self, key: str, value: str) -> None:
        raise StaleEpochError("the epoch has ended")


def worker(rank: int, address: str, run: str, folder: str) -> None:
    session = join(address, run, rank)
    if rank == 3:  # torch has numbered a group whose creation failed; the group of the replica needs the same name
        with pytest.raises(StaleEpochError):
            dist.init_process_group("gloo", store=EndedStore(), rank=1, world_size=2)
    check(session)
    check_store(session)
    left = Path(folder, "left")
    if rank == 3:
        session.close()
        assert not dist.is_initialized()
        left.touch()
        session = join(address, run, rank)
        session.replica_mesh()
    elif rank == 2:
        before = session.replica_mesh()
        wait_until(left.exists, "the other trainer leaves", timeout_s=60)
        assert session.replica_mesh() is not before
    check(session)
    check_store(session)
    dist.barrier()
    session.close()
    assert not dist.is_initialized()
    gloo.leave()


def test_replicas_meet_by_themselves_and_again(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    run_ranks(worker, cluster.address, uuid.uuid4().hex, str(tmp_path), count=WORLD.size)


def alone_worker(_: int, address: str, run: str) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(dp=2), min_trainers=1, host="here") as session:
        assert tuple(session.replica_mesh().shape) == (1, 1) and dist.get_world_size() == 1
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        session.close()
        assert dist.is_initialized(), "a group that the session has not made stays"
    with (
        shardwell.join(address, run=f"{run}-other", host="here") as session,
        pytest.raises(shardwell.UsageError, match=r"torch.distributed is initialised already"),
    ):
        session.replica_mesh()
    gloo.leave()


def test_replica_of_one_trainer_has_a_mesh_and_no_other_default_group(cluster: shardwell.LocalCluster) -> None:
    run_ranks(alone_worker, cluster.address, uuid.uuid4().hex, count=1)
