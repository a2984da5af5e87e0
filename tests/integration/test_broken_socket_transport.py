"""Tests of the socket transport: unauthorised connections, malformed bytes and broken connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.resending import TRANSFER, ReachedServer, Resending
from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell.transport.service_client import Endpoint
from shardwell.transport.socket_transport import SocketConnection, SocketTransport
from shardwell_server.shard.requests import client_streams
from shardwell_server.shard.transports import socket_transport
from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import Kind
from shardwell_wire.errors import (
    AccessError,
    ChunkError,
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import NO_CREDENTIALS
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import (
    BIG,
    PLAIN,
    OneUnit,
    ShardServer,
    error_of,
    in_background,
    train,
    unit,
)
from tests.support.socket_transport import ConnectedUnit, Peer, closing_transport, data, end_of

LOCAL = Endpoint("127.0.0.1:1", NO_CREDENTIALS)
"""Connects to ports of this host."""


@pytest.fixture
def connected(server: ShardServer) -> Iterator[ConnectedUnit]:
    with closing_transport(ConnectedUnit(server)) as made:
        yield made


@pytest.fixture
def big(server: ShardServer) -> Iterator[ConnectedUnit]:
    """A unit larger than the buffers of a connection."""
    with closing_transport(ConnectedUnit(server, BIG)) as made:
        yield made


# Who may connect.


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (socket_frames.hello(bytes(32)), AccessError),
        (b"GET / HTTP/1.1\r\nHost: here\r\n".ljust(socket_frames.HELLO_BYTES), InvalidRequestError),
        (b"shrdsock" + struct.pack("<I", 7) + bytes(32), InvalidRequestError),
    ],
)
def test_connection_without_token_is_rejected_and_closed(
    connected: ConnectedUnit, hello: bytes, error: type[ShardwellError]
) -> None:
    with Peer(connected, hello=hello) as peer:
        assert type(peer.error()) is error
        assert peer.is_closed()
    assert connected.gather()[0] == 0


def test_token_of_a_closed_session_is_rejected(connected: ConnectedUnit) -> None:
    other = SocketTransport(connected.server.client, connected.one.identity)
    hello = socket_frames.hello(other._offer.token)
    with Peer(connected, hello=hello) as peer:
        assert peer.frame() == (Kind.WELCOME, b"")
        other.close()
        assert peer.is_closed()
    with Peer(connected, hello=hello) as peer:
        assert type(peer.error()) is AccessError
        assert peer.is_closed()
    assert connected.gather()[0] == 0


def test_silent_connection_is_closed(connected: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_transport, "HELLO_LIMIT_S", 0.05)
    with Peer(connected, hello=b"shrd") as peer:
        assert "no token within 0.05 s" in str(peer.error())
        assert peer.is_closed()


def test_opening_ends_at_the_deadline() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, closing(ShardClient(f"127.0.0.1:{silent.getsockname()[1]}")) as client:
        error = error_of(lambda: SocketTransport(client, RunIdentity("r", "id-of-r"), timeout_s=0.1))
    assert isinstance(error, DeadlineError)
    assert "did not answer OpenTransport within 0.1 s" in str(error)


def test_unreachable_port_fails_the_opening(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = unit(server)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(server.sockets, "_port", unused.getsockname()[1])
        error = error_of(lambda: SocketTransport(server.client, one.identity))
    assert isinstance(error, UnavailableError)
    server.until(lambda: not server.sockets._sessions, "the session is closed")


def level_of_fallback(one: OneUnit, caplog: pytest.LogCaptureFixture, reason: str) -> int:
    """Connects to a server whose socket transport cannot be opened; returns the level of the log record."""
    caplog.set_level(logging.INFO)
    names = ("socket", "grpc")
    address = one.server.client.address
    with closing(ServerConnection(address, one.identity, ConnectOptions(names, 64 << 10))) as connection:
        assert connection.transport.name == "grpc"
    (record,) = (each for each in caplog.records if "no transport socket" in each.getMessage())
    assert reason in record.getMessage()
    return record.levelno


def test_transport_that_is_not_offered_is_logged_without_a_warning(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SocketTransport, "kind", 77)
    assert level_of_fallback(unit(server), caplog, "does not offer transport kind 77") == logging.INFO


def test_transport_that_fails_to_open_is_logged_as_a_warning(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setattr(server.sockets, "_port", nobody.getsockname()[1])
        assert level_of_fallback(unit(server), caplog, "connect") == logging.WARNING


def test_transport_is_opened_again_with_one_attempt_and_is_of_the_same_kind(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = unit(server)
    options = ConnectOptions(("socket", "grpc"), 64 << 10)
    with closing(ServerConnection(one.server.client.address, one.identity, options)) as connection:
        first, client, attempts = connection.transport, connection.client, list[str]()
        assert isinstance(first, SocketTransport)

        def unreachable(rpc_name: str, request: Any, timeout_s: float) -> Any:
            attempts.append(rpc_name)
            raise UnavailableError(f"{client.peer}: refused", peer=client.peer)

        with monkeypatch.context() as patched:
            patched.setattr(client, "_open", unreachable)
            first.session.cut()
            assert first.session.broke_within(20)
            for _ in range(2):
                error = error_of(connection.transports.require_stream)
                assert type(error) is UnavailableError
                assert connection.lost_transport(error, TRANSFER)
        assert attempts == ["OpenTransport"] * 2
        assert connection.transports.require_stream().name == "socket"
    assert len([each for each in caplog.records if "transport socket broke" in each.getMessage()]) == 1


def test_opening_for_an_unknown_run_is_rejected(server: ShardServer) -> None:
    assert isinstance(error_of(lambda: SocketTransport(server.client, RunIdentity("nowhere", "id"))), NotFoundError)


# Malformed bytes.


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (struct.pack("<IB", 1 << 31, Kind.GATHER), "a GATHER frame has 2147483648 bytes, expected at most"),
        (struct.pack("<IB", 0, 99), "a frame of kind 99: expected GATHER or REDUCE_SCATTER"),
        (data(b"abc"), "a frame of kind 7: expected GATHER or REDUCE_SCATTER"),
        (socket_frames.encode(Kind.GATHER, b"\0"), "a GATHER frame has 1 bytes"),
        (socket_frames.encode(Kind.GATHER, b"\0\0\0\0\xff\xff"), "do not decode as shardwell_wire.v1.GatherRequest"),
        (bytes(range(256)) * 512, "a frame of kind 4: expected GATHER or REDUCE_SCATTER"),
    ],
)
def test_garbage_closes_only_its_connection(connected: ConnectedUnit, sent: bytes, complaint: str) -> None:
    with Peer(connected) as peer:
        peer.send(sent)
        error = peer.error()
        assert isinstance(error, InvalidRequestError)
        assert complaint in str(error)
        assert peer.is_closed()
    assert connected.gather()[0] == 0


def test_long_name_is_rejected_with_a_short_error(connected: ConnectedUnit) -> None:
    with Peer(connected) as peer:
        peer.push(connected, context=common_pb2.RequestContext(run="r" * 2_000_000))
        error = peer.error()
    assert isinstance(error, InvalidRequestError)
    assert str(error).startswith("run is 'rrr")
    assert "(2000000 characters): expected 1 to 200 printable characters" in str(error)


RIGHT = bytes(PLAIN.size_bytes)


@pytest.mark.parametrize("known", [False, True], ids=["new", "duplicate"])
@pytest.mark.parametrize(
    ("stream", "error", "complaint"),
    [
        (data(RIGHT[1:]) + end_of(RIGHT[1:]), ChunkError, "ended after 239999 of 240000 bytes"),
        (data(RIGHT, b"\0") + end_of(RIGHT + b"\0"), ChunkError, "240001 bytes or more, expected 240000"),
        (data(b"", RIGHT) + end_of(RIGHT), ChunkError, "the frame at byte 0 is empty"),
        (struct.pack("<IB", (4 << 20) + 1, Kind.DATA), InvalidRequestError, "a DATA frame has 4194305 bytes"),
        (data(RIGHT) + end_of(b"other"), CorruptDataError, "the bytes have checksum"),
        (data(RIGHT[1:]) + socket_frames.encode(Kind.GATHER), InvalidRequestError, "expected DATA or END"),
    ],
    ids=["short", "long", "empty frame", "large frame", "checksum", "request within"],
)
def test_malformed_stream_leaves_no_trace(
    connected: ConnectedUnit, stream: bytes, error: type[ShardwellError], complaint: str, known: bool
) -> None:
    if known:
        connected.push(connected.one.zeros())
    with Peer(connected) as peer:
        peer.push(connected, stream)
        refused = peer.error()
        assert peer.is_closed()
    assert type(refused) is error
    assert complaint in str(refused)
    if not known:
        connected.assert_no_push_is_kept()
    assert connected.push(connected.one.zeros()).duplicate == known


# Connections that break.


@pytest.mark.parametrize(
    "sent", [b"", struct.pack("<IB", 4096, Kind.DATA)[:3], struct.pack("<IB", 4096, Kind.DATA), data(bytes(64))]
)
def test_stalled_push_is_cancelled(connected: ConnectedUnit, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    with Peer(connected) as peer:
        monkeypatch.setattr(client_streams, "IDLE_LIMIT_S", 0.05)
        peer.push(connected, sent)
        error = peer.error()
        assert isinstance(error, DeadlineError)
        assert "bytes of the stream moved in 0.05 s, expected at least 1048576" in str(error)
    connected.assert_no_push_is_kept()


def test_stalled_reader_is_disconnected(big: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    before = big.connections()
    with Peer(big) as peer:
        assert big.connections() == before + 1
        monkeypatch.setattr(client_streams, "IDLE_LIMIT_S", 0.05)
        peer.request(Kind.GATHER, big.one.gather_request(0))
        big.server.until(lambda: len(big.server.sockets._connections) == before, "the connection is closed")


def with_connection(scenario: Callable[[Connection, socket.socket], Coroutine[Any, Any, None]]) -> None:
    """Runs a scenario with both ends of a connection. The peer's end blocks."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname(), 20.0)
            accepted, _ = listener.accept()
            with peer, accepted:
                await asyncio.wait_for(scenario(Connection(accepted), peer), 20.0)

    asyncio.run(run())


