"""What Gather, ReduceScatter and ReduceGradientBuffer check and do, whichever way the bytes and messages come and
go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shardwell_server.shard.requests import average_reading
from shardwell_server.shard.requests.pushes import Push, check_wire_dtype
from shardwell_server.shard.requests.streams import IncomingStream
from shardwell_server.shard.state.parameters import Parameters
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.transports.shm_transport import ShmTransports
from shardwell_wire import codec
from shardwell_wire.errors import InvalidRequestError, VersionGoneError
from shardwell_wire.v1 import shard_pb2

_MAX_MEASURED_BYTES = 64 << 20


@dataclass(frozen=True)
class Reading:
    """A range of one version of a shard, while somebody reads it."""

    shard: UnitShard
    parameters: Parameters
    header: shard_pb2.GatherHeader

    first_byte: int
    """Where what is sent begins in the bytes of ``parameters``."""
    size_bytes: int
    """How much is sent."""

    def memory(self) -> memoryview:
        """What is sent, as it lies in memory now; ``parameters.check()`` before every look at it."""
        return self.parameters.memory(self.first_byte, self.first_byte + self.size_bytes)

    def pieces(self, piece_bytes: int) -> Iterator[memoryview]:
        """Views of the range's memory, one after the other; each may be read until the next is asked for.

        Raises:
            ShardwellError: The bytes were taken from their readers, so the last piece may be of two versions.
        """
        for start in range(0, self.size_bytes, piece_bytes):
            buffer = self.parameters.buffer  # looked up anew: an old version may move to another one
            yield self.memory()[start : start + piece_bytes]
            self.parameters.check()
            if self.parameters.buffer is not buffer:
                raise VersionGoneError(
                    f"version {self.header.version} of {self.shard.what} is being overwritten",
                    unit=self.shard.unit,
                    version=self.header.version,
                )


def is_there(store: ShardStore, request: shard_pb2.GatherRequest) -> bool:
    """Whether ``reading`` has the version without waiting for it.

    Raises:
        NotFoundError: The run or unit is not here.
    """
    return store.run(request.run, request.run_id).shard(request.unit).values.readable(_version(request))


@asynccontextmanager
async def reading(store: ShardStore, request: shard_pb2.GatherRequest, wait_s: float) -> AsyncIterator[Reading]:
    """Waits for the version that a Gather wants, and keeps it as it is.

    Raises:
        NotFoundError: The run or unit is not here.
        InvalidRequestError: The range is not the shard's, or the chunks are too large.
        DeadlineError: The version does not exist yet.
        VersionGoneError: It has been overwritten.
        StepStateError: Averages are wanted, and there are none.
    """
    run = store.run(request.run, request.run_id)
    shard = run.shard(request.unit)
    start, stop = _range(shard, request)
    if request.chunk_bytes > codec.MAX_CHUNK_BYTES:
        raise InvalidRequestError(f"chunk_bytes is {request.chunk_bytes}: at most {codec.MAX_CHUNK_BYTES}")
    wanted = _version(request)
    if request.ema:
        async with average_reading.reading(store, run, shard, wanted, wait_s) as (version, averages):
            header = shard_pb2.GatherHeader(version=version, start_bytes=start, stop_bytes=stop)
            yield Reading(shard, averages, header, start - shard.start_bytes, stop - start)
        return
    version, parameters = await shard.values.read(wanted, wait_s)
    header = shard_pb2.GatherHeader(version=version, start_bytes=start, stop_bytes=stop)
    try:
        if not request.wire_dtype:
            yield Reading(shard, parameters, header, start - shard.start_bytes, stop - start)
            return
        encoded = await shard.encoded.read(
            request.wire_dtype, parameters, store.in_thread, wait_s=wait_s, what=shard.what
        )
        try:
            yield Reading(shard, encoded, header, 0, encoded.buffer.numel())
        finally:
            shard.encoded.release(encoded)
    finally:
        shard.values.release(parameters)


def _version(request: shard_pb2.GatherRequest) -> int | None:
    return request.version if request.HasField("version") else None


def _range(shard: UnitShard, request: shard_pb2.GatherRequest) -> tuple[int, int]:
    start, stop = request.start_bytes, request.stop_bytes
    check_wire_dtype(request.wire_dtype)
    if request.ema and request.wire_dtype:
        raise InvalidRequestError(f"{shard.what}: averages are sent as they are stored only")
    if start == stop == 0:
        return shard.start_bytes, shard.stop_bytes
    if request.wire_dtype and (start, stop) != (shard.start_bytes, shard.stop_bytes):
        raise InvalidRequestError(f"{shard.what}: only the whole shard is sent in another dtype, not [{start}, {stop})")
    if not shard.start_bytes <= start <= stop <= shard.stop_bytes:
        raise InvalidRequestError(
            f"{shard.what}: [{start}, {stop}) is not in this server's [{shard.start_bytes}, {shard.stop_bytes})"
        )
    return start, stop


async def push(
    store: ShardStore, header: shard_pb2.ReduceScatterHeader, incoming: IncomingStream, wait_s: float
) -> shard_pb2.ReduceScatterResponse:
    """Receives one part of a contribution; raises as ``Push.receive`` does.

    Raises:
        DuplicateError: The request id was used for another request.
        NotFoundError: The run or unit is not here.
    """
    store.requests.check_content("ReduceScatter", header.context, header)
    run = store.exact_run(header.context)
    duplicate = await Push(store, run, run.shard(header.unit), header).receive(incoming, wait_s)
    return shard_pb2.ReduceScatterResponse(duplicate=duplicate, version=header.context.step)


async def reduce_gradient_buffer(
    store: ShardStore, transports: ShmTransports, request: shard_pb2.ReduceGradientBufferRequest
) -> shard_pb2.ReduceGradientBufferResponse:
    """Takes one part of a contribution out of a gradient buffer; raises as ``Push.adopt`` does.

    Raises:
        DuplicateError: The request id was used for another request.
        NotFoundError: The run or unit is not here.
        ConflictError: The transport is not open, or has no such gradient buffer.
    """
    header = request.header
    # The same push as over any other way, or from another gradient buffer.
    store.requests.check_content("ReduceScatter", header.context, header)
    run = store.exact_run(header.context)
    gradient_buffer = transports.transport(request.transport_id, run.identity).gradient_buffer(
        request.gradient_buffer_id
    )
    duplicate = await Push(store, run, run.shard(header.unit), header).adopt(gradient_buffer)
    return shard_pb2.ReduceGradientBufferResponse(
        duplicate=duplicate, version=header.context.step, adopted=gradient_buffer.held
    )


def meaningless(request: shard_pb2.MeasureTransportRequest, default_bytes: int) -> Iterator[memoryview]:
    """What MeasureTransport sends, in chunks as asked for.

    Args:
        request: What the trainer wants.
        default_bytes: Of a chunk, if the request does not say.

    Raises:
        InvalidRequestError: It wants too much.
    """
    if request.size_bytes > _MAX_MEASURED_BYTES or request.chunk_bytes > codec.MAX_CHUNK_BYTES:
        raise InvalidRequestError(
            f"size_bytes {request.size_bytes}, chunk_bytes {request.chunk_bytes}: at most {_MAX_MEASURED_BYTES} and "
            f"{codec.MAX_CHUNK_BYTES}"
        )
    chunk_bytes = request.chunk_bytes or default_bytes
    zeros = memoryview(bytes(min(chunk_bytes, request.size_bytes)))
    return (zeros[: request.size_bytes - start] for start in range(0, request.size_bytes, chunk_bytes))
