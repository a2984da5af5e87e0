"""Receives one chunk stream into memory; keeps nothing of one that is not complete and correct."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import xxhash
from google.protobuf.message import Message

from shardwell_wire.codec import AnyMessage, ChunkView, StreamReceiver, decode_message
from shardwell_wire.errors import ChunkError, DeadlineError, InvalidRequestError

IDLE_LIMIT_S = 30.0
"""A stream that brings nothing for this long is given up."""


class IncomingStream:
    """The messages of one client stream, one at a time.

    Args:
        messages: Serialised messages, as grpc hands them out.
        message_type: Their type.
        idle_limit_s: Longest wait for the next one.
    """

    def __init__(
        self, messages: AsyncIterator[bytes], message_type: type[AnyMessage], *, idle_limit_s: float = IDLE_LIMIT_S
    ) -> None:
        self._messages, self._type, self._idle_limit_s = messages, message_type, idle_limit_s
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
        return header

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        """Receives the whole stream; returns its checksum.

        Raises:
            ChunkError: Gap, overlap, excess or a short stream.
            CorruptDataError: The checksum does not match.
            DeadlineError: Nothing came for too long.
        """
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

    async def checksum(self) -> int:
        """Reads the rest without keeping it; returns the checksum of what came."""
        hasher = xxhash.xxh3_64()
        if self._first is not None:
            hasher.update(self._first.payload)
        while (data := await self._next()) is not None:
            hasher.update(decode_message(data, self._type)[1].payload)
        return hasher.intdigest()

    async def _next(self) -> bytes | None:
        try:
            return await asyncio.wait_for(anext(self._messages, None), self._idle_limit_s)
        except TimeoutError:
            raise DeadlineError(f"the stream brought nothing for {self._idle_limit_s:.0f} s") from None
