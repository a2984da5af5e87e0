"""Transports through shared memory: trainers of this host map shards, lay gradients in gradient buffers, update
partitions on staging buffers."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import SharedBuffer, SharedMemory
from shardwell_server.shard.memory.staging_buffers import StagingBuffer
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.transports.gradient_buffers import GradientBuffer
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import ConflictError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import shard_pb2

_PROOF_BYTES = 32
PROOF_FILE_BYTES = 1 << 20
"""Size of the file with the proof, which trainers also measure with."""


class ShmTransport:
    """One trainer's gradient buffers and staging buffers.

    Args:
        run: The run that the transport is for.
        shared: Where gradient buffers are made.
        memory: Whose budget they count against.
    """

    def __init__(self, run: RunIdentity, shared: SharedMemory, memory: Memory) -> None:
        self._run, self._shared, self._memory = run, shared, memory
        self._gradient_buffers: dict[int, GradientBuffer] = {}
        self._staging_buffers: dict[int, tuple[UnitShard, int, StagingBuffer]] = {}
        self._numbers = itertools.count(1)

    def check_run(self, run: RunIdentity) -> None:
        """Raises ConflictError for another run, also for one of the same name."""
        if run != self._run:
            raise ConflictError(
                f"the transport is open for run {self._run.name!r} with id {self._run.run_id}, "
                f"not for {run.name!r} with id "
                f"{run.run_id}: open another transport"
            )

    def open_gradient_buffer(self, shard: UnitShard) -> tuple[int, GradientBuffer]:
        """A new gradient buffer and its number.

        Raises:
            CapacityError: Beyond the memory budget, or the shared memory is full.
        """
        what = f"a gradient buffer for {shard.what}"
        room = self._memory.try_room(shard.size_bytes, shard.contribution_cover, what)
        try:
            shared = self._shared.create(shard.size_bytes, what)
        except BaseException:
            room.give()
            raise
        number = next(self._numbers)
        self._gradient_buffers[number] = GradientBuffer(shard, shared, room)
        return number, self._gradient_buffers[number]

    def gradient_buffer(self, number: int) -> GradientBuffer:
        """Raises ConflictError if the transport has no such gradient buffer."""
        if number not in self._gradient_buffers:
            raise ConflictError(f"the transport has no gradient buffer {number}")
        return self._gradient_buffers[number]

    def staging_buffer(self, shard: UnitShard, dp_rank: int) -> tuple[int, StagingBuffer]:
        """The staging buffer for a rank's partition, a new one if there is none that is free, and its number.

        What is staged on one stays staged, for the step may be about to commit: that staging buffer is given up, and
        is gone
        once it is not needed.

        Raises:
            CapacityError: Beyond the memory budget, or the shared memory is full.
        """
        for number, (owner, rank, staging_buffer) in list(self._staging_buffers.items()):
            if owner is shard and rank == dp_rank and staging_buffer.held:
                shard.partitions.close_staging_buffer(staging_buffer)
            if staging_buffer.closed:
                del self._staging_buffers[number]
            elif owner is shard and rank == dp_rank:
                return number, staging_buffer
        staging_buffer, number = shard.partitions.open_staging_buffer(dp_rank), next(self._numbers)
        self._staging_buffers[number] = shard, dp_rank, staging_buffer
        return number, staging_buffer

    def opened_staging_buffer(self, number: int, shard: UnitShard, dp_rank: int) -> StagingBuffer:
        """Raises ConflictError if the transport has no such staging buffer for a rank's partition."""
        owner, rank, staging_buffer = self._staging_buffers.get(number, (None, None, None))
        if staging_buffer is None or owner is not shard or rank != dp_rank:
            raise ConflictError(f"the transport has no staging buffer {number} for {shard.what}, rank {dp_rank}")
        return staging_buffer

    def close(self) -> None:
        """Gives all gradient buffers and staging buffers up."""
        for gradient_buffer in self._gradient_buffers.values():
            gradient_buffer.close()
        self._gradient_buffers.clear()
        for shard, _, staging_buffer in self._staging_buffers.values():
            shard.partitions.close_staging_buffer(staging_buffer)
        self._staging_buffers.clear()


class ShmTransports:
    """The transports that are open, by name.

    Args:
        shared: Where gradient buffers are made.
        memory: Whose budget they count against.
    """

    def __init__(self, shared: SharedMemory, memory: Memory) -> None:
        self._shared, self._memory = shared, memory
        self._open: dict[str, ShmTransport] = {}
        self._proof: SharedBuffer | None = None

    @asynccontextmanager
    async def open(self, run: RunIdentity) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        """See ``TransportOffer.open``."""
        name, proof = secrets.token_hex(8), self._proof or self._prove()
        transport = self._open[name] = ShmTransport(run, self._shared, self._memory)
        try:
            offer = shard_pb2.SharedMemoryOffer(path=proof.path, proof=bytes(_proof_in(proof)))
            yield shard_pb2.OpenTransportResponse(transport_id=name, shm=offer)
        finally:
            del self._open[name]
            transport.close()
            if not self._open:
                proof.unlink()
                self._memory.note_shared(-PROOF_FILE_BYTES)
                self._proof = None

    def _prove(self) -> SharedBuffer:
        """Makes the file that shows trainers that they share this memory: one for all transports, while any is open."""
        self._proof = self._shared.create(PROOF_FILE_BYTES, "a transport")
        _proof_in(self._proof)[:] = secrets.token_bytes(_PROOF_BYTES)
        self._memory.note_shared(PROOF_FILE_BYTES)
        return self._proof

    def transport(self, name: str, run: RunIdentity) -> ShmTransport:
        """An open transport of a run.

        Raises:
            ConflictError: It is not open, or for another run.
        """
        transport = self._open.get(name)
        if transport is None:
            raise ConflictError(f"no shm transport {name!r} is open here")
        transport.check_run(run)
        return transport


def _proof_in(file: SharedBuffer) -> memoryview:
    return memory_at(file.tensor.data_ptr(), _PROOF_BYTES)
