"""Optimizer partitions of one shard, which trainers update: staged values, and the optimizers' state.

The update of a committed step applies staged values and state together. Until then they can be replaced. They are
dropped when the gradient that they were computed from changes. ``TrainerState`` is the state as checkpoints and copies
of shards have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwell_server.shard.memory.budget import BufferQuota, Grant, Memory
from shardwell_server.shard.memory.buffer_reuse import tensor_memory
from shardwell_server.shard.memory.mapped_memory import SharedBuffer, SharedMemory
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError, ConflictError, IncompleteStepError
from shardwell_wire.model.layout import Segment, UnitLayout
from shardwell_wire.model.topology import part_in, state_places, values_offset
from shardwell_wire.v1 import shard_pb2


@dataclass(frozen=True)
class PartitionState:
    """An optimizer's state of one partition. The server does not interpret it."""

    tensors: Sequence[shard_pb2.StateTensor] = ()
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """All tensors, at the offsets that ``state_places`` returns. uint8. [size_bytes]"""
    shared: SharedBuffer | None = None
    """The file that contains ``data``. None: trainers cannot map the state."""
    writer: SharedStagingBuffer | None = None
    """Staging buffer in which a trainer wrote the state. None: the state was received."""
    request_id: str = ""
    """Id of the request that staged the state together with the values of the same version."""

    @property
    def pooled(self) -> bool:
        """True if ``data`` is a buffer of the pool."""
        return self.shared is None and self.data.numel() > 0

    @property
    def pieces(self) -> list[memoryview]:
        """The memory of each tensor."""
        ranges, _ = state_places(self.tensors)
        return [memory_at(self.data.data_ptr() + start, stop - start, self.data) for start, stop in ranges]


@dataclass(frozen=True)
class StagedPartition:
    """New values and state of one partition, received or written in a staging buffer."""

    epoch: int
    segments: Sequence[Segment]
    """Segments that have new values."""
    values: Sequence[torch.Tensor]
    """Bytes of each segment. uint8."""
    state: PartitionState
    release: Callable[[], None]
    """Releases the memory of the values. Called once."""

    @property
    def memory(self) -> list[memoryview]:
        """The memory of the values, then that of the state."""
        return [*map(tensor_memory, self.values), *self.state.pieces]


