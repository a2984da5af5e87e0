"""The frames of a socket lane: what is written is read, and what is wrong is refused before it costs anything."""

from __future__ import annotations

import struct

import pytest
import xxhash

from shardwell_wire import frames
from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError
from shardwell_wire.frames import Kind
from shardwell_wire.v1 import shard_pb2

TOKEN = bytes(range(32))


def test_hello_carries_the_token() -> None:
    hello = frames.hello(TOKEN)
    assert hello == b"shrdlane" + b"\x01\0\0\0" + TOKEN
    assert (len(hello), frames.token_of(hello)) == (frames.HELLO_BYTES, TOKEN)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(frames.HELLO_BYTES), "begins with b'GET / HT'; expected b'shrdlane'"),
        (b"shrdlane" + b"\x02\0\0\0" + TOKEN, "protocol 2: this end speaks 1"),
    ],
)
def test_another_hello_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        frames.token_of(data)


def test_a_frame_is_length_kind_payload() -> None:
    frame = frames.encode(Kind.GATHERING, b"abc")
    assert frame == b"\x03\0\0\0" + bytes([Kind.GATHERING]) + b"abc"
    assert frames.parse_head(frame[: frames.HEAD_BYTES], Kind.ERROR, Kind.GATHERING) == (Kind.GATHERING, 3)


@pytest.mark.parametrize("kind", Kind)
def test_no_kind_may_announce_what_nobody_would_allocate(kind: Kind) -> None:
    with pytest.raises(InvalidRequestError, match=f"a {kind.name} frame of 4294967295 bytes: at most"):
        frames.parse_head(struct.pack("<IB", 0xFFFFFFFF, kind), kind)


def test_a_frame_too_long_is_not_written() -> None:
    with pytest.raises(InvalidRequestError, match="a WELCOME frame of 1 bytes: at most 0"):
        frames.encode(Kind.WELCOME, b"x")


@pytest.mark.parametrize("number", [0, Kind.DATA, 200])
def test_an_unexpected_kind_is_named(number: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"kind {number}: expected GATHER or REDUCE_SCATTER"):
        frames.parse_head(struct.pack("<IB", 0, number), *frames.REQUESTS)


@pytest.mark.parametrize(("given_s", "read_s"), [(1.5, 1.5), (0.0, 0.001), (1e9, 4294967.295)])
def test_a_request_carries_its_timeout(given_s: float, read_s: float) -> None:
    message = shard_pb2.GatherRequest(run="r", unit="u", version=3)
    frame = frames.encode_request(Kind.GATHER, message, given_s)
    assert frames.parse_request(Kind.GATHER, frame[frames.HEAD_BYTES :]) == (read_s, message)


@pytest.mark.parametrize(("payload", "complaint"), [(b"\0\0\0", "begins with 4"), (b"\0\0\0\0\xff", "do not decode")])
def test_a_request_that_is_none_is_refused(payload: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        frames.parse_request(Kind.GATHER, payload)


class Stream:
    """Plays the driver of a receiver, handing it a few bytes at a time."""

    def __init__(self, *sizes: int) -> None:
        self.targets = [bytearray(size) for size in sizes]
        self.receiver = frames.StreamReceiver(map(memoryview, self.targets), sum(sizes), "a stream")

    def data(self, payload: bytes, step: int = 3) -> None:
        self.receiver.begin(len(payload))
        while self.receiver.missing_bytes:
            place = self.receiver.place()
            count = min(step, len(place))
            place[:count], payload = payload[:count], payload[count:]
            self.receiver.took(count)

    def end(self, checksum: int) -> int:
        return self.receiver.end(checksum.to_bytes(8, "little"))


def test_a_stream_arrives_over_the_bounds_of_targets_and_frames() -> None:
    sent = bytes(range(23))
    sender, stream = frames.StreamSender(), Stream(4, 0, 10, 9)
    for payload in (sent[:5], sent[5:22], sent[22:]):
        head, *parts = sender.data([payload[:2], payload[2:]])
        assert frames.parse_head(head, Kind.DATA) == (Kind.DATA, len(payload))
        stream.data(b"".join(parts))
    checksum = xxhash.xxh3_64_intdigest(sent)
    end = sender.end()
    assert end[frames.HEAD_BYTES :] == checksum.to_bytes(8, "little")
    assert stream.end(checksum) == checksum
    assert b"".join(stream.targets) == sent


def test_an_empty_stream_has_a_checksum() -> None:
    end = frames.StreamSender().end()[frames.HEAD_BYTES :]
    assert Stream().receiver.end(end) == xxhash.xxh3_64_intdigest(b"")


def test_streams_that_are_wrong_are_refused() -> None:
    with pytest.raises(ChunkError, match="a stream: 9 bytes or more, expected 8"):
        Stream(8).data(bytes(9))
    with pytest.raises(ChunkError, match="an empty frame at byte 0"):
        Stream(8).data(b"")
    short = Stream(8)
    short.data(bytes(7))
    with pytest.raises(ChunkError, match="ended after 7 of 8 bytes"):
        short.end(0)
    wrong = Stream(8)
    wrong.data(bytes(8))
    with pytest.raises(CorruptDataError, match="checksum 0x0000000000000001 was announced"):
        wrong.end(1)
    with pytest.raises(ChunkError, match="a checksum of 7 bytes"):
        wrong.receiver.end(bytes(7))


@pytest.mark.parametrize("sent", range(7))
def test_what_was_not_sent_is_left(sent: int) -> None:
    left = frames.unsent([b"ab", b"", b"cde", b"f"], sent)
    assert b"".join(left) == b"abcdef"[sent:]
    assert all(len(buffer) for buffer in left[:1])
