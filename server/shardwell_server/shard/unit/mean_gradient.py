"""The mean gradient of the step in flight of one shard, and the memory that contains it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

import torch

from shardwell_server.shard.arithmetic.reduction import (
    MAX_BYTES,
    Reduced,
    SmallMean,
    SmallReduction,
    block_rows,
    reduce_shard,
)
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.unit.contributions import Contribution
from shardwell_wire.model.sum_order import SumOrder

Compute = Callable[[Callable[[], Reduced]], Awaitable[Reduced]]
"""Runs tensor work, in a thread if that is worth it."""


class MeanGradient:
    """The mean gradient of one shard. Used on the event loop.

    The mean is in a buffer of the server's memory, in a shared file, or in the only contribution.

    Args:
        memory: The server's memory.
        size_bytes: Size of the shard.
        segment_starts: First byte of each segment in the unit's flat vector.
        views: Splits a buffer of the shard's size into segments, by segment number.
    """

    def __init__(
        self,
        memory: Memory,
        size_bytes: int,
        segment_starts: Sequence[int],
        views: Callable[[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        self._memory, self._size_bytes, self._starts, self._views = memory, size_bytes, segment_starts, views
        self.reduced: Reduced | None = None
        """None: not computed yet, or discarded."""
        self.in_file = False
        """True if the mean is in the shard's shared file."""
        self.recorded = False
        """True if the shard's record names the mean."""
        self.from_former = False
        """True if a former process of the server computed the mean, so that this one has no contributions."""
        self.filling: torch.Tensor | None = None
        """The file that a stream of a primary fills. None: no stream fills one."""
        self._is_small = size_bytes <= MAX_BYTES
        """False if ``reduce_small`` cannot reduce the shard."""
        self._file: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        """The file of the last mean, and its segments."""
        self._small_mean: tuple[torch.Tensor, SmallMean] | None = None
        """The file of the last mean, and its parts for ``reduce_small``."""

    @property
    def present(self) -> list[int]:
        """Numbers of the segments that have a gradient."""
        gradients = [] if self.reduced is None else self.reduced.gradients
        return [number for number, gradient in enumerate(gradients) if gradient is not None]

    def discard(self) -> None:
        """Discards the mean and releases its memory."""
        self._release_buffer()
        self.reduced = None
        self.in_file = self.recorded = self.from_former = False

    def set_empty(self, *, skipped: bool) -> None:
        """Sets a mean without gradients.

        Args:
            skipped: True if the step is skipped, False if there is nothing to reduce.
        """
        self.reduced = Reduced([None] * len(self._starts), None, [], skipped=skipped)

    async def compute(
        self, found: Sequence[tuple[int, Contribution]], order: SumOrder, file: torch.Tensor | None, compute: Compute
    ) -> None:
        """Computes the mean in the run's order of additions.

        Args:
            found: The contributions, by ascending data rank.
            order: The order of additions.
            file: Where to write the mean. None: to a buffer, or nowhere if the only gradient is the mean.
            compute: Runs the work.
        """
        terms = [
            [(rank, gradient) for rank, own in found if (gradient := own.gradient(number)) is not None]
            for number in range(len(self._starts))
        ]
        several = any(order.dp > 1 or len(own) > 1 for own in terms if own)
        buffer = self._memory.pool.acquire(self._size_bytes) if several and file is None else None
        outs = self._views_of_file(file) if file is not None else None if buffer is None else self._views(buffer)
        work = partial(reduce_shard, terms, order, outs, self._starts, buffer=buffer)
        try:
            self.reduced = await compute(work)
        except BaseException:
            self.release(buffer)
            raise
        self.in_file, self.recorded = file is not None, False

    def _views_of_file(self, file: torch.Tensor) -> list[torch.Tensor]:
        if self._file is None or self._file[0] is not file:
            self._file = file, self._views(file)
        return self._file[1]

    def begin_small(
        self, found: Sequence[tuple[int, Contribution]], file: torch.Tensor | None
    ) -> SmallReduction | None:
        """Returns the work of ``reduce_small``. None: ``compute`` must compute the mean.

        Arguments as in ``compute``. Call ``end_small`` afterwards.
        """
        if not self._is_small or not found or any(len(own.present) < len(self._starts) for _, own in found):
            return None
        mean = self._mean_in(file) if file is not None else self._mean_in_buffer()
        if mean is None:
            return None
        dtype = mean.vector.dtype
        return SmallReduction([(rank, own.buffer.view(dtype)) for rank, own in found], mean)

    def end_small(self, work: SmallReduction, reduced: Reduced | None) -> None:
        """Sets the mean that ``reduce_small`` computed. None: it computed none."""
        if reduced is None:
            self.release(work.mean.buffer)
            return
        self.reduced = reduced
        self.in_file, self.recorded = work.mean.buffer is None, False

    def _mean_in(self, file: torch.Tensor) -> SmallMean | None:
        if self._small_mean is None or self._small_mean[0] is not file:
            if (mean := self._small(file, None)) is None:
                return None
            self._small_mean = file, mean
        return self._small_mean[1]

    def _mean_in_buffer(self) -> SmallMean | None:
        buffer = self._memory.pool.acquire(self._size_bytes)
        try:
            mean = self._small(buffer, buffer)
        except BaseException:
            self.release(buffer)
            raise
        if mean is None:
            self.release(buffer)
        return mean

    def _small(self, out: torch.Tensor, buffer: torch.Tensor | None) -> SmallMean | None:
        """Returns the parts of a mean for ``reduce_small``. None: it cannot reduce the shard.

        16-bit gradients need a sum in fp32.
        """
        views = self._views(out)
        dtypes = {view.dtype for view in views}
        self._is_small = len(dtypes) == 1 and views[0].element_size() >= 4
        if not self._is_small:
            return None
        rows = [row for view, start in zip(views, self._starts, strict=True) for row in block_rows(view, start)]
        return SmallMean(out.view(*dtypes), views, rows, buffer)

    def compute_write(self, file: torch.Tensor) -> None:
        """Copies the gradients, which are in a contribution, to their file. uint8. [size_bytes]"""
        assert self.reduced is not None
        for view, gradient in zip(self._views(file), self.reduced.gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)

    # ---- received from a primary, or taken up from a former process ----

    def acquire(
        self, numbers: Collection[int], file: Callable[[], torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Returns memory for a mean that a primary sends: the buffer, and the views of some segments.

        It is the shard's file, unless the file contains a mean or another stream fills it.

        Args:
            numbers: The segments that the primary sends.
            file: Returns the file. None: there is none.

        Raises:
            CapacityError: The operating system has no memory.
        """
        if not numbers:
            return None, []
        buffer = file() if self.filling is None and not self.in_file else None
        if buffer is None:
            buffer = self._memory.pool.acquire(self._size_bytes)
            views = self._views(buffer)
        else:
            self.filling, views = buffer, self._views_of_file(buffer)
        return buffer, [views[number] for number in sorted(numbers)]

    def release(self, buffer: torch.Tensor | None) -> None:
        """Releases memory that ``acquire`` returned and ``set`` did not take."""
        if buffer is not None and buffer is self.filling:
            self.filling = None
        elif buffer is not None:
            self._memory.pool.release(buffer)

    def set(self, buffer: torch.Tensor | None, numbers: Collection[int], *, skipped: bool = False) -> None:
        """Sets the mean that a primary sent.

        Args:
            buffer: The mean, laid out like the shard. None: no segment has a gradient.
            numbers: Segments that have a gradient.
            skipped: True if the step is skipped.
        """
        self._release_buffer()
        gradients = self._gradients(buffer, numbers)
        self.in_file, self.recorded = buffer is not None and buffer is self.filling, False
        if self.in_file:
            self.filling = buffer = None
        self.reduced = Reduced(gradients, buffer, [], skipped=skipped)

    def take_up(self, file: torch.Tensor | None, numbers: Collection[int], *, skipped: bool) -> None:
        """Sets the mean that a former process of the server left in its file."""
        self.reduced = Reduced(self._gradients(file, numbers), None, [], skipped=skipped)

    def _gradients(self, buffer: torch.Tensor | None, numbers: Collection[int]) -> list[torch.Tensor | None]:
        views = [] if buffer is None else self._views(buffer)
        return [views[number] if number in numbers else None for number in range(len(self._starts))]

    def _release_buffer(self) -> None:
        if self.reduced is not None:
            self.release(self.reduced.buffer)
