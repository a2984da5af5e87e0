"""Trainers with an expired lease continue where they were, unless their work was reassigned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_wire.errors import StaleEpochError
from tests.support.coordinator import Harness
from tests.unit.coordinator_steps.test_partitions import on_trainers


def kinds(cluster: Harness) -> list[str]:
    return [kind for kind, _ in cluster.events()]


async def test_only_trainer_keeps_its_epochs_after_its_lease_expired(cluster: Harness) -> None:
    (a,) = await cluster.team("a")
    await cluster.publish_unit([a])
    await cluster.pass_time(11)
    assert kinds(cluster)[-1] == "lease_expired"
    assert not (await cluster.call("DescribeRun", run="r")).trainers[0].live
    (line,) = (await cluster.call("ExplainStall", run="r")).waiting_for
    assert "its lease expired: the step continues when the trainer sends a request" in line
    before = a.items[0].epoch
    assert (await a.finish(0, wait_s=5)).all_finished
    assert (await a.commit(0, wait_s=5)).committed
    assert a.items[0].epoch == before
    assert kinds(cluster).count("trainer_returned") == 1
    assert all(shard.calls["Fence"] == 0 for shard in cluster.shards.values()), "no trainer was fenced"


async def test_trainer_is_fenced_after_its_work_was_reassigned(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await cluster.pass_time(11, b)
    taking = await b.finish(0, wait_s=5)
    assert [item.global_rank for item in taking.work.items] == [0]
    for call in (a.heartbeat, lambda: a.finish(0), lambda: a.commit(0)):
        with pytest.raises(StaleEpochError, match="its lease expired and its work was reassigned, or it left: join"):
            await call()
    fences = [shard.runs["r"].epochs[0] for shard in cluster.shards.values()]
    assert all(a.items[0].epoch < fence <= b.items[0].epoch for fence in fences)


async def test_work_of_an_expired_trainer_is_leased_to_a_waiting_trainer_at_once(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    waiting = asyncio.create_task(b.finish(0, wait_s=5))
    await asyncio.sleep(0)
    await cluster.pass_time(11)
    assert [item.global_rank for item in (await waiting).work.items] == [0]
    with pytest.raises(StaleEpochError):
        await a.heartbeat()


async def test_trainer_that_rejects_reassigned_work_waits_for_the_expired_one(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await cluster.pass_time(11, b)
    assert not (await b.finish(0, accept_work=False)).all_finished
    await a.finish(0, accept_work=False)
    assert (await b.finish(0, accept_work=False)).all_finished
    await cluster.pass_time(11, b)
    committed = await asyncio.gather(b.commit(0, wait_s=5), return_exceptions=True)
    assert committed[0].committed, "b is the leader now, because a is silent"  # type: ignore[union-attr]
    with pytest.raises(StaleEpochError):
        await a.commit(0)


async def test_expired_trainer_with_finished_work_gets_its_next_work(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    for trainer in (a, b):
        await trainer.finish(0, accept_work=False)
    assert not (await b.commit(0)).committed
    await cluster.pass_time(11, a)
    assert (await a.finish(0, accept_work=False, wait_s=5)).all_finished
    assert (await a.commit(0, wait_s=5)).committed
    assert kinds(cluster).count("trainer_returned") == 0
    assert (await b.commit(0)).committed
    assert list(b.items) == [1]
    assert kinds(cluster).count("trainer_returned") == 1
    for trainer in (a, b):
        await trainer.finish(1, accept_work=False)
    assert (await a.commit(1, wait_s=5)).committed


async def test_partitions_of_an_expired_trainer_are_fenced_before_another_updates_them(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await a.finish(0)
    await b.finish(0)
    await cluster.pass_time(11, a)
    await a.commit(0, optimizer=on_trainers())
    await cluster.settle()
    answer = await a.commit(0, wait_s=5, optimizer=on_trainers())
    work = {at.global_rank: at.epoch for at in answer.partitions}
    assert sorted(work) == [0, 1]
    assert work[1] > b.items[1].epoch
    with pytest.raises(StaleEpochError):
        await b.commit(0, optimizer=on_trainers())


async def test_joining_trainer_replaces_an_expired_one(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await cluster.pass_time(11, b)
    c = await cluster.join("c", wait_s=5)
    assert c.ranks == [0]
    with pytest.raises(StaleEpochError):
        await a.heartbeat()


async def test_fences_of_a_step_do_not_reach_the_next_step(cluster: Harness) -> None:
    """A trainer is lost while the commit record is written. Its attempts mean nothing in the next step."""
    a, b = await cluster.team_with_unit("a", "b")
    await b.reset(0, 1)
    await asyncio.gather(a.finish(0, wait_s=5), b.finish(0, wait_s=5))
    storage, written = cluster.state.storage, asyncio.Event()
    save_commit = storage.save_commit

    async def save_slowly(*arguments: Any) -> None:
        await written.wait()
        await save_commit(*arguments)

    storage.save_commit = save_slowly  # type: ignore[method-assign]
    run = cluster.state.runs["r"]
    committing = asyncio.create_task(a.commit(0, wait_s=5))
    await cluster.until(lambda: run.commits.writing, "the commit record")
    save_run = storage.save_run

    async def save_after_commit(*arguments: Any) -> None:
        written.set()
        await cluster.until(lambda: run.committed_step == 1, "the commit")
        await save_run(*arguments)

    storage.save_run = save_after_commit  # type: ignore[method-assign]
    cluster.coordinator.trainers.leave(run, run.members.by_name["b"])
    assert (await committing).committed
    await cluster.settle()
    attempts = {rank: item.attempt for rank, item in run.work.steps[0].items.items()}
    for shard in cluster.shards.values():
        assert all(attempt <= attempts[rank] for rank, attempt in shard.runs["r"].attempts.items())
    await a.finish(1)
    assert (await a.finish(1, wait_s=5)).all_finished
    assert (await a.commit(1, wait_s=5)).committed
