"""The partitions of one shard that trainers update: what is staged for the next version, and the optimizers' state.

Staged values and state take effect with the update of a committed step, together. Until then they may be
replaced, and they are void when the gradient that they were computed from is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import SharedBuffer, SharedMemory
from shardwell_server.shard.memory.staging_buffers import StagingBuffer
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import CapacityError, IncompleteStepError
from shardwell_wire.layout import Segment
from shardwell_wire.partitions import part_in, state_places
from shardwell_wire.v1 import shard_pb2


@dataclass(frozen=True)
class PartitionState:
    """An optimizer's state of one partition, opaque to the server."""

    tensors: Sequence[shard_pb2.StateTensor] = ()
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """The tensors, where ``state_places`` has them. uint8. [size_bytes]"""
    shared: SharedBuffer | None = None
    """What ``data`` is, if trainers of this host can map it."""
    writer: StagingBuffer | None = None
    """Whose trainer wrote it in place; None: it was received."""
    request_id: str = ""
    """Of the request that staged it, and the values of the same version."""

    @property
    def pooled(self) -> bool:
        """Whether ``data`` is ordinary memory."""
        return self.shared is None and self.data.numel() > 0

    @property
    def pieces(self) -> list[memoryview]:
        """The memory of each tensor."""
        ranges, _ = state_places(self.tensors)
        return [memory_at(self.data.data_ptr() + start, stop - start) for start, stop in ranges]


@dataclass(frozen=True)
class StagedPartition:
    """What a trainer sent for one partition, or laid on a staging buffer."""

    epoch: int
    segments: Sequence[Segment]
    """Of the parameters that have new values."""
    values: Sequence[torch.Tensor]
    """Their bytes, by segment. uint8."""
    state: PartitionState
    give_back: Callable[[], None]
    """Gives the memory of the values back; called once."""


