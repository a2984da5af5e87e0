"""Work items: reports, leases, and new attempts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_wire.errors import (
    HyperparameterMismatchError,
    IncompleteStepError,
    InvalidRequestError,
    ShardwellError,
    StaleEpochError,
    StepRestartedError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import Harness, config, finished_item, optimizer, proposers, take_step
from tests.support.fake_shards import fail_times


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"global_rank": 9}, InvalidRequestError, "rank 9 does not exist"),
        ({"global_rank": 0}, InvalidRequestError, "a rank is reported twice"),
        ({"epoch": 99}, StepStateError, "but the item was leased to 'a'"),
        ({"attempt": 5}, StepStateError, "attempt 5, but the item was leased to 'a'"),
        ({"units": [common_pb2.UnitParts(unit_index=3)]}, InvalidRequestError, "unit index 3, but the run has 1 units"),
        ({"units": [common_pb2.UnitParts(unit_index=0)] * 2}, InvalidRequestError, "reports a unit index twice"),
    ],
)
async def test_invalid_report_is_rejected_as_a_whole(
    cluster: Harness, change: dict[str, Any], error: type[ShardwellError], message: str
) -> None:
    a, _ = await cluster.team_with_unit("a", "b", dp=4)
    good, bad = a.finished()
    for name, value in change.items():
        bad.ClearField(name)
        bad.MergeFrom(coordinator_pb2.FinishedItem(**{name: value}))
    with pytest.raises(error, match=message):
        await a.finish(0, [good, bad])
    states = {work.state for work in (await cluster.call("DescribeRun", run="r")).work}
    assert states == {coordinator_pb2.WORK_STATE_LEASED}


async def test_report_of_a_former_attempt_has_no_effect_and_is_answered_with_the_restarted_items(
    cluster: Harness,
) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    reports = a.finished()
    await a.finish(0, reports)
    run = cluster.state.runs["r"]
    run.work.restart()
    unfenced = await a.finish(0, reports)
    assert not unfenced.HasField("work"), "servers have not fenced the former attempts"
    cluster.coordinator.trainers.items.start_fencing(run)
    for trainer in (a, b):
        answer = await trainer.finish(0, accept_work=False, wait_s=5)
        assert [(item.epoch, item.attempt) for item in answer.work.items] == [
            (trainer.items[item.global_rank].epoch, 1) for item in answer.work.items
        ]
        assert not answer.all_finished
    fences = [shard.runs["r"].attempts for shard in cluster.shards.values()]
    assert all(found == {0: 1, 1: 1} for found in fences)


async def test_report_of_another_trainers_work_is_rejected(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    with pytest.raises(StepStateError, match="the item was leased to 'b'"):
        await a.finish(0, b.finished())
    await a.finish(0)
    with pytest.raises(StepStateError, match="was finished before with parts"):
        await a.finish(0, parts={0: 2})


async def test_item_of_a_lost_trainer_is_leased_after_fencing(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    fenced_at: list[int] = []
    for shard in cluster.shards.values():
        shard.fail = lambda rpc_name, request: fenced_at.append(request.ranks[0].epoch) if rpc_name == "Fence" else None
    lost_epoch = b.items[1].epoch
    waiting = asyncio.create_task(a.finish(0, wait_s=5))
    await asyncio.sleep(0)
    await cluster.pass_time(11, a)
    response = await waiting
    (item,) = response.work.items
    assert item.global_rank == 1
    assert len(fenced_at) == 2
    assert all(lost_epoch < epoch <= item.epoch for epoch in fenced_at)
    with pytest.raises(StaleEpochError):
        await b.finish(0)
    assert (await a.finish(0, wait_s=1)).all_finished
    committed = await a.commit(0, wait_s=5)
    assert sorted(item.global_rank for item in committed.next_work.items) == [0, 1], (
        "one trainer computes both ranks until another joins"
    )


async def test_item_leased_in_a_lost_response_is_returned_again(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    own = a.finished()
    await b.leave()
    await cluster.settle()
    first = await a.finish(0, own)
    assert first.work.items[0].global_rank == 1
    assert (await a.finish(0, own)).work == first.work


async def test_spares_get_vacant_items_first_and_one_each(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b", dp=4)
    spare = await cluster.join("c", run="r", config=a.joined.config)
    run = cluster.state.runs["r"]
    owners = {rank: "b" if owner == "c" else owner for rank, owner in run.owners.by_rank.items()}
    run.owners.restore(owners, {})
    polls = [asyncio.create_task(trainer.finish(0, wait_s=5)) for trainer in (a, spare)]
    await cluster.until(lambda: set(run.members.waiting_for_work) == {"a", "c"}, "both wait for work")
    await b.leave()
    responses = await asyncio.gather(*polls)
    assert [[item.global_rank for item in response.work.items] for response in responses] == [[3], [2]]


async def test_trainer_that_rejects_reassigned_work_gets_no_items(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0, accept_work=False), b.finish(0, accept_work=False))
    await b.leave()
    committed = await a.commit(0, wait_s=5)
    assert [item.global_rank for item in committed.next_work.items] == [0]
    await cluster.settle()
    response = await a.finish(1, accept_work=False)
    assert not response.HasField("work")
    assert list(response.waiting_for) == ["rank 1: vacant, because trainer 'b' is gone"]
    reborn = await cluster.join("b", wait_s=1)
    assert sorted(reborn.items) == [1]
    await reborn.finish(1, accept_work=False)
    assert (await a.finish(1, accept_work=False, wait_s=1)).all_finished


async def test_commit_continues_when_the_leader_dies(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0))
    waiting = asyncio.create_task(b.commit(0, wait_s=5, optimizer=optimizer(lr=0.5)))
    await cluster.until(lambda: "b" in proposers(cluster), "b waits for the commit")
    assert not waiting.done()
    await cluster.pass_time(11, b)
    assert (await waiting).committed
    assert cluster.shards["s0"].runs["r"].updates[0].optimizer == optimizer(lr=0.5)


async def test_proposal_of_a_dead_leader_is_committed(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await a.finish(0)
    assert not (await a.commit(0)).committed
    await a.leave()
    await cluster.settle()
    assert (await b.finish(0, wait_s=1)).all_finished
    with pytest.raises(HyperparameterMismatchError):
        await b.commit(0, wait_s=5, optimizer=optimizer(lr=0.5))
    assert (await b.commit(0, wait_s=5)).committed


async def test_reset_raises_the_attempt_and_invalidates_the_preparation(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    attempts = (await b.prepare(0)).attempts
    item = await a.reset(0, 0, request_id="once")
    assert item.attempt == 1
    assert (await a.reset(0, 0, request_id="once")).attempt == 1, "a retry starts no further attempt"
    assert (await a.reset(0, 0, request_id="twice")).attempt == 2
    assert cluster.shards["s0"].runs["r"].attempts == {0: 2}
    assert not (await b.finish(0)).all_finished
    with pytest.raises(StepRestartedError, match="clips step 0 by an outdated gradient norm"):
        await b.commit(0, clip_coefficient=1.0, norm_attempts=attempts)
    assert not (await b.commit(0, clip_coefficient=1.0)).committed, (
        "b gives no norm_attempts, so its clip coefficient is not checked for an outdated norm"
    )
    outdated = await a.finish(0, [finished_item(item)])
    assert [(work.global_rank, work.attempt) for work in outdated.work.items] == [(0, 2)]
    await a.finish(0)
    assert (await a.commit(0, wait_s=5)).committed
    prepared = cluster.shards["s0"].calls["PrepareStep"]
    assert prepared == 2


async def test_waiting_commit_survives_a_reset_of_another_rank(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    await b.reset(0, 1)
    waiting = asyncio.create_task(a.commit(0, wait_s=5))
    await cluster.until(lambda: "a" in proposers(cluster), "a waits for the commit")
    await b.reset(0, 1)
    await b.finish(0)
    assert (await waiting).committed


async def test_work_of_a_lost_trainer_is_leased_with_a_higher_attempt(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await b.leave()
    await cluster.settle()
    again = await cluster.join("b", wait_s=5)
    assert [(rank, item.attempt) for rank, item in again.items.items()] == [(1, 1)]
    assert cluster.shards["s0"].runs["r"].attempts == {1: 1}, "servers drop the parts that the former process pushed"
    await again.leave()
    await cluster.settle()
    response = await a.finish(0, wait_s=5)
    assert [(item.global_rank, item.attempt) for item in response.work.items] == [(1, 2)]


async def test_finished_work_of_a_lost_trainer_keeps_its_attempt(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    await b.leave()
    await cluster.settle()
    assert (await a.commit(0, wait_s=5)).committed
    assert cluster.shards["s0"].manifests[0].ranks[1].attempt == 0


async def test_reset_does_not_disturb_the_update_of_the_previous_step(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    cluster.shards["s1"].fail = fail_times("Update", 3, UnavailableError("busy"))
    await take_step(trainers, 0)
    assert (await a.reset(1, 0)).attempt == 1
    await asyncio.gather(a.finish(1), b.finish(1))
    assert (await a.commit(1, wait_s=5)).committed
    await cluster.settle()
    for shard in cluster.shards.values():
        assert [update.context.step for update in shard.runs["r"].updates] == [0, 1]


async def test_reset_of_another_trainers_rank_is_rejected(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    with pytest.raises(StaleEpochError, match="'b' has epoch"):
        await cluster.call("ResetWork", context=a.context(0, b.items[1].epoch), trainer="a", global_rank=1)
    with pytest.raises(StaleEpochError):
        await cluster.call("ResetWork", context=a.context(0, a.items[0].epoch - 1), trainer="a", global_rank=0)
    with pytest.raises(InvalidRequestError, match="rank 2 does not exist"):
        await cluster.call("ResetWork", context=a.context(0, 1), trainer="a", global_rank=2)


async def test_failure_of_a_reset_attempt_is_ignored(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    restarted = False

    def fail(rpc_name: str, request: Any) -> None:
        if rpc_name == "PrepareStep" and request.ranks[1].attempt == 0:
            raise IncompleteStepError("rank 1 is missing") if restarted else UnavailableError("busy")

    cluster.shards["s1"].fail = fail
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    committing = asyncio.create_task(a.commit(0, wait_s=5))
    await cluster.until(lambda: cluster.shards["s1"].calls["PrepareStep"] > 0, "the first attempt to prepare")
    await b.reset(0, 1)
    restarted = True
    await b.finish(0)
    assert (await committing).committed


async def test_trainer_that_proposes_gets_work_that_was_restarted_and_whose_trainer_is_gone(cluster: Harness) -> None:
    """The former process of the only trainer has finished the item. The next one has none, and waits for the commit."""
    (a,) = await cluster.team_with_unit("a")
    await a.finish(0, wait_s=5)
    await a.leave()
    again = await cluster.join("a", config=config(World(dp=1)), wait_s=5)
    assert not again.items
    assert (await again.finish(0, [], wait_s=5)).all_finished
    run = cluster.state.runs["r"]
    run.work.restart()
    run.changed.notify()
    for request in (again.prepare(0), again.commit(0, wait_s=5)):
        with pytest.raises(StepRestartedError, match="step 0 has not finished: the work of rank 0 was restarted"):
            await request
    cluster.coordinator.trainers.items.start_fencing(run)
    assert [item.dp_rank for item in (await again.finish(0, [], wait_s=5)).work.items] == [0]
    await again.finish(0, wait_s=5)
    assert (await again.commit(0, wait_s=5)).committed
