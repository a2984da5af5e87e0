"""Streams that a shard server sends from memory that may change while the peer reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing

import pytest

from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire import socket_frames
from shardwell_wire.errors import ShardwellError, VersionGoneError, from_status_details
from shardwell_wire.socket_frames import Kind, StreamReceiver
from shardwell_wire.v1 import shard_pb2

RESPONSE = shard_pb2.GatherBatchResponse(ranges=[shard_pb2.GatheredRange(version=3, size_bytes=600)])


def nothing() -> None:
    """A check of memory that has not changed."""


def gone() -> None:
    """A check of memory that has changed."""
    raise VersionGoneError("version 3 is being overwritten")


def send(parts: list[memoryview], check: Callable[[], None]) -> tuple[bytes, memoryview]:
    """Sends a group over a TCP connection; returns the received response and stream."""

    async def run() -> tuple[bytes, memoryview]:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)

        async def serve() -> None:
            with accepted:
                connection = Connection(accepted)
                try:
                    await connection.send_whole(parts, RESPONSE, check)
                except ShardwellError as error:
                    await connection.send_error(error)

        serving = asyncio.ensure_future(serve())
        await asyncio.sleep(0)  # the server sends what the kernel takes
        with closing(peer):
            received = await loop.run_in_executor(None, receive, peer, sum(map(len, parts)))
        await serving
        return received

    return asyncio.run(run())


def receive(peer: socket.socket, size_bytes: int) -> tuple[bytes, memoryview]:
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
    response, target = exactly(count), memoryview(bytearray(size_bytes))
    receiver = StreamReceiver([target], size_bytes, "a group", may_be_refused=True)
    while not receiver.over:
        count, *_ = peer.recvmsg_into(receiver.places())
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
