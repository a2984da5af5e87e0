"""The newest version of a shard in lossy wire dtypes, encoded once for all readers.

Clients that have an older version get deltas, each computed once for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import xxhash

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.unit.values import Snapshots, VersionBytes
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.chunk_streams import Buffer, copy_bytes, memory_at
from shardwell_wire.encoding.streams import InVector, RangePlans
from shardwell_wire.encoding.wire_dtypes import WireDtype
from shardwell_wire.v1 import shard_pb2


class EncodedVersions:
    """The newest version of one shard in lossy wire dtypes, encoded once for all readers. Used on the event loop.

    An encoding is kept until the next version, or until other requests need the memory. Clients that have a former
    version get deltas, see Note: [Delta chain].

    Args:
        plans: Stream plans of the shard.
        start_bytes: Start of the shard in the flat vector.
        reader_copies: Takes encodings that are replaced while they have readers.
    """

    def __init__(self, plans: RangePlans, start_bytes: int, memory: Memory, reader_copies: Snapshots) -> None:
        self._plans, self._start_bytes, self._memory, self._reader_copies = plans, start_bytes, memory, reader_copies
        self._kept: dict[WireDtype, VersionBytes] = {}
        self._chains: dict[WireDtype, DeltaChain] = {}
        self._lock = asyncio.Lock()
        """Held while encoding, so that concurrent readers share one encoding."""

    async def read(
        self,
        wire_dtype: WireDtype,
        source: VersionBytes,
        *,
        wait_s: float,
        what: str,
        base: shard_pb2.StreamBase | None = None,
    ) -> EncodedStream:
        """Returns a version in a wire dtype, or deltas. The caller must ``release`` its source.

        Args:
            wire_dtype: A lossy dtype.
            source: The version. The caller must be one of its readers.
            wait_s: Seconds to wait for memory.
            what: Names the shard in errors.
            base: What the client has of the stream. None: the client accepts no deltas.

        Raises:
            CapacityError: No memory became free in time.
            VersionGoneError: The version was overwritten during the call.
        """
        async with self._lock:
            if base is None or wire_dtype not in value_deltas.WIRE_DTYPES:
                encoded = await self._read(wire_dtype, source, wait_s, what)
                return EncodedStream(encoded, encoded.buffer.numel())
            chain = self._chains.setdefault(wire_dtype, DeltaChain(self._memory, self._reader_copies))
            chain.use()
            size_bytes = self._plans.plan(None, wire_dtype).size_bytes
            if (deltas := await chain.find(base, source.version, size_bytes)) is not None:
                return deltas
            encoded = await self._read(wire_dtype, source, wait_s, what)
            try:
                # The first reader of a version makes its deltas, which later readers share.
                if not chain.has(encoded.version):
                    await chain.extend(encoded)
                    deltas = await chain.find(base, source.version, size_bytes)
            except BaseException:
                self.release(encoded)
                raise
            if deltas is None:
                return chain.whole(encoded)
            self.release(encoded)
            return deltas

    async def _read(self, wire_dtype: WireDtype, source: VersionBytes, wait_s: float, what: str) -> VersionBytes:
        """Returns an encoding with a reader. The caller holds the lock."""
        encoded = self._kept.get(wire_dtype)
        if encoded is None or not source.newest:
            encoded = await self._encode(wire_dtype, source, wait_s, what)
            encoded.newest = source.newest
            # The encoding lasts only as long as its readers if the version was replaced meanwhile, or if others began
            # to wait for memory: they evicted what was kept then.
            if source.newest and not self._memory.unreserved.has_waiters:
                self._kept[wire_dtype] = encoded
        encoded.readers += 1
        if self._kept.get(wire_dtype) is not encoded:
            self._reader_copies.add(encoded)
        return encoded

    def release(self, encoded: VersionBytes) -> None:
        """Ends one read of an encoding."""
        self._reader_copies.release(encoded)

    def supersede(self) -> None:
        """Discards the encodings, because an update begins. Encodings with readers become reader copies."""
        kept, self._kept = self._kept, {}
        for encoded in kept.values():
            self._reader_copies.add(encoded)
        for chain in self._chains.values():
            chain.supersede()

    def discard(self) -> None:
        """Discards all encodings and deltas. If they have readers, they become reader copies."""
        for chain in self._chains.values():
            chain.drop()  # first, because ``supersede`` would let the deltas in use be evicted
        self.supersede()

    async def _encode(self, wire_dtype: WireDtype, source: VersionBytes, wait_s: float, what: str) -> VersionBytes:
        size_bytes = self._plans.plan(None, wire_dtype).size_bytes
        buffer = await self._memory.acquire(size_bytes, wait_s, f"{what}, to be sent in another dtype")
        encoded = VersionBytes(buffer, source.version)
        try:
            before = None
            while source.buffer is not before:  # an update has moved the readers of the version meanwhile
                before = source.buffer
                await self._memory.in_thread(partial(self.compute_encode, wire_dtype, before, encoded))
                source.check()
        except BaseException:
            self._memory.release_buffer(encoded.buffer)
            raise
        return encoded

    def compute_encode(self, wire_dtype: WireDtype, values: torch.Tensor, encoded: VersionBytes) -> None:
        """Encodes the shard's bytes in ``values`` into ``encoded``."""
        source = InVector(memory_at(values.data_ptr(), values.numel(), values), self._start_bytes)
        stream = encoded.memory(0, encoded.buffer.numel())
        self._plans.plan(None, wire_dtype).encode(source, stream)


