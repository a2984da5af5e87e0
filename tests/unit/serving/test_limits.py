"""Limits of callers and runs, and of callers without a right."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

from shardwell_server.serving import limits
from shardwell_server.serving.limits import (
    Rate,
    RequestLimits,
    Unproven,
    close_connection,
    close_connections,
    grpc_port,
)
from shardwell_wire.errors import TooManyRequestsError
from shardwell_wire.security.tokens import Identity, Role


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def trainer(name: str = "a", run: str = "gpt") -> Identity:
    return Identity(role=Role.TRAINER, run=run, run_id="1", member=name, expires_s=1 << 40)


def test_events_above_the_rate_wait_for_their_turn() -> None:
    clock = Clock()
    rate = Rate(10.0, 3, clock)
    assert [rate.count("a") for _ in range(3)] == [0.0] * 3
    assert [rate.count("a") for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3], abs=1e-5)
    assert rate.count("b") == 0.0
    clock.now_s += 0.4  # four more events
    assert rate.count("a") == 0.0
    assert rate.count("a") == pytest.approx(0.1, abs=1e-5)
    clock.now_s += 60.0
    assert [rate.count("a") for _ in range(3)] == [0.0] * 3


def test_dropped_events_do_not_count() -> None:
    """A host that called far too often is not treated as if it still did so."""
    clock = Clock()
    rate = Rate(100.0, 10, clock)
    admitted_count = 0
    for _ in range(10_000):  # ten times the rate, for 10 s
        clock.now_s += 0.001
        admitted_count += rate.admit("a")
    assert admitted_count == pytest.approx(1000 + 10, abs=2)
    clock.now_s += 0.1
    assert [rate.admit("a") for _ in range(10)] == [True] * 10


def test_idle_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    rate = Rate(10.0, 3, clock)
    for number in range(100):
        rate.count(f"connection {number}")
        clock.now_s += 1.0
    assert len(rate._busy_until_s) <= 2
    monkeypatch.setattr(limits, "_MAX_KEYS", 50)
    for number in range(100):  # all at once
        rate.count(f"key {number}")
    assert len(rate._busy_until_s) <= 50


def admitted(limits_of_server: RequestLimits, *callers: Identity | None, peer: str = "p", size_bytes: int = 0) -> float:
    """Admits unfinished requests; returns how long all of them took."""

    async def work() -> float:
        start_s = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            for caller in callers:
                await stack.enter_async_context(limits_of_server.request(caller, peer, size_bytes))
            return asyncio.get_running_loop().time() - start_s

    return asyncio.run(work())


def test_caller_above_its_rate_is_delayed_then_refused() -> None:
    clock = Clock()
    own = RequestLimits(Rate(50.0, 1, clock), Rate(1e6, 1000, clock))
    assert admitted(own, trainer()) < 0.02
    assert admitted(own, trainer()) >= 0.02
    own._caller.count("trainer/gpt/1/a")
    for _ in range(110):  # more than MAX_DELAY_S
        own._caller.count("trainer/gpt/1/a")
    with pytest.raises(TooManyRequestsError, match=r"trainer 'a' of run 'gpt' sends more than 50 requests per second"):
        admitted(own, trainer())
    assert admitted(own, trainer("b"), None) < 0.02, "other callers are not affected"
    assert not own._unfinished


def test_a_run_has_a_rate_for_all_its_trainers() -> None:
    clock = Clock()
    own = RequestLimits(Rate(1e6, 1000, clock), Rate(10.0, 30, clock))
    for number in range(30 + 20):
        own._run.count("gpt/1")
        assert number < 30 or own._run.delay_s("gpt/1")
    own._run.count("gpt/1")
    with pytest.raises(TooManyRequestsError, match="run 'gpt' sends more than 10 requests per second"):
        admitted(own, trainer("new"))
    assert admitted(own, trainer(run="other")) < 0.02


def test_connections_are_callers_in_a_cluster_without_a_key() -> None:
    own = RequestLimits(Rate(10.0, 2, Clock()))
    admitted(own, None, None, peer="ipv4:10.0.0.1:5")
    assert own._caller.delay_s("ipv4:10.0.0.1:5") > 0
    assert own._caller.delay_s("ipv4:10.0.0.1:6") == 0


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.SERVER])
def test_holders_of_the_key_are_not_limited(role: Role) -> None:
    own = RequestLimits(Rate(1.0, 1, Clock()))
    assert admitted(own, *[Identity(role=role, expires_s=1 << 40)] * 50) < 1.0


def test_unfinished_requests_are_limited_by_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REQUESTS_AT_ONCE", 3)
    monkeypatch.setattr(limits, "MAX_REQUEST_BYTES", 100)
    monkeypatch.setattr(limits, "MAX_RUN_REQUESTS_AT_ONCE", 5)
    own = RequestLimits()
    admitted(own, *[trainer()] * 3)
    with pytest.raises(
        TooManyRequestsError, match="trainer 'a' of run 'gpt' has 3 unfinished requests, expected at mo"
    ):
        admitted(own, *[trainer()] * 4)
    with pytest.raises(TooManyRequestsError, match="run 'gpt' has 5 unfinished requests, expected at most 5"):
        admitted(own, *[trainer(name) for name in "aaabbb"])
    with pytest.raises(TooManyRequestsError, match="has 60 bytes of unfinished requests and sends 60 more"):
        admitted(own, *[trainer()] * 2, size_bytes=60)
    assert admitted(own, trainer(), size_bytes=500) < 1.0, "one request of any size is admitted"
    assert not own._unfinished


def closed_after(calls: Iterable[str], rate: Rate) -> list[set[str]]:
    """Returns the connections that are closed after calls of these peers, by search."""
    searches: list[set[str]] = []

    async def work() -> None:
        unproven = Unproven(rate, lambda peers: searches.append(set(peers)) or 1)
        for peer in calls:
            unproven.count(peer)
        deadline_s = asyncio.get_running_loop().time() + 20.0
        while unproven._closing and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.001)

    asyncio.run(work())
    return searches


def test_connections_of_a_host_with_too_many_refusals_are_closed_together() -> None:
    rate = Rate(1.0, 4, Clock())
    calls = [f"ipv4:10.0.0.1:{port}" for port in (1, 2, 1, 2, 1, 2, 3, 3)]
    assert closed_after([*calls, "ipv4:10.0.0.2:1"], rate) == [{f"ipv4:10.0.0.1:{port}" for port in (1, 2, 3)}]
    assert closed_after(["ipv4:10.0.0.2:1"], rate) == []


def test_host_with_too_many_unfinished_calls_loses_the_connections_of_further_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_CALLS_AT_ONCE", 3)
    closed: set[str] = set()

    async def work() -> None:
        unproven = Unproven(Rate(1e6, 1000, Clock()), lambda peers: closed.update(peers) or 1)
        with ExitStack() as stack:
            for port in range(4):
                stack.enter_context(unproven.handling(f"ipv4:10.0.0.1:{port}"))
            stack.enter_context(unproven.handling("ipv4:10.0.0.2:9"))
            deadline_s = asyncio.get_running_loop().time() + 20.0
            while unproven._closing and asyncio.get_running_loop().time() < deadline_s:
                await asyncio.sleep(0.001)
        assert not unproven._unfinished
        with unproven.handling("ipv4:10.0.0.1:9"):
            assert not unproven._closing

    asyncio.run(work())
    assert closed == {"ipv4:10.0.0.1:3"}


def test_connection_of_the_same_peer_to_another_port_stays_open() -> None:
    """A router that translates addresses, or the kernel, may use one local port for two destinations."""

    def connected(listener: socket.socket, port: int) -> socket.socket:
        client = stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind(("127.0.0.1", port))
        client.connect(listener.getsockname())
        stack.enter_context(listener.accept()[0])
        client.settimeout(20.0)
        return client

    with ExitStack() as stack:
        other, listener = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        stack.enter_context(grpc_port(listener.getsockname()[1]))
        to_other = connected(other, 0)
        to_grpc = connected(listener, to_other.getsockname()[1])
        assert to_grpc.getsockname() == to_other.getsockname()
        assert close_connection(peer_of(to_grpc))
        assert to_grpc.recv(1) == b""
        to_other.setblocking(False)
        with pytest.raises(BlockingIOError):
            to_other.recv(1)


def on_connections(count: int, check: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, grpc_port(listener.getsockname()[1]):
        clients = [socket.create_connection(listener.getsockname(), 20.0) for _ in range(count)]
        accepted = [listener.accept()[0] for _ in clients]
        try:
            check(clients)
        finally:
            for each in (*clients, *accepted):
                each.close()


def peer_of(client: socket.socket) -> str:
    return "ipv4:{}:{}".format(*client.getsockname())


def test_only_the_named_connections_are_closed() -> None:
    def check(clients: list[socket.socket]) -> None:
        assert close_connections([peer_of(clients[0]), peer_of(clients[2]), "ipv4:127.0.0.9:1", "unix:x"]) == 2
        for number, client in enumerate(clients):
            client.setblocking(False)
            if number == 1:
                with pytest.raises(BlockingIOError):
                    client.recv(1)
            else:
                assert client.recv(1) == b""
        assert close_connection(peer_of(clients[1]))
        assert not close_connection("ipv4:127.0.0.9:1")

    on_connections(3, check)
