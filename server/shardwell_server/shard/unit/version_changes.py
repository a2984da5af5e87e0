"""What has changed between two versions of a shard, computed once for all readers that have the older one.

Readers follow a run at their own pace, so the older version is any that is still readable.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

import torch

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.unit.encoded_versions import EncodedStream, EncodedVersions, copied, largest_useful
from shardwell_server.shard.unit.values import Snapshots, VersionBytes
from shardwell_wire.encoding import shard_changes, value_deltas
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.shard_changes import Span
from shardwell_wire.encoding.streams import RangePlans
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2

_MAX_PAIRS = 8
"""Largest number of pairs of versions whose changes are kept."""

_Pair = tuple[WireDtype, int, int, bool]
"""Wire dtype, former version, new version, and whether the changes have differences."""


class VersionChanges:
    """Changes between versions of one shard. Used on the event loop.

    Keeps the changes of ``_MAX_PAIRS`` pairs, and at most three quarters of the shard. Drops changes that no
    client has read between two updates. Drops all changes if other requests need the memory. Also keeps the newest
    encoding, and drops it with the changes: most readers ask for what has changed since that version.

    Args:
        layout: The shard's unit.
        plans: Stream plans of the shard.
        start_bytes: Start of the shard in the flat vector.
        encoded: Encodes versions in lossy dtypes.
        memory: Memory for changes.
        reader_copies: Counts readers, and frees changes that are discarded while they have readers.
    """

    def __init__(
        self,
        layout: UnitLayout,
        plans: RangePlans,
        start_bytes: int,
        encoded: EncodedVersions,
        memory: Memory,
        reader_copies: Snapshots,
    ) -> None:
        self._layout, self._plans, self._start_bytes = layout, plans, start_bytes
        self._encoded, self._memory, self._reader_copies = encoded, memory, reader_copies
        self._stored_bytes = plans.plan(None, AS_STORED).size_bytes
        self._kept: dict[_Pair, tuple[VersionBytes, int] | None] = {}
        """Changes and their size, those that were read last at the end. None: the stream is sent instead."""
        self._unread = set[_Pair]()
        """Pairs that nobody has read since the last update began."""
        self._newest: dict[WireDtype, VersionBytes] = {}
        """The newest encoding that was compared. This object is one of its readers."""
        self._lock = asyncio.Lock()
        """Held while changes are computed, so that concurrent readers share them."""

    async def read(
        self,
        wire_dtype: WireDtype,
        former: VersionBytes,
        source: VersionBytes,
        differences: bool = False,
        *,
        wait_s: float,
        what: str,
    ) -> EncodedStream:
        """Returns the changes, or the whole stream if they are not smaller. The caller must ``release`` its source.

        Args:
            wire_dtype: The dtype in which float32 values travel.
            former: The version that the client has. The caller must be one of its readers.
            source: The version that the client wants. The caller must be one of its readers.
            differences: Whether the client has the values of ``former``.
            wait_s: Seconds to wait for memory.
            what: Names the shard in errors.

        Raises:
            CapacityError: No memory became free in time.
            VersionGoneError: A version was evicted during the call.
        """
        differences = differences and wire_dtype in value_deltas.WIRE_DTYPES
        pair = wire_dtype, former.version, source.version, differences
        async with self._lock:
            if is_kept := pair in self._kept:
                self._unread.discard(pair)
                self._kept[pair] = self._kept.pop(pair)
            found = self._kept[pair] if is_kept else await self._make(pair, former, source, wait_s, what)
            if found is not None:
                found[0].readers += 1
            self._trim()
        if found is None:
            return EncodedStream(*await self._stream(wire_dtype, source, wait_s, what))
        return EncodedStream(*found, shard_pb2.StreamDeltas(sizes_bytes=[found[1]], has_differences=differences))

    def release(self, source: VersionBytes) -> None:
        """Ends one read of changes, or of a stream that was sent instead."""
        self._reader_copies.release(source)

    def supersede(self) -> None:
        """Discards the changes that nobody has read since the last update, because an update begins."""
        self._drop_unread()
        self._unread = set(self._kept)
        if not self._kept:
            self._drop_newest()

    def _drop_newest(self) -> None:
        while self._newest:
            self.release(self._newest.popitem()[1])

    def _drop_unread(self) -> None:
        for pair in list(self._unread):
            self._drop(pair)

    def discard(self) -> None:
        """Discards all changes. If they have readers, they become reader copies."""
        for pair in list(self._kept):
            self._drop(pair)
        self._drop_newest()

    def _trim(self) -> None:
        if self._memory.unreserved.has_waiters:
            self.discard()
        while len(self._kept) > _MAX_PAIRS or self._kept_bytes > largest_useful(self._stored_bytes):
            self._drop(next(iter(self._kept)))

    @property
    def _kept_bytes(self) -> int:
        return sum(changes[0].buffer.numel() for changes in filter(None, self._kept.values()))

    def _drop(self, pair: _Pair) -> None:
        self._unread.discard(pair)
        if (changes := self._kept.pop(pair)) is not None:
            self._reader_copies.add(changes[0])  # frees it at once if it has no reader

    async def _stream(
        self, wire_dtype: WireDtype, source: VersionBytes, wait_s: float, what: str
    ) -> tuple[VersionBytes, int]:
        """Returns a version in the wire dtype, with a reader, and its size."""
        if wire_dtype == AS_STORED:
            source.readers += 1
            return source, source.buffer.numel()
        newest = self._newest.get(wire_dtype)
        if newest is not None and newest.version == source.version and newest.revoked is None:
            newest.readers += 1
            return newest, newest.buffer.numel()
        encoded = await self._encoded.read(wire_dtype, source, wait_s=wait_s, what=what)
        return encoded.source, encoded.size_bytes

    async def _make(
        self, pair: _Pair, former: VersionBytes, source: VersionBytes, wait_s: float, what: str
    ) -> tuple[VersionBytes, int] | None:
        """Returns the changes, and keeps them. None: the stream is better, or no memory is free now."""
        wire_dtype = pair[0]
        spans = shard_changes.spans_of(self._layout, self._plans.segments(None), wire_dtype, self._start_bytes)
        if not spans:
            return None
        with ExitStack() as stack:
            sides = list[VersionBytes]()
            for version in (former, source):
                sides.append((await self._stream(wire_dtype, version, wait_s, what))[0])
                stack.callback(self.release, sides[-1])
            buffers, pieces = list[torch.Tensor](), None
            # An update moves the readers of the newest version before it changes a byte. See Note: [Moving versions].
            while not buffers or any(side.buffer is not each for side, each in zip(sides, buffers, strict=True)):
                buffers = [side.buffer for side in sides]
                pieces = await self._memory.in_thread(partial(_compute, spans, pair[3], *buffers))
                for side in sides:
                    side.check()
            stream_bytes = buffers[1].numel()
            newest = self._newest.get(wire_dtype)
            if wire_dtype != AS_STORED and (newest is None or newest.version < source.version):
                self._newest[wire_dtype], sides[1].readers = sides[1], sides[1].readers + 1
                if newest is not None:
                    self.release(newest)
        if pieces is None:
            self._kept[pair] = None
            return None
        while (buffer := await copied(self._memory, pieces, stream_bytes)) is None:
            if not self._unread:
                return None
            self._drop_unread()
        if revoked := former.revoked or source.revoked:  # nothing would free changes of a dropped shard
            self._memory.release_buffer(buffer)
            raise revoked
        found = self._kept[pair] = VersionBytes(buffer, source.version, newest=False), sum(map(len, pieces))
        return found


def _compute(spans: list[Span], differences: bool, before: torch.Tensor, after: torch.Tensor) -> list[bytes] | None:
    """Returns the changes in consecutive pieces. None: the stream is better. Called in a thread."""
    base, stream = (memory_at(each.data_ptr(), each.numel(), each) for each in (before, after))
    return shard_changes.encode(spans, base, stream, largest_useful(len(stream)), differences)