@dataclass(frozen=True, slots=True)
class EncodedStream:
    """What a client gets of one version: the encoding, or deltas. Its reader must release ``source``."""

    source: VersionBytes
    size_bytes: int
    """The stream is the first bytes of the source."""
    deltas: shard_pb2.StreamDeltas | None = None


# Note: [Delta chain]
# A chain has the newest of the encodings that were made for clients which name a base, and the deltas that lead to it:
#
#     version 3 --delta--> version 5 --delta--> version 6 = tip
#
# A client that has version 3 gets both deltas, which together are the delta from 3 to 6. Versions that nobody has read
# are no members of the chain. Encodings and deltas use unreserved memory, which is evicted when training needs it. A
# client whose base is not in the chain gets the whole stream.

_IDLE_UPDATES = 32
"""Updates without a request after which the chain is dropped. Its memory would otherwise keep others from copies."""

_INLINE_BYTES = 256 << 10
"""Copies up to this size run on the event loop: they take less time than waking a thread."""

_SIZE_CLASSES = 64
"""Sizes of the buffers for deltas, as parts of the stream. With few sizes, buffers are reused."""


def largest_useful(stream_bytes: int) -> int:
    """Returns the size up to which deltas are sent instead of a stream. A larger one costs more time than it saves."""
    return stream_bytes * 3 // 4


@dataclass(frozen=True, slots=True)
class _Node:
    """One version of the stream. A version has one content per shard, so the checksum matters to clients only."""

    version: int
    checksum: int

    def matches(self, base: shard_pb2.StreamBase) -> bool:
        return base.HasField("version") and (base.version, base.checksum) == (self.version, self.checksum)


@dataclass(frozen=True, slots=True)
class _Link:
    """The delta from one node to the next."""

    base: _Node
    result: _Node
    delta: VersionBytes
    """Its readers keep it while its result is the newest version, as those of an encoding."""
    size_bytes: int


