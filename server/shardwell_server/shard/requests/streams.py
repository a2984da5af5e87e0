"""Receives one chunk stream into memory; keeps nothing of one that is not complete and correct."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import xxhash
from google.protobuf.message import Message

from shardwell_wire.codec import AnyMessage, ChunkView, StreamReceiver, decode_message
from shardwell_wire.errors import ChunkError, DeadlineError, InvalidRequestError
from shardwell_wire.names import check_names

IDLE_LIMIT_S = 30.0
"""A stream that brings nothing for this long is given up."""


class IncomingStream(Protocol):
    """A stream that begins to come in, whichever way."""

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        """Receives the whole stream; returns its checksum.

        Raises:
            ChunkError: Gap, overlap, excess or a short stream.
            CorruptDataError: The checksum does not match.
            DeadlineError: Nothing came for too long.
        """
        ...

    async def checksum(self, total_bytes: int, what: str) -> int:
        """Receives the whole stream without keeping it; returns its checksum.

        Raises:
            ChunkError: It has a gap, an overlap, or another length than ``total_bytes``.
            DeadlineError: Nothing came for too long.
        """
        ...


class IncomingMessages:
    """The messages of one client stream, one at a time: an ``IncomingStream`` after its header.

    Args:
        messages: Serialised messages, as grpc hands them out.
        message_type: Their type.
    """

    def __init__(self, messages: AsyncIterator[bytes], message_type: type[AnyMessage]) -> None:
        self._messages, self._type = messages, message_type
        self._first: ChunkView | None = None

    async def header(self) -> Message:
        """The first message's header.

        Raises:
            InvalidRequestError: The stream is empty or does not begin with a header.
        """
        data = await self._next()
        if data is None:
            raise InvalidRequestError(f"an empty stream of {self._type.DESCRIPTOR.full_name}: expected a header")
        message, self._first = decode_message(data, self._type)
        if not message.HasField("header"):
            raise InvalidRequestError(f"the first {self._type.DESCRIPTOR.full_name} has no header")
        header: Message = message.header  # type: ignore[attr-defined]
        check_names(header)
        return header

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        receiver = StreamReceiver(targets, what)
        assert self._first is not None
        receiver.feed(self._first)
        self._first = None
        while (data := await self._next()) is not None:
            message, chunk = decode_message(data, self._type)
            if message.HasField("header"):
                raise ChunkError(f"{what}: a second header")
            receiver.feed(chunk)
        receiver.require_complete()
        return receiver.checksum

    async def checksum(self, total_bytes: int, what: str) -> int:
        hasher, received, chunk = xxhash.xxh3_64(), 0, self._first
        while chunk is not None:
            size = len(chunk.payload)
            if chunk.offset_bytes != received or received + size > total_bytes:
                raise ChunkError(
                    f"{what}: {size} bytes at byte {chunk.offset_bytes}; expected {total_bytes} in all, "
                    f"the next at byte {received}"
                )
            hasher.update(chunk.payload)
            received += size
            data = await self._next()
            chunk = None if data is None else decode_message(data, self._type)[1]
        if received != total_bytes:
            raise ChunkError(f"{what}: ended after {received} of {total_bytes} bytes")
        return hasher.intdigest()

    async def _next(self) -> bytes | None:
        try:
            async with asyncio.timeout(IDLE_LIMIT_S):
                return await anext(self._messages, None)
        except TimeoutError:
            raise DeadlineError(f"the stream brought nothing for {IDLE_LIMIT_S:g} s") from None
