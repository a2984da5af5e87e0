"""Requests with the gradients of several units. They arrive as rpcs or over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from shardwell_server.rpc import reported_error
from shardwell_server.shard.requests import pushes
from shardwell_server.shard.state.store import NamesRun, ShardStore
from shardwell_server.shard.transports import shm_requests
from shardwell_server.shard.transports.base import ServerTransports
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError, to_status_details
from shardwell_wire.v1 import shard_pb2

MAX_PARTS = 256
"""Maximum number of parts in one request."""


class ReceivedStream:
    """A stream that a message contains as a whole. An ``IncomingStream``.

    Args:
        data: The stream.
        announced: Its checksum, as the sender computed it.
    """

    def __init__(self, data: bytes, announced: int) -> None:
        self._data, self._announced = data, announced

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        """See ``IncomingStream``."""
        checksum, position, left = self._check(sum(map(len, targets)), what), 0, memoryview(self._data)
        for target in targets:
            target[:] = left[position : position + len(target)]
            position += len(target)
        return checksum

    async def checksum(self, total_bytes: int, what: str) -> int:
        """See ``IncomingStream``."""
        return self._check(total_bytes, what)

    def _check(self, total_bytes: int, what: str) -> int:
        if len(self._data) != total_bytes:
            raise ChunkError(f"{what}: the stream has {len(self._data)} bytes, expected {total_bytes}")
        checksum = xxhash.xxh3_64_intdigest(self._data)
        if checksum != self._announced:
            raise CorruptDataError(
                f"{what}: the bytes have checksum {checksum:#018x}, expected {self._announced:#018x}"
            )
        return checksum


async def reduce_batch(
    store: ShardStore, offered: ServerTransports, request: shard_pb2.ReduceBatchRequest, wait_s: float, peer: str
) -> shard_pb2.ReduceBatchResponse:
    """Handles the parts of a batch one after another; a rejected part does not affect the others.

    Args:
        store: The server's shards.
        offered: The server's transports.
        request: The batch.
        wait_s: Seconds that all parts together may wait.
        peer: Address of the sender, for the log.

    Raises:
        InvalidRequestError: The batch is empty or too large, or a part names another run. No part is handled.
    """
    _check_count(len(request.parts), "parts")
    _complete_headers(request)
    for number, part in enumerate(request.parts):
        _check_run(request, part.header.context, f"part {number}")
    loop, response = asyncio.get_running_loop(), shard_pb2.ReduceBatchResponse()
    deadline = loop.time() + wait_s
    for part in request.parts:
        try:
            result = await _reduce(store, offered, request, part, max(0.0, deadline - loop.time()))
        except Exception as error:
            rejected = reported_error("ReduceBatch", error, peer)
            result = shard_pb2.BatchedPartResult(status=to_status_details(rejected))
        response.results.append(result)
    return response


def _complete_headers(request: shard_pb2.ReduceBatchRequest) -> None:
    """Adds the common fields to the headers of parts without a context."""
    for part in request.parts:
        if not part.header.HasField("context"):
            own = part.header.SerializeToString()
            part.header.CopyFrom(request.common)
            part.header.MergeFromString(own)


async def _reduce(
    store: ShardStore,
    offered: ServerTransports,
    request: shard_pb2.ReduceBatchRequest,
    part: shard_pb2.BatchedPart,
    wait_s: float,
) -> shard_pb2.BatchedPartResult:
    if part.HasField("stream"):
        pushed = await pushes.push(store, part.header, ReceivedStream(part.stream, part.checksum), wait_s)
        return shard_pb2.BatchedPartResult(duplicate=pushed.duplicate)
    if not part.HasField("gradient_buffer_id"):
        raise InvalidRequestError("a part of the batch has neither a stream nor a gradient buffer")
    buffered = shard_pb2.ReduceGradientBufferRequest(
        header=part.header, transport_id=request.transport_id, gradient_buffer_id=part.gradient_buffer_id
    )
    shm = offered.find(ShmTransport)
    reduced = await shm_requests.reduce_gradient_buffer(store, shm, buffered, wait_s)
    return shard_pb2.BatchedPartResult(duplicate=reduced.duplicate, adopted=reduced.adopted)


def _check_count(count: int, what: str) -> None:
    if not 1 <= count <= MAX_PARTS:
        raise InvalidRequestError(f"the batch has {count} {what}, expected 1 to {MAX_PARTS}")


def _check_run(batch: NamesRun, part: NamesRun, what: str) -> None:
    if (part.run, part.run_id) != (batch.run, batch.run_id):
        raise InvalidRequestError(
            f"{what} of the batch names run {part.run!r} with id {part.run_id or 'none'}, but the batch is for run "
            f"{batch.run!r} with id {batch.run_id or 'none'}: send one batch per run"
        )