def test_push_over_a_slow_link_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = 0.4
    monkeypatch.setattr(client_streams, "IDLE_LIMIT_S", limit_s)
    monkeypatch.setattr(client_streams, "MIN_STREAM_BYTES", 100)
    sent, received = bytes([1]) * 300, bytearray(300)
    stream = data(sent) + end_of(sent)

    async def scenario(connection: Connection, peer: socket.socket) -> None:
        began_s = asyncio.get_running_loop().time()
        receiving = asyncio.ensure_future(connection.into([memoryview(received)], "a stream"))
        for came in (100, 200):
            peer.sendall(stream[:105] if came == 100 else stream[105:205])
            while sum(received) < came and not receiving.done():
                await asyncio.sleep(0.002)
        peer.sendall(stream[205:])
        await receiving
        assert asyncio.get_running_loop().time() > began_s + limit_s

    with_connection(scenario)
    assert received == sent


def test_many_small_frames_do_not_block_other_connections() -> None:
    count = 4000
    sent, received = bytes(count), bytearray(count)

    async def scenario(connection: Connection, peer: socket.socket) -> None:
        peer.sendall(data(*[b"\0"] * count) + end_of(sent))
        receiving, turns = asyncio.ensure_future(connection.into([memoryview(received)], "a stream")), 0
        # Counts how often the loop could serve other connections.
        while not receiving.done():
            await asyncio.sleep(0)
            turns += 1
        await receiving
        assert turns > count // 200

    with_connection(scenario)


