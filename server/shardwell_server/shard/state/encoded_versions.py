"""What lossy wire dtypes make of the newest version of a shard, worked out once for all who gather it."""

from __future__ import annotations

import asyncio

import torch

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.state.parameters import Parameters
from shardwell_server.shard.state.reader_copies import ReaderCopies
from shardwell_server.shard.threads import InThread
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.stream_plan import InVector, RangePlans
from shardwell_wire.wire_dtypes import WireDtype


class EncodedVersions:
    """The encoded bytes of one shard, by wire dtype; kept until the next version or until others need the room.

    Args:
        plans: Of the shard.
        start_bytes: Where the shard begins in the flat vector.
        memory: Where buffers come from.
        copies: Takes those that are not kept any more while they are read.
    """

    def __init__(self, plans: RangePlans, start_bytes: int, memory: Memory, copies: ReaderCopies) -> None:
        self._plans, self._start_bytes, self._memory, self._copies = plans, start_bytes, memory, copies
        self._kept: dict[WireDtype, Parameters] = {}
        self._lock = asyncio.Lock()

    async def read(
        self, wire_dtype: WireDtype, source: Parameters, in_thread: InThread, *, wait_s: float, what: str
    ) -> Parameters:
        """The bytes in a wire dtype, until ``release``.

        Args:
            wire_dtype: A lossy one.
            source: The version, which the caller reads.
            in_thread: Where it is encoded.
            wait_s: How long to wait for room.
            what: Names the shard in errors.

        Raises:
            CapacityError: There was no room in time.
            VersionGoneError: The version was overwritten meanwhile.
        """
        async with self._lock:
            encoded = self._kept.get(wire_dtype)
            if encoded is None or not source.newest:
                encoded = await self._encode(wire_dtype, source, in_thread, wait_s, what)
                if source.newest:
                    self._kept[wire_dtype] = encoded
            encoded.readers += 1
            if not source.newest:
                encoded.newest = False
                self._copies.add(encoded)
            return encoded

    def release(self, encoded: Parameters) -> None:
        """A reader is done."""
        self._copies.release(encoded)

    def forget(self) -> None:
        """There is another version, or others need the room: nothing is kept but for those who read it now."""
        kept, self._kept = self._kept, {}
        for encoded in kept.values():
            self._copies.add(encoded)

    async def _encode(
        self, wire_dtype: WireDtype, source: Parameters, in_thread: InThread, wait_s: float, what: str
    ) -> Parameters:
        size_bytes = self._plans.plan(None, wire_dtype).size_bytes
        buffer = await self._memory.lend(size_bytes, wait_s, f"{what}, to be sent in another dtype")
        encoded = Parameters(buffer, source.version)
        try:
            before = source.buffer
            await in_thread(lambda: self.compute_encode(wire_dtype, before, encoded))
            source.check()
            if source.buffer is not before:
                raise VersionGoneError(f"{what} was overwritten while it was encoded")
        except BaseException:
            self._memory.take_back(encoded.buffer)
            raise
        return encoded

    def compute_encode(self, wire_dtype: WireDtype, values: torch.Tensor, encoded: Parameters) -> None:
        """Encodes the bytes of a shard, which lie in ``values``."""
        source = InVector(memory_at(values.data_ptr(), values.numel()), self._start_bytes)
        stream = encoded.memory(0, encoded.buffer.numel())
        self._plans.plan(None, wire_dtype).encode(source, stream)
