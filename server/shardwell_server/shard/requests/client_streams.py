"""Client streams: of gradients and values over any transport, and of the initial values of a shard.

Limits the streams that clients keep open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import torch
import xxhash
from google.protobuf.message import Message

from shardwell_server.shard.arithmetic import random_values
from shardwell_server.shard.memory.buffer_reuse import tensor_memory
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire import fault_points
from shardwell_wire.encoding.chunk_streams import AnyMessage, ChunkView, StreamReceiver, decode_message
from shardwell_wire.errors import (
    CapacityError,
    ChunkError,
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    NonFiniteError,
    StaleEpochError,
)
from shardwell_wire.model.layout import Segment
from shardwell_wire.model.names import check_names
from shardwell_wire.v1 import initialization_pb2, shard_pb2

IDLE_LIMIT_S = 30.0
"""A stream without any bytes for this long is cancelled. Also the period of ``MIN_STREAM_BYTES``."""

MIN_STREAM_BYTES = 1 << 20
"""A stream that moves fewer bytes in ``IDLE_LIMIT_S`` is cancelled, unless it is complete. A client that sends or reads
a little now and then would otherwise occupy a buffer for hours."""

MAX_OPEN_STREAMS = 16_384
"""Maximum number of transport sessions and pinned versions of all clients."""

MAX_OPEN_STREAMS_PER_PEER = 256
"""Maximum per connection. A trainer needs a few."""


Header = TypeVar("Header", bound=Message)


class IncomingStream(Protocol):
    """A chunk stream that is being received over any transport."""

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        """Receives the whole stream into memory; returns its checksum.

        Raises:
            ChunkError: The stream has a gap, an overlap, or the wrong length.
            CorruptDataError: The checksum does not match.
            DeadlineError: Fewer than ``MIN_STREAM_BYTES`` arrived in ``IDLE_LIMIT_S``.
        """
        ...

    async def checksum(self, total_bytes: int, what: str) -> int:
        """Receives the whole stream without storing it; returns its checksum.

        Raises:
            ChunkError: The stream has a gap, an overlap, or another length than ``total_bytes``.
            DeadlineError: Fewer than ``MIN_STREAM_BYTES`` arrived in ``IDLE_LIMIT_S``.
        """
        ...


class IncomingMessages:
    """The messages of one client stream over gRPC. An ``IncomingStream`` after ``header`` has returned.

    Args:
        messages: Serialised messages, from grpc.
    """

    def __init__(self, messages: AsyncIterator[bytes], message_type: type[AnyMessage]) -> None:
        self._messages, self._type = messages, message_type
        self._first: ChunkView | None = None
        self._waited_s, self._arrived_bytes = 0.0, 0
        """Time spent waiting for messages, and bytes that arrived, in the current period of ``IDLE_LIMIT_S``."""

    async def header(self, kind: type[Header], check: Callable[[Message], None]) -> Header:
        """Returns the header in the first message.

        Args:
            check: Called with the header; raises if the caller may not send it.

        Raises:
            InvalidRequestError: The stream is empty or does not begin with a header.
        """
        data = await self._next()
        if data is None:
            raise InvalidRequestError(f"the stream of {self._type.DESCRIPTOR.full_name} is empty: expected a header")
        message, self._first = decode_message(data, self._type)
        if not message.HasField("header"):
            raise InvalidRequestError(f"the first {self._type.DESCRIPTOR.full_name} has no header")
        header = message.header  # type: ignore[attr-defined]
        assert isinstance(header, kind)
        check_names(header)
        check(header)
        return header

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        receiver = StreamReceiver(targets, what)
        assert self._first is not None
        receiver.feed(self._first)
        self._first = None
        while (data := await self._next()) is not None:
            message, chunk = decode_message(data, self._type)
            if message.HasField("header"):
                raise ChunkError(f"{what}: the stream has a second header")
            fault_points.reach("server.stream.middle")
            receiver.feed(chunk)
        receiver.require_complete()
        return receiver.checksum

    async def checksum(self, total_bytes: int, what: str) -> int:
        hasher, received, chunk = xxhash.xxh3_64(), 0, self._first
        while chunk is not None:
            size = len(chunk.payload)
            if chunk.offset_bytes != received or received + size > total_bytes:
                raise ChunkError(
                    f"{what}: got {size} bytes at byte {chunk.offset_bytes}; expected byte {received} next, and "
                    f"{total_bytes} bytes in total"
                )
            hasher.update(chunk.payload)
            received += size
            data = await self._next()
            chunk = None if data is None else decode_message(data, self._type)[1]
        if received != total_bytes:
            raise ChunkError(f"{what}: the stream ended after {received} of {total_bytes} bytes")
        return hasher.intdigest()

    async def _next(self) -> bytes | None:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        try:
            async with asyncio.timeout(IDLE_LIMIT_S):
                data = await anext(self._messages, None)
        except TimeoutError:
            raise too_slow(self._arrived_bytes) from None
        if data is not None:
            self._note_arrival(len(data), clock() - start_s)
        return data

    def _note_arrival(self, size_bytes: int, waited_s: float) -> None:
        # Only waits count: the server may also have had other work, or no memory for the stream.
        self._waited_s += waited_s
        self._arrived_bytes += size_bytes
        if self._waited_s >= IDLE_LIMIT_S:
            if self._arrived_bytes < MIN_STREAM_BYTES:
                raise too_slow(self._arrived_bytes)
            self._waited_s, self._arrived_bytes = 0.0, 0


class ReceivedStream:
    """A stream that has arrived as a whole, within a message. An ``IncomingStream``.

    Args:
        announced: Its checksum, as the sender computed it.
    """

    def __init__(self, data: bytes | memoryview, announced: int) -> None:
        self._data, self._announced = data, announced

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        return self.copy_into(targets, what)

    async def checksum(self, total_bytes: int, what: str) -> int:
        return self._check(total_bytes, what)

    def copy_into(self, targets: Sequence[memoryview], what: str) -> int:
        """As ``into``, at once."""
        checksum, position, left = self._check(sum(map(len, targets)), what), 0, memoryview(self._data)
        for target in targets:
            target[:] = left[position : position + len(target)]
            position += len(target)
        return checksum

    def _check(self, total_bytes: int, what: str) -> int:
        if len(self._data) != total_bytes:
            raise ChunkError(f"{what}: the stream has {len(self._data)} bytes, expected {total_bytes}")
        checksum = xxhash.xxh3_64_intdigest(self._data)
        if checksum != self._announced:
            raise CorruptDataError(
                f"{what}: the bytes have checksum {checksum:#018x}, expected {self._announced:#018x}"
            )
        return checksum


def too_slow(moved_bytes: int) -> DeadlineError:
    """Returns the error for a stream that moved this many bytes in ``IDLE_LIMIT_S``."""
    return DeadlineError(
        f"{moved_bytes} bytes of the stream moved in {IDLE_LIMIT_S:g} s, expected at least {MIN_STREAM_BYTES}: the "
        "network or the client is too slow"
    )


class StandingStreams:
    """Counts transport sessions and pinned versions, in total and per connection. Used on the event loop."""

    def __init__(self) -> None:
        self._by_peer: Counter[str] = Counter()

    @contextmanager
    def count(self, peer: str) -> Iterator[None]:
        """Counts one stream while the block runs.

        Args:
            peer: The connection.

        Raises:
            CapacityError: Too many streams are open.
        """
        own, total = self._by_peer.get(peer, 0), self._by_peer.total()
        if own >= MAX_OPEN_STREAMS_PER_PEER or total >= MAX_OPEN_STREAMS:
            raise CapacityError(
                f"{own} transport sessions and pinned versions of this connection are open, {total} of all clients; "
                f"the limits are {MAX_OPEN_STREAMS_PER_PEER} and {MAX_OPEN_STREAMS}: close some before opening more"
            )
        self._by_peer[peer] += 1
        try:
            yield
        finally:
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]


Draws = Mapping[int, initialization_pb2.ParameterDraw]
"""By parameter index."""

_Parts = Sequence[tuple[Segment, torch.Tensor]]
"""The segments of a shard, each with its values."""


async def receive(
    store: ShardStore, shard: UnitShard, header: shard_pb2.InitializeUnitHeader, incoming: IncomingStream, wait_s: float
) -> None:
    """Receives and draws the initial values of a shard. A newer stream replaces an unfinished one.

    Values for a published unit are ignored.

    Raises:
        NotFoundError: The range is not the shard's.
        InvalidRequestError: The stream is broken, or a distribution is invalid.
        StaleEpochError: The shard has values of a newer epoch, or a newer stream replaced this one.
        NonFiniteError: A value is NaN or infinity; nothing is stored.
        CapacityError: No memory became free in time.
    """
    shard.check_range(header.start_bytes, header.stop_bytes)
    draws = _checked_draws(shard, header)
    epoch, what = header.context.epoch, f"initial values of {shard.what}"
    if shard.version is not None:
        return
    async with shard.streams.replace("initial values", (epoch,), what):
        _check_epoch(shard, epoch)
        with await store.memory.incoming(shard.size_bytes, shard.initial_quota, wait_s=wait_s, what=what) as received:
            _clear_gaps(shard, received.buffer)
            views = shard.views(received.buffer)
            parts = list(zip(shard.segments, views, strict=True))
            streamed = [tensor_memory(view) for segment, view in parts if segment.parameter_index not in draws]
            await incoming.into(streamed, what)
            await store.memory.in_thread(partial(_compute_draw, shard, parts, draws))
            if not shard.layout.holds_buffers:
                await store.memory.in_thread(partial(_compute_check_finite, shard, parts, set(header.frozen_indices)))
            if shard.version is None:
                _check_epoch(shard, epoch)  # a stream of a newer epoch may have ended meanwhile
                shard.values.accept_initial(epoch, received)


def _checked_draws(shard: UnitShard, header: shard_pb2.InitializeUnitHeader) -> Draws:
    draws: dict[int, initialization_pb2.ParameterDraw] = {}
    parameters = shard.layout.parameters
    if header.draws and shard.layout.holds_buffers:
        raise InvalidRequestError(f"{shard.what} holds buffers, whose values cannot be drawn: send them")
    for draw in header.draws:
        if draw.parameter_index >= len(parameters) or draw.parameter_index in draws:
            raise InvalidRequestError(
                f"{shard.what}: parameter_index is {draw.parameter_index} in draws, expected unique numbers below "
                f"{len(parameters)}"
            )
        parameter = parameters[draw.parameter_index]
        if not parameter.is_trainable:
            raise InvalidRequestError(f"parameter {parameter.name!r} is {parameter.dtype}, which cannot be drawn")
        random_values.check(draw, parameter.name)
        draws[draw.parameter_index] = draw
    return draws


def _clear_gaps(shard: UnitShard, buffer: torch.Tensor) -> None:
    """Zeroes the padding between segments."""
    position = 0
    for segment in shard.segments:
        buffer[position : segment.start_bytes - shard.start_bytes].zero_()
        position = segment.stop_bytes - shard.start_bytes
    buffer[position:].zero_()


def _compute_draw(shard: UnitShard, parts: _Parts, draws: Draws) -> None:
    for segment, view in parts:
        if (draw := draws.get(segment.parameter_index)) is not None:
            box = shard.layout.parameters[segment.parameter_index].box
            random_values.fill(view, segment.start_element, draw, box)


def _compute_check_finite(shard: UnitShard, parts: _Parts, frozen: Collection[int]) -> None:
    for segment, view in parts:
        parameter = shard.layout.parameters[segment.parameter_index]
        if segment.parameter_index in frozen or not parameter.is_trainable:
            continue
        if not bool(torch.isfinite(view).all()):
            raise NonFiniteError(
                f"the initial value of parameter {parameter.name!r} has NaN or infinity. Only a parameter that is "
                "frozen when it is sharded (requires_grad=False) may have such values. A frozen float32 parameter may "
                "not if gather_dtype has 8 bits",
                parameter=parameter.name,
            )


def _check_epoch(shard: UnitShard, epoch: int) -> None:
    if epoch < shard.values.initial_epoch:
        raise StaleEpochError(
            f"initial values of {shard.what}: epoch {epoch} is over, the shard has values of epoch "
            f"{shard.values.initial_epoch}",
            epoch=epoch,
            newest=shard.values.initial_epoch,
        )
