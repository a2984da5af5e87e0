"""The process group of a replica: it is ended through its backend, and its store answers NCCL's checks by itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Work, _create_work_from_future
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d
from torch.futures import Future

from shardwell.grid import process_group, replica
from shardwell.grid.process_group import ReplicaProcessGroup
from shardwell.grid.replica import ReplicaGroup, ReplicaMembers
from shardwell.grid.replica_store import ReplicaStore
from shardwell.grid.torchrun_rendezvous import TorchrunStore
from shardwell.membership.membership import ReplicaEpoch
from shardwell_wire.errors import DeadlineError, ReplicaLostError, UsageError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2

LIMIT_S = 20.0


class Backend(dist.ProcessGroup):
    """A group whose collectives end as those of NCCL do: a lost trainer makes them wait until the group is aborted, and
    they end without an error and without a result."""

    groups: ClassVar[list[Backend]] = []

    def __init__(self, store: object, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.waits, self.ends, self.calls = threading.Event(), threading.Event(), list[str]()
        self.groups.append(self)

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> Work:
        self.calls.append("allreduce")
        self.waits.set()
        assert self.ends.wait(LIMIT_S), "nobody has aborted the group"
        done: Future[list[torch.Tensor]] = Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    def abort(self) -> None:
        self.calls.append("abort")
        self.ends.set()

    def shutdown(self) -> None:
        assert not self.waits.is_set() or self.ends.is_set(), "shutdown would wait for the collective"
        self.calls.append("shutdown")


dist.Backend.register_backend("stuck", Backend, devices=["cpu"])


class FakeMembership:
    """A member of the first of two replicas, which computes a work item."""

    world, trainer, computes_item = World(dp=2, tp=2), "a", True
    cp_rank = pp_rank = 0

    def __init__(self) -> None:
        self.replica_epoch = ReplicaEpoch()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaGroup]:
    Backend.groups.clear()
    membership: Any = FakeMembership()
    group = ReplicaGroup(membership, wait_limit_s=LIMIT_S)
    members = ReplicaMembers(dp_rank=0, epoch=3, rank=0, missing=())
    monkeypatch.setattr(group, "_members", lambda **_: members)
    group.mesh("cpu", "stuck")
    yield group
    group.close(lost=True)
    assert not dist.is_initialized()


ITEM = coordinator_pb2.WorkItem(dp_rank=0, attempt=0, replica_epoch=3)


def test_void_epoch_aborts_the_groups_and_their_results_do_not_count(group: ReplicaGroup) -> None:
    world, *axes = Backend.groups
    with ThreadPoolExecutor(1) as threads:  # the training thread waits for a trainer that was lost
        waiting = threads.submit(group.require_same_item, ITEM)
        assert world.waits.wait(LIMIT_S)
        group._membership.replica_epoch.announce(4)  # the membership's thread
        with pytest.raises(ReplicaLostError, match=r"replica 0 was lost or replaced.*epoch 3, now 4"):
            waiting.result(LIMIT_S)
    with pytest.raises(ReplicaLostError, match="epoch 3, now 4"):
        group.require_results()
    group.close()
    group.require_results()
    assert world.calls == ["allreduce", "abort", "shutdown"], "never shut down before it is aborted"
    assert axes and all(each.calls == ["abort", "shutdown"] for each in axes)


def test_group_is_destroyed_without_abort_if_no_trainer_is_lost(group: ReplicaGroup) -> None:
    world = Backend.groups[0]
    group.require_results()
    group.close()
    assert world.calls == ["shutdown"]


def test_group_stays_after_the_item(group: ReplicaGroup) -> None:
    world = Backend.groups[0]
    group._membership.computes_item = False  # type: ignore[misc]
    group._membership.replica_epoch.announce(4)
    assert world.calls == [], "trainers may leave after the last step, while others use the group"
    group.close()
    assert world.calls == ["abort", "shutdown"]


LEFT = "trainer 'b' (logical rank 1) has left with ValueError: bad batch"


def test_error_of_a_collective_names_the_error_with_which_another_trainer_has_left(group: ReplicaGroup) -> None:
    epoch = group._membership.replica_epoch
    with ThreadPoolExecutor(1) as threads:  # the collective fails first
        failed = threads.submit(group.lost_error, RuntimeError("gloo: connection closed by peer"))
        epoch.announce(4, LEFT)
        assert str(failed.result(LIMIT_S)).startswith(LEFT)


def test_error_of_a_collective_tells_the_cause_if_the_coordinator_tells_none(
    group: ReplicaGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_NEWS_LIMIT_S", 0.01)
    text = str(group.lost_error(RuntimeError("gloo: timed out\nstack")))
    assert text.startswith("a trainer of this replica was lost, or did not answer") and text.endswith("gloo: timed out")


def test_error_of_a_collective_names_the_trainer_that_is_silent(
    group: ReplicaGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_NEWS_LIMIT_S", 0.01)
    monkeypatch.setattr(group, "_members", lambda **_: ReplicaMembers(0, 3, 0, missing=("b",)))
    text = str(group.lost_error(RuntimeError("gloo: timed out\nstack")))
    assert text.startswith("trainer 'b' of this replica sent nothing for longer than a lease"), text
    assert "shardwell launch --restart" in text and text.endswith("gloo: timed out")


@pytest.mark.parametrize("comes_back", [True, False])
def test_trainer_waits_a_moment_for_the_successor_of_one_that_has_left_with_an_error(
    group: ReplicaGroup, monkeypatch: pytest.MonkeyPatch, *, comes_back: bool
) -> None:
    calls = []

    def members(**_: object) -> ReplicaMembers:
        calls.append(1)
        missing = not comes_back or len(calls) < 3
        return ReplicaMembers(0, 4, 0, missing=("b",) * missing, errors=(LEFT,) * missing)

    monkeypatch.setattr(group, "_members", members)
    monkeypatch.setattr(replica, "SUCCESSOR_LIMIT_S", LIMIT_S if comes_back else 0.2)
    group._membership.replica_epoch.announce(4, LEFT)
    if comes_back:
        group.wait_for_successors()
        assert len(calls) == 3
    else:
        with pytest.raises(
            ReplicaLostError, match=r"^trainer 'b' \(logical rank 1\) has left with ValueError: bad batch\."
        ):
            group.wait_for_successors()


def test_trainer_does_not_wait_for_the_successor_of_a_lost_one(
    group: ReplicaGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_members", lambda **_: pytest.fail("not asked"))
    group._membership.replica_epoch.announce(4)
    group.wait_for_successors()  # the replica waits for it when it is formed again


def test_group_without_the_other_trainers_computes_nothing(
    group: ReplicaGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = ReplicaMembers(0, 4, 0, missing=("b",), ended=True)
    monkeypatch.setattr(group, "_members", lambda: members)
    monkeypatch.setattr(group, "_wait_limit_s", 0.0)
    with pytest.raises(DeadlineError, match=r"\['b'\] are gone and not replaced"):
        group.mesh("cpu", "stuck")
    group.may_be_alone = True
    mesh = group.mesh("cpu", "stuck")
    assert tuple(mesh.shape) == (2, 1) and group.is_alone
    assert group.mesh("cpu", "stuck") is mesh
    one = torch.ones(1)
    for use in (
        group.require_valid,
        partial(group.require_same_item, ITEM),
        partial(dist.all_reduce, one),
        partial(dist.send, one, 1),
        partial(dist.recv, one, 1),
        partial(dist.broadcast, one, 0),
        partial(dist.all_gather, [one, one], one),
        partial(dist.barrier, mesh["tp"].get_group()),
        partial(funcol.all_reduce, one, "sum", mesh["tp"]),
    ):
        with pytest.raises(ReplicaLostError, match="other trainers of this replica have ended their training"):
            use()
    monkeypatch.setattr(group, "_members", lambda: ReplicaMembers(0, 5, 0, missing=()))
    assert tuple(group.mesh("cpu", "stuck").shape) == (2, 1) and not group.is_alone
    group.require_valid()


@pytest.mark.parametrize(("device_type", "backend"), [("cpu", "nccl"), ("cpu", "none")])
def test_backend_must_serve_the_device_type(device_type: str, backend: str) -> None:
    with pytest.raises(
        UsageError, match=rf"backend '{backend}' does not serve device_type='cpu': choose one of 'gloo'"
    ):
        replica.check_backend(device_type, backend)


def test_backend_follows_from_the_device_type() -> None:
    choices = [replica.check_backend(*each) for each in (("cpu", None), ("cuda", None), ("cuda", "gloo"))]
    assert choices == ["gloo", "nccl", "gloo"]


@pytest.mark.parametrize(("setting", "expected"), [(None, "0"), ("1", "1")])
def test_nccl_leaves_failed_collectives_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: str
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, setting or "")
    if setting is None:
        monkeypatch.delenv(name)
    found = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.append(os.environ.get(name)))
    monkeypatch.setattr(process_group, "DeviceMesh", lambda *_, **__: None)
    ReplicaProcessGroup("nccl", "cuda", HashStore(), rank=0, shape={"tp": 1, "pp": 2}, timeout_s=1.0)
    assert found == [expected]


class NoRpcs:
    trainer = "a"

    def context(self, step: int) -> Any:
        raise AssertionError("the store asks the coordinator")


def test_store_answers_the_checks_of_nccl_without_an_rpc() -> None:
    membership: Any = NoRpcs()
    store = ReplicaStore(membership, 3)
    prefixed = PrefixStore("default_pg", PrefixStore("cuda", store))
    for each in (store, prefixed):
        assert each.check(["exception_dump"]) is False
        each.set("exception_dump", "rank 1")
        assert each.check(["exception_dump"]) is True
        assert each.get("exception_dump") == b"rank 1"
    with pytest.raises(AssertionError, match="asks the coordinator"):
        store.check(["exception_dump", "other"])


def test_clone_of_a_store_serves_torch_although_nobody_keeps_it() -> None:
    client: Any = None
    store = TorchrunStore(client, "rendezvous")
    values = {"a/key": b"value"}
    store.multi_get = lambda keys: [values[key] for key in keys]  # type: ignore[method-assign]
    assert PrefixStore("a", store).clone().get("key") == b"value"
