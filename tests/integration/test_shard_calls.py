"""The coordinator's check whether a shard server process runs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc.aio
import pytest

from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell_server.coordinator.servers.cluster import Server
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_wire.errors import NotFoundError, UnavailableError
from shardwell_wire.model.names import RunIdentity
from tests.support.shard_server import ShardServer, shared_loop


def is_running(address: str, server_id: str = "s", incarnation: str = "1", process: str = "") -> bool:
    async def ask() -> bool:
        calls = ShardCalls()
        try:
            return await calls.is_running(Server(server_id, address, incarnation, 1, 1, 0.0, process))
        finally:
            await calls.close()

    return asyncio.run_coroutine_threadsafe(ask(), shared_loop()).result(30)


def test_running_process_reports_its_incarnation(server: ShardServer) -> None:
    address = server.client.address
    assert is_running(address, "here")
    assert not is_running(address, "here", incarnation="2"), "another process of this server has taken its address"
    with pytest.raises(UnavailableError, match=f"another shard server, 'here', answers at {address}"):
        is_running(address, "other", incarnation="2")


def test_refused_connection_proves_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"the coordinator cannot reach {address}: Connection refused"):
            is_running(address)


def test_process_gone_from_this_host_has_ended() -> None:
    program = "from shardwell_wire.host.server_folders import own_identity; print(own_identity())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not is_running("127.0.0.1:9", process=ended.stdout.strip())


def test_other_service_at_the_address_proves_nothing() -> None:
    async def start() -> tuple[grpc.aio.Server, int]:
        other = grpc.aio.server()
        port = other.add_insecure_port("127.0.0.1:0")
        await other.start()
        return other, port

    other, port = asyncio.run_coroutine_threadsafe(start(), shared_loop()).result(30)
    try:
        with pytest.raises(UnavailableError, match="the server does not implement this rpc"):
            is_running(f"127.0.0.1:{port}")
    finally:
        asyncio.run_coroutine_threadsafe(other.stop(0), shared_loop()).result(30)


def test_unanswered_call_proves_nothing() -> None:
    message = r"the coordinator cannot reach 127.0.0.1:\d+: no answer within 2 s"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UnavailableError, match=message):
        is_running(f"127.0.0.1:{silent.getsockname()[1]}")


def test_http_server_is_not_a_shard_server() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        with pytest.raises(UnavailableError, match=r"the coordinator cannot reach 127\.0\.0\.1:\d+: \S"):
            is_running(f"127.0.0.1:{http.server_port}")
        http.shutdown()


def test_trainer_that_reaches_another_server_says_which(server: ShardServer) -> None:
    with pytest.raises(NotFoundError, match="of shard server 'other' leads to shard server 'here': start 'other' with"):
        ServerConnection(
            server.client.address,
            RunIdentity("r", "r-1"),
            ConnectOptions(("grpc",), 64 << 10),
            server_id="other",
        )
