"""Streams that a shard server sends from memory that may change while the peer reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import Kind, StreamReceiver
from shardwell_wire.errors import ShardwellError, VersionGoneError, from_status_details
from shardwell_wire.v1 import shard_pb2

RESPONSE = shard_pb2.GatherBatchResponse(ranges=[shard_pb2.GatheredRange(version=3, size_bytes=600)])


def nothing() -> None:
    """A check of memory that has not changed."""


def gone() -> None:
    """A check of memory that has changed."""
    raise VersionGoneError("version 3 is being overwritten")


def connected() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        return listener.accept()[0], peer


def send(
    parts: list[memoryview],
    check: Callable[[], None],
    meanwhile: Callable[[], None] = nothing,
    *,
    as_stream: bool = False,
    target: memoryview | None = None,
) -> tuple[bytes, memoryview]:
    """Sends a group over a TCP connection; returns the received response and stream.

    Args:
        parts: The stream.
        check: See ``Connection.send_whole``.
        meanwhile: Called when the kernel has taken what it takes at once.
        as_stream: Whether to send it with ``send_stream``.
        target: Memory for the received stream.
    """

    async def run() -> tuple[bytes, memoryview]:
        loop = asyncio.get_running_loop()
        accepted, peer = connected()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)

        async def serve() -> None:
            with accepted:
                connection = Connection(accepted)
                try:
                    if as_stream:
                        await connection.send_stream(checked(parts, check), RESPONSE, check)
                    else:
                        await connection.send_whole(parts, RESPONSE, check)
                except ShardwellError as error:
                    await connection.send_error(error)

        serving = asyncio.ensure_future(serve())
        await asyncio.sleep(0)  # the server sends what the kernel takes
        meanwhile()
        memory = memoryview(bytearray(sum(map(len, parts)))) if target is None else target
        with closing(peer):
            received = await loop.run_in_executor(None, receive, peer, memory)
        await serving
        return received

    return asyncio.run(run())


def checked(parts: list[memoryview], check: Callable[[], None]) -> Iterator[memoryview]:
    """Yields the pieces of a stream, as ``Reading.pieces`` does."""
    for part in parts:
        yield part
        check()


def receive(peer: socket.socket, target: memoryview) -> tuple[bytes, memoryview]:
    """Receives a response and its stream. If an error replaces the end of the stream, raises it."""
    peer.settimeout(10)

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = peer.recv(count - len(data))
            assert more, "the server closed the connection"
            data += more
        return data

    _, count = socket_frames.parse_head(exactly(socket_frames.HEAD_BYTES), Kind.BATCH_GATHERED)
    response = exactly(count)
    receiver = StreamReceiver([target], len(target), "a group", may_be_refused=True)
    while not receiver.over:
        count, *_ = peer.recvmsg_into(receiver.places)
        assert count
        receiver.took(count)
    if receiver.refusal_bytes is not None:
        raise from_status_details(exactly(receiver.refusal_bytes), "the server")
    return response, target


@pytest.mark.parametrize("sizes", [[], [100], [100, 200, 300]])
def test_a_group_that_the_kernel_takes_at_once_needs_no_check(sizes: list[int]) -> None:
    parts = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]
    response, stream = send(parts, gone)
    assert shard_pb2.GatherBatchResponse.FromString(response) == RESPONSE
    assert bytes(stream) == b"".join(parts)


def test_a_group_is_sent_while_the_peer_reads() -> None:
    parts = [memoryview(bytes([number + 1]) * (1 << 20)) for number in range(4)]
    _, stream = send(parts, nothing)
    assert bytes(stream) == b"".join(parts)


def test_memory_that_changes_while_the_peer_reads_gives_an_error_in_place_of_the_end() -> None:
    parts = [memoryview(bytes(1 << 20)) for _ in range(4)]
    with pytest.raises(VersionGoneError, match="being overwritten"):
        send(parts, gone)


@pytest.mark.parametrize("as_stream", [False, True])
def test_memory_that_was_released_while_the_peer_reads_is_not_sent(as_stream: bool) -> None:
    memory, released = bytearray(b"o" * (4 << 20)), False

    def check() -> None:
        if released:
            gone()

    def reuse() -> None:
        nonlocal released
        released, memory[:] = True, b"x" * len(memory)  # the weights of another run

    with pytest.raises(VersionGoneError, match="being overwritten"):
        send([memoryview(memory)], check, reuse, as_stream=as_stream, target=(target := memoryview(bytearray(4 << 20))))
    sent_bytes = bytes(target).rstrip(b"\0").count(b"o")
    assert 0 < sent_bytes < len(target) and bytes(target) == b"o" * sent_bytes + bytes(len(target) - sent_bytes)


def test_a_large_frame_may_arrive_in_parts() -> None:
    sent = bytes(range(256)) * 1024

    async def run() -> bytearray:
        loop = asyncio.get_running_loop()
        own, peer = connected()
        with own, peer:
            peer.setblocking(False)
            receiving = asyncio.ensure_future(Connection(own).exactly(len(sent)))
            for start in range(0, len(sent), 48 << 10):
                await asyncio.sleep(0)  # the server has received all bytes, and waits for more
                await loop.sock_sendall(peer, sent[start : start + (48 << 10)])
            return await asyncio.wait_for(receiving, 10)

    assert asyncio.run(run()) == sent
