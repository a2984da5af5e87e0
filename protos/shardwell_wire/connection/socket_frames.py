"""Options of TCP connections that the socket transport opens.

The protocol of socket transports, byte for byte.

A connection starts with a hello: magic bytes, protocol number and the transport's token. Then both sides send frames:
payload length (4 bytes, little-endian), kind (1 byte), payload. The client sends a request and reads the whole response
before the next request::

    client                             server
    hello                          ->
                                   <-  WELCOME
    GATHER                         ->
                                   <-  GATHERING, DATA ..., END
    REDUCE_SCATTER, DATA ..., END  ->
                                   <-  REDUCE_SCATTERED
    REDUCE_GRADIENT_BUFFER         ->
                                   <-  GRADIENT_BUFFER_REDUCED
    REDUCE_BATCH                   ->
                                   <-  BATCH_REDUCED
    GATHER_BATCH                   ->
                                   <-  BATCH_GATHERED, DATA ..., END
                                       (repeated until every range is answered)

DATA frames contain the bytes of a stream, as ``Chunk`` payloads do over gRPC. END contains the XXH3-64 of all of them.
The server may send ERROR, with a ``google.rpc.Status``, instead of any frame. This module does no I/O: both ends use it
with their own sockets.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from shardwell_wire.encoding.chunk_streams import Buffer
from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError
from shardwell_wire.v1 import shard_pb2

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 2, 1, 10
"""Silence before the first probe, time between two probes, and number of probes without an answer that end a
connection. A host that does not answer for 12 s counts as gone."""


def set_options(connected: socket.socket) -> None:
    """Makes a connection send small messages at once, and notice that the other end is gone.

    An end that waits for data sends nothing. Without keepalive probes it would never learn that the other end has lost
    the connection, for example because a firewall reset it in one direction. A host that does not know the connection
    answers the first probe with a reset.

    Args:
        connected: The connected socket.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


PROTOCOL = 3
"""Protocol number. Increases with every change that an older peer would misinterpret."""

TOKEN_BYTES = 32

DATA_BYTES = 4 << 20
"""Maximum payload of a DATA frame. Senders fill frames."""

_MAGIC = b"shrdsock"
_HELLO = struct.Struct(f"<8sI{TOKEN_BYTES}s")
_HEAD = struct.Struct("<IB")
_TIMEOUT = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")

MAX_PLACES = 256
"""Most places that a receiver returns at once. The systems limit the buffers of a call to 1024 or more."""

HELLO_BYTES = _HELLO.size
HEAD_BYTES = _HEAD.size

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Kind(enum.IntEnum):
    """Kind of a frame."""

    WELCOME = 1
    """The server accepted the token."""
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
    """XXH3-64 (8 bytes) of the whole stream."""
    MEASURE = 9
    """Request: timeout in ms (4 bytes), ``MeasureTransportRequest``. The response is a meaningless stream."""
    REDUCE_GRADIENT_BUFFER = 10
    """Request: timeout in ms (4 bytes), ``ReduceGradientBufferRequest``. The gradients are in shared memory."""
    GRADIENT_BUFFER_REDUCED = 11
    """``ReduceGradientBufferResponse``."""
    REDUCE_BATCH = 12
    """Request: timeout in ms (4 bytes), ``ReduceBatchRequest``. Small gradients are in the message."""
    BATCH_REDUCED = 13
    """``ReduceBatchResponse``."""
    GATHER_BATCH = 14
    """Request: timeout in ms (4 bytes), ``GatherBatchRequest``."""
    BATCH_GATHERED = 15
    """``GatherBatchResponse`` without a chunk; the stream of its ranges follows."""


REQUESTS: dict[Kind, type[Message]] = {
    Kind.GATHER: shard_pb2.GatherRequest,
    Kind.REDUCE_SCATTER: shard_pb2.ReduceScatterHeader,
    Kind.MEASURE: shard_pb2.MeasureTransportRequest,
    Kind.REDUCE_GRADIENT_BUFFER: shard_pb2.ReduceGradientBufferRequest,
    Kind.REDUCE_BATCH: shard_pb2.ReduceBatchRequest,
    Kind.GATHER_BATCH: shard_pb2.GatherBatchRequest,
}
"""Message types of the requests."""

_RESPONSES: dict[type[Message], Kind] = {
    shard_pb2.GatherHeader: Kind.GATHERING,
    shard_pb2.ReduceScatterResponse: Kind.REDUCE_SCATTERED,
    shard_pb2.ReduceGradientBufferResponse: Kind.GRADIENT_BUFFER_REDUCED,
    shard_pb2.ReduceBatchResponse: Kind.BATCH_REDUCED,
    shard_pb2.GatherBatchResponse: Kind.BATCH_GATHERED,
}
"""Kinds of the frames that answer requests, by message type."""

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
    Kind.REDUCE_BATCH: 4 << 20,
    Kind.BATCH_REDUCED: 4 << 20,
    Kind.GATHER_BATCH: 4 << 20,
    Kind.BATCH_GATHERED: 4 << 20,
}
"""Maximum payload of each kind of frame."""