class Partitions:
    """The optimizer partitions of one shard. Used on the event loop; methods named ``compute_*`` run in a thread."""

    def __init__(self, spec: ShardSpec, memory: Memory) -> None:
        self.generation = 0
        """Rises when the gradient changes. Values are staged for one generation."""
        self.stage_count = 0
        """Rises when a partition is staged."""
        self.states: dict[int, PartitionState] = {}
        """Optimizer state of the newest version, by dp rank."""
        self._spec, self._what, self._dp = spec, spec.what, spec.dp
        self._staged: dict[int, StagedPartition] = {}
        self._memory = memory
        self._staging_buffers: set[SharedStagingBuffer] = set()

    @property
    def state_bytes(self) -> int:
        """Size of the optimizers' state."""
        return sum(state.data.numel() for state in self.states.values())

    def bounds(self, dp_rank: int) -> tuple[int, int]:
        """Returns the half-open range of a rank's partition within this shard."""
        return part_in(self._spec.layout.size_bytes, self._dp, dp_rank, self._spec.start_bytes, self._spec.stop_bytes)

    # ---- staging ----

    def staged_epoch(self, dp_rank: int) -> int:
        """Returns the epoch under which a rank's partition was staged. -1 if it is not staged."""
        staged = self._staged.get(dp_rank)
        return -1 if staged is None else staged.epoch

    @property
    def staged(self) -> Mapping[int, StagedPartition]:
        """The staged partitions, by dp rank."""
        return self._staged

    def stage(self, dp_rank: int, staged: StagedPartition) -> None:
        """Stages a rank's partition. Replaces what was staged before."""
        self._drop(dp_rank)
        self._staged[dp_rank] = staged
        self.stage_count += 1

    def check_staged(self) -> None:
        """Raises IncompleteStepError unless every partition is staged."""
        bounds = ((rank, *self.bounds(rank)) for rank in range(self._dp))
        missing = [rank for rank, start, stop in bounds if start < stop and rank not in self._staged]
        if missing:
            ranks = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            raise IncompleteStepError(
                f"{self._what}: the optimizer partition of data rank {ranks} is not staged", ranks=ranks
            )

    def compute_apply(self, live: torch.Tensor) -> None:
        """Copies the staged values into the shard. uint8. [stop_bytes - start_bytes]"""
        for staged in self._staged.values():
            for segment, values in zip(staged.segments, staged.values, strict=True):
                begin = segment.start_bytes - self._spec.start_bytes
                live[begin : begin + segment.size_bytes] = values

    def settle(self) -> None:
        """Makes the staged state current, after the staged values were applied."""
        for rank, staged in self._staged.items():
            former, self.states[rank] = self.states.get(rank, PartitionState()), staged.state
            writer = staged.state.writer
            if staged.state.pooled:
                self._memory.pool.detach(staged.state.data)
            # The new state occupies the staging buffer's memory for state, so the buffer gets the memory of the former
            # state.
            if writer is None or not writer.swap_state(former.shared, former.writer):
                self._free_settled(former)
            staged.release()
        self._staged.clear()
        self.invalidate()

    def invalidate(self) -> None:
        """Drops everything staged, because the gradient has changed or is gone."""
        self.generation += 1
        for dp_rank in list(self._staged):
            self._drop(dp_rank)

    def _drop(self, dp_rank: int) -> None:
        if (staged := self._staged.pop(dp_rank, None)) is not None:
            self.free(staged)

    # ---- memory ----

    def allocate(
        self,
        epoch: int,
        segments: Sequence[Segment],
        tensors: Sequence[shard_pb2.StateTensor],
        request_id: str,
        *,
        share: bool,
        what: str,
    ) -> StagedPartition:
        """Allocates memory for a partition that is about to be received. The caller stages or frees it.

        Args:
            epoch: Epoch of the sender's lease.
            segments: Segments that have new values.
            tensors: Descriptions of the state.
            share: Whether the state should be in shared memory if possible.

        Raises:
            CapacityError: There is no memory.
        """
        sizes = [segment.size_bytes for segment in segments]
        grant = self._memory.grant(sum(sizes) + state_places(tensors)[1], BufferQuota(0), what)
        buffer = grant.incoming(sum(sizes))
        try:
            state = self.allocate_state(tensors, request_id, share=share)
        except BaseException:
            buffer.release()
            raise
        return StagedPartition(epoch, segments, torch.split(buffer.buffer, sizes), state, buffer.release)

    def free(self, staged: StagedPartition) -> None:
        """Frees a partition that is not applied. State written in a staging buffer belongs to that buffer."""
        state = staged.state
        if state.pooled:
            self._memory.pool.release(state.data)
        elif state.writer is None and state.shared is not None:
            state.shared.unlink()
        staged.release()

    def allocate_state(
        self, tensors: Sequence[shard_pb2.StateTensor], request_id: str, *, share: bool
    ) -> PartitionState:
        """Allocates memory for state that a trainer is about to send, in shared memory if ``share`` is True and
        possible."""
        _, size_bytes = state_places(tensors)
        if share and self._memory.shared is not None and size_bytes:
            try:
                shared = self._memory.shared.create_sealed(size_bytes, f"state of {self._what}")
                return PartitionState(tensors, shared.tensor, shared, request_id=request_id)
            except CapacityError:
                pass  # SharedMemory logs the reason; ordinary memory works too
        return PartitionState(tensors, self._memory.pool.acquire(size_bytes), request_id=request_id)

    def allocate_restored(self, dp_rank: int, tensors: Sequence[shard_pb2.StateTensor]) -> list[torch.Tensor]:
        """Allocates a rank's state that is imported; returns the memory of each tensor, which the caller fills.

        Raises:
            CapacityError: The operating system has no memory.
        """
        state = self.allocate_state(tensors, "", share=True)
        if state.pooled:
            self._memory.pool.detach(state.data)
        self.states[dp_rank] = state
        ranges, _ = state_places(tensors)
        return [state.data[start:stop] for start, stop in ranges]

    def _free_settled(self, state: PartitionState) -> None:
        if state.pooled:
            self._memory.pool.release_detached(state.data)
        elif state.shared is not None:
            state.shared.unlink()

    def add_staging_buffer(self, staging_buffer: SharedStagingBuffer) -> None:
        """Registers an open staging buffer, so that it can be evicted or closed with the run."""
        self._staging_buffers.add(staging_buffer)

    def close_staging_buffer(self, staging_buffer: SharedStagingBuffer) -> None:
        """Closes a staging buffer. Values staged in it stay until they are applied or dropped."""
        self._staging_buffers.discard(staging_buffer)
        staging_buffer.close()

    def evict(self) -> None:
        """Closes the staging buffers that have no staged values. A trainer then opens another buffer or streams."""
        for staging_buffer in [staging_buffer for staging_buffer in self._staging_buffers if not staging_buffer.staged]:
            self.close_staging_buffer(staging_buffer)

    def close(self) -> None:
        """Frees everything, because the run was deleted."""
        self.invalidate()
        for staging_buffer in list(self._staging_buffers):
            self.close_staging_buffer(staging_buffer)
        for state in self.states.values():
            self._free_settled(state)
        self.states.clear()


