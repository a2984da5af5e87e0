"""The transport through memory that this trainer and a shard server of the same host both map."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwell.transport.gradient_buffers import GradientBuffer, GradientBuffers
from shardwell.transport.grpc_transport import ShardClient
from shardwell_wire.errors import UnavailableError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.shared_files import open_in_folder, opened, require_folder, server_folder
from shardwell_wire.v1 import common_pb2, shard_pb2

_MIN_PROOF_BYTES, _MAX_PROOF_FILE_BYTES = 16, 16 << 20

HandOver = Callable[[shard_pb2.ReduceGradientBufferRequest], shard_pb2.ReduceGradientBufferResponse]
"""Has a server take one part of a contribution out of a gradient buffer, over whichever way messages go."""


@dataclass(frozen=True, slots=True)
class LaidPart:
    """One part of a contribution, as it lies in a gradient buffer until it is handed over."""

    header: shard_pb2.ReduceScatterHeader
    transport: ShmTransport
    """The gradient buffer's; the memory outlives it."""
    gradient_buffer: GradientBuffer

    def memory(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """A range of the unit's flat vector that lies in the shard."""
        first = self.header.start_bytes
        return self.gradient_buffer.memory[start_bytes - first : stop_bytes - first]


class ShmTransport:
    """Reads shards in place, hands over gradients in gradient buffers and partitions on staging buffers; rpcs carry
    control messages only.

    Args:
        client: Calls the server.
        run: The run.
        timeout_s: How long opening it may take.

    Raises:
        UnavailableError: The server's memory cannot be seen from here.
        ShardwellError: The server does not offer the transport.
    """

    kind = "shm"

    def __init__(self, client: ShardClient, run: RunIdentity, *, timeout_s: float) -> None:
        self._client, self._run = client, run
        request = shard_pb2.OpenTransportRequest(run=run.name, run_id=run.run_id, kind=common_pb2.TRANSPORT_KIND_SHM)
        self._rpc = client.open("OpenTransport", request, timeout_s=timeout_s)
        self._name = self._rpc.answer.transport_id
        try:
            self._shared = self._prove(self._rpc.answer.shm)
        except BaseException:
            self._rpc.end()
            raise
        self._sizes: dict[str, int] = {}
        self._gradient_buffers = GradientBuffers(self._open_gradient_buffer)

    def _prove(self, offer: shard_pb2.SharedMemoryOffer) -> mmap.mmap:
        try:
            self._folder = server_folder(offer.path)
            with opened(open_in_folder(offer.path)) as descriptor:
                if os.fstat(descriptor).st_size > _MAX_PROOF_FILE_BYTES:
                    raise ValueError(f"the file with the proof has more than {_MAX_PROOF_FILE_BYTES} bytes")
                shared = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise UnavailableError(f"{self._client.peer} offers shared memory at {offer.path}, but {error}") from error
        if len(offer.proof) < _MIN_PROOF_BYTES or shared[: len(offer.proof)] != offer.proof:
            raise UnavailableError(f"{self._client.peer} offers shared memory, but {offer.path} is another file here")
        return shared

    def measure(self) -> float:
        """Copies some shared memory; returns bytes per second."""
        target = bytearray(len(self._shared))
        for _ in range(2):  # the first time both are touched for the first time
            started = time.perf_counter()
            target[:] = memoryview(self._shared)
            elapsed_s = time.perf_counter() - started
        return len(target) / elapsed_s

    def locate(
        self, unit: str, version: int | None, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.LocateShardResponse:
        """Where a shard lies; waits until the version exists.

        Raises:
            VersionGoneError: A newer version has replaced it.
            DeadlineError: It did not come to exist in time.
            ConflictError: The shard is not in shared memory.
            UntrustedFileError: The server names a file outside its folder.
        """
        request = shard_pb2.LocateShardRequest(
            run=self._run.name, run_id=self._run.run_id, unit=unit, version=version, transport_id=self._name
        )
        answer: shard_pb2.LocateShardResponse = self._client.call(
            "LocateShard", request, timeout_s=timeout_s, retry_for_s=retry_for_s
        )
        require_folder(answer.segment.path, self._folder)
        return answer

    def lay(self, header: shard_pb2.ReduceScatterHeader, write: Callable[[memoryview], None]) -> LaidPart:
        """Has one part of a contribution written to a gradient buffer.

        Args:
            header: What it is of.
            write: Is given memory laid out like the shard, with any content.

        Raises:
            CapacityError: The server has no room for another gradient buffer.
        """
        laid = self._empty(header)
        write(laid.gradient_buffer.memory)
        return laid

    def hand_over(self, laid: LaidPart, through: HandOver) -> None:
        """Has the server take what was laid in a gradient buffer; if that was another transport's, in a copy of it.

        Args:
            laid: What to hand over. Doing so twice is harmless: a server that has the part drops it.
            through: Tells the server.

        Raises:
            CapacityError: The server has no room for another gradient buffer.
            ConflictError: The transport is closed.
        """
        if laid.transport is not self:
            laid = self._copy(laid)
        request = shard_pb2.ReduceGradientBufferRequest(
            header=laid.header, transport_id=self._name, gradient_buffer_id=laid.gradient_buffer.number
        )
        if not through(request).adopted:
            self._gradient_buffers.give(laid.gradient_buffer)

    def open_staging_buffer(
        self, request: shard_pb2.ReadPartitionRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.OpenStagingBufferResponse:
        """Has a partition laid out in shared memory.

        Raises:
            CapacityError: The server has no room for that.
            ConflictError: The optimizer's state is not in shared memory.
            StepStateError: The step is not prepared, or not any more.
            StaleEpochError: The partition went to another trainer.
            UntrustedFileError: The server names a file outside its folder.
        """
        answer: shard_pb2.OpenStagingBufferResponse = self._client.call(
            "OpenStagingBuffer",
            shard_pb2.OpenStagingBufferRequest(partition=request, transport_id=self._name),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )
        for path in (answer.path, answer.state_path, answer.new_state_path):
            if path:
                require_folder(path, self._folder)
        return answer

    def stage_staging_buffer(
        self, header: shard_pb2.StagePartitionHeader, staging_buffer: int, *, timeout_s: float, retry_for_s: float
    ) -> None:
        """Stages what lies on a staging buffer.

        Raises:
            ConflictError: The staging buffer was given up, or the state has other tensors now.
            StepStateError: The gradient is another by now.
            StaleEpochError: The partition went to another trainer.
            NonFiniteError: A value is NaN or infinity.
        """
        request = shard_pb2.StageStagingBufferRequest(
            header=header, transport_id=self._name, staging_buffer_id=staging_buffer
        )
        self._client.call("StageStagingBuffer", request, timeout_s=timeout_s, retry_for_s=retry_for_s)

    def _copy(self, laid: LaidPart) -> LaidPart:
        copy = self._empty(laid.header)
        copy.gradient_buffer.memory[:] = laid.gradient_buffer.memory
        return copy

    def _empty(self, header: shard_pb2.ReduceScatterHeader) -> LaidPart:
        self._sizes[header.unit] = header.stop_bytes - header.start_bytes
        return LaidPart(header, self, self._gradient_buffers.take(header.unit, header.dp_rank))

    def release(self, dp_rank: int | None = None) -> None:
        """The contributions of a rank, or of all, are used up or withdrawn: their gradient buffers are free again."""
        self._gradient_buffers.release(dp_rank)

    @property
    def has_gradient_buffers(self) -> bool:
        """Whether the server keeps memory for this trainer's gradients."""
        return bool(self._sizes)

    @property
    def broke(self) -> bool:
        """Whether it ended though nobody gave it up."""
        return self._rpc.broke

    def broke_within(self, timeout_s: float) -> bool:
        """Whether it broke, or does before so much time has passed."""
        return self._rpc.broke_within(timeout_s)

    def close(self) -> None:
        """Gives the transport up, and with it the gradient buffers."""
        self._rpc.end()

    def _open_gradient_buffer(self, unit: str) -> GradientBuffer:
        request = shard_pb2.OpenGradientBufferRequest(
            run=self._run.name, run_id=self._run.run_id, unit=unit, transport_id=self._name
        )
        answer: shard_pb2.OpenGradientBufferResponse = self._client.call("OpenGradientBuffer", request)
        return GradientBuffer.open(
            answer.gradient_buffer_id, require_folder(answer.path, self._folder), self._sizes[unit]
        )
