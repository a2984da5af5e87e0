"""The bytes of one version of a shard, and evictable snapshots that exist only while readers use them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from shardwell_server.shard.concurrency import InThread
from shardwell_server.shard.memory.budget import Memory
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import ShardwellError, VersionGoneError
from shardwell_wire.stream_plan import InVector, RangePlans
from shardwell_wire.wire_dtypes import WireDtype

# Note: [Moving versions]
# The newest version of a shard keeps its address, because trainers map it. When an update starts to change these bytes
# in place, readers of the former version continue in a snapshot. A reader must therefore call ``check`` and look up
# ``buffer`` again before every piece that it reads.


@dataclass(eq=False)
class VersionBytes:
    """The bytes of one version of a shard, and their readers. Used on the event loop. See Note: [Moving versions]."""

    buffer: torch.Tensor
    """uint8. [stop_bytes - start_bytes]"""
    version: int
    """Number of the version. For unpublished values, the version that they become when published."""
    readers: int = 0
    """The bytes stay unchanged while this is positive, unless they are revoked."""
    pins: int = 0
    """Number of readers that keep the version for more than one update."""
    revoked: ShardwellError | None = None
    """Why readers can no longer read the bytes."""
    newest: bool = True
    """False once another version replaces this one, or is about to."""

    def check(self) -> None:
        """Raises the reason if the bytes have been revoked. See Note: [Moving versions]."""
        if self.revoked is not None:
            raise self.revoked

    def memory(self, start: int, stop: int) -> memoryview:
        """Returns a range of the bytes at their current address."""
        return memory_at(self.buffer.data_ptr() + start, stop - start)


class Snapshots:
    """Evictable snapshots of one shard's bytes, each kept until its last reader is done.

    They use unreserved memory. Snapshots of older versions are evicted when other requests need the memory, because
    their readers may be arbitrarily slow. Used on the event loop.

    Args:
        what: Names the shard in errors.
        unit: Name of the unit, for errors.
        memory: Memory from which the snapshots were acquired.
    """

    def __init__(self, what: str, unit: str, memory: Memory) -> None:
        self._what, self._unit, self._memory = what, unit, memory
        self._snapshots: list[VersionBytes] = []

    def find(self, version: int) -> VersionBytes | None:
        """Returns the snapshot of a version. None if there is none."""
        return next((snapshot for snapshot in self._snapshots if snapshot.version == version), None)

    def add(self, snapshot: VersionBytes) -> None:
        """Adds a complete snapshot. Frees it at once if it has no reader."""
        self._snapshots.append(snapshot)
        if snapshot.readers == 0:
            self._free(snapshot)

    def release(self, snapshot: VersionBytes) -> None:
        """Ends one read of a snapshot, or of bytes that may become one."""
        snapshot.readers -= 1
        if snapshot.readers == 0 and snapshot in self._snapshots:
            self._free(snapshot)

    def supersede(self) -> None:
        """Marks all snapshots as older versions, because an update begins."""
        for snapshot in self._snapshots:
            snapshot.newest = False
        if self._memory.unreserved.has_waiters:
            self.evict()

    def evict(self, *, pinned_too: bool = True) -> None:
        """Revokes the snapshots of older versions and frees their memory."""
        for snapshot in [s for s in self._snapshots if not s.newest and (pinned_too or not s.pins)]:
            self._revoke(snapshot, self._evicted(snapshot))

    def drop(self, why: ShardwellError) -> None:
        """Revokes all snapshots. Their readers get the error."""
        for snapshot in list(self._snapshots):
            self._revoke(snapshot, why)

    def _revoke(self, snapshot: VersionBytes, why: ShardwellError) -> None:
        snapshot.revoked = why
        self._free(snapshot)

    def _free(self, snapshot: VersionBytes) -> None:
        self._snapshots.remove(snapshot)
        self._memory.release_buffer(snapshot.buffer)

    def _evicted(self, snapshot: VersionBytes) -> VersionGoneError:
        return VersionGoneError(
            f"version {snapshot.version} of {self._what} has been overwritten, and its snapshot was evicted because "
            "other requests needed the memory",
            unit=self._unit,
            version=snapshot.version,
        )


class EncodedVersions:
    """The newest version of one shard in lossy wire dtypes, encoded once for all readers. Used on the event loop.

    An encoding is kept until the next version, or until other requests need the memory.

    Args:
        plans: Stream plans of the shard.
        start_bytes: Start of the shard in the flat vector.
        memory: Memory for encodings.
        reader_copies: Takes encodings that are replaced while they have readers.
    """

    def __init__(self, plans: RangePlans, start_bytes: int, memory: Memory, reader_copies: Snapshots) -> None:
        self._plans, self._start_bytes, self._memory, self._reader_copies = plans, start_bytes, memory, reader_copies
        self._kept: dict[WireDtype, VersionBytes] = {}
        self._lock = asyncio.Lock()
        """Held while encoding, so that concurrent readers share one encoding."""

    async def read(
        self, wire_dtype: WireDtype, source: VersionBytes, in_thread: InThread, *, wait_s: float, what: str
    ) -> VersionBytes:
        """Returns a version in a wire dtype. The caller must ``release`` it.

        Args:
            wire_dtype: A lossy dtype.
            source: The version. The caller must be one of its readers.
            in_thread: Runs the encoding in a thread.
            wait_s: Seconds to wait for memory.
            what: Names the shard in errors.

        Raises:
            CapacityError: No memory became free in time.
            VersionGoneError: The version was overwritten during the call.
        """
        async with self._lock:
            encoded = self._kept.get(wire_dtype)
            if encoded is None or not source.newest:
                encoded = await self._encode(wire_dtype, source, in_thread, wait_s, what)
                if source.newest:
                    self._kept[wire_dtype] = encoded
            encoded.readers += 1
            # The version was replaced meanwhile, so the encoding lasts only as long as its readers.
            if not source.newest:
                encoded.newest = False
                self._reader_copies.add(encoded)
            return encoded

    def release(self, encoded: VersionBytes) -> None:
        """Ends one read of an encoding."""
        self._reader_copies.release(encoded)

    def discard(self) -> None:
        """Discards all encodings. Those with readers become reader copies."""
        kept, self._kept = self._kept, {}
        for encoded in kept.values():
            self._reader_copies.add(encoded)

    async def _encode(
        self, wire_dtype: WireDtype, source: VersionBytes, in_thread: InThread, wait_s: float, what: str
    ) -> VersionBytes:
        size_bytes = self._plans.plan(None, wire_dtype).size_bytes
        buffer = await self._memory.acquire(size_bytes, wait_s, f"{what}, to be sent in another dtype")
        encoded = VersionBytes(buffer, source.version)
        try:
            before = source.buffer
            await in_thread(lambda: self.compute_encode(wire_dtype, before, encoded))
            source.check()
            if source.buffer is not before:
                raise VersionGoneError(f"version {source.version} of {what} was overwritten while it was encoded")
        except BaseException:
            self._memory.release_buffer(encoded.buffer)
            raise
        return encoded

    def compute_encode(self, wire_dtype: WireDtype, values: torch.Tensor, encoded: VersionBytes) -> None:
        """Encodes the shard's bytes in ``values`` into ``encoded``."""
        source = InVector(memory_at(values.data_ptr(), values.numel()), self._start_bytes)
        stream = encoded.memory(0, encoded.buffer.numel())
        self._plans.plan(None, wire_dtype).encode(source, stream)
