"""The newest version of a shard in lossy wire dtypes, encoded once for all readers."""

from __future__ import annotations

import asyncio

import torch

from shardwell_server.shard.concurrency import InThread
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.state.delta_chain import DeltaChain, EncodedStream
from shardwell_server.shard.state.snapshots import Snapshots, VersionBytes
from shardwell_wire import value_deltas
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.stream_plan import InVector, RangePlans
from shardwell_wire.v1 import shard_pb2
from shardwell_wire.wire_dtypes import WireDtype


class EncodedVersions:
    """The newest version of one shard in lossy wire dtypes, encoded once for all readers. Used on the event loop.

    An encoding is kept until the next version, or until other requests need the memory. Clients that have a former
    version get deltas, see Note: [Delta chain].

    Args:
        plans: Stream plans of the shard.
        start_bytes: Start of the shard in the flat vector.
        memory: Memory for encodings.
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
        in_thread: InThread,
        *,
        wait_s: float,
        what: str,
        base: shard_pb2.StreamBase | None = None,
    ) -> EncodedStream:
        """Returns a version in a wire dtype, or deltas. The caller must ``release`` its source.

        Args:
            wire_dtype: A lossy dtype.
            source: The version. The caller must be one of its readers.
            in_thread: Runs the encoding in a thread.
            wait_s: Seconds to wait for memory.
            what: Names the shard in errors.
            base: What the client has of the stream. None: the client accepts no deltas.

        Raises:
            CapacityError: No memory became free in time.
            VersionGoneError: The version was overwritten during the call.
        """
        async with self._lock:
            if base is None or wire_dtype not in value_deltas.WIRE_DTYPES:
                encoded = await self._read(wire_dtype, source, in_thread, wait_s, what)
                return EncodedStream(encoded, encoded.buffer.numel())
            chain = self._chains.setdefault(wire_dtype, DeltaChain(self._memory, self._reader_copies))
            chain.use()
            size_bytes = self._plans.plan(None, wire_dtype).size_bytes
            if (deltas := await chain.find(base, source.version, size_bytes, in_thread)) is not None:
                return deltas
            encoded = await self._read(wire_dtype, source, in_thread, wait_s, what)
            try:
                if not chain.has(encoded.version):
                    await chain.extend(encoded, in_thread)
                    deltas = await chain.find(base, source.version, size_bytes, in_thread)
            except BaseException:
                self.release(encoded)
                raise
            if deltas is None:
                return chain.whole(encoded)
            self.release(encoded)
            return deltas

    async def _read(
        self, wire_dtype: WireDtype, source: VersionBytes, in_thread: InThread, wait_s: float, what: str
    ) -> VersionBytes:
        """Returns an encoding with a reader. The caller holds the lock."""
        encoded = self._kept.get(wire_dtype)
        if encoded is None or not source.newest:
            encoded = await self._encode(wire_dtype, source, in_thread, wait_s, what)
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
        """Discards the encodings, because an update begins. Those with readers become reader copies."""
        kept, self._kept = self._kept, {}
        for encoded in kept.values():
            self._reader_copies.add(encoded)
        for chain in self._chains.values():
            chain.supersede()

    def discard(self) -> None:
        """Discards all encodings and deltas. Those with readers become reader copies."""
        for chain in self._chains.values():
            chain.drop()  # first, because ``supersede`` would let the deltas in use be evicted
        self.supersede()

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
