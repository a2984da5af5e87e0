"""Reads of weights: Gather over any transport, moving averages, and pinned versions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import torch

from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.encoded_versions import EncodedStream
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_server.shard.unit.values import Values, VersionBytes
from shardwell_wire import fault_points
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.encoding.wire_dtypes import check_gather_dtype
from shardwell_wire.errors import InvalidRequestError, NotFoundError, VersionGoneError
from shardwell_wire.v1 import shard_pb2


@dataclass(eq=False)
class Reading:
    """A range of one version of a shard that a client reads."""

    shard: UnitShard
    source: VersionBytes
    header: shard_pb2.GatherHeader

    first_byte: int
    """Start of the range in the bytes of ``source``."""
    size_bytes: int
    """Size of the range."""

    _returned: torch.Tensor | None = field(default=None, init=False, repr=False)
    """The buffer whose memory ``memory`` has returned. It stays alive while it is sent."""

    def memory(self) -> memoryview:
        """Returns the range at its current address. Call ``source.check()`` first. See Note: [Moving versions]."""
        self._returned = self.source.buffer
        return self.source.memory(self.first_byte, self.first_byte + self.size_bytes)

    def end(self) -> None:
        """Ends the reading of stored values."""
        self.shard.values.release(self.source)

    def pieces(self, piece_bytes: int) -> Iterator[memoryview]:
        """Yields consecutive views of the range. Each is valid until the next one is requested.

        Raises:
            ShardwellError: The bytes were revoked, so the last piece may mix two versions.
        """
        for start in range(0, self.size_bytes, piece_bytes):
            yield self.memory()[start : start + piece_bytes]
            fault_points.reach("server.gather.middle")
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises ShardwellError if the bytes that ``memory`` has returned may have changed since."""
        self.source.check()
        if self.source.buffer is not self._returned:
            raise VersionGoneError(
                f"version {self.header.version} of {self.shard.what} is being overwritten",
                unit=self.shard.unit,
                version=self.header.version,
            )


def requested_shard(store: ShardStore, request: shard_pb2.GatherRequest) -> tuple[HostedRun, UnitShard]:
    """Returns the run and the shard that a Gather names.

    Raises:
        NotFoundError: This server does not hold the run, the unit or the range.
        UnavailableError: This server has a backup only; or the newest version is wanted, and the server has no lease.
        InvalidRequestError: No range is given, and the server has several shards of the unit.
    """
    run = store.run(request.run, request.run_id)
    return run, shard_in(store, run, request)


def shard_in(store: ShardStore, run: HostedRun, request: shard_pb2.GatherRequest) -> UnitShard:
    """Returns the shard of a run that a Gather names; raises as ``requested_shard`` does."""
    if not request.HasField("version"):
        store.lease.check()  # another server may have a newer version; a given version is the same everywhere
    if request.start_bytes == request.stop_bytes == 0:
        return run.primary(request.unit)
    return run.primary(request.unit, request.start_bytes, request.stop_bytes)


def read_at_once(shard: UnitShard, request: shard_pb2.GatherRequest) -> Reading | None:
    """Reads a range as stored if its version is readable. Call ``Reading.end`` afterwards.

    Returns:
        None: use ``reading``, which can wait, and reads averages and other dtypes.

    Raises:
        ShardwellError: As ``reading``.
    """
    if request.ema or request.wire_dtype or request.HasField("since") or not is_readable(shard, request):
        return None
    start, stop = _checked_range(shard, request)
    version, source = shard.values.read_at_once(version_of(request))
    header = shard_pb2.GatherHeader(version=version, start_bytes=start, stop_bytes=stop)
    return Reading(shard, source, header, start - shard.start_bytes, stop - start)


def is_readable(shard: UnitShard, request: shard_pb2.GatherRequest) -> bool:
    """Returns True if ``reading`` need not wait for the version."""
    return shard.values.readable(version_of(request))


@asynccontextmanager
async def reading(
    store: ShardStore, run: HostedRun, shard: UnitShard, request: shard_pb2.GatherRequest, wait_s: float
) -> AsyncIterator[Reading]:
    """Waits for the version that a Gather requests, and keeps it readable while the block runs.

    Args:
        run: The run, from ``requested_shard``.
        shard: The shard, from ``requested_shard``.
        wait_s: Seconds to wait for the version, and for memory.

    Raises:
        NotFoundError: The dtype is lossy or changes are requested, and the range is not the whole shard.
        InvalidRequestError: The range is malformed, or the chunks are too large.
        DeadlineError: The version does not exist yet.
        VersionGoneError: The version has been overwritten.
        StepStateError: The request is for averages, and there are none.
    """
    start, stop = _checked_range(shard, request)
    wanted = version_of(request)
    if request.HasField("wait_s"):
        await shard.values.wait_for(wanted, min(wait_s, request.wait_s))
    if request.ema:
        async with _reading_averages(store, run, shard, wanted, wait_s) as (version, averages):
            header = shard_pb2.GatherHeader(version=version, start_bytes=start, stop_bytes=stop)
            yield Reading(shard, averages, header, start - shard.start_bytes, stop - start)
        return
    version, source = await shard.values.read(wanted, wait_s)
    header = shard_pb2.GatherHeader(version=version, start_bytes=start, stop_bytes=stop)
    try:
        if request.HasField("since"):
            async with _reading_changes(shard, request, source, header, wait_s) as changes:
                yield changes
            return
        if not request.wire_dtype:
            yield Reading(shard, source, header, start - shard.start_bytes, stop - start)
            return
        base = request.base if request.HasField("base") else None
        encoded = await shard.encoded.read(request.wire_dtype, source, wait_s=wait_s, what=shard.what, base=base)
        with _reading_stream(shard, encoded, header, shard.encoded.release) as reading:
            yield reading
    finally:
        shard.values.release(source)


