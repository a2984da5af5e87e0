"""Shard servers that leave, end or are forgotten, and unconfirmed servers after a coordinator restart."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwell.command import inspect_tables
from shardwell_server.coordinator.servers.cluster import ServerState
from shardwell_wire.errors import ConflictError, DuplicateError, NotFoundError, StaleEpochError, UnavailableError
from shardwell_wire.host.server_folders import has_ended
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, unit


async def states(cluster: Harness) -> dict[str, str]:
    listed = (await cluster.call("ListServers")).servers
    return {
        server.server_id: coordinator_pb2.ServerState.Name(server.state).removeprefix("SERVER_STATE_")
        for server in listed
    }


async def leave(cluster: Harness, name: str, epoch: int) -> None:
    await cluster.call("DeregisterServer", server_id=name, epoch=epoch)


async def test_server_that_leaves_without_shards_is_forgotten_and_its_epoch_not_reused(cluster: Harness) -> None:
    epoch = cluster.state.cluster.servers["s1"].epoch
    with pytest.raises(StaleEpochError, match="the process of this id has"):
        await leave(cluster, "s1", epoch - 1)
    with pytest.raises(NotFoundError, match="server 'nobody' is not registered"):
        await leave(cluster, "nobody", 7)
    assert await states(cluster) == {"s0": "LIVE", "s1": "LIVE"}
    await leave(cluster, "s1", epoch)
    await leave(cluster, "s1", epoch)
    assert [message for kind, message in cluster.events() if kind == "server_left"] == [
        "server 's1' at s1:1 was stopped and left the cluster"
    ]
    with pytest.raises(DuplicateError, match="this process has left the cluster"):
        await cluster.register("s1")  # a delayed retry of the first registration
    cluster.coordinator.expire()
    await cluster.until(lambda: "s1" not in cluster.state.cluster.servers, "the end of s1")
    with pytest.raises(StaleEpochError, match="is not registered"):
        await cluster.call("HeartbeatServer", server_id="s1", epoch=epoch)
    await cluster.restart()
    assert list(await states(cluster)) == ["s0"]
    assert await cluster.register("s1", incarnation="2") > epoch


async def test_server_that_leaves_with_shards_fails_its_runs_and_can_register_again(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await leave(cluster, "s1", 2)
    assert cluster.events()[-1][0] == "server_left"
    assert cluster.events()[-1][1].endswith("left the cluster: run 'r' lost shards")
    message = "server 's1' at s1:1 was stopped and left the cluster, and its shards of unit 'u' of this run"
    with pytest.raises(ConflictError, match=message):
        await a.heartbeat()
    assert (await cluster.call("ExplainStall", run="r")).waiting_for[0].startswith(message)
    await cluster.restart()
    cluster.coordinator.expire()
    assert (await states(cluster))["s1"] == "LEFT"
    with pytest.raises(ConflictError, match=message):
        await b.heartbeat()
    with pytest.raises(ConflictError, match="server 's1' owns shards of run 'r'"):
        await cluster.call("ForgetServer", server_id="s1")
    cluster.shards["s1"].restart("2")
    assert await cluster.register("s1", incarnation="2") == 3
    with pytest.raises(ConflictError, match="server 's1' was restarted and has lost its shards"):
        await b.heartbeat()


async def test_only_a_gone_server_without_shards_can_be_forgotten(cluster: Harness) -> None:
    await cluster.team_with_unit("a", "b")
    with pytest.raises(ConflictError, match="server 's1' at s1:1 is live: only a server that is lost"):
        await cluster.call("ForgetServer", server_id="s1")
    with pytest.raises(NotFoundError, match="server 's9' is not registered"):
        await cluster.call("ForgetServer", server_id="s9")
    cluster.shards["s1"].incarnation = None
    cluster.state.cluster.servers["s1"].last_seen_s -= 11
    cluster.coordinator.expire()
    await cluster.until(lambda: cluster.state.cluster.servers["s1"].ended, "the end of s1")
    with pytest.raises(ConflictError, match="owns shards of run 'r', which cannot be located"):
        await cluster.call("ForgetServer", server_id="s1")
    cluster.limit_s = 0.1
    await cluster.call("DeleteRun", run="r", force=True)
    await cluster.call("ForgetServer", server_id="s1")
    await cluster.restart()
    assert list(await states(cluster)) == ["s0"]


@pytest.mark.harness(num_shards=3)
async def test_no_unit_is_placed_on_an_unconfirmed_server(cluster: Harness) -> None:
    cluster.shards["s1"].available = cluster.shards["s2"].available = False
    await cluster.restart()
    assert await states(cluster) == dict.fromkeys(("s0", "s1", "s2"), "UNCONFIRMED")
    await cluster.call("HeartbeatServer", server_id="s2", epoch=3)
    cluster.shards["s2"].available = True
    await cluster.until(lambda: len(cluster.state.cluster.live) == 2, "answers of s0 and s2")
    a, _ = await cluster.team("a", "b")
    assert {at.server_id for at in (await a.declare(unit("u", (64, 64)))).shards} == {"s0", "s2"}
    with pytest.raises(UnavailableError, match="another process at s1:1 has this id and may be alive"):
        await cluster.register("s1", incarnation="2")
    lost = cluster.state.cluster.servers["s1"]
    lost.last_seen_s -= 11
    await cluster.until(lambda: lost.state is ServerState.LOST, "the loss of s1")
    kind, message = cluster.events()[-1]
    assert (kind, message) == (
        "server_lost",
        "server 's1' at s1:1: its lease expired, and the coordinator cannot reach s1:1: fake",
    )


async def test_silent_server_that_answers_a_probe_keeps_its_lease(cluster: Harness) -> None:
    a, _ = await cluster.team_with_unit("a", "b")
    server = cluster.state.cluster.servers["s1"]
    server.last_seen_s -= 11
    cluster.coordinator.expire()
    await cluster.until(lambda: server.last_seen_s == cluster.clock.now, "an answer of s1")
    assert server.live
    assert "server_lost" not in [kind for kind, _ in cluster.events()]
    await a.finish(0)


async def test_server_whose_heartbeats_do_not_arrive_is_lost_although_it_answers_probes(cluster: Harness) -> None:
    """Such a server refuses trainers, because nobody acknowledges its heartbeats."""
    server = cluster.state.cluster.servers["s1"]
    server.last_seen_s -= 11
    cluster.coordinator.expire()
    await cluster.until(lambda: server.last_seen_s == cluster.clock.now, "an answer of s1")
    server.last_seen_s -= 11
    cluster.coordinator.expire()
    await cluster.until(lambda: server.state is ServerState.LOST, "the loss of s1")
    assert cluster.events()[-1] == (
        "server_lost",
        "server 's1' at s1:1: its lease expired, and it answers probes, but no heartbeats arrive from it",
    )
    await cluster.call("HeartbeatServer", server_id="s1", epoch=server.epoch)
    assert server.live and not server.renewed_by_probe


def test_ended_process_is_detected_by_its_identity_on_the_same_host_only() -> None:
    program = "import sys; from shardwell_wire.host.server_folders import own_identity; print(own_identity()); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        identity = child.stdout.readline().strip()
        assert identity.rpartition("/")[2].isdecimal()
        assert not has_ended(identity)
        elsewhere = identity.replace("pid:", "other:")
        another_start = identity + "1"
        assert has_ended(another_start), "the process id was reused"
        child.kill()
        child.wait()
        assert has_ended(identity)
        assert not has_ended(elsewhere), "the process is in another container"
    for nothing in ("", "x", "a/b/c", "/-1/3", identity.replace(f"/{child.pid}/", "/99999999999999999999/")):
        assert not has_ended(nothing) or "9999" in nothing


def test_every_server_state_has_a_display_name() -> None:
    names = {f"SERVER_STATE_{state.name}" for state in ServerState} | {"SERVER_STATE_UNREACHABLE"}
    assert names == set(coordinator_pb2.ServerState.keys()) - {"SERVER_STATE_UNSPECIFIED"}
    for name in names:
        summary = coordinator_pb2.ServerSummary(state=coordinator_pb2.ServerState.Value(name))
        assert str(inspect_tables.server_state(summary)) == name.removeprefix("SERVER_STATE_").lower()
