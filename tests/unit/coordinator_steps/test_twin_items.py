"""Twins of late work items: who may compute one, and which of two trainers wins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.steps.work import WorkTimes
from shardwell_wire.errors import UnavailableError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer, config, finished_item, harness, run_async
from tests.support.fake_shards import fail_times


async def finish(trainer: Trainer, step: int, *ranks: int, wait_s: float = 0.0, **changes: Any) -> Any:
    """Finishes some items of a trainer that accepts copies. Adds newly leased items to its items."""
    items = [finished_item(trainer.items[rank]) for rank in ranks]
    options = {"accept_work": True, "accept_copies": True, "wait_s": wait_s} | changes
    response = await trainer.rpcs.call(
        "FinishWork", context=trainer.context(step), trainer=trainer.name, items=items, **options
    )
    trainer.items.update({item.global_rank: item for item in response.work.items})
    return response


async def compute(trainer: Trainer, step: int, rank: int, for_s: float = 0.0) -> None:
    """Reports that a trainer computes an item."""
    progress = coordinator_pb2.ItemInProgress(step=step, global_rank=rank, for_s=for_s)
    await trainer.rpcs.call(
        "Heartbeat",
        run=trainer.run,
        run_id=trainer.run_id,
        trainer=trainer.name,
        epoch=trainer.epoch,
        item_in_progress=progress,
    )


async def commit(cluster: Harness, step: int, *trainers: Trainer) -> None:
    """Commits a step in every trainer."""
    for trainer in trainers:
        assert (await trainer.commit(step, wait_s=5)).committed
    await cluster.settle()


async def spare(cluster: Harness, name: str) -> Trainer:
    """Joins a spare."""
    return await cluster.join(name, config=config(World(dp=2), min_trainers=2))


async def practised(cluster: Harness, *names: str) -> list[Trainer]:
    """Returns trainers of a run that has committed two steps, in which every item took 0.1 s. The third is a spare."""
    trainers = await cluster.team_with_unit(*names[:2])
    trainers += [await spare(cluster, name) for name in names[2:]]
    for step in range(2):
        cluster.clock.now += 0.1
        for trainer in trainers:
            await finish(trainer, step, *trainer.items)
        await commit(cluster, step, *trainers)
    return trainers


def manifest(cluster: Harness, step: int) -> dict[int, int]:
    """Returns the attempt of each rank that the servers were told to use."""
    request = next(each for each in reversed(cluster.shards["s0"].manifests) if each.context.step == step)
    return {rank.dp_rank: rank.attempt for rank in request.ranks}


def test_item_is_late_after_twice_the_median_and_a_margin() -> None:
    times = WorkTimes()
    for seconds in (1.0, 2.0):
        times.add(seconds)
    assert times.late_after_s is None
    times.add(30.0)
    assert times.late_after_s == 2 * 2.0 + 0.5


def test_idle_trainer_computes_a_copy_and_the_first_finished_one_counts(tmp_path: Path) -> None:
    async def scenario(copy_wins: bool, directory: Path) -> None:
        async with harness(directory) as cluster:
            a, b = await practised(cluster, "a", "b")
            await compute(b, 2, 1)
            response = await finish(a, 2, 0)
            assert not response.HasField("work")
            cluster.clock.now += 0.65
            assert not (await finish(a, 2, 0)).HasField("work"), "not late yet"
            cluster.clock.now += 0.1
            (copy,) = (await finish(a, 2, 0)).work.items
            assert (copy.global_rank, copy.attempt, copy.copy) == (1, 1, True)
            assert copy.epoch > b.items[1].epoch
            assert cluster.events()[-1][0] == "work_copied"
            (line,) = (await cluster.call("ExplainStall", run="r")).waiting_for
            assert "'b'" in line
            assert list((await finish(a, 2, 0)).work.items) == [copy], "the response may have been lost"
            first, second = (a, b) if copy_wins else (b, a)
            assert (await finish(first, 2, *first.items, wait_s=5)).all_finished
            await commit(cluster, 2, first)
            assert manifest(cluster, 2) == {0: 0, 1: int(copy_wins)}
            assert sorted(first.items) == [0, 1], "the other trainer still computes in vain"
            assert (await finish(second, 2, *second.items)).all_finished
            await commit(cluster, 2, second)
            assert not second.items
            cluster.clock.now += 0.1
            await finish(second, 3)
            await finish(first, 3, 0, 1)
            await commit(cluster, 3, first, second)
            assert sorted(a.items) == [0], "each trainer has its own rank again"
            assert sorted(b.items) == [1]

    run_async(scenario(True, tmp_path / "copy"))
    run_async(scenario(False, tmp_path / "original"))


async def test_waiting_trainer_is_woken_when_an_item_becomes_late(cluster: Harness) -> None:
    a, b = await practised(cluster, "a", "b")
    waiting = asyncio.ensure_future(finish(a, 2, 0, wait_s=20))
    await cluster.until(lambda: bool(cluster.state.runs["r"].members.waiting_for_work), "a to wait")
    cluster.clock.now += 0.6
    await compute(b, 2, 1, for_s=0.6)
    await cluster.until(lambda: cluster.state.runs["r"].calls.waking.in_flight, "a timer")
    cluster.clock.now += 0.2  # the timer sleeps for the rest of 0.7 s
    assert [item.copy for item in (await waiting).work.items] == [True]


async def test_time_that_servers_take_to_update_makes_no_item_late(cluster: Harness) -> None:
    a, b = await practised(cluster, "a", "b")
    await finish(a, 2, 0)
    await finish(b, 2, 1)
    cluster.shards["s0"].fail = fail_times("Update", 10**6, UnavailableError("busy"))
    for trainer in (a, b):
        assert (await trainer.commit(2, wait_s=5)).committed
    await compute(b, 3, 1)
    cluster.clock.now += 5.0
    assert not (await finish(a, 3, 0)).HasField("work"), "b waits for the server, as every trainer"
    cluster.shards["s0"].fail = lambda rpc_name, request: None
    await cluster.settle()
    await compute(b, 3, 1, for_s=5.0)
    cluster.clock.now += 0.65
    assert not (await finish(a, 3, 0)).HasField("work"), "not late yet"
    cluster.clock.now += 0.1
    assert [item.copy for item in (await finish(a, 3, 0)).work.items] == [True]


@pytest.mark.parametrize("reason", ["evaluates", "plain loop", "lossy pushes", "few steps"])
async def test_no_copy_of_items_that_are_not_known_to_be_late(cluster: Harness, reason: str) -> None:
    if reason == "few steps":
        a, b = await cluster.team_with_unit("a", "b")
    else:
        a, b = await practised(cluster, "a", "b")
    step = cluster.state.runs["r"].committed_step
    if reason == "plain loop":
        cluster.state.runs["r"].members.by_name["b"].accepts_reassigned_work = False
    if reason != "evaluates":  # between two steps, a trainer relies on the run to wait for it
        await compute(b, step, 1)
    cluster.clock.now += 5
    response = await finish(a, step, 0, accept_copies=reason != "lossy pushes")
    assert not response.HasField("work")


async def test_only_one_item_is_copied_at_a_time(cluster: Harness) -> None:
    a, b, c = await practised(cluster, "a", "b", "c")
    await compute(a, 2, 0)
    await compute(b, 2, 1)
    d = await spare(cluster, "d")
    cluster.clock.now += 5
    assert [item.global_rank for item in (await finish(c, 2)).work.items] == [0]
    assert not (await finish(d, 2)).HasField("work")
    assert not (await finish(c, 2, accept_copies=False)).HasField("work"), "c gives its copy up"
    (copy,) = (await finish(d, 2)).work.items
    assert copy.attempt == 2, "no attempt number is used twice"
    for trainer, ranks in ((a, [0]), (b, [1]), (c, []), (d, [copy.global_rank])):
        assert (await finish(trainer, 2, *ranks, wait_s=5 * (trainer is not a))).all_finished == (trainer is not a)
    await cluster.settle()
    assert manifest(cluster, 2) == {0: 0, 1: 0}


async def test_copy_becomes_the_item_if_its_trainer_is_lost(cluster: Harness) -> None:
    a, b = await practised(cluster, "a", "b")
    await compute(b, 2, 1)
    cluster.clock.now += 1
    (copy,) = (await finish(a, 2, 0)).work.items
    await b.leave()
    await cluster.settle()
    assert cluster.shards["s0"].runs["r"].attempts[1] == copy.attempt, "the former trainer is fenced"
    assert (await finish(a, 2, 0, 1, wait_s=5)).all_finished
    await commit(cluster, 2, a)
    assert manifest(cluster, 2) == {0: 0, 1: copy.attempt}


async def test_lost_copy_is_dropped_and_a_reset_of_the_item_ends_its_copy(cluster: Harness) -> None:
    a, b, c = await practised(cluster, "a", "b", "c")
    await compute(b, 2, 1)
    cluster.clock.now += 1
    assert not (await finish(a, 2, 0, accept_copies=False)).HasField("work")
    (copy,) = (await finish(c, 2)).work.items
    await c.leave()
    (copy,) = (await finish(a, 2, 0)).work.items
    assert copy.attempt == 2
    assert (await b.reset(2, 1)).attempt == 3
    assert not (await finish(a, 2, 0, 1)).all_finished, "the copy has no effect"
    assert (await finish(b, 2, 1, wait_s=5)).all_finished
    await cluster.settle()
    assert manifest(cluster, 2) == {0: 0, 1: 3}


def test_copies_survive_a_coordinator_restart_or_have_no_effect(tmp_path: Path) -> None:
    async def scenario(finished: bool, directory: Path) -> None:
        async with harness(directory) as cluster:
            a, b = await practised(cluster, "a", "b")
            await compute(b, 2, 1)
            cluster.clock.now += 1
            await finish(a, 2, 0)
            if finished:
                assert (await finish(a, 2, 0, 1, wait_s=5)).all_finished
            await cluster.restart()
            for trainer, ranks in ((a, [0, 1]), (b, [1])):
                response = await finish(trainer, 2, *ranks, wait_s=5 if finished or trainer is b else 0)
                assert response.all_finished == (finished or trainer is b)
            await commit(cluster, 2, a, b)
            assert manifest(cluster, 2) == {0: 0, 1: int(finished)}

    run_async(scenario(True, tmp_path / "finished"))
    run_async(scenario(False, tmp_path / "lost"))


async def test_trainer_whose_copy_won_gets_no_work_until_it_is_back(cluster: Harness) -> None:
    a, b, c = await practised(cluster, "a", "b", "c")
    await compute(b, 2, 1)
    cluster.clock.now += 1
    await finish(a, 2, 0)
    await finish(a, 2, 0, accept_copies=False)
    assert [item.copy for item in (await finish(c, 2)).work.items] == [True]
    await finish(c, 2, 1, wait_s=5)
    await commit(cluster, 2, a, c)
    assert sorted(c.items) == [1], "b is still busy with step 2"
    late = await b.commit(2)
    assert late.committed
    assert list(late.next_work.items) == []
    cluster.clock.now += 0.1
    for trainer in (b, a, c):
        await finish(trainer, 3, *trainer.items)
    await commit(cluster, 3, a, c, b)
    assert sorted(b.items) == [1], "b is back"
    assert sorted(c.items) == []
