"""Chunk streams arrive unchanged, and invalid streams raise precise errors."""

import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwell_wire.encoding import chunk_streams
from shardwell_wire.encoding.chunk_streams import (
    MAX_CHUNK_BYTES,
    ChunkView,
    StreamReceiver,
    decode_message,
    encode_stream,
)
from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError
from shardwell_wire.v1 import shard_pb2

HEADER = shard_pb2.ReduceScatterHeader(unit="block", dp_rank=3, parameter_indices=[0, 2, 300], start_bytes=1 << 40)
FIRST = shard_pb2.ReduceScatterRequest(header=HEADER)


def chunks_of(data: bytes, chunk_bytes: int = 1000) -> list[ChunkView]:
    messages = encode_stream(FIRST, [data], chunk_bytes=chunk_bytes)
    return [decode_message(message, shard_pb2.ReduceScatterRequest)[1] for message in messages]


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 12345])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 1 << 20])
def test_stream_round_trips_however_it_is_split(size: int, chunk_bytes: int) -> None:
    if size // chunk_bytes > 2000:
        chunk_bytes = 50
    data = os.urandom(size)
    pieces = [data[: size // 3], b"", data[size // 3 : size // 2], data[size // 2 :]]
    received = bytearray(size)
    view = memoryview(received)
    receiver = StreamReceiver([view[: size // 4], view[size // 4 :]], "test")
    headers = []
    for message in encode_stream(FIRST, pieces, chunk_bytes=chunk_bytes):
        head, chunk = decode_message(message, shard_pb2.ReduceScatterRequest)
        assert len(chunk.payload) <= chunk_bytes
        headers.append(head)
        receiver.feed(chunk)
    receiver.require_complete()
    assert bytes(received) == data
    assert headers[0] == FIRST
    assert all(not head.HasField("header") for head in headers[1:])


def test_messages_are_plain_protobuf() -> None:
    data = os.urandom(2500)
    parsed = [shard_pb2.ReduceScatterRequest.FromString(m) for m in encode_stream(FIRST, [data], chunk_bytes=1000)]
    assert b"".join(message.chunk.payload for message in parsed) == data
    assert [message.chunk.offset_bytes for message in parsed] == [0, 1000, 2000]
    assert [message.chunk.HasField("checksum") for message in parsed] == [False, False, True]
    assert parsed[0].header == HEADER


def test_protobuf_of_other_encoders_decodes_in_any_field_order() -> None:
    chunk = shard_pb2.ReduceScatterRequest()
    chunk.chunk.payload = b"payload"
    chunk.chunk.offset_bytes = 5
    head = FIRST.SerializeToString()
    for data in (head + chunk.SerializeToString(), chunk.SerializeToString() + head):
        message, view = decode_message(data, shard_pb2.ReduceScatterRequest)
        assert message == FIRST
        assert (view.offset_bytes, bytes(view.payload), view.checksum) == (5, b"payload", None)
    payload_first = b"\x7a\x07payload" + b"\x08\x05"
    data = head + b"\x7a" + bytes([len(payload_first)]) + payload_first
    assert bytes(decode_message(data, shard_pb2.ReduceScatterRequest)[1].payload) == b"payload"


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 20, b"\x7a\x7f", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x08"]
)
def test_invalid_messages_are_rejected(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_message(data, shard_pb2.ReduceScatterRequest)


def broken(change: Callable[[list[ChunkView]], list[ChunkView]]) -> StreamReceiver:
    receiver = StreamReceiver([memoryview(bytearray(3000))], "test stream")
    for chunk in change(chunks_of(os.urandom(3000))):
        receiver.feed(chunk)
    receiver.require_complete()
    return receiver


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: [c[0], c[2]], ChunkError, "gap: expected a chunk at byte 1000, got 2000"),
        (lambda c: [c[0], c[0]], ChunkError, "overlap: expected a chunk at byte 1000, got 0"),
        (lambda c: [*c, c[2]], ChunkError, "follows the end"),
        (lambda c: c[:2], ChunkError, "ended after 2000 of 3000"),
        (lambda c: [], ChunkError, "ended after 0 of 3000"),
        (lambda c: [c[0], replace(c[1], payload=memoryview(bytes(2001)))], ChunkError, "expected 3000"),
        (lambda c: [replace(c[0], payload=memoryview(bytes(MAX_CHUNK_BYTES + 1)))], ChunkError, "at most"),
        (lambda c: [replace(c[0], payload=memoryview(b""))], ChunkError, "is empty"),
        (lambda c: [*c[:2], replace(c[2], checksum=None)], ChunkError, "expected a checksum on the last"),
        (lambda c: [replace(c[0], checksum=1)], ChunkError, "expected a checksum on the last"),
        (lambda c: [*c[:2], replace(c[2], checksum=1)], CorruptDataError, "checksum"),
        (lambda c: [c[0], replace(c[1], payload=memoryview(bytes(1000))), c[2]], CorruptDataError, "checksum"),
    ],
)
def test_invalid_streams_raise_precise_errors(
    change: Callable[[list[ChunkView]], list[ChunkView]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        broken(change)


class Memory(bytearray):
    """Bytes that support weak references."""


def test_slice_of_a_view_keeps_the_memory_alive() -> None:
    owner = Memory(b"weights")
    ended = weakref.ref(owner)
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    part = chunk_streams.memory_at(address, len(owner), owner)[2:4]
    del owner
    assert ended() is not None
    assert bytes(part) == b"ig"
    del part
    assert ended() is None