class SharedStagingBuffer:
    """Shared memory in which a trainer updates one optimizer partition: gradients, new values and new state.

    Used on the event loop. What the trainer writes takes effect only after it is staged. See
    Note: [Buffers belong to one trainer] in ``shm_buffers.py``.

    Args:
        bounds: Half-open range of the partition within the shard.

    Raises:
        CapacityError: The buffer does not fit the memory budget or the shared memory.
    """

    def __init__(self, what: str, bounds: tuple[int, int], memory: Memory, shared: SharedMemory) -> None:
        self._what, self._memory, self._shared = what, memory, shared
        self._size_bytes, self._values_offset = bounds[1] - bounds[0], values_offset(*bounds)
        self._file, self._grant = self._allocate(self._values_offset + self._size_bytes)
        self._state: SharedBuffer | None = None
        self._state_grant: Grant | None = None
        self._staged = self._closed = False

    @property
    def file(self) -> SharedBuffer:
        """The gradients, and from ``values_offset`` the values."""
        return self._file

    @property
    def staged(self) -> bool:
        """True while the values in the buffer are staged."""
        return self._staged

    @property
    def closed(self) -> bool:
        """True once the trainer or the end of the session has closed the buffer, or the buffer was evicted."""
        return self._closed

    @property
    def gradients(self) -> torch.Tensor:
        """Laid out like the partition. uint8. [size_bytes]"""
        return self._file.tensor[: self._size_bytes]

    @property
    def values(self) -> torch.Tensor:
        """Laid out like the partition. uint8. [size_bytes]"""
        return self._file.tensor[self._values_offset :]

    def allocate_state(self, size_bytes: int) -> SharedBuffer:
        """Returns memory for the new state.

        Raises:
            CapacityError: The state does not fit the memory budget or the shared memory.
            ConflictError: Allocating the state has evicted this buffer.
        """
        if self._state is None or self._state.tensor.numel() != size_bytes:
            self._free_state()
            self._state, self._state_grant = self._allocate(size_bytes)
            # The allocation may have evicted this buffer, which closes it.
            if self._closed:
                self._free_state()
            self.check_open()
        return self._state

    def written_state(self, size_bytes: int) -> SharedBuffer | None:
        """Returns the new state that the trainer wrote. None if the state is empty.

        Raises:
            ConflictError: ``allocate_state`` has not allocated this size.
        """
        if not size_bytes:
            return None
        if self._state is None or self._state.tensor.numel() != size_bytes:
            raise ConflictError(
                f"{self._what} has no memory for a state of {size_bytes} bytes: stream the partition instead"
            )
        return self._state

    def check_open(self) -> None:
        """Raises ConflictError if the buffer is closed."""
        if self._closed:
            raise ConflictError(f"{self._what} is closed: stream the partition, or open another buffer")

    def mark_staged(self) -> None:
        """Marks the values in the buffer as staged, until ``release``."""
        self._staged = True

    def release(self) -> None:
        """Called when the staged values are applied or dropped. The trainer may write again."""
        self._staged = False
        if self._closed:
            self._free()

    def swap_state(self, former: SharedBuffer | None, writer: SharedStagingBuffer | None) -> bool:
        """Passes the new state to the shard and takes the former state's memory for the next one.

        The memory is not taken if another trainer wrote the former state, because that trainer may still write there.

        Args:
            former: The former state. None: there was no state, or it was not in shared memory.
            writer: Staging buffer in which the former state was written. None: the state was received.

        Returns:
            True if the memory was taken. Otherwise the caller frees it.
        """
        written, self._state = self._state, None
        if former is None or writer not in (None, self) or self._closed or written is None:
            self._free_state()
            return False
        self._state = former
        return True

    def close(self) -> None:
        """Closes the buffer. Its memory is freed when nothing staged needs it."""
        if not self._closed:
            self._closed = True
            self._file.unlink()
            if not self._staged:
                self._free()

    def _free(self) -> None:
        self._free_state()
        self._memory.note_shared(-self._file.tensor.numel())
        self._grant.release()

    def _free_state(self) -> None:
        if self._state is not None:
            self._state.unlink()
        if self._state_grant is not None:
            self._memory.note_shared(-self._state_grant.size_bytes)
            self._state_grant.release()
        self._state = self._state_grant = None

    def _allocate(self, size_bytes: int) -> tuple[SharedBuffer, Grant]:
        grant = self._memory.grant(size_bytes, BufferQuota(0), self._what)
        try:
            made = self._shared.create_sealed(size_bytes, self._what)
        except BaseException:
            grant.release()
            raise
        self._memory.note_shared(size_bytes)
        return made, grant


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state that a trainer's optimizer keeps for a range of one data rank's optimizer partition."""

    dp_rank: int
    start_bytes: int
    """Start of the half-open range in the unit's flat vector."""
    stop_bytes: int
    """End of the range."""
    tensors: Sequence[shard_pb2.StateTensor]
    """Descriptions of the tensors."""
    data: Sequence[torch.Tensor]
    """Bytes of each tensor. Each uint8."""

    def located(self, layout: UnitLayout) -> Iterator[tuple[shard_pb2.StateTensor, torch.Tensor, Segment]]:
        """Yields the description of each tensor, its bytes, and the segment of the range that it belongs to."""
        segments = _segments(layout, self.start_bytes, self.stop_bytes)
        for tensor, content in zip(self.tensors, self.data, strict=True):
            yield tensor, content, segments[tensor.parameter_index]


def _segments(layout: UnitLayout, start_bytes: int, stop_bytes: int) -> dict[int, Segment]:
    """Returns the segments of a range by parameter index."""
    return {segment.parameter_index: segment for segment in layout.segments(start_bytes, stop_bytes)}
