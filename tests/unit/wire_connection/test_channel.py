"""Channels between members of a cluster ignore HTTP proxies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from shardwell_wire.connection.channel import open_aio_channel, open_channel


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A proxy that accepts connections and never responds."""
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY", "grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        yield listening


def url(proxy: socket.socket) -> str:
    return f"http://127.0.0.1:{proxy.getsockname()[1]}"


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy"])
def test_http_proxy_is_ignored(address: str, proxy: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, url(proxy))
    with open_channel(address) as channel, pytest.raises(grpc.RpcError) as answer:
        channel.unary_unary("/none/none")(b"", timeout=20)
    assert answer.value.code() is grpc.StatusCode.UNIMPLEMENTED  # the server has no such rpc

    async def connect() -> None:
        async with open_aio_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)

    asyncio.run(connect())


def test_grpc_proxy_is_used(address: str, proxy: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", url(proxy))
    with open_channel(address) as channel:
        call = channel.unary_unary("/none/none").future(b"", timeout=20)
        connection, _ = proxy.accept()
        with connection:
            assert connection.recv(7) == b"CONNECT"
        call.cancel()