def hello(token: bytes) -> bytes:
    """Returns the bytes that a client sends first."""
    return _HELLO.pack(_MAGIC, PROTOCOL, token)


def token_of(data: Buffer) -> bytes:
    """Returns the token in a hello. [HELLO_BYTES]

    Raises:
        InvalidRequestError: The bytes are not a hello, or the client uses another protocol number.
    """
    magic, protocol, token = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise InvalidRequestError(
            f"the connection starts with {magic!r}, expected {_MAGIC!r}: this port serves socket transports only"
        )
    if protocol != PROTOCOL:
        raise InvalidRequestError(
            f"the client uses socket protocol {protocol}, expected {PROTOCOL}: use one Shardwell version on both sides"
        )
    return bytes(token)


def encode(kind: Kind, *payload: bytes) -> bytes:
    """Returns a complete frame. Its payload consists of several parts."""
    size_bytes = sum(map(len, payload))
    if size_bytes > _MAX_BYTES[kind]:
        raise InvalidRequestError(f"a {kind.name} frame has {size_bytes} bytes, expected at most {_MAX_BYTES[kind]}")
    return b"".join((_HEAD.pack(size_bytes, kind), *payload))


def parse_head(data: Buffer, *expected: Kind) -> tuple[Kind, int]:
    """Returns the kind and the payload length of a frame. [HEAD_BYTES]

    Raises:
        InvalidRequestError: The kind is not expected, or the payload is too long.
    """
    size, number = _HEAD.unpack(data)
    if number not in expected:
        raise InvalidRequestError(
            f"received a frame of kind {number}: expected {' or '.join(kind.name for kind in expected)}"
        )
    kind = Kind(number)
    if size > _MAX_BYTES[kind]:
        raise InvalidRequestError(f"a {kind.name} frame has {size} bytes, expected at most {_MAX_BYTES[kind]}")
    return kind, size


def parse_message(payload: Buffer, message_type: type[AnyMessage]) -> AnyMessage:
    """Returns the message in a payload.

    Raises:
        InvalidRequestError: The payload does not decode as this type.
    """
    try:
        return message_type.FromString(payload)  # type: ignore[arg-type]  # takes any buffer
    except DecodeError as error:
        raise InvalidRequestError(f"bytes do not decode as {message_type.DESCRIPTOR.full_name}") from error


def encode_request(kind: Kind, message: Message, timeout_s: float) -> bytes:
    """Returns the frame of a request that times out after ``timeout_s`` seconds."""
    timeout_ms = min(max(1, round(timeout_s * 1000)), 0xFFFFFFFF)
    return encode(kind, _TIMEOUT.pack(timeout_ms), message.SerializeToString())


def parse_request(kind: Kind, payload: Buffer) -> tuple[float, Message]:
    """Returns the timeout in seconds and the message of a request.

    Raises:
        InvalidRequestError: The payload does not decode as a request of this kind.
    """
    if len(payload) < _TIMEOUT.size:
        raise InvalidRequestError(f"a {kind.name} frame has {len(payload)} bytes, expected at least {_TIMEOUT.size}")
    (timeout_ms,) = _TIMEOUT.unpack_from(payload)
    return timeout_ms / 1000, parse_message(memoryview(payload)[_TIMEOUT.size :], REQUESTS[kind])


def encode_response(message: Message) -> bytes:
    """Returns the frame of a message that answers a request."""
    return encode(_RESPONSES[type(message)], message.SerializeToString())


