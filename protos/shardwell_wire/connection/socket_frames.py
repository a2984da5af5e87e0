"""The protocol of socket transports, byte for byte, and the TCP connections that carry it, with TLS 1.3 or without.

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
The server may send ERROR, with a ``google.rpc.Status``, instead of any frame. Frames do no I/O: both ends send and
receive them with a ``ByteStream`` of their own sockets.

Note: [TLS in memory]
    The TLS of Python's ``ssl`` module works in memory here. One system call moves many records, and the waits for the
    socket are the same as without TLS. If a connection ends without TLS's own end, the missing END frame or the
    checksum shows it.
"""

from __future__ import annotations

import enum
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
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


WAKE_BYTES = 1 << 20
"""Largest low-water mark. Data arrives in parts of a few KiB, and waking a reader costs more than copying one part. The
kernel buffers up to twice as much unread data per socket."""


_BATCH_BYTES = 256 << 10
"""Bytes that one call encrypts, and encrypted bytes that one call receives."""

_MAX_RECORD_BYTES = 5 + (16 << 10) + 256
"""Longest record of TLS 1.3, encrypted."""

_MOST_RECORDS = 1 << 24
"""Records in each direction after which a connection is replaced. An AES-GCM key must encrypt at most 2**24.5 records
(RFC 8446, section 5.5)."""


class ByteStream:
    """The bytes of a socket in both directions. Errors of the socket are OSErrors.

    Args:
        connected: The socket. ``send`` waits if it is blocking.
    """

    plain: socket.socket | None = None
    """The socket, if its bytes are not encrypted: who receives many frames needs no function around its method."""
    buffered_bytes = 0
    """Bytes that were received from the socket, and not by the caller. 0 does not exclude a part of a record."""
    is_worn_out = False
    """Whether the connection should be replaced by a new one."""

    send: Callable[[Sequence[Buffer]], int]
    """Sends bytes of consecutive buffers; returns how many. Raises BlockingIOError if the socket takes no bytes now.
    After this error, the next call must begin with the same bytes."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.mark_bytes = 1
        """The receive low-water mark of the socket (``SO_RCVLOWAT``), which ``poll`` respects."""

    def want(self, size_bytes: int) -> None:
        """Sets the low-water mark before waiting for a number of bytes, at least 1.

        A reader is woken below the mark if the connection ends or the kernel's buffer is full.
        """
        mark_bytes = min(size_bytes, WAKE_BYTES)
        if mark_bytes != self.mark_bytes:
            self.mark_bytes = mark_bytes
            with suppress(OSError):  # without the option, readers are only woken more often
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark_bytes)

    def receive(self, places: Sequence[memoryview]) -> int:
        """Receives bytes into consecutive places without waiting; returns how many. 0: the peer has closed.

        Raises:
            BlockingIOError: No bytes have arrived.
        """
        raise NotImplementedError


class PlainStream(ByteStream):
    """The bytes of a socket as they are."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.plain, self.send = connected, connected.sendmsg  # without a function: every frame comes here

    def receive(self, places: Sequence[memoryview]) -> int:
        count, *_ = self._socket.recvmsg_into(places, 0, socket.MSG_DONTWAIT)
        return count


