"""Channels with several addresses: calls go to the server that serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from shardwell_wire.connection.channel import FailoverChannel, open_aio_channel, open_channel
from shardwell_wire.errors import STATUS_DETAILS_KEY, UsageError
from tests.support.ports import reserved_ports


class Server(grpc.GenericRpcHandler):
    """Answers every rpc with its name, or with an error."""

    def __init__(self, name: bytes) -> None:
        self.name, self.details, self.is_stand_by = name, b"", False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def service(self, _: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._answer)

    def _answer(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.may_answer.wait(10)
        if self.details:
            context.set_trailing_metadata(((STATUS_DETAILS_KEY, self.details),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "the run is being loaded")
        if self.is_stand_by:
            context.abort(grpc.StatusCode.UNAVAILABLE, "a stand-by")
        yield self.name

    @contextmanager
    def listening(self, port: int) -> Iterator[None]:
        server = grpc.server(ThreadPoolExecutor(2), handlers=[self])
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()


@pytest.fixture
def port() -> Iterator[int]:
    """Yields the first of two ports at which nothing listens."""
    with reserved_ports(2) as first:
        yield first


def both(port: int) -> str:
    return f"127.0.0.1:{port},127.0.0.1:{port + 1}"


def ask(channel: Any, kind: str) -> bytes:
    stub = getattr(channel, kind)("/service/rpc")
    answer = stub(b"", timeout=10) if kind == "unary_unary" else next(stub(b"", timeout=10))
    assert isinstance(answer, bytes)
    return answer


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_calls_go_to_the_server_that_serves(port: int, kind: str) -> None:
    with open_channel(both(port)) as channel, Server(b"second").listening(port + 1):
        assert isinstance(channel, FailoverChannel)
        with pytest.raises(grpc.RpcError):
            ask(channel, kind)
        assert ask(channel, kind) == ask(channel, kind) == b"second"
        assert channel.address == f"127.0.0.1:{port + 1}"


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_stand_by_is_left_and_a_servers_own_error_is_not(port: int, kind: str) -> None:
    first, second = Server(b"first"), Server(b"second")
    with open_channel(both(port)) as channel, first.listening(port), second.listening(port + 1):
        first.details = b"details"
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match="the run is being loaded"):
                ask(channel, kind)
        first.details = b""
        assert ask(channel, kind) == b"first"
        first.is_stand_by = True
        with pytest.raises(grpc.RpcError, match="a stand-by"):
            ask(channel, kind)
        assert ask(channel, kind) == b"second"


def test_failures_of_several_calls_to_one_server_count_once(port: int) -> None:
    first, second = Server(b"first"), Server(b"second")
    first.is_stand_by = True
    first.may_answer.clear()
    with open_channel(both(port)) as channel, first.listening(port), second.listening(port + 1):
        stub = channel.unary_stream("/service/rpc")
        calls = [stub(b"", timeout=10) for _ in range(2)]
        first.may_answer.set()
        for call in calls:
            with pytest.raises(grpc.RpcError, match="a stand-by"):
                next(call)
        assert ask(channel, "unary_unary") == b"second"


def test_asynchronous_calls_go_to_the_server_that_serves(port: int) -> None:
    async def call_both() -> list[bytes]:
        async with open_aio_channel(both(port)) as channel:
            unary, stream = channel.unary_unary("/service/rpc"), channel.unary_stream("/service/rpc")
            with pytest.raises(grpc.RpcError):
                await unary(b"", timeout=10)
            async with asyncio.timeout(10):
                while channel.address != f"127.0.0.1:{port + 1}":
                    await asyncio.sleep(0)
            return [await unary(b"", timeout=10), *[each async for each in stream(b"", wait_for_ready=True)]]

    with Server(b"second").listening(port + 1):
        assert asyncio.run(call_both()) == [b"second", b"second"]


def test_each_address_is_checked() -> None:
    with pytest.raises(UsageError, match="'host' is not an address: expected HOST:PORT"):
        open_channel("localhost:50051,host")
