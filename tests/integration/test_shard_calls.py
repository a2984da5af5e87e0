"""How the coordinator finds out which shard server process serves at an address, if any does."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio
import pytest

from shardwell_server.coordinator.shard_client import GrpcShardCalls
from shardwell_wire.errors import UnavailableError
from tests.support.shard_server import ShardServer, shared_loop


def process_at(address: str) -> str | None:
    async def ask() -> str | None:
        calls = GrpcShardCalls()
        try:
            return await calls.process_at(address)
        finally:
            await calls.close()

    return asyncio.run_coroutine_threadsafe(ask(), shared_loop()).result(30)


def test_a_process_says_which_one_it_is(server: ShardServer) -> None:
    assert process_at(server.client.address) == "1"


def test_where_nothing_listens_there_is_none() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert process_at(f"127.0.0.1:{probe.getsockname()[1]}") is None


def test_where_something_else_serves_there_is_none() -> None:
    async def start() -> tuple[grpc.aio.Server, int]:
        other = grpc.aio.server()
        port = other.add_insecure_port("127.0.0.1:0")
        await other.start()
        return other, port

    other, port = asyncio.run_coroutine_threadsafe(start(), shared_loop()).result(30)
    try:
        assert process_at(f"127.0.0.1:{port}") is None
    finally:
        asyncio.run_coroutine_threadsafe(other.stop(0), shared_loop()).result(30)


def test_silence_tells_nothing() -> None:
    message = r"nothing at 127.0.0.1:\d+ answered within 2 s \(time is over\)"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UnavailableError, match=message):
        process_at(f"127.0.0.1:{silent.getsockname()[1]}")