class Partitions:
    """Of one shard. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        what: Names the shard in errors.
        unit_bytes: Length of the unit's flat vector.
        start_bytes: Half-open range of the shard.
        stop_bytes: Its end.
        dp: Logical data ranks.
        memory: Whose budget staging buffers count against.
        shared: Where state and staging buffers lie, if trainers shall be able to map them.
    """

    def __init__(
        self,
        what: str,
        unit_bytes: int,
        start_bytes: int,
        stop_bytes: int,
        dp: int,
        memory: Memory,
        shared: SharedMemory | None,
    ) -> None:
        self.generation = 0
        """Of the gradient that values are computed from."""
        self.states: dict[int, PartitionState] = {}
        """By dp rank, as of the newest version."""
        self._what, self._dp = what, dp
        self._unit_bytes, self._start_bytes, self._stop_bytes = unit_bytes, start_bytes, stop_bytes
        self._staged: dict[int, StagedPartition] = {}
        self._memory, self._shared = memory, shared
        self._staging_buffers: set[StagingBuffer] = set()

    @property
    def state_bytes(self) -> int:
        """What the optimizers' state takes."""
        return sum(state.data.numel() for state in self.states.values())

    def bounds(self, dp_rank: int) -> tuple[int, int]:
        """The half-open part of a rank's partition that lies here."""
        return part_in(self._unit_bytes, self._dp, dp_rank, self._start_bytes, self._stop_bytes)

    def staged_epoch(self, dp_rank: int) -> int:
        """Under which epoch the values of a rank's partition were staged; -1 if they are not."""
        staged = self._staged.get(dp_rank)
        return -1 if staged is None else staged.epoch

    def stage(self, dp_rank: int, staged: StagedPartition) -> None:
        """Takes what a trainer sent, in place of what is there."""
        self._drop(dp_rank)
        self._staged[dp_rank] = staged

    def check_staged(self) -> None:
        """Raises IncompleteStepError unless every partition is staged."""
        bounds = ((rank, *self.bounds(rank)) for rank in range(self._dp))
        missing = [rank for rank, start, stop in bounds if start < stop and rank not in self._staged]
        if missing:
            ranks = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            raise IncompleteStepError(f"{self._what}: the partition of data rank {ranks} is not staged", ranks=ranks)

    def compute_apply(self, home: torch.Tensor) -> None:
        """Copies the staged values to their places in the shard. uint8. [stop_bytes - start_bytes]"""
        for staged in self._staged.values():
            for segment, values in zip(staged.segments, staged.values, strict=True):
                begin = segment.start_bytes - self._start_bytes
                home[begin : begin + segment.size_bytes] = values

    def settle(self) -> None:
        """The staged values are in place: their state is the optimizers' from now on."""
        for rank, staged in self._staged.items():
            former, self.states[rank] = self.states.get(rank, PartitionState()), staged.state
            staging_buffer = staged.state.writer
            if staged.state.pooled:
                self._memory.pool.part_with(staged.state.data)
            # A staging buffer's room for a state is what holds the new one now: it gets the former one for the next.
            if staging_buffer is None or not staging_buffer.take_state(former.shared, former.writer):
                self._free_settled(former)
            staged.give_back()
        self._staged.clear()
        self.void()

    def void(self) -> None:
        """The gradient is another from now on, or gone: what is staged is dropped."""
        self.generation += 1
        for dp_rank in list(self._staged):
            self._drop(dp_rank)

    def _drop(self, dp_rank: int) -> None:
        if (staged := self._staged.pop(dp_rank, None)) is not None:
            self.free_unsettled(staged.state)
            staged.give_back()

    # ---- shared memory ----

    def make_state(self, tensors: Sequence[shard_pb2.StateTensor], request_id: str, *, share: bool) -> PartitionState:
        """Room for the state that a trainer is about to send; to ``share`` it, in shared memory if that has room."""
        _, size_bytes = state_places(tensors)
        if share and self._shared is not None and size_bytes:
            try:
                shared = self._shared.create(size_bytes, f"state of {self._what}")
                return PartitionState(tensors, shared.tensor, shared, request_id=request_id)
            except CapacityError:
                pass  # ordinary memory will do; the log says why
        return PartitionState(tensors, self._memory.pool.take(size_bytes), request_id=request_id)

    def free_unsettled(self, state: PartitionState) -> None:
        """Frees what ``make_state`` made; what was written on a staging buffer stays the staging buffer's."""
        if state.pooled:
            self._memory.pool.give(state.data)
        elif state.writer is None and state.shared is not None:
            state.shared.unlink()

    def _free_settled(self, state: PartitionState) -> None:
        if state.pooled:
            self._memory.pool.take_over(state.data)
        elif state.shared is not None:
            state.shared.unlink()

    def open_staging_buffer(self, dp_rank: int) -> StagingBuffer:
        """A new staging buffer for a rank's partition.

        Raises:
            CapacityError: There is no room for it.
        """
        assert self._shared is not None
        staging_buffer = StagingBuffer(
            f"a staging buffer for {self._what}", self.bounds(dp_rank), self._memory, self._shared
        )
        self._staging_buffers.add(staging_buffer)
        return staging_buffer

    def close_staging_buffer(self, staging_buffer: StagingBuffer) -> None:
        """The trainer is gone; what is staged there stays until it is used or void."""
        self._staging_buffers.discard(staging_buffer)
        staging_buffer.close()

    def make_room(self) -> None:
        """Gives up the staging buffers on which nothing is staged: their trainers stage over another transport, or
        open another."""
        for staging_buffer in [staging_buffer for staging_buffer in self._staging_buffers if not staging_buffer.held]:
            self.close_staging_buffer(staging_buffer)

    def close(self) -> None:
        """Frees everything: the run was deleted."""
        self.void()
        for staging_buffer in list(self._staging_buffers):
            self.close_staging_buffer(staging_buffer)
        for state in self.states.values():
            self._free_settled(state)
        self.states.clear()
