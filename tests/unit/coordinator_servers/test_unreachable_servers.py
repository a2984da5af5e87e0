"""Shard servers that send heartbeats but cannot be reached at the address that they advertise."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_server.coordinator.servers.cluster import ServerState
from shardwell_wire.errors import NotFoundError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, unit

UNREACHABLE = (
    "server 's1' at s1:1 gets no units: the coordinator cannot reach s1:1: fake. Start it with --advertise HOST"
)


async def server(cluster: Harness, server_id: str) -> coordinator_pb2.ServerSummary:
    listed = (await cluster.call("ListServers")).servers
    return next(each for each in listed if each.server_id == server_id)


async def stall(cluster: Harness) -> str:
    return "\n".join((await cluster.call("ExplainStall", run="r")).waiting_for)


async def register_unreachable(cluster: Harness) -> None:
    """Registers another process of s1, which does not answer."""
    cluster.shards["s1"].restart("2")
    cluster.state.cluster.servers["s1"].state = ServerState.ENDED
    cluster.shards["s1"].available = False
    await cluster.register("s1", "2")


async def test_server_gets_no_units_until_it_answers_at_its_address(cluster: Harness) -> None:
    await register_unreachable(cluster)
    seen = await server(cluster, "s1")
    assert seen.state == coordinator_pb2.SERVER_STATE_UNREACHABLE
    assert (seen.live, seen.unreachable_because) == (False, "the coordinator cannot reach s1:1: fake")
    beat = await cluster.call("HeartbeatServer", server_id="s1", epoch=seen.epoch)
    assert beat.unreachable_because == seen.unreachable_because, "a heartbeat does not prove the address"
    stream = cluster.stream("KeepServerMembership", server_id="s1", epoch=seen.epoch)
    await anext(stream)
    assert (await server(cluster, "s1")).state == coordinator_pb2.SERVER_STATE_UNREACHABLE, "nor does a stream"
    a, _ = await cluster.team("a", "b")
    assert {at.server_id for at in (await a.declare(unit("u", (64, 64)))).shards} == {"s0"}
    assert UNREACHABLE in await stall(cluster)
    cluster.shards["s1"].available = True
    await cluster.until(lambda: len(cluster.state.cluster.live) == 2, "an answer of s1")
    assert (await server(cluster, "s1")).state == coordinator_pb2.SERVER_STATE_LIVE
    assert ("server_returned", "server 's1' is reachable now") in cluster.events()
    assert UNREACHABLE not in await stall(cluster)
    assert "s1" in {at.server_id for at in (await a.declare(unit("v", (64, 64)))).shards}


@pytest.mark.harness(num_shards=1)
async def test_server_at_the_address_of_another_server_gets_no_units(cluster: Harness) -> None:
    await cluster.call("RegisterServer", server_id="s1", address="s0:1", incarnation="x", budget_bytes=1 << 40)
    assert (await server(cluster, "s1")).state == coordinator_pb2.SERVER_STATE_UNREACHABLE
    a, _ = await cluster.team("a", "b")
    assert {at.server_id for at in (await a.declare(unit("u", (64, 64)))).shards} == {"s0"}


@pytest.mark.harness(min_servers=2)
async def test_declaration_names_the_servers_that_are_not_reached(cluster: Harness) -> None:
    await register_unreachable(cluster)
    a, _ = await cluster.team("a", "b")
    cluster.limit_s = 0.05
    with pytest.raises(UnavailableError, match="1 of 2 are live") as raised:
        await a.declare(unit("u", (64,)))
    assert UNREACHABLE in str(raised.value)


async def test_unreached_server_is_still_unreached_after_a_restart_of_the_coordinator(cluster: Harness) -> None:
    await register_unreachable(cluster)
    epoch = (await server(cluster, "s1")).epoch
    await cluster.restart()
    await cluster.call("HeartbeatServer", server_id="s1", epoch=epoch)
    assert (await server(cluster, "s1")).state == coordinator_pb2.SERVER_STATE_UNREACHABLE


async def test_stall_omits_addresses_of_former_servers(cluster: Harness) -> None:
    _, b = await cluster.team_with_unit("a", "b")
    cuts = [coordinator_pb2.UnreachableServer(address=at, for_s=9.0, reason="gone") for at in ("old:1", "s1:1")]
    run_id = cluster.state.runs["r"].identity.run_id
    await cluster.call("Heartbeat", run="r", run_id=run_id, trainer="b", epoch=b.epoch, unreachable=cuts)
    said = await stall(cluster)
    assert "has not reached server 's1' at s1:1 for 9.0 s" in said
    assert "old:1" not in said


@pytest.mark.parametrize("rpc", ["ForgetServer", "DrainServer"])
async def test_unknown_server_is_answered_with_the_known_ones(rpc: str, cluster: Harness) -> None:
    with pytest.raises(NotFoundError, match="server 's7' is not registered: the servers are 's0', 's1'"):
        await cluster.call(rpc, server_id="s7")


async def test_lost_answers_of_a_probe_do_not_stop_the_probes(cluster: Harness) -> None:
    await register_unreachable(cluster)
    await cluster.restart()
    epoch = (await server(cluster, "s1")).epoch
    await cluster.call("HeartbeatServer", server_id="s1", epoch=epoch)
    cluster.shards["s1"].available = True
    for _ in range(3):
        await asyncio.sleep(0)
        cluster.coordinator.expire()
    await cluster.until(lambda: len(cluster.state.cluster.live) == 2, "an answer of s1")
