"""What travels on the connections of a socket transport, byte for byte.

A connection begins with a hello: who speaks, which protocol, and the transport's token. From then on both
sides send frames: payload length (4 bytes, little-endian), kind (1 byte), payload. The client sends a
request and reads the whole answer before the next one::

    client                             server
    hello                          ->
                                   <-  WELCOME
    GATHER                         ->
                                   <-  GATHERING, DATA ..., END
    REDUCE_SCATTER, DATA ..., END  ->
                                   <-  REDUCE_SCATTERED
    REDUCE_GRADIENT_BUFFER                 ->
                                   <-  GRADIENT_BUFFER_REDUCED

DATA frames carry the bytes of a stream as ``Chunk`` payloads do over gRPC; END carries the XXH3-64 of
all of them. ERROR, with a ``google.rpc.Status``, may stand in place of any frame of the server.
Nothing here touches a socket: both ends drive these functions with their own.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from shardwell_wire.codec import Buffer
from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError
from shardwell_wire.v1 import shard_pb2

PROTOCOL = 2
"""Raised with every change that an older end would misread."""

TOKEN_BYTES = 32

DATA_BYTES = 4 << 20
"""Payload per DATA frame, at the most; senders fill them."""

_MAGIC = b"shrdlane"
_HELLO = struct.Struct(f"<8sI{TOKEN_BYTES}s")
_HEAD = struct.Struct("<IB")
_TIMEOUT = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")

HELLO_BYTES = _HELLO.size
HEAD_BYTES = _HEAD.size

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Kind(enum.IntEnum):
    """What a frame is."""

    WELCOME = 1
    """The token is good."""
    ERROR = 2
    """``google.rpc.Status``."""
    GATHER = 3
    """Request: timeout in ms (4 bytes), ``GatherRequest``."""
    GATHERING = 4
    """``GatherHeader``; the stream follows."""
    REDUCE_SCATTER = 5
    """Request: timeout in ms (4 bytes), ``ReduceScatterHeader``; the stream follows."""
    REDUCE_SCATTERED = 6
    """``ReduceScatterResponse``."""
    DATA = 7
    """The next bytes of a stream."""
    END = 8
    """XXH3-64 (8 bytes) of a whole stream."""
    MEASURE = 9
    """Request: timeout in ms (4 bytes), ``MeasureTransportRequest``; the answer is a stream without meaning."""
    REDUCE_GRADIENT_BUFFER = 10
    """Request: timeout in ms (4 bytes), ``ReduceGradientBufferRequest``; what it names lies in shared memory."""
    GRADIENT_BUFFER_REDUCED = 11
    """``ReduceGradientBufferResponse``."""


REQUESTS: dict[Kind, type[Message]] = {
    Kind.GATHER: shard_pb2.GatherRequest,
    Kind.REDUCE_SCATTER: shard_pb2.ReduceScatterHeader,
    Kind.MEASURE: shard_pb2.MeasureTransportRequest,
    Kind.REDUCE_GRADIENT_BUFFER: shard_pb2.ReduceGradientBufferRequest,
}
"""What a client may begin with."""

_MAX_BYTES = {
    Kind.WELCOME: 0,
    Kind.ERROR: 1 << 20,
    Kind.GATHER: 64 << 10,
    Kind.GATHERING: 64 << 10,
    Kind.REDUCE_SCATTER: 4 << 20,
    Kind.REDUCE_SCATTERED: 64 << 10,
    Kind.DATA: DATA_BYTES,
    Kind.END: _CHECKSUM.size,
    Kind.MEASURE: 64 << 10,
    Kind.REDUCE_GRADIENT_BUFFER: 4 << 20,
    Kind.GRADIENT_BUFFER_REDUCED: 64 << 10,
}


def hello(token: bytes) -> bytes:
    """What a client sends first."""
    return _HELLO.pack(_MAGIC, PROTOCOL, token)


def token_of(data: Buffer) -> bytes:
    """The token in a hello. [HELLO_BYTES]

    Raises:
        InvalidRequestError: Something else speaks, or another protocol.
    """
    magic, protocol, token = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise InvalidRequestError(
            f"the connection begins with {magic!r}; expected {_MAGIC!r}: this is a socket transport"
        )
    if protocol != PROTOCOL:
        raise InvalidRequestError(f"socket transport protocol {protocol}: this end speaks {PROTOCOL}")
    return bytes(token)


def encode(kind: Kind, payload: bytes = b"") -> bytes:
    """A whole small frame."""
    if len(payload) > _MAX_BYTES[kind]:
        raise InvalidRequestError(f"a {kind.name} frame of {len(payload)} bytes: at most {_MAX_BYTES[kind]}")
    return _HEAD.pack(len(payload), kind) + payload


def parse_head(data: Buffer, *expected: Kind) -> tuple[Kind, int]:
    """Kind and payload length of a frame. [HEAD_BYTES]

    Raises:
        InvalidRequestError: The kind is not an expected one, or the payload is too long for it.
    """
    size, number = _HEAD.unpack(data)
    if number not in expected:
        raise InvalidRequestError(f"a frame of kind {number}: expected {' or '.join(kind.name for kind in expected)}")
    kind = Kind(number)
    if size > _MAX_BYTES[kind]:
        raise InvalidRequestError(f"a {kind.name} frame of {size} bytes: at most {_MAX_BYTES[kind]}")
    return kind, size


def parse_message(payload: bytes, message_type: type[AnyMessage]) -> AnyMessage:
    """The message in a payload.

    Raises:
        InvalidRequestError: The bytes are no such message.
    """
    try:
        return message_type.FromString(payload)
    except DecodeError as error:
        raise InvalidRequestError(f"bytes do not decode as {message_type.DESCRIPTOR.full_name}") from error


def encode_request(kind: Kind, message: Message, timeout_s: float) -> bytes:
    """The frame of a request that is given up after ``timeout_s``."""
    timeout_ms = min(max(1, round(timeout_s * 1000)), 0xFFFFFFFF)
    return encode(kind, _TIMEOUT.pack(timeout_ms) + message.SerializeToString())


def parse_request(kind: Kind, payload: bytes) -> tuple[float, Message]:
    """Timeout in seconds and message of a request.

    Raises:
        InvalidRequestError: The payload is no such request.
    """
    if len(payload) < _TIMEOUT.size:
        raise InvalidRequestError(f"a {kind.name} frame of {len(payload)} bytes: it begins with {_TIMEOUT.size}")
    (timeout_ms,) = _TIMEOUT.unpack_from(payload)
    return timeout_ms / 1000, parse_message(payload[_TIMEOUT.size :], REQUESTS[kind])


class StreamSender:
    """Frames one stream; its bytes go from where they are, uncopied."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()

    def data(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """A DATA frame, as buffers to be sent one after the other."""
        for part in parts:
            self._hasher.update(part)
        return [_HEAD.pack(sum(len(part) for part in parts), Kind.DATA), *parts]

    def end(self) -> bytes:
        """The END frame."""
        return encode(Kind.END, _CHECKSUM.pack(self._hasher.intdigest()))


class StreamReceiver:
    """Says where the next bytes of one stream belong, and checks them.

    The driver receives into ``places()`` and says how much came with ``took``, until ``over``.

    Args:
        targets: Memory that receives the stream, as consecutive views.
        total_bytes: Their size together.
        what: Names the stream in errors.
        may_be_refused: Whether ERROR may come in the place of a frame; its payload is left to the driver.
    """

    def __init__(
        self, targets: Iterable[memoryview], total_bytes: int, what: str, *, may_be_refused: bool = False
    ) -> None:
        self._targets, self._total_bytes, self._what = iter(targets), total_bytes, what
        self._kinds = (Kind.DATA, Kind.END, Kind.ERROR) if may_be_refused else (Kind.DATA, Kind.END)
        self._hasher, self._target = xxhash.xxh3_64(), memoryview(b"")
        self._received_bytes = self._missing_bytes = 0
        """Of the stream, and of the frame that was begun."""
        self._head = memoryview(bytearray(HEAD_BYTES + _CHECKSUM.size))
        self._head_bytes, self._head_wanted_bytes = 0, HEAD_BYTES
        self.checksum: int | None = None
        """Of the whole stream, once it is complete."""
        self.refusal_bytes: int | None = None
        """The size of ERROR's payload, which comes next, once its head is here."""

    @property
    def over(self) -> bool:
        return self.checksum is not None or self.refusal_bytes is not None

    @property
    def left_bytes(self) -> int:
        """Of the stream, still to come."""
        return self._total_bytes - self._received_bytes

    @property
    def wanted_bytes(self) -> int:
        """What will come before anything has to be decided, at the least."""
        return self._missing_bytes or self._head_wanted_bytes - self._head_bytes

    def places(self) -> list[memoryview]:
        """Where the next bytes go, in this order. Not when it is over."""
        head = self._head[self._head_bytes : self._head_wanted_bytes]
        if not self._missing_bytes:
            return [head]
        while not self._target:
            self._target = next(self._targets)
        place = self._target[: self._missing_bytes]
        # Another frame follows the last byte of this one.
        return [place, head] if len(place) == self._missing_bytes else [place]

    def took(self, size_bytes: int) -> None:
        """So many bytes were put there.

        Raises:
            InvalidRequestError: A frame that does not belong here.
            ChunkError: A frame is empty, or more than the stream may have, or the stream is short.
            CorruptDataError: The checksum is another.
        """
        if self._missing_bytes:
            count = min(size_bytes, self._missing_bytes, len(self._target))
            self._hasher.update(self._target[:count])
            self._target = self._target[count:]
            self._missing_bytes -= count
            self._received_bytes += count
            size_bytes -= count
        self._head_bytes += size_bytes
        if self._head_bytes == self._head_wanted_bytes:
            self._parse_head()

    def _parse_head(self) -> None:
        kind, size_bytes = parse_head(self._head[:HEAD_BYTES], *self._kinds)
        if kind is Kind.ERROR:
            self.refusal_bytes = size_bytes
        elif kind is Kind.DATA:
            self._begin(size_bytes)
        elif self._head_bytes < HEAD_BYTES + size_bytes:
            self._head_wanted_bytes = HEAD_BYTES + size_bytes
        else:
            self._end(self._head[HEAD_BYTES : self._head_bytes])

    def _begin(self, size_bytes: int) -> None:
        if size_bytes == 0:
            raise ChunkError(f"{self._what}: an empty frame at byte {self._received_bytes}")
        if self._received_bytes + size_bytes > self._total_bytes:
            raise ChunkError(
                f"{self._what}: {self._received_bytes + size_bytes} bytes or more, expected {self._total_bytes}"
            )
        self._missing_bytes, self._head_bytes = size_bytes, 0

    def _end(self, payload: Buffer) -> None:
        if self._received_bytes != self._total_bytes:
            raise ChunkError(f"{self._what}: ended after {self._received_bytes} of {self._total_bytes} bytes")
        if len(payload) != _CHECKSUM.size:
            raise ChunkError(f"{self._what}: a checksum of {len(payload)} bytes, expected {_CHECKSUM.size}")
        (announced,), checksum = _CHECKSUM.unpack(payload), self._hasher.intdigest()
        if announced != checksum:
            raise CorruptDataError(
                f"{self._what}: checksum {announced:#018x} was announced, the bytes give {checksum:#018x}"
            )
        self.checksum = checksum


def unsent(buffers: Sequence[Buffer], sent_bytes: int) -> list[Buffer]:
    """What is left of consecutive buffers once their first bytes were sent."""
    left: Iterator[Buffer] = iter(buffers)
    for buffer in left:
        if sent_bytes < len(buffer):
            return [memoryview(buffer)[sent_bytes:], *left]
        sent_bytes -= len(buffer)
    return []
