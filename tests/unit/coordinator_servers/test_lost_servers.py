"""Runs whose shard servers are lost, end or restart."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from shardwell_server.coordinator.servers.cluster import ServerState
from shardwell_wire.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
)
from tests.support.coordinator import Harness, unit, until_lost
from tests.support.fake_shards import fail_times


async def test_requests_that_need_a_lost_server_fail_until_it_returns(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    waiting = asyncio.create_task(a.finish(0, wait_s=5))
    await asyncio.sleep(0)
    cluster.shards["s1"].available = False
    cluster.state.cluster.servers["s1"].last_seen_s -= 11
    await until_lost(cluster, "s1")
    for call in (waiting, b.finish(0), a.declare(unit("u", (64, 64)))):
        with pytest.raises(
            UnavailableError,
            match=r"server 's1' at s1:1 has sent no heartbeat for 11\.0 s \(the coordinator cannot",
        ):
            await call
    assert "server 's1'" in (await cluster.call("ExplainStall", run="r")).waiting_for[0]
    cluster.shards["s1"].available = True
    await cluster.call("HeartbeatServer", server_id="s1", epoch=2)
    assert (await b.finish(0, wait_s=1)).all_finished
    assert (await a.commit(0, wait_s=5)).committed


async def until_ended(cluster: Harness, name: str) -> None:
    async with asyncio.timeout(5):
        while not cluster.state.cluster.servers[name].ended:
            await cluster.state.cluster.changed.wait()


async def test_requests_that_need_an_ended_server_fail_permanently(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    for name in ("u", "v", "w", "x", "y", "z"):
        await cluster.publish_unit([a, b], name, (64, 64))
    cluster.shards["s1"].incarnation = None
    cluster.state.cluster.servers["s1"].last_seen_s -= 11
    cluster.coordinator.expire()
    await until_ended(cluster, "s1")
    assert cluster.events()[-1] == ("server_ended", "server 's1' at s1:1 has ended: run 'r' lost shards")
    message = (
        "server 's1' at s1:1 has ended, and its shards of units 'u', 'v', 'w', 'x', 'y' and 1 "
        r"more of this run are lost: delete the run \(shardwell delete-run r\) and start it again"
    )
    for call in (a.heartbeat, partial(b.finish, 0), partial(b.declare, unit("late", (1,)))):
        with pytest.raises(ConflictError, match=message):
            await call()
    await cluster.call("HeartbeatServer", server_id="s1", epoch=2)
    await a.heartbeat()


@pytest.mark.harness(lease_s=0.1)
async def test_lost_server_that_may_be_alive_does_not_fail_the_run_permanently(cluster: Harness) -> None:
    a, _ = await cluster.team_with_unit("a", "b")
    shard, server = cluster.shards["s1"], cluster.state.cluster.servers["s1"]
    shard.available = False
    server.last_seen_s -= 11
    await until_lost(cluster, "s1")
    await a.heartbeat()
    with pytest.raises(
        UnavailableError, match=r"of unit 'u' of this run\. The run continues when the server"
    ) as caught:
        await a.finish(0)
    assert "delete" not in str(caught.value), "the server may be alive"
    shard.available, shard.incarnation = True, "another"
    await until_ended(cluster, "s1")
    with pytest.raises(ConflictError, match="has ended"):
        await a.finish(0)


@pytest.mark.harness(lease_s=0.1)
async def test_unit_is_placed_on_other_servers_when_one_ends_before_reserving(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    cluster.shards["s1"].incarnation = None
    declaring = asyncio.create_task(a.declare(unit("u", (64, 64))))
    await asyncio.sleep(0)
    cluster.state.cluster.servers["s1"].last_seen_s -= 11
    cluster.coordinator.expire()
    assert {at.server_id for at in (await declaring).shards} == {"s0"}


@pytest.mark.harness(num_shards=1)
async def test_declaration_whose_turn_comes_when_no_server_is_live_is_unavailable(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    units = cluster.state.runs["r"].units
    async with units.placement_lock:
        declaring = asyncio.create_task(a.declare(unit("u", (64, 64))))
        await cluster.until(lambda: "u" in units.placing and units.placing["u"].in_flight, "the placement")
        cluster.shards["s0"].incarnation = None
        cluster.state.cluster.servers["s0"].state = ServerState.ENDED
    with pytest.raises(UnavailableError, match="no shard server is live: start one"):
        await declaring
    await cluster.register("s0", "2")
    cluster.shards["s0"].restart("2")
    assert (await a.declare(unit("u", (64, 64)))).shards


@pytest.mark.parametrize("answers", [False, True])
async def test_unit_is_placed_on_other_servers_when_one_is_forgotten_while_it_reserves(
    cluster: Harness, answers: bool
) -> None:
    a, _ = await cluster.team("a", "b")
    servers = cluster.state.cluster.servers

    def leave(rpc_name: str, request: object) -> None:
        if rpc_name == "ReserveUnit" and "s1" in servers:
            cluster.state.cluster.deregister(servers["s1"])
            cluster.state.cluster.forget(servers["s1"])
            if not answers:
                raise NotFoundError("server 's1' is not registered: register first")

    cluster.shards["s1"].fail = leave
    assert {at.server_id for at in (await a.declare(unit("u", (64, 64)))).shards} == {"s0"}


async def test_heartbeat_fails_when_shards_are_lost_permanently(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    await a.declare(unit("u", (64, 64)))
    cluster.shards["s1"].restart("2")
    await cluster.register("s1", incarnation="2")
    await a.heartbeat()
    declared = await a.declare(unit("u", (64, 64)))
    await a.publish("u", declared.epoch)
    cluster.shards["s1"].restart("3")
    await cluster.register("s1", incarnation="3")
    with pytest.raises(ConflictError, match="was restarted and has lost its shards of unit 'u' of this run: del"):
        await a.heartbeat()


async def test_restarted_server_has_lost_its_shards(cluster: Harness) -> None:
    a, _ = await cluster.team_with_unit("a", "b")
    cluster.shards["s1"].restart("2")
    await cluster.register("s1", incarnation="2")
    for call in (a.finish(0), a.declare(unit("u", (64, 64)))):
        with pytest.raises(
            ConflictError, match="server 's1' was restarted and has lost its shards of unit 'u' of this run"
        ):
            await call
    assert cluster.events()[-1][0] == "server_restarted"
    assert "run 'r' lost shards" in cluster.events()[-1][1]
    await cluster.call("DeleteRun", run="r", force=True)
    a, _ = await cluster.team_with_unit("a", "b")


async def test_permanently_lost_server_is_named_before_an_unreachable_one(cluster: Harness) -> None:
    a, _ = await cluster.team_with_unit("a", "b")
    cluster.shards["s1"].restart("2")
    await cluster.register("s1", incarnation="2")
    cluster.shards["s0"].available = False
    cluster.state.cluster.servers["s0"].last_seen_s -= 11
    await until_lost(cluster, "s0")
    with pytest.raises(ConflictError, match="server 's1' was restarted"):
        await a.finish(0)


async def test_unpublished_unit_is_placed_again_on_a_restarted_server(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    await a.declare(unit("u", (64, 64)))
    cluster.shards["s1"].restart("2")
    await cluster.register("s1", incarnation="2")
    declared = await a.declare(unit("u", (64, 64)))
    assert cluster.shards["s1"].runs["r"].units
    await a.publish("u", declared.epoch)


async def test_update_does_not_wait_for_a_restarted_server(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    cluster.shards["s1"].fail = fail_times("Update", 10**6, UnavailableError("dead"))
    await asyncio.gather(a.finish(0), b.finish(0))
    await a.commit(0, wait_s=5)
    cluster.shards["s1"].restart("2")
    await cluster.register("s1", incarnation="2")
    await cluster.settle()
    stall = await cluster.call("ExplainStall", run="r")
    assert "was restarted and has lost its shards" in stall.waiting_for[0]
    assert stall.phase == "working"


async def test_loss_that_is_noticed_by_preparing_is_reported_as_a_loss(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")

    def fail(rpc_name: str, request: Any) -> None:
        if rpc_name == "PrepareStep":
            cluster.state.cluster.servers["s1"].incarnation = "2"
            raise NotFoundError("this server does not hold run 'r'")

    cluster.shards["s1"].fail = fail
    await a.finish(0)
    waiting = asyncio.create_task(a.prepare(0, wait_s=5.0))
    await asyncio.sleep(0)
    await b.finish(0)
    with pytest.raises(ConflictError, match="server 's1' was restarted and has lost its shards"):
        await waiting