class StreamSender:
    """Frames one stream without copying its bytes."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()

    def data(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """Returns a DATA frame as buffers to send one after the other."""
        for part in parts:
            self._hasher.update(part)
        return [_HEAD.pack(sum(len(part) for part in parts), Kind.DATA), *parts]

    def end(self) -> bytes:
        """Returns the END frame."""
        return encode(Kind.END, _CHECKSUM.pack(self._hasher.intdigest()))


class StreamReceiver:
    """Assigns the bytes of one stream to their targets and checks them.

    The caller receives bytes into ``places()`` and reports their number to ``took``, until ``over`` is True.

    Args:
        targets: Memory that receives the stream, as consecutive views.
        total_bytes: Size of all targets.
        what: Description of the stream, for errors.
        may_be_refused: True if an ERROR frame is allowed. The caller reads the payload of that frame.
    """

    def __init__(
        self, targets: Iterable[memoryview], total_bytes: int, what: str, *, may_be_refused: bool = False
    ) -> None:
        self._targets, self._total_bytes, self._what = iter(targets), total_bytes, what
        self._kinds = (Kind.DATA, Kind.END, Kind.ERROR) if may_be_refused else (Kind.DATA, Kind.END)
        self._hasher = xxhash.xxh3_64()
        self._places = deque[memoryview]()
        """Memory for the missing bytes of the current DATA frame, without empty views."""
        self._rest = memoryview(b"")
        """The part of the current target that follows these bytes."""
        self._received_bytes = self._missing_bytes = 0
        """Received bytes of the stream, and missing bytes of the current DATA frame."""
        self._head = memoryview(bytearray(HEAD_BYTES + _CHECKSUM.size))
        self._head_bytes, self._head_wanted_bytes = 0, HEAD_BYTES
        self.checksum: int | None = None
        """Checksum of the stream. None until the stream is complete."""
        self.refusal_bytes: int | None = None
        """Size of the ERROR payload, which follows. None unless an ERROR frame was received."""

    @property
    def over(self) -> bool:
        """True once the stream is complete or an ERROR frame has begun."""
        return self.checksum is not None or self.refusal_bytes is not None

    @property
    def left_bytes(self) -> int:
        """Bytes of the stream that are not received yet."""
        return self._total_bytes - self._received_bytes

    @property
    def wanted_bytes(self) -> int:
        """Minimum number of bytes that the caller can receive before it must call ``took``."""
        return self._missing_bytes or self._head_wanted_bytes - self._head_bytes

    def places(self) -> list[memoryview]:
        """Returns the memory for the next bytes, in order. Must not be called once ``over`` is True."""
        head = self._head[self._head_bytes : self._head_wanted_bytes]
        if len(self._places) < MAX_PLACES:
            return [*self._places, head]  # the head of the next frame follows the last bytes of this frame
        return list(islice(self._places, MAX_PLACES))

    def took(self, size_bytes: int) -> None:
        """Processes bytes that the caller has received into ``places()``.

        Raises:
            InvalidRequestError: A frame has an unexpected kind.
            ChunkError: A frame is empty, or the stream is too long or too short.
            CorruptDataError: The checksum does not match.
        """
        count = min(size_bytes, self._missing_bytes)
        self._missing_bytes -= count
        self._received_bytes += count
        self._head_bytes += size_bytes - count
        while count:
            place = self._places.popleft()
            if count < len(place):
                self._places.appendleft(place[count:])
                place = place[:count]
            self._hasher.update(place)
            count -= len(place)
        if self._head_bytes == self._head_wanted_bytes:
            self._parse_head()

    def _parse_head(self) -> None:
        kind, size_bytes = parse_head(self._head[:HEAD_BYTES], *self._kinds)
        if kind is Kind.ERROR:
            self.refusal_bytes = size_bytes
        elif kind is Kind.DATA:
            self._begin(size_bytes)
        elif self._head_bytes < HEAD_BYTES + size_bytes:  # END: the checksum follows the head in the same buffer
            self._head_wanted_bytes = HEAD_BYTES + size_bytes
        else:
            self._end(self._head[HEAD_BYTES : self._head_bytes])

    def _begin(self, size_bytes: int) -> None:
        if size_bytes == 0:
            raise ChunkError(f"{self._what}: the frame at byte {self._received_bytes} is empty")
        if self._received_bytes + size_bytes > self._total_bytes:
            raise ChunkError(
                f"{self._what}: the stream has {self._received_bytes + size_bytes} bytes or more, expected "
                f"{self._total_bytes}"
            )
        self._missing_bytes, self._head_bytes = size_bytes, 0
        while size_bytes:
            while not self._rest:  # targets may be empty
                self._rest = next(self._targets)
            place = self._rest[:size_bytes]
            self._places.append(place)
            self._rest = self._rest[len(place) :]
            size_bytes -= len(place)

    def _end(self, payload: Buffer) -> None:
        if self._received_bytes != self._total_bytes:
            raise ChunkError(
                f"{self._what}: the stream ended after {self._received_bytes} of {self._total_bytes} bytes"
            )
        if len(payload) != _CHECKSUM.size:
            raise ChunkError(f"{self._what}: the checksum has {len(payload)} bytes, expected {_CHECKSUM.size}")
        (announced,), checksum = _CHECKSUM.unpack(payload), self._hasher.intdigest()
        if announced != checksum:
            raise CorruptDataError(
                f"{self._what}: the bytes have checksum {checksum:#018x}, expected {announced:#018x}"
            )
        self.checksum = checksum


def unsent(buffers: Sequence[Buffer], sent_bytes: int) -> list[Buffer]:
    """Returns the rest of consecutive buffers after their first bytes were sent."""
    remaining: Iterator[Buffer] = iter(buffers)
    for buffer in remaining:
        if sent_bytes < len(buffer):
            return [memoryview(buffer)[sent_bytes:], *remaining]
        sent_bytes -= len(buffer)
    return []
