"""The optimizer of one shard: its state on this server, and the memory that the state takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import torch

from shardwell_server.shard.arithmetic.shard_optimizer import (
    OptimizerContent,
    RestoredPart,
    ShardOptimizer,
    allocate_ordinary,
)
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.restart.shard_files import ShardFiles
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.unit.partitions import Partitions
from shardwell_wire.errors import CapacityError, StepStateError
from shardwell_wire.v1 import common_pb2

Compute = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs tensor work, in a thread if that is worth it."""


class AppliedOptimizer:
    """The optimizer of one shard. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        spec: The shard.
        memory: The server's memory budget.
        partitions: State of optimizers that run on the trainers, which counts towards the same reservation.
        files: Shared files of the shard. None: the state is in ordinary memory.
        parameters: Returns the parameters of the shard in their shapes, by segment number.
    """

    def __init__(
        self,
        spec: ShardSpec,
        memory: Memory,
        partitions: Partitions,
        files: ShardFiles | None,
        parameters: Callable[[], list[torch.Tensor]],
    ) -> None:
        self._spec, self._memory, self._partitions, self._files = spec, memory, partitions, files
        self._parameters = parameters
        self.optimizer: ShardOptimizer | None = None
        """None before the first update is prepared."""
        self.size_bytes = 0
        """Size of the state, including that of the partitions."""

    def require(self) -> ShardOptimizer:
        """Returns the optimizer. Makes it when it is needed first."""
        if self.optimizer is None:
            allocate = allocate_ordinary if self._files is None else self._files.allocate
            self.optimizer = ShardOptimizer(self._parameters(), allocate)
        return self.optimizer

    async def prepare(
        self,
        present: Sequence[bool],
        optimizer: common_pb2.OptimizerStep,
        groups: Sequence[int],
        key: bytes,
        compute: Compute,
    ) -> bool:
        """Allocates the memory of the next update. Returns False if this was done before.

        Args:
            present: Which segments have a gradient.
            optimizer: The step's optimizer.
            groups: The group of each segment's parameter. -1: not optimised.
            key: ``optimizer_checks.allocation_key`` of the optimizer.
            compute: Runs the work.

        Raises:
            CapacityError: The memory does not fit the budget, or the operating system has none.
        """
        applied = self.require()
        if applied.is_prepared(present, groups, key):
            return False
        state_bytes = 0
        try:
            state_bytes, workspace_bytes = applied.needs(present, optimizer, groups)
            reserved_bytes = self._partitions.state_bytes + state_bytes
            self._memory.reserve_optimizer(self._spec.memory_key, reserved_bytes, workspace_bytes)
            await compute(lambda: applied.prepare(present, optimizer, groups, key))
            if self._files is not None:
                self._files.reserve_undo(applied.piece_bytes)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise CapacityError(
                f"the operating system refused to allocate {state_bytes or 'some'} bytes for the optimizer's state of "
                f"{self._spec.what}, which --memory-budget allows. The step is not committed: lower the budget to what "
                "this process may use, add shard servers, or use an optimizer with less state",
                unit=self._spec.unit,
                needed_bytes=state_bytes,
            ) from error
        finally:
            self.note_size()
        return True

    def restore(self, parts: Sequence[RestoredPart], *, averages_begun: bool) -> list[RestoredPart]:
        """Allocates state that is imported; returns its memory, which the caller fills.

        Args:
            parts: The state of each segment. Tensors may be on the meta device.
            averages_begun: Whether a step has updated moving averages.

        Raises:
            CapacityError: The state does not fit the memory budget.
        """
        if not averages_begun and all(part.algorithm is None for part in parts):
            return [RestoredPart() for _ in parts]
        tensors = [tensor for part in parts for tensor in (*part.state.values(), part.average) if tensor is not None]
        self._memory.reserve_optimizer(self._spec.memory_key, sum(tensor.nbytes for tensor in tensors), 0)
        optimizer = self.require()
        made = optimizer.allocate_like(parts)
        optimizer.restore(made, averages_begun=averages_begun)
        return made

    def take_up(self, content: OptimizerContent) -> None:
        """Continues with the state of a former process."""
        if content.parts:
            self.require().take_up(content)
            self.note_size()

    def note_size(self) -> None:
        """Records the size of the state in the memory budget."""
        self.size_bytes = self._partitions.state_bytes + (0 if self.optimizer is None else self.optimizer.size_bytes)
        self._memory.note_optimizer(self._spec.memory_key, self.size_bytes)

    def check_averaged(self) -> None:
        """Raises StepStateError if there are no averages to read."""
        if self.optimizer is None or not self.optimizer.averages.has_started:
            raise StepStateError(
                f"{self._spec.what} has no moving average: set optimizer.ema_decay before a step", unit=self._spec.unit
            )

    def compute_averages(self, views: Sequence[torch.Tensor]) -> None:
        """Replaces values by their averages, where there are any.

        Args:
            views: Copies of the values, by segment number. Each [numel].
        """
        assert self.optimizer is not None
        for number, view in enumerate(views):
            average = self.optimizer.averages[number]
            if average is not None:
                view.copy_(average.reshape(-1))
