"""Chunk streams: serializes and parses the tensor bytes of streaming rpcs, as messages that end with a ``Chunk``.

The last field of every streamed message is a ``Chunk``, and the last field of a ``Chunk`` is the payload. protobuf does
not process the payload on the fast path. The sender serializes the fields before the payload and joins them with the
payload once. The receiver parses the few fields before the payload and uses the payload in place, as a memoryview.
Messages with any other valid order of fields are parsed on a slow path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError
from shardwell_wire.v1 import common_pb2

DEFAULT_CHUNK_BYTES = 1 << 20
"""Payload per message. The fastest of the measured sizes with large HTTP/2 frames."""

MIN_CHUNK_BYTES = 4096
"""Smallest chunk that a server sends, except the last. A smaller one costs more than its bytes."""

MAX_CHUNK_BYTES = 4 << 20
"""Largest accepted payload. Bounds the memory that one message can occupy on a server."""

_LENGTH_DELIMITED = 2
_CHUNK_TAG = bytes([15 << 3 | _LENGTH_DELIMITED])
"""Tag of field 15: the chunk of a streamed message, and the payload of a chunk."""

Buffer = bytes | bytearray | memoryview
AnyMessage = TypeVar("AnyMessage", bound=Message)


def memory_at(address: int, size_bytes: int, owner: object) -> memoryview:
    """Returns a writable view of raw memory, such as a tensor's at ``data_ptr()``.

    Unlike ``Tensor.numpy``, the view leaves the storage resizable, and writes through it do not increment the tensor's
    version counter.

    Args:
        address: Address of the first byte.
        owner: Object that owns the memory. The view and its slices keep it alive, because a thread may use them longer
            than the caller. None: the memory is never freed.
    """
    if size_bytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * size_bytes).from_address(address)
    # The memoryview references the ctypes array, and the array references the owner.
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def copy_bytes(target: memoryview, offset: int, source: Buffer) -> None:
    """Copies ``source`` to ``target[offset:]``."""
    target[offset : offset + len(source)] = source


@dataclass(slots=True)
class ChunkView:
    """A received chunk. ``payload`` is a view of the received message."""

    offset_bytes: int
    checksum: int | None
    payload: memoryview


class StreamEncoder:
    """Serializes one stream of bytes, message by message.

    Args:
        first: The first message without its chunk; contains the header.
        total_bytes: Size of the whole stream.
    """

    def __init__(self, first: Message, total_bytes: int) -> None:
        self._head, self._total_bytes, self._offset = first.SerializeToString(), total_bytes, 0
        self._hasher = xxhash.xxh3_64()

    def encode(self, parts: Sequence[Buffer]) -> bytes:
        """Returns the next message, with a copy of its payload, which may consist of several buffers."""
        size = sum(len(part) for part in parts)
        for part in parts:
            self._hasher.update(part)
        chunk = common_pb2.Chunk(offset_bytes=self._offset)
        self._offset += size
        if self._offset == self._total_bytes:
            chunk.checksum = self._hasher.intdigest()
        # The payload field is written by hand, so that protobuf does not copy the payload.
        head, self._head = self._head, b""
        chunk_head = chunk.SerializeToString() + _CHUNK_TAG + _varint(size)
        return b"".join((head, _CHUNK_TAG, _varint(len(chunk_head) + size), chunk_head, *parts))


def encode_stream(
    first: Message, pieces: Iterable[Buffer], *, chunk_bytes: int = DEFAULT_CHUNK_BYTES, total_bytes: int | None = None
) -> Iterator[bytes]:
    """Serializes a stream of bytes as messages.

    Args:
        first: The first message without its chunk; contains the header.
        pieces: The stream, as consecutive buffers. Small buffers share a message.
        chunk_bytes: Payload per message.
        total_bytes: Size of all pieces. Required if ``pieces`` generates them on demand.

    Yields:
        Serialized messages, each with one copy of its payload. An empty stream has one message.
    """
    if total_bytes is None:
        pieces = list(pieces)
        total_bytes = sum(len(piece) for piece in pieces)
    encoder = StreamEncoder(first, total_bytes)
    return (encoder.encode(parts) for parts in batches(pieces, chunk_bytes))


def batches(pieces: Iterable[Buffer], chunk_bytes: int) -> Iterator[list[Buffer]]:
    """Cuts consecutive buffers into lists of views with ``chunk_bytes`` in total. Yields at least one list."""
    batch: list[Buffer] = []
    room, sent = chunk_bytes, False
    for piece in pieces:
        view, position = memoryview(piece), 0
        while position < len(view):
            part = view[position : position + room]
            batch.append(part)
            position, room = position + len(part), room - len(part)
            if room == 0:
                yield batch
                batch, room, sent = [], chunk_bytes, True
    if batch or not sent:
        yield batch


def decode_message(data: bytes, message_type: type[AnyMessage]) -> tuple[AnyMessage, ChunkView]:
    """Splits a received message into the message without its chunk, and the chunk. Does not copy the payload.

    Args:
        data: The serialized message.
        message_type: Type of the message, whose field 15 is a ``Chunk``.

    Raises:
        InvalidRequestError: The bytes do not decode as this type, or have no chunk.
    """
    view = memoryview(data)
    try:
        before, chunk_bytes = _split_last_field(view)
        if chunk_bytes is None:
            return _decode_slowly(data, message_type)
        chunk_before, payload = _split_last_field(chunk_bytes)
        if payload is None:
            return _decode_slowly(data, message_type)
        message = message_type.FromString(bytes(before))
        chunk = common_pb2.Chunk.FromString(bytes(chunk_before))
        if message.HasField("chunk") or chunk.payload:
            return _decode_slowly(data, message_type)
    except (DecodeError, IndexError, ValueError) as error:
        raise InvalidRequestError(f"bytes do not decode as {message_type.DESCRIPTOR.full_name}") from error
    return message, ChunkView(chunk.offset_bytes, chunk.checksum if chunk.HasField("checksum") else None, payload)


def _decode_slowly(data: bytes, message_type: type[AnyMessage]) -> tuple[AnyMessage, ChunkView]:
    message = message_type.FromString(data)
    if not message.HasField("chunk"):
        raise InvalidRequestError(f"{message_type.DESCRIPTOR.full_name} has no chunk: every streamed message needs one")
    chunk: common_pb2.Chunk = message.chunk  # type: ignore[attr-defined]
    checksum = chunk.checksum if chunk.HasField("checksum") else None
    view = ChunkView(chunk.offset_bytes, checksum, memoryview(chunk.payload))
    message.ClearField("chunk")
    return message, view


def _split_last_field(view: memoryview) -> tuple[memoryview, memoryview | None]:
    """Returns the bytes before field 15 and the content of field 15, or None if field 15 does not end the view."""
    position, end = 0, len(view)
    while position < end:
        field_start = position
        tag, position = _read_varint(view, position)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            size, position = _read_varint(view, position)
            if tag == _CHUNK_TAG[0]:
                if position + size != end:
                    return view, None
                return view[:field_start], view[position:end]
            position += size
        elif wire_type == 0:  # varint
            _, position = _read_varint(view, position)
        elif wire_type == 1:  # 64 bits
            position += 8
        elif wire_type == 5:  # 32 bits
            position += 4
        else:
            raise ValueError("unknown wire type")
    return view, None


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@dataclass
class StreamReceiver:
    """Checks the chunks of one stream and copies them to their targets.

    Args:
        targets: Memory that receives the stream, as consecutive views.
    """

    targets: Sequence[memoryview]
    what: str
    received_bytes: int = 0
    complete: bool = False
    checksum: int = 0
    """Checksum of the whole stream. Valid once the stream is complete."""
    _index: int = 0
    _position: int = 0
    _hasher: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def __post_init__(self) -> None:
        self.total_bytes = sum(len(target) for target in self.targets)

    def feed(self, chunk: ChunkView) -> None:
        """Processes the next chunk.

        Raises:
            ChunkError: The chunk is too large, leaves a gap, overlaps or exceeds the stream, the last chunk has no
                checksum, or an earlier chunk has one.
            CorruptDataError: The stream is complete and its checksum does not match.
        """
        size = len(chunk.payload)
        self._check_place(chunk, size)
        self._hasher.update(chunk.payload)
        self._copy(chunk.payload)
        self.received_bytes += size
        if self.received_bytes == self.total_bytes:
            self._finish(chunk)

    def _check_place(self, chunk: ChunkView, size: int) -> None:
        if self.complete:
            raise ChunkError(f"{self.what}: a chunk follows the end of the stream at {self.total_bytes} bytes")
        if size > MAX_CHUNK_BYTES:
            raise ChunkError(f"{self.what}: a chunk has {size} bytes, expected at most {MAX_CHUNK_BYTES}")
        if chunk.offset_bytes != self.received_bytes:
            kind = "gap" if chunk.offset_bytes > self.received_bytes else "overlap"
            raise ChunkError(
                f"{self.what}: {kind}: expected a chunk at byte {self.received_bytes}, got {chunk.offset_bytes}"
            )
        if self.received_bytes + size > self.total_bytes:
            raise ChunkError(
                f"{self.what}: the stream has {self.received_bytes + size} bytes or more, expected {self.total_bytes}"
            )
        if size == 0 and self.total_bytes:
            raise ChunkError(f"{self.what}: the chunk at byte {chunk.offset_bytes} is empty")
        if (chunk.checksum is not None) != (self.received_bytes + size == self.total_bytes):
            raise ChunkError(f"{self.what}: expected a checksum on the last chunk and on no other")

    def _copy(self, payload: memoryview) -> None:
        taken = 0
        while taken < len(payload):
            target = self.targets[self._index]
            part = payload[taken : taken + len(target) - self._position]
            copy_bytes(target, self._position, part)
            taken, self._position = taken + len(part), self._position + len(part)
            if self._position == len(target):
                self._index, self._position = self._index + 1, 0

    def _finish(self, chunk: ChunkView) -> None:
        self.complete, self.checksum = True, self._hasher.intdigest()
        if chunk.checksum != self.checksum:
            raise CorruptDataError(
                f"{self.what}: the bytes have checksum {self.checksum:#018x}, expected {chunk.checksum:#018x}"
            )

    def require_complete(self) -> None:
        """Raises ChunkError if the stream ended early."""
        if not self.complete:
            raise ChunkError(f"{self.what}: the stream ended after {self.received_bytes} of {self.total_bytes} bytes")
