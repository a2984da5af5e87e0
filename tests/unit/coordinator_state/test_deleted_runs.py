"""Deleted runs, and runs beside each other."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_wire.errors import (
    ConflictError,
    NotFoundError,
    StaleEpochError,
    StepStateError,
)
from tests.support.coordinator import Harness, finished_item, unit
from tests.support.fake_shards import COST, fail_times


async def test_deleting_a_run_frees_its_memory_and_fences_its_trainers(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    with pytest.raises(ConflictError, match=r"run 'r' has live trainers \('a', 'b'\)"):
        await cluster.call("DeleteRun", run="r")
    waiting = asyncio.create_task(a.finish(0, wait_s=5))
    await asyncio.sleep(0)
    deleted = await cluster.call("DeleteRun", run="r", force=True, request_id="x")
    assert deleted.freed_bytes == COST * 16384
    with pytest.raises(NotFoundError, match="run 'r' was deleted"):
        await waiting
    with pytest.raises(NotFoundError):
        await b.heartbeat()
    assert all(not shard.runs for shard in cluster.shards.values())
    assert (await cluster.call("DeleteRun", run="r", force=True, request_id="x")).freed_bytes == 0
    with pytest.raises(NotFoundError):
        await cluster.call("DeleteRun", run="r", force=True, request_id="y")
    await cluster.restart()
    assert not (await cluster.call("ListRuns")).runs


async def test_leftovers_of_a_deleted_run_are_not_used_by_the_next_run(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0))
    await a.commit(0, wait_s=5)
    await cluster.settle()
    cluster.shards["s1"].fail = fail_times("DropRun", 1, StepStateError("not now"))
    await cluster.call("DeleteRun", run="r", force=True)
    assert cluster.shards["s1"].runs["r"].units[0].version == 1
    a, b = await cluster.team("a", "b")
    await asyncio.gather(*(a.declare(unit(name, (64, 64))) for name in ("u", "v", "w")))
    units = cluster.shards["s1"].runs["r"].units
    assert {index: at.version for index, at in units.items()} == {0: None, 1: None, 2: None}


async def test_server_of_a_later_term_rejects_the_coordinator_by_name(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    cluster.shards["s0"].term = 7
    with pytest.raises(ConflictError, match="the server follows a coordinator with a later term than 1"):
        await a.declare(unit("u", (64, 64)))


async def test_runs_are_independent(cluster: Harness) -> None:
    teams = []
    for run in ("one", "two"):
        await cluster.try_join("a", run=run, incarnation="a")
        b = await cluster.join("b", run=run)
        teams.append((await cluster.join("a", run=run, incarnation="a"), b))
    for a, b in teams:
        await cluster.publish_unit([a, b])
    (a, b), _ = teams
    await asyncio.gather(a.finish(0), b.finish(0))
    assert (await a.commit(0, wait_s=5)).committed
    steps = {run.run: run.committed_step for run in (await cluster.call("ListRuns")).runs}
    assert steps == {"one": 1, "two": 0}
    with pytest.raises(StaleEpochError):
        await cluster.call("FinishWork", context=teams[1][0].context(0, epoch=9), trainer="a")
    assert finished_item(teams[1][0].items[0])