class EncryptedStream(ByteStream):
    """The bytes of a socket, encrypted with TLS. See Note: [TLS in memory].

    Args:
        connected: The socket. ``send`` waits if it is blocking.
        context: Versions and certificates.
        server_name: Name that the certificate of the server must have. None: this end is the server.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        super().__init__(connected)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._is_ready = False
        self._received = memoryview(bytearray(_BATCH_BYTES))
        self._unsent = memoryview(b"")
        """Encrypted bytes that the socket has not taken."""
        self._encrypted_bytes = 0
        """Bytes of the caller that are encrypted in ``_unsent``, or were sent before."""
        self._sent_records = self._received_records = 0

    @property
    def buffered_bytes(self) -> int:  # type: ignore[override]  # a plain stream has an attribute: no call
        return self._incoming.pending + self._tls.pending()

    @property
    def is_worn_out(self) -> bool:  # type: ignore[override]  # as above
        return max(self._sent_records, self._received_records) > _MOST_RECORDS

    def want(self, size_bytes: int) -> None:
        # OpenSSL also keeps the received part of one record, and does not tell its size.
        super().want(max(1, size_bytes - self.buffered_bytes - _MAX_RECORD_BYTES))

    def handshake(self) -> None:
        """Continues the handshake until it is complete.

        Raises:
            BlockingIOError: Bytes of the peer are missing. Call again when they have arrived.
            ssl.SSLError: The handshake failed, for example because the certificate of the peer is refused.
        """
        while not self._is_ready:
            try:
                self._tls.do_handshake()
                self._is_ready = True
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # tells the peer the reason
                raise
        self._flush()

    def send(self, buffers: Sequence[Buffer]) -> int:
        if not self._unsent:
            self._encrypt(buffers)
        self._flush()
        sent_bytes, self._encrypted_bytes = self._encrypted_bytes, 0
        return sent_bytes

    def receive(self, places: Sequence[memoryview]) -> int:
        try:
            while not (count := self._decrypt(places)):
                self._fill()
        except EOFError:
            return 0
        return count

    def _encrypt(self, buffers: Sequence[Buffer]) -> None:
        """Encrypts the first bytes of the buffers."""
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                if self._encrypted_bytes >= _BATCH_BYTES:
                    return
                count = self._tls.write(left)
                self._sent_records += 1
                self._encrypted_bytes += count
                left = left[count:]

    def _flush(self) -> None:
        """Sends the encrypted bytes. Raises BlockingIOError if some are left."""
        if self._outgoing.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _fill(self) -> None:
        """Receives encrypted bytes without waiting. Raises BlockingIOError without any, and EOFError after the last."""
        count = self._socket.recv_into(self._received, 0, socket.MSG_DONTWAIT)
        if not count:
            if not self._is_ready:
                raise ConnectionResetError("the peer closed the connection during the TLS handshake")
            raise EOFError
        self._incoming.write(self._received[:count])

    def _decrypt(self, places: Sequence[memoryview]) -> int:
        """Decrypts received bytes into consecutive places; returns how many."""
        total = 0
        with suppress(ssl.SSLWantReadError):
            for place in places:
                left = place
                while left:
                    count: int = self._tls.read(len(left), left)  # type: ignore[assignment]  # typed as without a buffer
                    if not count:
                        raise EOFError
                    self._received_records += 1
                    total += count
                    left = left[count:]
        return total


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


_KINDS = {kind.value: kind for kind in Kind}
"""A look-up here takes a tenth of the time of ``Kind(number)``."""

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
        raise _too_long(kind, size_bytes)
    return b"".join((_HEAD.pack(size_bytes, kind), *payload))


def _too_long(kind: Kind, size_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(f"a {kind.name} frame has {size_bytes} bytes, expected at most {_MAX_BYTES[kind]}")


def parse_head(data: Buffer, *expected: Kind) -> tuple[Kind, int]:
    """Returns the kind and the payload length of a frame. [HEAD_BYTES]

    Raises:
        InvalidRequestError: The kind is not expected, or the payload is too long.
    """
    size_bytes, number = _HEAD.unpack(data)
    if number not in expected:
        raise InvalidRequestError(
            f"received a frame of kind {number}: expected {' or '.join(kind.name for kind in expected)}"
        )
    kind = _KINDS[number]
    if size_bytes > _MAX_BYTES[kind]:
        raise _too_long(kind, size_bytes)
    return kind, size_bytes


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
    timeout_ms, encoded = min(max(1, round(timeout_s * 1000)), 0xFFFFFFFF), message.SerializeToString()
    size_bytes = _TIMEOUT.size + len(encoded)
    if size_bytes > _MAX_BYTES[kind]:
        raise _too_long(kind, size_bytes)
    return _HEAD.pack(size_bytes, kind) + _TIMEOUT.pack(timeout_ms) + encoded


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
        return [_HEAD.pack(sum(map(len, parts)), Kind.DATA), *parts]

    def end(self) -> bytes:
        """Returns the END frame."""
        return _HEAD.pack(_CHECKSUM.size, Kind.END) + _CHECKSUM.pack(self._hasher.intdigest())


def stream_frames(pieces: Iterable[memoryview], total_bytes: int) -> Iterator[list[Buffer]]:
    """Frames a whole stream without copying its bytes.

    Args:
        pieces: The stream, as consecutive buffers. Small buffers share a frame.
        total_bytes: Size of all pieces.

    Yields:
        The buffers of each DATA frame. END is behind the last one.
    """
    hasher, frame, room = xxhash.xxh3_64(), list[Buffer](), 0
    for piece in pieces:
        rest = piece
        while rest:
            if not room:
                room = min(total_bytes, DATA_BYTES)
                frame.append(_HEAD.pack(room, Kind.DATA))
            part, rest = rest[:room], rest[room:]
            hasher.update(part)
            frame.append(part)
            room -= len(part)
            total_bytes -= len(part)
            if not room and total_bytes:
                yield frame
                frame = []
    frame.append(_HEAD.pack(_CHECKSUM.size, Kind.END) + _CHECKSUM.pack(hasher.intdigest()))
    yield frame


class StreamReceiver:
    """Assigns the bytes of one stream to their targets and checks them.

    The caller receives bytes into ``places`` and reports their number to ``took``, until ``over`` is True.

    Args:
        targets: Memory that receives the stream, as consecutive views.
        may_be_refused: True if an ERROR frame is allowed. The caller reads the payload of that frame.
    """

    def __init__(
        self, targets: Iterable[memoryview], total_bytes: int, what: str, *, may_be_refused: bool = False
    ) -> None:
        self._targets, self._total_bytes, self._what = iter(targets), total_bytes, what
        self._kinds = (Kind.DATA, Kind.END, Kind.ERROR) if may_be_refused else (Kind.DATA, Kind.END)
        self._hasher = xxhash.xxh3_64()
        self._frame = deque[memoryview]()
        """Memory for the missing bytes of the current DATA frame, without empty views."""
        self._rest = memoryview(b"")
        """The part of the current target that follows these bytes."""
        self.left_bytes, self._missing_bytes = total_bytes, 0
        """Bytes that are not received yet: of the stream, and of the current DATA frame."""
        self._head = memoryview(bytearray(HEAD_BYTES + _CHECKSUM.size))
        self._head_bytes, self._head_wanted_bytes = 0, HEAD_BYTES
        self.places = [self._head[:HEAD_BYTES]]
        """Memory for the next bytes, in order. Not to be used once ``over`` is True."""
        self.over = False
        """True once the stream is complete or an ERROR frame has begun."""
        self.checksum: int | None = None
        """Checksum of the stream. None until the stream is complete."""
        self.refusal_bytes: int | None = None
        """Size of the ERROR payload, which follows. None unless an ERROR frame was received."""

    @property
    def wanted_bytes(self) -> int:
        """Minimum number of bytes that the caller can receive before it must call ``took``."""
        return self._missing_bytes or self._head_wanted_bytes - self._head_bytes

    def took(self, size_bytes: int) -> None:
        """Processes bytes that the caller has received into ``places``.

        Raises:
            InvalidRequestError: A frame has an unexpected kind.
            ChunkError: A frame is empty, or the stream is too long or too short.
            CorruptDataError: The checksum does not match.
        """
        count = min(size_bytes, self._missing_bytes)
        self._missing_bytes -= count
        self.left_bytes -= count
        self._head_bytes += size_bytes - count
        while count:
            place = self._frame.popleft()
            if count < len(place):
                self._frame.appendleft(place[count:])
                place = place[:count]
            self._hasher.update(place)
            count -= len(place)
        if self._head_bytes == self._head_wanted_bytes:
            size_bytes, number = _HEAD.unpack_from(self._head)
            if number == Kind.DATA and 0 < size_bytes <= min(self.left_bytes, DATA_BYTES):
                self._missing_bytes, self._head_bytes = size_bytes, 0
                while size_bytes:
                    while not self._rest:  # targets may be empty
                        self._rest = next(self._targets)
                    place = self._rest[:size_bytes]
                    self._frame.append(place)
                    self._rest = self._rest[len(place) :]
                    size_bytes -= len(place)
            elif number != Kind.END or size_bytes > _CHECKSUM.size:
                self._refuse()
            elif self._head_bytes < HEAD_BYTES + size_bytes:  # the checksum follows in the same buffer
                self._head_wanted_bytes = HEAD_BYTES + size_bytes
            else:
                self._end(self._head[HEAD_BYTES : self._head_bytes])
        if len(self._frame) < MAX_PLACES:  # the head of the next frame follows the last bytes of this frame
            self.places = [*self._frame, self._head[self._head_bytes : self._head_wanted_bytes]]
        else:
            self.places = list(islice(self._frame, MAX_PLACES))

    def _refuse(self) -> None:
        """Ends the stream at an ERROR frame, or raises the error of a frame that does not belong to the stream."""
        kind, size_bytes = parse_head(self._head[:HEAD_BYTES], *self._kinds)
        if kind is Kind.DATA:
            raise self._misfit(size_bytes)
        self.refusal_bytes, self.over = size_bytes, True

    def _misfit(self, size_bytes: int) -> ChunkError:
        """Returns the error of a DATA frame that is empty or too long."""
        received_bytes = self._total_bytes - self.left_bytes
        if size_bytes == 0:
            return ChunkError(f"{self._what}: the frame at byte {received_bytes} is empty")
        return ChunkError(
            f"{self._what}: the stream has {received_bytes + size_bytes} bytes or more, expected {self._total_bytes}"
        )

    def _end(self, payload: Buffer) -> None:
        if self.left_bytes:
            received_bytes = self._total_bytes - self.left_bytes
            raise ChunkError(f"{self._what}: the stream ended after {received_bytes} of {self._total_bytes} bytes")
        if len(payload) != _CHECKSUM.size:
            raise ChunkError(f"{self._what}: the checksum has {len(payload)} bytes, expected {_CHECKSUM.size}")
        (announced,), checksum = _CHECKSUM.unpack(payload), self._hasher.intdigest()
        if announced != checksum:
            raise CorruptDataError(
                f"{self._what}: the bytes have checksum {checksum:#018x}, expected {announced:#018x}"
            )
        self.checksum, self.over = checksum, True


def unsent(buffers: Sequence[Buffer], sent_bytes: int) -> list[Buffer]:
    """Returns the rest of consecutive buffers after their first bytes were sent."""
    remaining: Iterator[Buffer] = iter(buffers)
    for buffer in remaining:
        if sent_bytes < len(buffer):
            return [memoryview(buffer)[sent_bytes:], *remaining]
        sent_bytes -= len(buffer)
    return []
