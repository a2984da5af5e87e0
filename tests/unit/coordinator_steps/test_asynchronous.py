"""Runs whose work items are committed one by one, on fake shard servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_wire.errors import (
    InvalidRequestError,
    RunMismatchError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
)
from shardwell_wire.model.topology import ASYNCHRONOUS, BOUNDED_STALENESS, SYNCHRONOUS, Consistency, World
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.support.asynchronous import commits, take_item, team
from tests.support.coordinator import Harness, buffers, config, optimizer


def updates(cluster: Harness) -> list[shard_pb2.UpdateRequest]:
    return cluster.shards["s0"].runs["r"].updates


def rank_versions(update: shard_pb2.UpdateRequest) -> dict[int, int]:
    return {each.dp_rank: each.version for each in update.rank_versions}


async def test_each_item_is_committed_by_itself(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b")
    first = await take_item(a)
    assert (first.version, first.staleness) == (1, 0)
    assert [(item.dp_rank, item.number) for item in first.next_work.items] == [(0, 1)]
    assert (first.next_work.step, first.next_work.position) == (1, 1)
    assert (await take_item(a)).version == 2
    late = await take_item(b)
    assert (late.version, late.staleness) == (3, 2)
    assert (late.next_work.step, late.next_work.position) == (3, 1)
    assert commits(cluster) == [(0, 0, 0, 0), (1, 0, 1, 1), (2, 1, 0, 0)]
    await cluster.settle()
    assert [update.context.step for update in updates(cluster)] == [0, 1, 2]
    assert [rank_versions(update) for update in updates(cluster)] == [{0: 1, 1: 0}, {0: 2, 1: 0}, {0: 2, 1: 3}]
    manifests = cluster.shards["s0"].manifests
    assert [[rank.dp_rank for rank in manifest.ranks] for manifest in manifests] == [[0], [0], [1]]
    assert {manifest.dp for manifest in manifests} == {1}


async def test_no_item_is_prepared_after_a_commit_of_unknown_outcome(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b")
    for trainer in (a, b):
        await trainer.finish(0, wait_s=5)
    manifests, store = cluster.shards["s0"].manifests, cluster.state.storage._store
    write = store.write

    def fail(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        store.lost = UnavailableError("its outcome cannot be determined")
        raise store.lost

    store.write = fail  # type: ignore[method-assign]
    for trainer in (a, b):
        with pytest.raises(UnavailableError, match="cannot be determined"):
            await trainer.commit(0, wait_s=5)
    assert [[rank.dp_rank for rank in manifest.ranks] for manifest in manifests] == [[0]]
    store.lost, store.write = None, write  # type: ignore[method-assign]


async def test_a_repeated_commit_gets_the_same_answer(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b")
    first = await take_item(a)
    await take_item(b)
    repeated = await a.commit(0)
    assert (repeated.version, repeated.staleness, repeated.next_work) == (1, 0, first.next_work)
    assert len(commits(cluster)) == 2
    assert (await a.finish(0, [])).work == first.next_work


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_no_rank_starts_an_item_that_is_too_far_ahead(cluster: Harness, limit: int) -> None:
    a, b = await team(cluster, "a", "b", consistency=BOUNDED_STALENESS(limit))
    for _ in range(limit):
        assert (await take_item(a)).next_work.items
    last = await take_item(a)
    assert not last.next_work.items, "the next item is more than `limit` items ahead of b's"
    assert last.next_work.position == limit + 1
    waiting = await a.finish(a.version, [])
    assert not waiting.HasField("work")
    assert any("rank 1" in line and "'b'" in line for line in waiting.waiting_for), waiting
    assert [item.number for item in (await take_item(b)).next_work.items] == [1]
    started = (await a.finish(a.version, [])).work
    assert [item.number for item in started.items] == [limit + 1]
    assert started.step == limit + 2, "it reads the newest version"


async def test_item_of_a_lost_trainer_is_computed_once_from_the_newest_version(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b", consistency=BOUNDED_STALENESS(1))
    fences: list[shard_pb2.FenceRequest] = []

    def note(rpc_name: str, request: Any) -> None:
        if rpc_name == "Fence":
            fences.append(request)

    cluster.shards["s0"].fail = note
    await take_item(a)
    await take_item(a)
    assert (await b.finish(0, wait_s=5)).all_finished, "b has finished its item, but not proposed it"
    await cluster.pass_time(11, a)
    await cluster.settle()
    (fence,) = fences[-1].ranks
    assert (fence.dp_rank, fence.version) == (1, 2)
    assert fence.attempt > 0
    work = (await a.finish(a.version, [])).work
    (item,) = work.items
    assert (item.dp_rank, item.number, work.step) == (1, 0, 2)
    assert item.attempt == fence.attempt
    with pytest.raises(StaleEpochError):
        await b.commit(0)
    a.items, a.version = {item.global_rank: item}, work.step
    after = await take_item(a)
    assert [record[1:3] for record in commits(cluster)] == [(0, 0), (0, 1), (1, 0)]
    assert [(each.dp_rank, each.number) for each in after.next_work.items] == [(1, 1)], "the slowest rank first"


async def test_a_trainer_that_returns_gets_its_rank_back(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b")
    await take_item(a)
    await b.leave()
    await cluster.settle()
    again = await cluster.join("b", config=config(World(dp=2), min_trainers=2, consistency=ASYNCHRONOUS))
    (item,) = again.joined.work.items
    assert (item.dp_rank, item.number, again.joined.work.step) == (1, 0, 1)
    assert [each.dp_rank for each in (await take_item(a)).next_work.items] == [0]


async def test_a_norm_stays_valid_while_others_commit(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b")
    await a.finish(0)
    norm = await a.prepare(0)
    assert norm.prepared
    await take_item(b)
    response = await a.commit(0, wait_s=5, clip_coefficient=0.5, norm_attempts=norm.attempts)
    assert (response.version, response.staleness) == (2, 1)
    await cluster.settle()
    prepared = [(manifest.context.step, manifest.ranks[0].dp_rank) for manifest in cluster.shards["s0"].manifests]
    assert prepared == [(0, 0), (0, 1), (1, 0)]
    assert [update.clip_coefficient for update in updates(cluster)] == [1.0, 0.5]


async def test_trainers_may_commit_different_hyperparameters(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b")
    for trainer, rate in ((a, 0.1), (b, 0.2)):
        await trainer.finish(0)
        assert (await trainer.commit(0, wait_s=5, optimizer=optimizer(lr=rate))).committed
    await cluster.settle()
    assert [update.optimizer.groups[0].hyperparameters["lr"] for update in updates(cluster)] == [0.1, 0.2]


async def test_a_restarted_coordinator_continues_every_item(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b", consistency=BOUNDED_STALENESS(1))
    await take_item(a)
    second = await take_item(a)
    assert not second.next_work.items
    assert (await b.finish(0, wait_s=5)).all_finished
    await cluster.restart_all()
    await cluster.settle()
    repeated = await a.commit(1)
    assert (repeated.version, repeated.next_work.items) == (2, second.next_work.items)
    assert (await b.finish(0, wait_s=5)).all_finished, "b reports again the item that it finished before"
    response = await b.commit(0, wait_s=5)
    assert (response.version, response.staleness) == (3, 2)
    assert [item.number for item in (await a.finish(2, [])).work.items] == [2]
    assert commits(cluster) == [(0, 0, 0, 0), (1, 0, 1, 1), (2, 1, 0, 0)]


async def test_a_restarted_coordinator_leases_no_item_beyond_the_loop(cluster: Harness) -> None:
    """The new coordinator learns the end of the loop from the first commit."""

    a, _ = await team(cluster, "a", "b", consistency=BOUNDED_STALENESS(5))
    await take_item(a)
    await cluster.restart_all()
    assert (await a.finish(1, wait_s=5)).all_finished
    last = await a.commit(1, wait_s=5, item_limit=2)
    assert (last.committed, last.next_work.position, list(last.next_work.items)) == (True, 2, [])


async def test_a_trainer_that_joins_gets_no_item_beyond_its_loop(cluster: Harness) -> None:
    """Rank 0 has computed the two items that every loop wants. A trainer that joins must not get its next one."""

    a, b = await team(cluster, "a", "b")
    for version in range(2):
        await a.finish(version, wait_s=5)
        assert (await a.commit(version, wait_s=5, item_limit=2)).committed
    await a.leave()

    is_suspended = True

    def refuse(rpc_name: str, _: Any) -> None:
        if is_suspended and rpc_name == "Fence":
            raise UnavailableError("the server is suspended")

    cluster.shards["s0"].fail = refuse
    await b.leave()
    options = {"incarnation": "again", "config": config(World(dp=2), min_trainers=2, consistency=ASYNCHRONOUS)}
    joined = await cluster.try_join("b", **options)
    assert (joined.started, list(joined.work.items)) == (False, []), "its own item is not fenced yet"
    is_suspended = False
    again = await cluster.join("b", **options, wait_s=5)
    assert [(item.dp_rank, item.number) for item in again.joined.work.items] == [(1, 0)]


async def test_an_item_is_committed_once_if_the_run_is_stored_during_the_commit(cluster: Harness) -> None:
    """The coordinator ends after it has stored the run as it was before the commit, and after the commit record."""

    a, _ = await team(cluster, "a", "b")
    run, storage, stored = cluster.state.runs["r"], cluster.state.storage, asyncio.Event()
    save = storage.save_commit

    async def save_run_too(*arguments: Any) -> None:
        await save(*arguments)
        run.changes.touch()
        await cluster.state.save(run)
        stored.set()
        await asyncio.Event().wait()

    await a.finish(0, wait_s=5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage, "save_commit", save_run_too)
        committing = asyncio.create_task(a.commit(0, wait_s=5))
        await stored.wait()
        committing.cancel()
        await cluster.restart()
    for name in cluster.shards:
        await cluster.register(name)
    await cluster.settle()
    repeated = await a.commit(0, wait_s=5)
    assert (repeated.committed, repeated.version, repeated.next_work.position) == (True, 1, 1)
    assert commits(cluster) == [(0, 0, 0, 0)]
    assert [item.number for item in repeated.next_work.items] == [1]


async def test_an_item_whose_trainer_is_lost_while_it_is_recorded_is_committed_once(cluster: Harness) -> None:
    a, b = await team(cluster, "a", "b")
    run, storage = cluster.state.runs["r"], cluster.state.storage
    save, reached, proceed = storage.save_commit, asyncio.Event(), asyncio.Event()

    async def save_later(*arguments: Any) -> None:
        reached.set()
        await proceed.wait()
        await save(*arguments)

    await a.finish(0, wait_s=5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage, "save_commit", save_later)
        committing = asyncio.create_task(a.commit(0, wait_s=5))
        await reached.wait()
        cluster.coordinator.trainers.revoke(run, [run.members.by_name["a"]])
        proceed.set()
        await committing
    await cluster.settle()
    assert commits(cluster) == [(0, 0, 0, 0)]
    await take_item(b)
    assert [(item.dp_rank, item.number) for item in b.items.values()] == [(0, 1)], "a's next item"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reduction_groups": [2, 1]}, "reduction_groups=(2, 1)"),
        ({"world": common_pb2.World(dp=1, tp=2, pp=1)}, "tp=1 and pp=1"),
    ],
)
async def test_settings_that_need_a_synchronous_run_are_named(
    cluster: Harness, fields: dict[str, Any], message: str
) -> None:
    settings = config(World(dp=2), consistency=BOUNDED_STALENESS(2))
    settings.MergeFrom(coordinator_pb2.RunConfig(**fields))
    with pytest.raises(InvalidRequestError, match=r"consistency=BOUNDED_STALENESS\(2\)") as raised:
        await cluster.try_join("a", config=settings)
    assert message in str(raised.value)


async def test_requests_that_need_a_synchronous_run_are_rejected(cluster: Harness) -> None:
    a, _ = await team(cluster, "a", "b")
    await a.finish(0)
    requests = [
        cluster.call("RebalanceRun", run="r"),
        a.declare(buffers("b", "running_mean")),
        a.commit(0, optimizer=optimizer(groups=[-2])),
    ]
    for request in requests:
        with pytest.raises(ShardwellError, match="consistency=ASYNCHRONOUS"):
            await request
    with pytest.raises(RunMismatchError, match="consistency=ASYNCHRONOUS, but this trainer asks for consistency=SYNCH"):
        await cluster.try_join("c", config=config(World(dp=2), min_trainers=2, consistency=SYNCHRONOUS))


@pytest.mark.parametrize("mode", [SYNCHRONOUS, ASYNCHRONOUS, BOUNDED_STALENESS(0), BOUNDED_STALENESS(7)])
def test_modes_are_written_as_they_are_read(mode: Consistency) -> None:
    assert Consistency.parse(str(mode)) == mode
    assert Consistency.from_proto(coordinator_pb2.RunConfig(**mode.to_fields())) == mode


@pytest.mark.parametrize("text", ["", "ASYNC", "BOUNDED_STALENESS", "BOUNDED_STALENESS(-1)", "ASYNCHRONOUS(1)"])
def test_unknown_modes_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="expected SYNCHRONOUS, ASYNCHRONOUS or BOUNDED_STALENESS"):
        Consistency.parse(text)