@pytest.mark.parametrize("sent", [0, 1, 3 << 20])
def test_push_aborted_within_its_stream_leaves_no_trace(big: ConnectedUnit, sent: int) -> None:
    with Peer(big) as peer:
        peer.push(big, data(bytes(4 << 20))[: socket_frames.HEAD_BYTES + sent])
        big.server.until(lambda: len(big.one.shard.streams) == 1, "the stream is open")
    big.assert_no_push_is_kept()
    assert not big.push(big.one.filled(1.0)).duplicate


def test_disconnected_reader_releases_its_version(big: ConnectedUnit) -> None:
    with Peer(big) as peer:
        peer.request(Kind.GATHER, big.one.gather_request())
        assert peer.frame()[0] is Kind.GATHERING
        parameters = big.one.shard.values.current
        assert parameters is not None
        assert big.server.evaluate(lambda: parameters.readers) == 1
    big.server.until(lambda: parameters.readers == 0, "no reader is left")


def test_deadline_within_a_frame_closes_only_the_connection(big: ConnectedUnit) -> None:
    with Peer(big) as slow:
        slow.send(socket_frames.encode_request(Kind.GATHER, big.one.gather_request(), 1.0))
        assert slow.frame()[0] is Kind.GATHERING
        parameters = big.one.shard.values.current
        assert parameters is not None
        big.server.until(lambda: parameters.readers == 0, "no reader is left")
        rest = slow.read(big.one.size)
        frame_bytes = socket_frames.HEAD_BYTES + socket_frames.DATA_BYTES
        heads = {
            rest[start : start + socket_frames.HEAD_BYTES]
            for start in range(0, len(rest) - socket_frames.HEAD_BYTES, frame_bytes)
        }
    assert heads == {struct.pack("<IB", socket_frames.DATA_BYTES, Kind.DATA)}
    assert len(rest) < big.one.size
    assert big.gather()[0] == 0


def cut(connected: ConnectedUnit) -> None:
    """Makes the server drop every connection."""
    connected.server.evaluate(lambda: [task.cancel() for task in connected.server.sockets._connections])


def test_connection_that_broke_while_idle_is_replaced(connected: ConnectedUnit) -> None:
    connected.gather()
    cut(connected)
    connected.server.until(lambda: not connected.server.sockets._connections, "every connection is closed")
    assert connected.gather()[0] == 0


def test_request_on_a_broken_connection_is_repeated_by_resending_only(connected: ConnectedUnit) -> None:
    gather, repeating = partial(connected.gather, 1), Resending(ReachedServer("s:1")).run
    for outcome in ("fails", "succeeds"):
        waiting = in_background(gather if outcome == "fails" else partial(repeating, lambda *_: gather()))
        connected.server.until(lambda: len(connected.one.shard.values._waiting) == 1, "a request waits")
        cut(connected)
        if outcome == "fails":
            assert isinstance(error_of(partial(next, waiting)), UnavailableError)
            continue
        connected.server.until(lambda: len(connected.one.shard.values._waiting) == 1, "the request waits again")
        train(connected.one, 0)
        assert next(waiting)[0] == 1


def test_unresponsive_server_raises_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        offer = shard_pb2.SocketOffer(port=silent.getsockname()[1], token=bytes(32))
        connect = partial(SocketConnection, LOCAL, offer, peer="socket transport", timeout_s=0.1)
        error = error_of(connect)
        assert isinstance(error, DeadlineError)
        assert "socket transport did not finish within 0.1 s" in str(error)
    assert isinstance(error_of(connect), UnavailableError)
