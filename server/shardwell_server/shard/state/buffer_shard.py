"""One shard of a unit of buffers: data rank 0 pushes their new values, and an update stores them."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_server.shard.arithmetic.reduction import Reduced
from shardwell_server.shard.memory.budget import Cover, Memory
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.threads import InThread
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2


class BufferShard(UnitShard):
    """A shard of buffers.

    It is fenced, prepared, read and pinned like a shard of parameters. The contribution of data rank 0 holds the new
    values of the buffers that its work item changed; ``update`` copies them to the values. There is no mean, no norm
    and no optimizer. A step that is skipped because a gradient is not finite stores them too: as in PyTorch, the
    forward has changed the buffers already.

    Args:
        run: The run.
        layout: Of the unit.
        index: Of the unit in the run.
        start_bytes: Half-open range of the flat vector.
        stop_bytes: Its end.
        dp: Logical data ranks.
        memory: Where buffers come from.
        shared: Where values lie, if trainers shall be able to map them.
    """

    def __init__(
        self,
        run: RunIdentity,
        layout: UnitLayout,
        index: int,
        start_bytes: int,
        stop_bytes: int,
        dp: int,
        memory: Memory,
        shared: SharedMemory | None = None,
        placement: int = 0,
    ) -> None:
        super().__init__(run, layout, index, start_bytes, stop_bytes, dp, memory, shared, placement)
        self.contribution_cover = Cover(1)

    @property
    def changed(self) -> list[int]:
        """Layout indices of the buffers that have new values here, rising."""
        contribution = self.contributions.by_rank.get(0)
        present = sorted(contribution.present) if contribution is not None else []
        return [self.segments[number].parameter_index for number in present]

    def check_rank(self, dp_rank: int) -> None:
        if dp_rank != 0:
            raise InvalidRequestError(
                f"dp_rank {dp_rank}: {self.what} holds buffers, whose values come from data rank 0 only"
            )

    @property
    def seems_complete(self) -> bool:
        """Never: there is nothing to work out ahead."""
        return False

    async def reduce(self, in_thread: InThread) -> Reduced:
        """Nothing counts for the norm, and no value is refused."""
        self.reduce_to_nothing()
        assert self.reduced is not None
        return self.reduced

    def reduce_to_nothing(self) -> None:
        if self.reduced is None:
            self.reduced = Reduced([None] * len(self.segments), None, [])

    def check_partitions(self) -> None:
        """Optimizers that run on the trainers stage nothing for buffers."""

    async def prepare_update(
        self, in_thread: InThread, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, key: bytes
    ) -> None:
        """Nothing is to be allocated."""

    async def update(
        self,
        in_thread: InThread,
        step: int,
        optimizer: common_pb2.OptimizerStep,
        groups: Sequence[int] | None,
        clip_coefficient: float,
        key: bytes,
    ) -> None:
        """Makes version ``step + 1``: the values that rank 0 pushed take the place of the former ones."""
        self.encoded.forget()
        self.copies.supersede()
        async with self.values.becoming(step + 1, in_thread):
            if self.contributions.by_rank:
                await self._work(in_thread, self.compute_store)
        self.forget_reduced()
        self.contributions.end_step()

    def compute_store(self) -> None:
        """Copies the new values to their places."""
        assert self.values.home is not None
        home, contribution = self.values.home.buffer, self.contributions.by_rank[0]
        for number in contribution.present:
            segment = self.segments[number]
            here = slice(segment.start_bytes - self.start_bytes, segment.stop_bytes - self.start_bytes)
            home[here].copy_(contribution.buffer[here])
