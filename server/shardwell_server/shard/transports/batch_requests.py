"""Requests with the gradients of several units. They arrive as rpcs or over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property

import xxhash

from shardwell_server.rpc import reported_error
from shardwell_server.shard.requests import pushes
from shardwell_server.shard.requests.pushes import Push
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.store import NamesRun, ShardStore
from shardwell_server.shard.transports.base import ServerTransports
from shardwell_server.shard.transports.shm_buffers import SharedGradientBuffer
from shardwell_server.shard.transports.shm_transport import ShmSession, ShmTransport
from shardwell_wire.errors import ChunkError, CorruptDataError, InvalidRequestError, RunDeletedError, to_status_details
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
    return await _Batch(store, offered, request, wait_s, peer).handle()


class _Batch:
    """The parts of one request. Consecutive parts in shared gradient buffers become contributions together.

    Arguments as in ``reduce_batch``.
    """

    def __init__(
        self,
        store: ShardStore,
        offered: ServerTransports,
        request: shard_pb2.ReduceBatchRequest,
        wait_s: float,
        peer: str,
    ) -> None:
        self._store, self._offered, self._request, self._peer = store, offered, request, peer
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + wait_s
        self._results = [shard_pb2.BatchedPartResult() for _ in request.parts]
        self._adoptions: list[tuple[int, Push, SharedGradientBuffer]] = []
        """Number, push and buffer of the parts that become contributions next."""
        self._leases: set[tuple[int, int, bytes]] = set()
        """The rank, epoch and proof of the leases that are checked."""

    @cached_property
    def _run(self) -> HostedRun:
        return self._store.exact_run(self._request)

    @cached_property
    def _session(self) -> ShmSession:
        self._store.lease.check()
        return self._offered.find(ShmTransport).session(self._request.transport_id, self._run.identity)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - self._loop.time())

    async def handle(self) -> shard_pb2.ReduceBatchResponse:
        """Handles the parts in their order; a rejected part does not affect the others."""
        for number, part in enumerate(self._request.parts):
            try:
                if part.HasField("stream"):
                    await self._adopt()
                    received = ReceivedStream(part.stream, part.checksum)
                    pushed = await pushes.push(self._store, part.header, received, self._left_s)
                    self._results[number].duplicate = pushed.duplicate
                else:
                    self._adoptions.append((number, *self._adoption(part)))
            except Exception as error:
                self._reject(number, error)
        await self._adopt()
        return shard_pb2.ReduceBatchResponse(results=self._results)

    def _reject(self, number: int, error: Exception) -> None:
        rejected = reported_error("ReduceBatch", error, self._peer)
        self._results[number].CopyFrom(shard_pb2.BatchedPartResult(status=to_status_details(rejected)))

    def _adoption(self, part: shard_pb2.BatchedPart) -> tuple[Push, SharedGradientBuffer]:
        """Checks a part as ``shm_requests.reduce_gradient_buffer`` does."""
        if not part.HasField("gradient_buffer_id"):
            raise InvalidRequestError("a part of the batch has neither a stream nor a gradient buffer")
        header = part.header
        lease = (header.dp_rank, header.context.epoch, header.context.lease_proof)
        if header.summed or lease not in self._leases:
            pushes.check_leases(self._store, header)
            self._leases.add(lease)
        self._store.requests.check_content("ReduceScatter", header.context, header)
        gradient_buffer = self._session.gradient_buffer(part.gradient_buffer_id)
        push = Push(
            self._store, self._run, self._run.primary(header.unit, header.start_bytes, header.stop_bytes), header
        )
        push.check_adoption()
        return push, gradient_buffer

    async def _adopt(self) -> None:
        """Makes the buffers contributions, within one turn of the run's exclusive work."""
        waiting, self._adoptions = self._adoptions, []
        ready = []
        for number, push, gradient_buffer in waiting:
            try:
                await push.await_due_update(self._left_s)
                ready.append((number, push, gradient_buffer))
            except Exception as error:
                self._reject(number, error)
        if not ready:
            return

        async def adopt() -> None:
            for number, push, gradient_buffer in ready:
                try:
                    self._results[number].duplicate = await push.adopt_now(gradient_buffer)
                    self._results[number].adopted = gradient_buffer.claimed
                except Exception as error:
                    self._reject(number, error)

        try:
            await self._run.exclusively(adopt)
        except RunDeletedError as error:
            for number, _, _ in ready:
                self._reject(number, error)


def _complete_headers(request: shard_pb2.ReduceBatchRequest) -> None:
    """Adds the common fields to the headers of parts without a context."""
    for part in request.parts:
        if not part.header.HasField("context"):
            own = part.header.SerializeToString()
            part.header.CopyFrom(request.common)
            part.header.MergeFromString(own)


def _check_count(count: int, what: str) -> None:
    if not 1 <= count <= MAX_PARTS:
        raise InvalidRequestError(f"the batch has {count} {what}, expected 1 to {MAX_PARTS}")


def _check_run(batch: NamesRun, part: NamesRun, what: str) -> None:
    if (part.run, part.run_id) != (batch.run, batch.run_id):
        raise InvalidRequestError(
            f"{what} of the batch names run {part.run!r} with id {part.run_id or 'none'}, but the batch is for run "
            f"{batch.run!r} with id {batch.run_id or 'none'}: send one batch per run"
        )
