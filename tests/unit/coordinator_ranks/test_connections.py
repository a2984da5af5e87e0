"""Membership streams: what the coordinator does when one breaks, and what it sends over them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator import connection
from shardwell_server.coordinator.ranks.members import MemberState
from shardwell_server.coordinator.servers.cluster import ServerState
from shardwell_wire.errors import RunDeletedError, StaleEpochError
from shardwell_wire.host.server_folders import has_ended, own_identity, runs_here
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer, harness

_PROGRAM = "import sys; from shardwell_wire.host.server_folders import own_identity; print(own_identity()); input()"
ELSEWHERE = "another-boot/pid:[1]/7/9"
"""Identity of a process on another host."""


@contextmanager
def process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs a process. Yields its identity."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip(), child
        finally:
            child.kill()


class Stream:
    """One end of a membership stream. ``break_`` ends it as gRPC does when the connection closes."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self.received: list[Any] = []
        self._task = asyncio.get_running_loop().create_task(self._read(messages))

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            self.received.append(message)

    async def opened(self) -> Stream:
        while not self.received and not self._task.done():
            await asyncio.sleep(0)
        return self

    async def break_(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def error(self) -> BaseException | None:
        """Waits until the coordinator ends the stream. Returns its error."""
        await asyncio.wait([self._task], timeout=10)
        return self._task.exception()


async def keep(cluster: Harness, trainer: Trainer) -> Stream:
    fields = {"run": trainer.run, "run_id": trainer.run_id, "trainer": trainer.name, "epoch": trainer.epoch}
    return await Stream(cluster.stream("KeepMembership", **fields)).opened()


async def keep_server(cluster: Harness, name: str) -> Stream:
    epoch = cluster.state.cluster.servers[name].epoch
    return await Stream(cluster.stream("KeepServerMembership", server_id=name, epoch=epoch)).opened()


def member(cluster: Harness, name: str) -> Any:
    return cluster.state.runs["r"].members.by_name[name]


async def judged(cluster: Harness) -> None:
    """Returns when the coordinator has judged every broken stream."""
    await asyncio.sleep(connection.GRACE_S * 1.5)


def test_identity_of_a_process_tells_whether_it_runs() -> None:
    with process() as (identity, child):
        assert runs_here(identity)
        assert not has_ended(identity)
        child.kill()
        child.wait()
        assert has_ended(identity)
        assert not runs_here(identity)
    assert runs_here(own_identity())
    assert not runs_here(ELSEWHERE)
    assert not has_ended(ELSEWHERE)
    assert not runs_here("")


async def test_process_that_ended_on_this_host_loses_its_work_at_once(cluster: Harness) -> None:
    with process() as (identity, child):
        a, b = await cluster.team_with_unit("a", "b", processes={"b": identity})
        stream = await keep(cluster, b)
        waiting = asyncio.ensure_future(a.finish(0, wait_s=10))
        child.kill()
        child.wait()
        await stream.break_()
        response = await waiting
    assert [item.global_rank for item in response.work.items] == b.ranks
    assert (
        "trainer_ended",
        "trainer 'b' on host h: its process has ended; vacant ranks: 1",
    ) in cluster.events()
    with pytest.raises(StaleEpochError, match="its process ended"):
        await b.heartbeat()


async def test_disconnected_trainer_keeps_its_work_until_another_one_waits(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b", processes={"b": ELSEWHERE})
    await (await keep(cluster, b)).break_()
    assert member(cluster, "b").live, "the grace is not over"
    await judged(cluster)
    assert member(cluster, "b").expired
    assert ("lease_expired", "trainer 'b' on host h closed its connection; vacant ranks: 1") in cluster.events()
    stream = await keep(cluster, b)
    assert member(cluster, "b").live, "the trainer is back, and nobody wanted its work"
    await stream.break_()
    waiting = asyncio.ensure_future(a.finish(0, wait_s=10))
    assert [item.global_rank for item in (await waiting).work.items] == b.ranks


async def test_trainer_that_reconnects_within_the_grace_loses_nothing(cluster: Harness) -> None:
    _, b = await cluster.team_with_unit("a", "b", processes={"a": ELSEWHERE, "b": ELSEWHERE})
    for _ in range(3):
        await (await keep(cluster, b)).break_()
        again = await keep(cluster, b)
        await judged(cluster)
        await again.break_()
        await b.heartbeat()  # a request is as good as a stream
        await judged(cluster)
    overlapping, old = await keep(cluster, b), await keep(cluster, b)
    await old.break_()
    await judged(cluster)
    assert member(cluster, "b").live
    assert "lease_expired" not in [kind for kind, _ in cluster.events()]
    await overlapping.break_()


@pytest.mark.parametrize("silent", [False, True])
async def test_running_or_silent_process_has_its_whole_lease(cluster: Harness, silent: bool) -> None:
    a, b = await cluster.team_with_unit("a", "b", processes={"b": ELSEWHERE if silent else own_identity()})
    stream = await keep(cluster, b)
    if silent:  # stopped: gRPC's keepalive closes the connection after a while
        cluster.clock.now += 6
    await stream.break_()
    await judged(cluster)
    assert member(cluster, "b").live
    await cluster.pass_time(11, a)
    assert member(cluster, "b").expired


async def test_streams_of_live_trainers_end_the_grace_after_a_coordinator_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwell_server.coordinator.leases.trainer_leases._RESTART_GRACE_S", 0.3)
    async with harness(tmp_path) as cluster:
        with process() as (identity, child):
            a, *_ = await cluster.team_with_unit(
                "a", "b", "c", processes={"a": ELSEWHERE, "b": ELSEWHERE, "c": identity}
            )
            await cluster.stop()
            child.kill()
            child.wait()
            await cluster.start()
            await keep(cluster, a)
            assert member(cluster, "b").live
            await cluster.until(lambda: member(cluster, "c").state is MemberState.GONE, "the end of c")
            await cluster.until(lambda: member(cluster, "b").expired, "the expiry of b")
        assert member(cluster, "a").live


async def test_stream_tells_commits_and_placements_and_the_end_of_the_membership(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    stream = await keep(cluster, b)
    assert stream.received == [coordinator_pb2.KeepMembershipResponse()]
    await a.finish(0)
    await b.finish(0)
    assert (await a.commit(0, wait_s=5)).committed
    await cluster.until(lambda: len(stream.received) == 2, "news of the commit")
    assert stream.received[1].committed_step == 1
    await b.leave()
    assert isinstance(await stream.error(), StaleEpochError)
    stream = await keep(cluster, a)
    await cluster.call("DeleteRun", run="r", force=True)
    assert isinstance(await stream.error(), RunDeletedError)
    with pytest.raises(RunDeletedError):
        await anext(cluster.stream("KeepMembership", run="r", run_id=a.run_id, trainer="a", epoch=a.epoch))


async def test_stopping_coordinator_ends_all_streams(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b", processes={"b": ELSEWHERE})
    streams = [await keep(cluster, a), await keep(cluster, b), await keep_server(cluster, "s0")]
    cluster.state.stop()
    assert [await stream.error() for stream in streams] == [None] * 3


async def test_server_that_ended_on_this_host_is_noticed_at_once(cluster: Harness) -> None:
    with process() as (identity, child):
        server = cluster.state.cluster.servers["s0"]
        server.process = identity
        stream = await keep_server(cluster, "s0")
        child.kill()
        child.wait()
        await stream.break_()
        await cluster.until(lambda: server.state is ServerState.ENDED, "the end of s0")
        with pytest.raises(StaleEpochError):
            await anext(cluster.stream("KeepServerMembership", server_id="s0", epoch=server.epoch + 7))


async def test_server_whose_host_refuses_connections_is_lost_at_once(cluster: Harness) -> None:
    servers = cluster.state.cluster.servers
    servers["s0"].process = servers["s1"].process = ELSEWHERE
    cluster.shards["s0"].refuses, cluster.shards["s1"].available = True, False
    for name in ("s0", "s1"):
        await (await keep_server(cluster, name)).break_()
    await cluster.until(lambda: servers["s0"].state is ServerState.LOST, "the loss of s0")
    assert servers["s0"].refused
    assert cluster.events()[-1][1].startswith("server 's0' at s0:1: it closed its connection, and")
    await cluster.until(lambda: bool(servers["s1"].unreachable_because), "a probe of s1")
    assert servers["s1"].live, "its host may be silent: only the lease decides"
    cluster.shards["s1"].available = True
    await cluster.until(lambda: not servers["s1"].suspected, "an answer of s1")
    await keep_server(cluster, "s0")
    assert servers["s0"].live
    assert not servers["s0"].refused


async def test_suspended_coordinator_does_not_remove_a_trainer_that_waits_in_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has no stream before Join returns. Its process is on another host, so only requests show it."""
    monkeypatch.setattr("shardwell_server.coordinator.leases.trainer_leases._RESTART_GRACE_S", 0.05)
    async with harness(tmp_path) as cluster:
        waiting = asyncio.ensure_future(cluster.try_join("a", wait_s=10, process=ELSEWHERE))
        await cluster.until(lambda: "r" in cluster.state.runs and member(cluster, "a").live, "a waits")
        cluster.coordinator.trainers.renew_all()
        await judged(cluster)
        await cluster.try_join("b")
        assert (await waiting).started


async def test_trainer_that_is_removed_while_it_waits_in_join_learns_that_it_may_join_again(cluster: Harness) -> None:
    waiting = asyncio.ensure_future(cluster.try_join("a", wait_s=10))
    await cluster.until(lambda: "r" in cluster.state.runs and member(cluster, "a").live, "a waits")
    cluster.state.runs["r"].revoke_lease(member(cluster, "a"))
    with pytest.raises(StaleEpochError, match="was removed while it waited for the start"):
        await waiting
