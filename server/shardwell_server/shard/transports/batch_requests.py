"""Requests with the gradients of several units, and for their values. They arrive as rpcs or over a socket.

Note: [Groups of ranges]
    The ranges of a batch are answered in groups: first all ranges that are readable at once, later those that had to
    wait for their versions. The streams of a group follow its response as one stream, so a group costs one message, and
    a range without its version does not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, nullcontext, suppress
from functools import cached_property

from shardwell_server.serving.rpc import reported_error
from shardwell_server.shard.memory.budget import IncomingBuffer
from shardwell_server.shard.requests import pushes, weight_reads
from shardwell_server.shard.requests.client_streams import ReceivedStream
from shardwell_server.shard.requests.pushes import Push
from shardwell_server.shard.requests.weight_reads import Reading
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import NamesRun, ShardStore
from shardwell_server.shard.transports.server_transport import ServerTransports
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
        offered: The server's transports.
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
        """Checks a part as ``shm_transport.reduce_gradient_buffer`` does."""
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
                async with self._run.exclusively():
                    await self._accept_all(ready)
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
                    result.duplicate = await push.accept(gradients, self._request.parts[number].checksum)
                else:
                    result.duplicate = await push.accept(gradients, None)
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


MAX_RANGES = 256
"""Maximum number of ranges in one request."""

MAX_GATHERED_BYTES = 512 << 10
"""Maximum size of the values of one request. Clients request no more."""


class Group:
    """A response, and the values of its ranges that were read. They stay readable until the next group is requested."""

    def __init__(self) -> None:
        self.response = shard_pb2.GatherBatchResponse()
        self._readings: list[Reading] = []

    def add(self, number: int, found: Reading) -> None:
        """Adds a range that was read."""
        self._readings.append(found)
        described = self.response.ranges.add(number=number, version=found.header.version, size_bytes=found.size_bytes)
        if found.header.HasField("deltas"):
            described.deltas.CopyFrom(found.header.deltas)

    @property
    def size_bytes(self) -> int:
        """Size of the streams."""
        return sum(found.size_bytes for found in self._readings)

    def memory(self) -> list[memoryview]:
        """Returns the streams at their current addresses. See Note: [Moving versions].

        Raises:
            ShardwellError: The bytes of a range were revoked.
        """
        for found in self._readings:
            found.source.check()
        return [found.memory() for found in self._readings if found.size_bytes]

    def check(self) -> None:
        """Raises ShardwellError if bytes that ``memory`` returned may have changed since."""
        for found in self._readings:
            if found.size_bytes:
                found.check_unchanged()


async def groups(
    store: ShardStore,
    request: shard_pb2.GatherBatchRequest,
    wait_s: float,
    peer: str,
    waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> AsyncGenerator[Group, None]:
    """Reads the ranges of a batch. See Note: [Groups of ranges]. Close the iterator if it is not exhausted.

    Args:
        store: The server's shards.
        request: The batch.
        wait_s: Seconds that all ranges together may wait for their versions.
        peer: Address of the sender, for the log.
        waiting: Context of waits for versions.

    Raises:
        InvalidRequestError: The batch is empty or too large, or a range is of another run. Nothing is read.
        NotFoundError: This server does not hold the run.
    """
    _check(request)
    run, loop = store.run(request.run, request.run_id), asyncio.get_running_loop()
    deadline, left_bytes = loop.time() + wait_s, MAX_GATHERED_BYTES
    left = dict(enumerate(request.ranges))
    while left:
        # At the deadline all ranges are answered, those without their version by an error.
        is_last = loop.time() >= deadline
        ready = [number for number, wanted in left.items() if is_last or _is_ready(store, run, wanted)]
        if not ready:
            async with waiting():
                await _wait_for_any(store, run, left.values(), deadline - loop.time())
            continue
        async with AsyncExitStack() as stack:
            group = Group()
            for number in ready:
                wanted, left_s = left.pop(number), max(0.0, deadline - loop.time())
                try:
                    shard = weight_reads.shard_in(store, run, wanted)
                    if (found := weight_reads.read_at_once(shard, wanted)) is not None:
                        stack.callback(found.end)
                    else:
                        found = await stack.enter_async_context(weight_reads.reading(store, run, shard, wanted, left_s))
                    _check_fits(found, left_bytes)
                except Exception as error:
                    status = to_status_details(reported_error("GatherBatch", error, peer))
                    group.response.ranges.add(number=number, status=status)
                else:
                    left_bytes -= found.size_bytes
                    group.add(number, found)
            yield group
            store.traffic.gathered_bytes += group.size_bytes


def _check(request: shard_pb2.GatherBatchRequest) -> None:
    if not 1 <= len(request.ranges) <= MAX_RANGES:
        raise InvalidRequestError(f"the batch has {len(request.ranges)} ranges, expected 1 to {MAX_RANGES}")
    for number, wanted in enumerate(request.ranges):
        if (wanted.run or request.run, wanted.run_id or request.run_id) != (request.run, request.run_id):
            raise InvalidRequestError(
                f"range {number} of the batch names run {wanted.run!r} with id {wanted.run_id or 'none'}, but the "
                f"batch is for run {request.run!r} with id {request.run_id or 'none'}: send one batch per run"
            )


def _is_ready(store: ShardStore, run: HostedRun, wanted: shard_pb2.GatherRequest) -> bool:
    """Returns True if the range can be read, or rejected, without waiting for its version."""
    try:
        return weight_reads.is_readable(weight_reads.shard_in(store, run, wanted), wanted)
    except Exception:  # reading the range raises the error again
        return True


async def _wait_for_any(
    store: ShardStore, run: HostedRun, ranges: Iterable[shard_pb2.GatherRequest], wait_s: float
) -> None:
    """Waits until one of several ranges may have become readable. None of them is now."""
    changed = asyncio.Event()
    with ExitStack() as stack, suppress(TimeoutError):
        for wanted in ranges:
            stack.enter_context(weight_reads.shard_in(store, run, wanted).values.waking(changed))
        async with asyncio.timeout(max(0.0, wait_s)):
            await changed.wait()


def _check_fits(found: Reading, left_bytes: int) -> None:
    if found.size_bytes > left_bytes:
        raise InvalidRequestError(
            f"{found.shard.what}: {found.size_bytes} bytes do not fit the batch, whose values may have "
            f"{MAX_GATHERED_BYTES} bytes: request the range by itself"
        )
