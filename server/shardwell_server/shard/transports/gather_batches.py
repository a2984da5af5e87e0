"""Requests for the values of several units. They arrive as rpcs or over a socket.

Note: [Groups of ranges]
    The ranges of a batch are answered in groups: first all ranges that are readable at once, later those that had to
    wait for their versions. The streams of a group follow its response as one stream, so a group costs one message, and
    a range without its version does not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, nullcontext, suppress

from shardwell_server.rpc import reported_error
from shardwell_server.shard.requests import reading
from shardwell_server.shard.requests.reading import Reading
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.store import ShardStore
from shardwell_wire.errors import InvalidRequestError, to_status_details
from shardwell_wire.v1 import shard_pb2

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
                    shard = reading.shard_in(store, run, wanted)
                    if (found := reading.read_at_once(shard, wanted)) is not None:
                        stack.callback(found.end)
                    else:
                        found = await stack.enter_async_context(reading.reading(store, run, shard, wanted, left_s))
                    _check_fits(found, left_bytes)
                except Exception as error:
                    status = to_status_details(reported_error("GatherBatch", error, peer))
                    group.response.ranges.add(number=number, status=status)
                else:
                    left_bytes -= found.size_bytes
                    group.add(number, found)
            yield group


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
        return reading.is_readable(reading.shard_in(store, run, wanted), wanted)
    except Exception:  # reading the range raises the error again
        return True


async def _wait_for_any(
    store: ShardStore, run: HostedRun, ranges: Iterable[shard_pb2.GatherRequest], wait_s: float
) -> None:
    """Waits until one of several ranges may have become readable. None of them is now."""
    changed = asyncio.Event()
    with ExitStack() as stack, suppress(TimeoutError):
        for wanted in ranges:
            stack.enter_context(reading.shard_in(store, run, wanted).values.waking(changed))
        async with asyncio.timeout(max(0.0, wait_s)):
            await changed.wait()


def _check_fits(found: Reading, left_bytes: int) -> None:
    if found.size_bytes > left_bytes:
        raise InvalidRequestError(
            f"{found.shard.what}: {found.size_bytes} bytes do not fit the batch, whose values may have "
            f"{MAX_GATHERED_BYTES} bytes: request the range by itself"
        )
