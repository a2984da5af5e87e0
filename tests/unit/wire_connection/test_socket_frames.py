"""Frames of socket transports round-trip, and invalid frames are rejected before memory is allocated."""

from __future__ import annotations

import struct

import pytest
import xxhash

from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import Kind
from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError
from shardwell_wire.v1 import shard_pb2

TOKEN = bytes(range(32))


def test_hello_contains_the_token() -> None:
    hello = socket_frames.hello(TOKEN)
    assert hello == b"shrdsock" + b"\x03\0\0\0" + TOKEN
    assert (len(hello), socket_frames.token_of(hello)) == (socket_frames.HELLO_BYTES, TOKEN)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(socket_frames.HELLO_BYTES), "starts with b'GET / HT', expected b'shrdsock'"),
        (b"shrdsock" + b"\x01\0\0\0" + TOKEN, "protocol 1, expected 3"),
    ],
)
def test_invalid_hello_is_rejected(data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        socket_frames.token_of(data)


def test_frame_has_length_kind_and_payload() -> None:
    frame = socket_frames.encode(Kind.GATHERING, b"abc")
    assert frame == b"\x03\0\0\0" + bytes([Kind.GATHERING]) + b"abc"
    head = frame[: socket_frames.HEAD_BYTES]
    assert socket_frames.parse_head(head, Kind.ERROR, Kind.GATHERING) == (Kind.GATHERING, 3)


@pytest.mark.parametrize("kind", Kind)
def test_oversized_payload_length_is_rejected_for_every_kind(kind: Kind) -> None:
    with pytest.raises(InvalidRequestError, match=f"a {kind.name} frame has 4294967295 bytes, expected at most"):
        socket_frames.parse_head(struct.pack("<IB", 0xFFFFFFFF, kind), kind)


def test_encoding_an_oversized_frame_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="a WELCOME frame has 1 bytes, expected at most 0"):
        socket_frames.encode(Kind.WELCOME, b"x")


@pytest.mark.parametrize("number", [0, Kind.DATA, 200])
def test_unexpected_kind_is_rejected_and_named(number: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"kind {number}: expected GATHER or REDUCE_SCATTER"):
        socket_frames.parse_head(struct.pack("<IB", 0, number), *socket_frames.REQUESTS)


@pytest.mark.parametrize(("given_s", "read_s"), [(1.5, 1.5), (0.0, 0.001), (1e9, 4294967.295)])
def test_request_contains_its_timeout(given_s: float, read_s: float) -> None:
    message = shard_pb2.GatherRequest(run="r", unit="u", version=3)
    frame = socket_frames.encode_request(Kind.GATHER, message, given_s)
    assert socket_frames.parse_request(Kind.GATHER, frame[socket_frames.HEAD_BYTES :]) == (read_s, message)


@pytest.mark.parametrize(
    ("payload", "complaint"), [(b"\0\0\0", "expected at least 4"), (b"\0\0\0\0\xff", "do not decode")]
)
def test_invalid_request_is_rejected(payload: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        socket_frames.parse_request(Kind.GATHER, payload)


class Stream:
    """Passes bytes to a receiver, a few at a time."""

    def __init__(self, *sizes: int, step: int = 3, may_be_refused: bool = False) -> None:
        self.targets, self.step = [bytearray(size) for size in sizes], step
        targets = map(memoryview, self.targets)
        self.receiver = socket_frames.StreamReceiver(targets, sum(sizes), "a stream", may_be_refused=may_be_refused)

    def feed(self, sent: bytes) -> bytes:
        """Passes bytes until the stream is over. Returns the remaining bytes."""
        while sent and not self.receiver.over:
            places = self.receiver.places
            assert all(places), (
                "a receive into an empty buffer returns 0 bytes, which would be mistaken for the end of the connection"
            )
            assert sum(map(len, places)) >= self.receiver.wanted_bytes or len(places) == 1
            came, count = sent[: self.step], 0
            for place in places:
                part = came[count : count + len(place)]
                place[: len(part)] = part
                count += len(part)
            self.receiver.took(count)
            sent = sent[count:]
        return sent


def data(payload: bytes) -> bytes:
    return struct.pack("<IB", len(payload), Kind.DATA) + payload


def end(checksum: int) -> bytes:
    return socket_frames.encode(Kind.END, checksum.to_bytes(8, "little"))


@pytest.mark.parametrize("step", [1, 3, 7, 100])
def test_stream_crosses_bounds_of_targets_and_frames(step: int) -> None:
    sent = bytes(range(23))
    sender, stream = socket_frames.StreamSender(), Stream(4, 0, 10, 9, step=step)
    for payload in (sent[:5], sent[5:22], sent[22:]):
        head, *parts = sender.data([payload[:2], payload[2:]])
        assert socket_frames.parse_head(head, Kind.DATA) == (Kind.DATA, len(payload))
        assert stream.feed(b"".join([head, *parts])) == b""
        assert not stream.receiver.over
    checksum = xxhash.xxh3_64_intdigest(sent)
    assert sender.end() == end(checksum)
    assert stream.feed(end(checksum) + b"the next frame") == b"the next frame"
    assert stream.receiver.checksum == checksum
    assert b"".join(stream.targets) == sent


def test_empty_stream_has_a_checksum() -> None:
    stream = Stream()
    assert stream.feed(socket_frames.StreamSender().end()) == b""
    assert stream.receiver.checksum == xxhash.xxh3_64_intdigest(b"")


@pytest.mark.parametrize(
    ("sent", "error", "complaint"),
    [
        (data(bytes(9)), ChunkError, "a stream: the stream has 9 bytes or more, expected 8"),
        (data(bytes(6)) + data(bytes(3)), ChunkError, "a stream: the stream has 9 bytes or more, expected 8"),
        (data(b""), ChunkError, "the frame at byte 0 is empty"),
        (data(bytes(7)) + end(0), ChunkError, "ended after 7 of 8 bytes"),
        (data(bytes(8)) + end(1), CorruptDataError, "expected 0x0000000000000001"),
        (data(bytes(8)) + socket_frames.encode(Kind.END, bytes(7)), ChunkError, "the checksum has 7 bytes"),
        (data(bytes(8)) + socket_frames.encode(Kind.END), ChunkError, "the checksum has 0 bytes"),
        (data(bytes(3)) + socket_frames.encode(Kind.WELCOME), InvalidRequestError, "kind 1: expected DATA or END"),
        (socket_frames.encode(Kind.ERROR, b"why"), InvalidRequestError, "kind 2: expected DATA or END"),
    ],
)
def test_invalid_streams_are_rejected(sent: bytes, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        Stream(8).feed(sent)


def test_error_frame_between_data_frames_is_left_to_the_caller() -> None:
    stream = Stream(8, may_be_refused=True)
    assert stream.feed(data(bytes(3)) + socket_frames.encode(Kind.ERROR, b"why")) == b"why"
    assert (stream.receiver.refusal_bytes, stream.receiver.checksum) == (3, None)


@pytest.mark.parametrize("sent", range(7))
def test_unsent_returns_the_rest_of_the_buffers(sent: int) -> None:
    left = socket_frames.unsent([b"ab", b"", b"cde", b"f"], sent)
    assert b"".join(left) == b"abcdef"[sent:]
    assert all(len(buffer) for buffer in left[:1])