class DeltaChain:
    """The chain of one shard in one wire dtype. Used on the event loop. See Note: [Delta chain].

    Args:
        reader_copies: Counts the readers of encodings, and frees deltas that are dropped while they have readers.
    """

    def __init__(self, memory: Memory, reader_copies: Snapshots) -> None:
        self._memory, self._reader_copies = memory, reader_copies
        self._tip: tuple[_Node, VersionBytes] | None = None
        """The chain is a reader of the tip's encoding."""
        self._links: deque[_Link] = deque()
        self._idle_updates = 0

    def has(self, version: int) -> bool:
        """Returns whether a version is the tip or older than it."""
        return self._tip is not None and version <= self._tip[0].version

    def use(self) -> None:
        """Notes a request that names a base."""
        self._idle_updates = 0

    def supersede(self) -> None:
        """Called when an update of the shard begins. Drops the chain if no client has used it for long."""
        self._idle_updates += 1
        for link in self._links:
            link.delta.newest = False
        if self._idle_updates > _IDLE_UPDATES:
            self.drop()

    def drop(self) -> None:
        """Releases all memory, that of deltas with readers when these are done."""
        while self._links:
            self._drop_oldest()
        self._replace_tip(None)

    def whole(self, encoded: VersionBytes) -> EncodedStream:
        """Returns the whole stream of an encoding, as a base of later deltas if it is the tip."""
        deltas = None
        if self._tip is not None and self._tip[0].version == encoded.version:
            deltas = shard_pb2.StreamDeltas(checksum=self._tip[0].checksum)
        return EncodedStream(encoded, encoded.buffer.numel(), deltas)

    async def find(self, base: shard_pb2.StreamBase, version: int, stream_bytes: int) -> EncodedStream | None:
        """Returns the deltas from a client's base to a version, with a reader.

        Args:
            stream_bytes: Size of the whole stream.

        Returns:
            None: The chain does not have them, or no memory is free to join several.
        """
        if (path := self._path(base, version)) is None:
            return None
        sizes = [link.size_bytes for link in path]
        deltas = shard_pb2.StreamDeltas(checksum=path[-1].result.checksum, sizes_bytes=sizes)
        if len(path) == 1:
            path[0].delta.readers += 1
            return EncodedStream(path[0].delta, sizes[0], deltas)
        for link in path:
            link.delta.readers += 1
        try:
            # The deltas may be evicted while a thread copies them. As they have readers, they are then marked as
            # revoked.
            pieces = [link.delta.memory(0, link.size_bytes) for link in path]
            buffer = await copied(self._memory, pieces, stream_bytes)
            revoked = any(link.delta.revoked is not None for link in path)
        finally:
            for link in path:
                self._reader_copies.release(link.delta)
        if buffer is None:
            return None
        joined = VersionBytes(buffer, version, newest=path[-1].delta.newest)
        joined.readers = 0 if revoked else 1
        self._reader_copies.add(joined)
        return None if revoked else EncodedStream(joined, sum(sizes), deltas)

    def _path(self, base: shard_pb2.StreamBase, version: int) -> list[_Link] | None:
        """Returns the links from a base to a version. None: one of them is not in the chain."""
        links = list(self._links)
        starts = [number for number, link in enumerate(links) if link.base.matches(base)]
        stops = [number for number, link in enumerate(links) if link.result.version == version]
        return links[starts[0] : stops[0] + 1] or None if starts and stops else None

    async def extend(self, encoded: VersionBytes) -> None:
        """Makes an encoding the tip, and adds the delta from the former tip if it is small enough.

        Args:
            encoded: A later version than the tip. The caller is one of its readers.
        """
        former, stream_bytes = self._tip, encoded.buffer.numel()
        # Both tensors are kept alive: either encoding may be evicted meanwhile.
        base, stream = None if former is None else former[1].buffer, encoded.buffer

        def compute() -> tuple[int, list[bytes] | None]:
            after = memory_at(stream.data_ptr(), stream_bytes, stream)
            checksum = xxhash.xxh3_64_intdigest(after)
            if base is None or not stream_bytes or stream_bytes % value_deltas.ITEM_BYTES:
                return checksum, None
            before = memory_at(base.data_ptr(), stream_bytes, base)
            return checksum, value_deltas.encode(before, after, largest_useful(stream_bytes))

        checksum, pieces = await self._memory.in_thread(compute)
        buffer = None if pieces is None else await copied(self._memory, pieces, stream_bytes)
        # Nothing is awaited from here on.
        tip = _Node(encoded.version, checksum)
        is_dropped = former is None or self._tip is not former or former[1].revoked is not None
        if buffer is not None:
            delta = VersionBytes(buffer, encoded.version, newest=encoded.newest)
            if former is None or is_dropped:
                self._reader_copies.add(delta)  # which frees it
            else:
                self._links.append(_Link(former[0], tip, delta, sum(map(len, pieces or []))))
        is_lasting = encoded.revoked is None and not self._memory.unreserved.has_waiters
        if buffer is None or is_dropped or not is_lasting:
            self.drop()
        if is_lasting:
            self._replace_tip((tip, encoded))
            while sum(link.delta.buffer.numel() for link in self._links) > largest_useful(stream_bytes):
                self._drop_oldest()

    def _replace_tip(self, tip: tuple[_Node, VersionBytes] | None) -> None:
        if tip is not None:
            tip[1].readers += 1
        former, self._tip = self._tip, tip
        if former is not None:
            self._reader_copies.release(former[1])

    def _drop_oldest(self) -> None:
        self._reader_copies.add(self._links.popleft().delta)  # frees it at once if it has no reader


async def copied(memory: Memory, pieces: Sequence[Buffer], stream_bytes: int) -> torch.Tensor | None:
    """Returns a buffer that starts with the pieces. None: no memory is free.

    Args:
        pieces: Together smaller than the stream.
        stream_bytes: Size of the stream that they replace.
    """
    size_bytes, step = sum(map(len, pieces)), max(1, stream_bytes // _SIZE_CLASSES)
    # Sizes are rounded up to a few classes, so that buffers can be reused.
    buffer = memory.try_acquire(-(-size_bytes // step) * step)
    if buffer is None:
        return None
    target = memory_at(buffer.data_ptr(), buffer.numel(), buffer)

    def copy() -> None:
        position = 0
        for piece in pieces:
            copy_bytes(target, position, piece)
            position += len(piece)

    try:
        if size_bytes <= _INLINE_BYTES:
            copy()
        else:
            await memory.in_thread(copy)
    except BaseException:
        memory.release_buffer(buffer)
        raise
    return buffer
