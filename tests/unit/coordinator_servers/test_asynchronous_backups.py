"""Backups replace lost primaries of runs whose work items are committed one by one, on fake shard servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shardwell_wire.errors import InvalidRequestError, StepRestartedError, UnavailableError
from shardwell_wire.model.topology import ASYNCHRONOUS
from shardwell_wire.v1 import shard_pb2
from tests.support.asynchronous import commits, take_item, take_restarted_item
from tests.support.coordinator import Harness, Trainer
from tests.support.fake_shards import fail_times
from tests.support.relocation import histories, in_sync, kill, kinds, run_of, started

pytestmark = pytest.mark.usefixtures("without_pauses")


async def at_version_two(cluster: Harness) -> list[Trainer]:
    """Returns two trainers with backups. Rank 0 has committed two items, and rank 1 computes one from version 0."""
    a, b = await started(cluster, consistency=ASYNCHRONOUS)
    await take_item(a)
    await take_item(a)
    await cluster.settle()
    return [a, b]


def victim(cluster: Harness) -> str:
    return run_of(cluster).units.require("u0").shards[0].server_id


async def lose_primary(cluster: Harness) -> None:
    """Ends the server of a primary. Returns when its backup has replaced it."""
    kill(cluster, victim(cluster))
    await cluster.until(lambda: run_of(cluster).relocations.announced == 1, "the relocation")


@pytest.mark.parametrize("when", ["working", "finished", "prepared", "committed"])
@pytest.mark.harness(num_shards=3)
async def test_items_in_flight_are_computed_again_from_the_newest_version(cluster: Harness, when: str) -> None:
    a, b = await at_version_two(cluster)
    if when != "working":
        assert (await b.finish(0, wait_s=5)).all_finished
    if when in ("prepared", "committed"):
        assert (await b.prepare(0)).prepared
    if when == "committed":
        cluster.shards[victim(cluster)].fail = fail_times("Update", 10**6, UnavailableError("stopped"))
        b.version = (await b.commit(0, wait_s=5)).next_work.step
    await lose_primary(cluster)
    newest = 3 if when == "committed" else 2
    for trainer in (b, a):
        await take_restarted_item(trainer)
    await cluster.settle()
    lost = (2, 1, 0, 0)
    again = [(3, 1, 1, 3), (4, 0, 2, 3)] if when == "committed" else [(2, 1, 0, newest), (3, 0, 2, newest)]
    assert commits(cluster) == [(0, 0, 0, 0), (1, 0, 1, 1), *([lost] if when == "committed" else []), *again]
    steps = run_of(cluster).committed_step
    assert histories(cluster) == [list(range(steps))] * len(histories(cluster))
    assert kinds(cluster).count("shards_promoted") == 1
    await in_sync(cluster, 1)


async def test_a_restarted_item_is_fenced_at_the_version_that_it_reads(cluster: Harness) -> None:
    _, b = await at_version_two(cluster)
    fences: list[shard_pb2.RankFence] = []

    def note(rpc_name: str, request: Any) -> None:
        if rpc_name in ("Fence", "PromoteShards"):
            fences.extend(request.ranks if rpc_name == "Fence" else request.fences)

    for shard in cluster.shards.values():
        shard.fail = note
    await lose_primary(cluster)
    await cluster.settle()
    work = (await b.finish(0, [], wait_s=5)).work
    (item,) = work.items
    assert (work.step, item.number, item.attempt) == (2, 0, 1)
    assert {(fence.version, fence.attempt) for fence in fences} == {(2, 1)}
    assert {fence.dp_rank for fence in fences} == {0, 1}


async def test_a_restarted_item_is_not_assigned_before_it_is_fenced(cluster: Harness) -> None:
    _, b = await at_version_two(cluster)
    for shard in cluster.shards.values():
        shard.fail = fail_times("PromoteShards", 10**6, UnavailableError("stopped"))
    await lose_primary(cluster)
    assert not run_of(cluster).work.assigned_to("b").items
    assert not (await b.finish(0, [])).HasField("work")
    for shard in cluster.shards.values():
        shard.fail = lambda rpc_name, request: None
    assert [item.attempt for item in (await b.finish(0, [], wait_s=5)).work.items] == [1]


@pytest.mark.parametrize(
    "request_of",
    [
        lambda trainer: trainer.commit(0),
        lambda trainer: trainer.prepare(0, wait_s=0),
        lambda trainer: trainer.reset(0, 1),
    ],
)
async def test_requests_about_a_restarted_item_are_refused(
    cluster: Harness, request_of: Callable[[Trainer], Awaitable[object]]
) -> None:
    _, b = await at_version_two(cluster)
    assert (await b.finish(0, wait_s=5)).all_finished
    await lose_primary(cluster)
    with pytest.raises(StepRestartedError, match="item 0 is now computed from version 2"):
        await request_of(b)
    assert [record[1:3] for record in commits(cluster)] == [(0, 0), (0, 1)]


async def test_a_commit_is_repeated_to_its_trainer_after_the_items_were_restarted(cluster: Harness) -> None:
    a, b = await at_version_two(cluster)
    committed = await take_item(b)
    await lose_primary(cluster)
    repeated = await b.commit(0)
    assert (repeated.committed, repeated.version, repeated.staleness) == (True, committed.version, 2)
    await take_restarted_item(b)
    await take_restarted_item(a)
    assert [record[1:3] for record in commits(cluster)] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.harness(num_shards=3)
async def test_a_restarted_coordinator_continues_the_restarted_items(cluster: Harness, finished: bool) -> None:
    a, b = await at_version_two(cluster)
    lost = victim(cluster)
    await lose_primary(cluster)
    if finished:
        work = (await b.finish(0, wait_s=5)).work
        b.version = work.step
        assert (await b.finish(b.version, wait_s=5)).all_finished
    await cluster.restart()
    for name in cluster.shards:
        if name != lost:
            await cluster.register(name)
    for trainer in (b, a):
        await take_restarted_item(trainer)
    assert commits(cluster)[2:] == [(2, 1, 0, 2), (3, 0, 2, 2)]


@pytest.mark.harness(num_shards=3)
async def test_shards_do_not_move_and_a_drain_says_what_to_do(cluster: Harness) -> None:
    a, _ = await at_version_two(cluster)
    draining = victim(cluster)
    answer = await cluster.call("DrainServer", server_id=draining)
    (line,) = answer.waiting_for
    assert "consistency=ASYNCHRONOUS, in which shards cannot move; 2 of its 2 shards" in line
    assert "stop the server: the backups replace it" in line
    await take_item(a)
    await cluster.settle()
    assert victim(cluster) == draining
    with pytest.raises(InvalidRequestError, match="consistency=ASYNCHRONOUS, in which shards cannot move"):
        await cluster.call("RebalanceRun", run="r")
