"""Calls to a shard server end when its process is gone, when their caller is cancelled, and with their own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_wire.errors import DeadlineError, UnavailableError
from shardwell_wire.v1 import shard_pb2
from tests.support.coordinator import Harness

PROCESS = ("s0", "1")


class HangingCalls:
    """``ShardCalls`` that run a function instead of an rpc."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self._answer = answer
        self.started = asyncio.Event()

    async def call(self, address: str, rpc_name: str, request: Any, *, retry_for_s: float) -> Any:
        self.started.set()
        return await self._answer()


def servers_with(cluster: Harness, calls: HangingCalls) -> ShardServers:
    return ShardServers(cluster.state.cluster, calls, term=1, lease_s=1.0)  # type: ignore[arg-type]


async def start_call(servers: ShardServers, calls: HangingCalls) -> asyncio.Task[Any]:
    task = asyncio.create_task(servers.call("s0", "DescribeServer", shard_pb2.DescribeServerRequest()))
    await calls.started.wait()
    return task


async def test_calls_in_flight_end_when_their_server_is_gone(cluster: Harness) -> None:
    calls = HangingCalls(asyncio.Event().wait)
    servers = servers_with(cluster, calls)
    both = [await start_call(servers, calls), await start_call(servers, calls)]
    servers.abandon(("s0", "another process"))
    await asyncio.sleep(0)
    assert not any(task.done() for task in both)
    servers.abandon(PROCESS)
    servers.abandon(PROCESS)
    for task in both:
        with pytest.raises(UnavailableError, match="server 's0': DescribeServer: the server is gone"):
            await task
    assert not servers._in_flight


async def test_call_whose_server_is_gone_before_it_is_sent_ends(cluster: Harness) -> None:
    calls = HangingCalls(asyncio.Event().wait)
    servers = servers_with(cluster, calls)
    task = asyncio.create_task(servers.call_all(["s0"], "DescribeServer", shard_pb2.DescribeServerRequest()))
    await asyncio.sleep(0)  # the task that sends the call has not started
    servers.abandon(PROCESS)
    with pytest.raises(UnavailableError, match="server 's0': DescribeServer: the server is gone"):
        await asyncio.wait_for(task, 5)
    assert not calls.started.is_set()
    assert not servers._in_flight


async def test_cancelled_call_of_several_servers_leaves_none_in_flight(cluster: Harness) -> None:
    servers = servers_with(cluster, HangingCalls(asyncio.Event().wait))
    task = asyncio.create_task(servers.call_all(["s0", "s1"], "DescribeServer", shard_pb2.DescribeServerRequest()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not servers._in_flight


async def test_cancelled_caller_ends_its_own_call_only(cluster: Harness) -> None:
    answered = asyncio.Event()
    calls = HangingCalls(answered.wait)
    servers = servers_with(cluster, calls)
    cancelled, other = await start_call(servers, calls), await start_call(servers, calls)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    answered.set()
    assert await other
    assert not servers._in_flight


async def test_deadline_of_the_server_stays_a_deadline(cluster: Harness) -> None:
    async def fail() -> None:
        raise DeadlineError("too late")

    servers = servers_with(cluster, HangingCalls(fail))
    with pytest.raises(DeadlineError, match="too late"):
        await servers.call("s0", "DescribeServer", shard_pb2.DescribeServerRequest())
