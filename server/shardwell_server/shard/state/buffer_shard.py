"""One shard of a unit of buffers: data rank 0 pushes new values, and an update stores them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwell_server.shard.arithmetic.reduction import Reduced
from shardwell_server.shard.concurrency import InThread
from shardwell_server.shard.state.contributions import Contribution
from shardwell_server.shard.state.shard_record import PreparedRecord
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import common_pb2, shard_pb2


class BufferShard(UnitShard):
    """A shard of buffers.

    It is fenced, prepared, read and pinned like a shard of parameters. The contribution of data rank 0 contains the new
    values of the buffers that its work item changed, and ``update`` copies them. There is no mean, no norm and no
    optimizer. A step that is skipped because a gradient is not finite stores new values too: as in PyTorch, the forward
    has already changed the buffers.
    """

    @property
    def max_contributions(self) -> int:
        return 1

    @property
    def changed(self) -> list[int]:
        """Layout indices of the buffers that have new values, rising."""
        contribution = self.contributions.by_rank.get(0)
        present = sorted(contribution.present) if contribution is not None else []
        return [self.segments[number].parameter_index for number in present]

    def check_rank(self, dp_rank: int) -> None:
        if dp_rank != 0:
            raise InvalidRequestError(
                f"dp_rank is {dp_rank}, but {self.what} holds buffers, whose values come from data rank 0 only"
            )

    def check_sum(self, header: shard_pb2.ReduceScatterHeader) -> None:
        raise InvalidRequestError(f"{self.what} holds buffers, whose values are not added: leave summed empty")

    @property
    def seems_complete(self) -> bool:
        """Always False: there is nothing to reduce ahead."""
        return False

    @property
    def awaits_reduction(self) -> bool:
        """Always False, for the same reason."""
        return False

    async def reduce(self, in_thread: InThread) -> Reduced:
        """Returns a mean without gradients: buffers have no norm, and any value is accepted."""
        self.skip_reduction()
        assert self.reduced is not None
        return self.reduced

    def skip_reduction(self) -> None:
        if self.reduced is None:
            self.mean.set_empty(skipped=False)

    def set_no_mean(self) -> None:
        self.skip_reduction()

    def check_partitions(self) -> None:
        """Does nothing: optimizers that run on the trainers stage nothing for buffers."""

    async def prepare_update(
        self, in_thread: InThread, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, key: bytes
    ) -> None:
        """Does nothing: an update of buffers needs no memory."""

    async def update(
        self,
        in_thread: InThread,
        step: int,
        optimizer: common_pb2.OptimizerStep,
        groups: Sequence[int] | None,
        clip_coefficient: float,
        key: bytes,
        *,
        hold: bool = False,
    ) -> None:
        """Makes version ``step + 1`` from version ``step`` and the values that rank 0 pushed."""
        self.encoded.discard()
        self.reader_copies.supersede()
        has_new = bool(self.contributions.by_rank)
        async with self.values.becoming(step + 1, in_thread, changes=has_new):
            await self._compute(in_thread, self.compute_store)
        self.discard_reduced()
        self.contributions.end_step(self.counted)
        self.replica = None

    def compute_store(self) -> None:
        """Copies the new values into the shard. Can be repeated."""
        assert self.values.live is not None and self.version is not None
        if self._files is not None:
            self._files.begin_update(self)
        self._copy_new(self.values.live.buffer)
        if self._files is not None:
            self._files.save(self, self.version + 1)

    def _copy_new(self, target: torch.Tensor) -> None:
        if (contribution := self.contributions.by_rank.get(0)) is None:
            return
        for number in contribution.present:
            segment = self.segments[number]
            inside = slice(segment.start_bytes - self.start_bytes, segment.stop_bytes - self.start_bytes)
            target[inside].copy_(contribution.buffer[inside])

    @property
    def recorded_segments(self) -> list[int] | None:
        contribution = self.contributions.by_rank.get(0)
        present = [] if contribution is None else sorted(contribution.present)
        return present if self.mean.in_file or not present else None

    def compute_write_mean(self, file: torch.Tensor) -> None:
        self._copy_new(file)

    def _take_up_gradients(self, mean: torch.Tensor | None, prepared: PreparedRecord) -> None:
        self.skip_reduction()
        if mean is not None and prepared.present:
            taken = Contribution(0, 0, mean, self.views(mean), _do_nothing, set(prepared.present))
            self.contributions.add(0, taken)


def _do_nothing() -> None:
    pass
