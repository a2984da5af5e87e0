"""Trainers that cannot reach a live shard server: stall explanation and reassignment of their work."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_wire.errors import StaleEpochError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer


async def report(cluster: Harness, trainer: Trainer, address: str = "", for_s: float = 0.0) -> None:
    cut = [coordinator_pb2.UnreachableServer(address=address, for_s=for_s, reason="timed out")] if address else []
    await cluster.call(
        "Heartbeat",
        run=trainer.run,
        run_id=cluster.state.runs[trainer.run].identity.run_id,
        trainer=trainer.name,
        epoch=trainer.epoch,
        unreachable=cut,
    )


async def stall(cluster: Harness) -> str:
    return "\n".join((await cluster.call("ExplainStall", run="r")).waiting_for)


async def test_stall_names_the_trainer_the_server_and_the_duration(cluster: Harness) -> None:
    _, b = await cluster.team_with_unit("a", "b")
    await report(cluster, b, "s1:1", 4.0)
    cluster.clock.now += 2
    assert "trainer 'b' on host h has not reached server 's1' at s1:1 for 6.0 s (timed out)" in await stall(cluster)
    await report(cluster, b)
    assert "s1" not in await stall(cluster)


async def test_work_is_reassigned_to_a_waiting_trainer_that_reaches_the_server(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    waiting = asyncio.create_task(a.finish(0, wait_s=5))
    await asyncio.sleep(0)
    await report(cluster, b, "s1:1", 9.0)
    cluster.coordinator.expire()
    assert not waiting.done(), "the connection may recover within the lease"
    await report(cluster, b, "s1:1", 11.0)
    cluster.coordinator.expire()
    assert [item.global_rank for item in (await waiting).work.items] == [1]
    message = "it could not reach server 's1' at s1:1 for 11.0 s, and its work was reassigned: join again"
    with pytest.raises(StaleEpochError, match=message):
        await b.finish(0)
    assert "trainer_cut_off" in [kind for kind, _ in cluster.events()]


@pytest.mark.parametrize(
    "why", ["no trainer waits", "the waiting trainer is cut off too", "the server is silent", "another address"]
)
async def test_work_is_not_reassigned_without_a_better_trainer(cluster: Harness, why: str) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    waiting = None if why == "no trainer waits" else asyncio.create_task(a.finish(0, wait_s=0.3))
    await asyncio.sleep(0)
    await report(cluster, b, "s9:1" if why == "another address" else "s1:1", 11.0)
    if why == "the waiting trainer is cut off too":
        await report(cluster, a, "s1:1", 1.0)
    if why == "the server is silent":
        cluster.state.cluster.servers["s1"].last_seen_s -= 6
    cluster.coordinator.expire()
    if waiting is not None:
        assert not (await waiting).HasField("work")
    answer = await b.finish(0)
    assert answer.all_finished == (waiting is not None), "the trainer continues when it reaches the server"