@asynccontextmanager
async def _reading_changes(
    shard: UnitShard,
    request: shard_pb2.GatherRequest,
    source: VersionBytes,
    header: shard_pb2.GatherHeader,
    wait_s: float,
) -> AsyncIterator[Reading]:
    if request.HasField("base") or request.since > source.version:
        raise InvalidRequestError(
            f"{shard.what}: since is {request.since} for version {source.version}"
            f"{', with a base' if request.HasField('base') else ''}: expected an older version, and no base"
        )
    _, former = shard.values.read_at_once(request.since)
    try:
        wire_dtype, differences = request.wire_dtype, request.takes_differences
        found = await shard.changes.read(wire_dtype, former, source, differences, wait_s=wait_s, what=shard.what)
        with _reading_stream(shard, found, header, shard.changes.release) as reading:
            yield reading
    finally:
        shard.values.release(former)


@contextmanager
def _reading_stream(
    shard: UnitShard, stream: EncodedStream, header: shard_pb2.GatherHeader, release: Callable[[VersionBytes], None]
) -> Iterator[Reading]:
    """Yields a kept stream of encoded values or changes, and releases it."""
    if stream.deltas is not None:
        header.deltas.CopyFrom(stream.deltas)
    try:
        yield Reading(shard, stream.source, header, 0, stream.size_bytes)
    finally:
        release(stream.source)


def version_of(request: shard_pb2.GatherRequest) -> int | None:
    """Returns the version that a Gather requests. None: the newest."""
    return request.version if request.HasField("version") else None


def _checked_range(shard: UnitShard, request: shard_pb2.GatherRequest) -> tuple[int, int]:
    start, stop = request.start_bytes, request.stop_bytes
    if request.chunk_bytes > chunk_streams.MAX_CHUNK_BYTES:
        raise InvalidRequestError(
            f"chunk_bytes is {request.chunk_bytes}, expected at most {chunk_streams.MAX_CHUNK_BYTES}"
        )
    check_gather_dtype(request.wire_dtype)
    if request.ema and (request.wire_dtype or request.HasField("since")):
        raise InvalidRequestError(
            f"{shard.what}: wire_dtype is {request.wire_dtype}, but averages have the dtype of their parameters and "
            "are not kept: leave wire_dtype and since unset"
        )
    if start == stop == 0:
        return shard.start_bytes, shard.stop_bytes
    if (request.wire_dtype or request.HasField("since")) and (start, stop) != (shard.start_bytes, shard.stop_bytes):
        raise NotFoundError(
            f"{shard.what}: range [{start}, {stop}) with wire_dtype {request.wire_dtype}: lossy dtypes and changes "
            f"are available for the whole shard only, [{shard.start_bytes}, {shard.stop_bytes}). The unit may have "
            "been cut anew",
            unit=shard.unit,
        )
    if stop < start:
        raise InvalidRequestError(f"{shard.what}: range [{start}, {stop}) ends before it starts")
    return start, stop


@asynccontextmanager
async def _reading_averages(
    store: ShardStore, run: HostedRun, shard: UnitShard, version: int | None, wait_s: float
) -> AsyncIterator[tuple[int, VersionBytes]]:
    """Makes a snapshot of a shard with averages in place of values; yields its version and bytes.

    Args:
        version: Version to read. None: the newest.
        wait_s: Seconds to wait for the version, and for memory.

    Raises:
        StepStateError: The last step was not averaged.
        VersionGoneError: A newer version exists.
        CapacityError: No memory became free in time.
        ShardwellError: As ``Values.read``.
    """
    newest, source = await shard.values.read(version, wait_s)
    shard.values.release(source)
    # Acquired outside the run's lock: work that frees memory may need the lock.
    copy = await store.memory.acquire(shard.size_bytes, wait_s, f"{shard.what}, to read averages")
    averages = VersionBytes(copy, newest, readers=1)
    try:
        async with run.exclusively():
            if shard.version != newest or shard.values.updating:
                raise VersionGoneError(
                    f"version {newest} of {shard.what} has been overwritten", unit=shard.unit, version=newest
                )
            shard.check_averaged()
            await store.memory.in_thread(lambda: shard.compute_averages(copy))
            shard.reader_copies.add(averages)
    except BaseException:
        store.memory.release_buffer(copy)
        raise
    try:
        yield newest, averages
    finally:
        shard.reader_copies.release(averages)


@asynccontextmanager
async def pinning(run: HostedRun, version: int, wait_s: float) -> AsyncIterator[shard_pb2.PinVersionResponse]:
    """Pins one version of all of a run's shards on this server; yields when each shard last changed.

    The next update copies pinned versions to snapshots if there is memory. The snapshots are evicted when training
    needs the memory.

    Args:
        wait_s: Seconds to wait for the version of all shards.

    Raises:
        DeadlineError: A shard has not reached the version.
        VersionGoneError: The version has been overwritten.
    """
    pins: list[tuple[Values, VersionBytes]] = []
    response = shard_pb2.PinVersionResponse(version=version)
    deadline = asyncio.get_running_loop().time() + wait_s
    try:
        for shard in run.published:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            pins.append((shard.values, await shard.values.pin(version, left_s)))
            # A later update may have changed the shard while this call waited for another shard.
            changed = min(shard.values.changed_version, version)
            response.changes.add(
                unit=shard.unit, start_bytes=shard.start_bytes, stop_bytes=shard.stop_bytes, version=changed
            )
        response.shard_count = len(pins)
        run.pins[version] += 1
        try:
            yield response
        finally:
            run.pins -= Counter((version,))
    finally:
        for values, pinned in pins:
            values.unpin(pinned)
