"""Requests with the gradients of several units. They arrive as rpcs or over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cached_property, partial

from shardwell_server.rpc import reported_error
from shardwell_server.shard.memory.budget import IncomingBuffer
from shardwell_server.shard.requests import pushes
from shardwell_server.shard.requests.pushes import Push
from shardwell_server.shard.requests.streams import ReceivedStream
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.store import NamesRun, ShardStore
from shardwell_server.shard.transports.base import ServerTransports
from shardwell_server.shard.transports.shm_buffers import SharedGradientBuffer
from shardwell_server.shard.transports.shm_transport import ShmSession, ShmTransport
from shardwell_wire.errors import InvalidRequestError, RunDeletedError, to_status_details
from shardwell_wire.v1 import shard_pb2

MAX_PARTS = 256
"""Maximum number of parts in one request."""


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
    """The parts of one request. Consecutive parts become contributions together, within one turn of exclusive work.

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
        self._ready: list[tuple[int, Push, IncomingBuffer | SharedGradientBuffer]] = []
        """Number, push and gradients of the parts that become contributions next."""
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
        try:
            for number, part in enumerate(self._request.parts):
                try:
                    push = self._push(part.header)
                    if part.HasField("stream"):
                        await self._add_stream(number, push, ReceivedStream(part.stream, part.checksum))
                    else:
                        self._ready.append((number, push, self._adoptable(part, push)))
                except Exception as error:
                    self._reject(number, error)
            await self._accept()
        finally:
            _release_unclaimed(self._ready)
        return shard_pb2.ReduceBatchResponse(results=self._results)

    def _reject(self, number: int, error: Exception) -> None:
        rejected = reported_error("ReduceBatch", error, self._peer)
        self._results[number].CopyFrom(shard_pb2.BatchedPartResult(status=to_status_details(rejected)))

    def _push(self, header: shard_pb2.ReduceScatterHeader) -> Push:
        """Checks the sender of a part as ``pushes.push`` does, but each lease once."""
        lease = (header.dp_rank, header.context.epoch, header.context.lease_proof)
        if header.summed or lease not in self._leases:
            pushes.check_leases(self._store, header)
            self._leases.add(lease)
        self._store.requests.check_content("ReduceScatter", header.context, header)
        shard = self._run.primary(header.unit, header.start_bytes, header.stop_bytes)
        return Push(self._store, self._run, shard, header)

    async def _add_stream(self, number: int, push: Push, stream: ReceivedStream) -> None:
        if (copy := push.copy_at_once(stream)) is not None:
            self._ready.append((number, push, copy))
            return
        await self._accept()  # this part may follow another part of the same contribution
        self._results[number].duplicate = await push.receive(stream, self._left_s)

    def _adoptable(self, part: shard_pb2.BatchedPart, push: Push) -> SharedGradientBuffer:
        """Checks a part as ``shm_requests.reduce_gradient_buffer`` does."""
        if not part.HasField("gradient_buffer_id"):
            raise InvalidRequestError("a part of the batch has neither a stream nor a gradient buffer")
        gradient_buffer = self._session.gradient_buffer(part.gradient_buffer_id)
        push.check_adoption()
        return gradient_buffer

    async def _accept(self) -> None:
        """Makes the parts that are ready contributions."""
        waiting, self._ready = self._ready, []
        try:
            ready = [each for each in waiting if await self._may_begin(*each)]
            if ready:
                await self._run.exclusively(partial(self._accept_all, ready))
        except RunDeletedError as error:
            for number, _, _ in ready:
                self._reject(number, error)
        finally:
            _release_unclaimed(waiting)

    async def _may_begin(self, number: int, push: Push, _: object) -> bool:
        try:
            await push.await_due_update(self._left_s)
        except Exception as error:
            self._reject(number, error)
            return False
        return True

    async def _accept_all(self, ready: Iterable[tuple[int, Push, IncomingBuffer | SharedGradientBuffer]]) -> None:
        for number, push, gradients in ready:
            result = self._results[number]
            try:
                if isinstance(gradients, IncomingBuffer):
                    result.duplicate = await push.accept_now(gradients, self._request.parts[number].checksum)
                else:
                    result.duplicate = await push.adopt_now(gradients)
                    result.adopted = gradients.claimed
            except Exception as error:
                self._reject(number, error)


def _release_unclaimed(parts: Iterable[tuple[int, Push, IncomingBuffer | SharedGradientBuffer]]) -> None:
    """Releases the memory of streams that have not become contributions."""
    for _, _, gradients in parts:
        if isinstance(gradients, IncomingBuffer) and not gradients.claimed:
            gradients.release()


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
