"""The gradient of the step in flight of one shard: contributions, twins of late items, kept gradients, and the mean.

For a shard of buffers, the values that data rank 0 pushed for the next version. ``MeanGradient`` has the memory of the
mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

import torch

from shardwell_server.shard.arithmetic.reduction import (
    MAX_BYTES,
    Reduced,
    SmallMean,
    SmallReduction,
    block_rows,
    reduce_shard,
)
from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.memory.budget import BufferQuota, Memory
from shardwell_server.shard.restart.shard_files import ShardFiles
from shardwell_server.shard.restart.shard_record import PreparedRecord
from shardwell_server.shard.shard_spec import Segments, ShardSpec
from shardwell_server.shard.unit.contributions import (
    Contribution,
    ContributionMemory,
    Contributions,
    KeptGradients,
    LazyViews,
)
from shardwell_server.shard.unit.partitions import Partitions
from shardwell_wire.errors import InvalidRequestError, NonFiniteError, StepStateError
from shardwell_wire.model.optimizers import KEPT_GROUP
from shardwell_wire.model.sum_order import SumOrder
from shardwell_wire.v1 import shard_pb2

Result = TypeVar("Result")

Compute = Callable[[Callable[[], Reduced]], Awaitable[Reduced]]
"""Runs tensor work, in a thread if that is worth it."""


class StepGradient:
    """The gradient of one shard. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        partitions: What trainers staged from the mean.
        files: Files from which another process of the server can take up the mean. None: nothing outlives the process.
    """

    def __init__(
        self, spec: ShardSpec, parts: Segments, memory: Memory, partitions: Partitions, files: ShardFiles | None
    ) -> None:
        self._spec, self._parts, self._partitions, self._files = spec, parts, partitions, files
        self._memory = memory
        summed = 1 if spec.asynchronous else spec.dp
        self.order = SumOrder(
            summed, spec.reduction_groups, num_contributors=spec.layout.contributors_per_item, cp=spec.layout.cp
        )
        """The order in which contributions are added."""
        self.counted = _all_contributors(spec.max_contributions)
        """Contributors of the next step. In an asynchronous run those of one data rank, named by PrepareStep."""
        self.contributions = Contributions()
        self.twins = Contributions()
        """Contributions of twins of late work items, apart until ``choose`` decides which trainer's counts."""
        starts = [segment.start_bytes for segment in parts.segments]
        self.mean = MeanGradient(memory, spec.size_bytes, starts, parts.views)
        self.quota = BufferQuota(self.reserved_buffers)
        """Buffers for contributions that the shard's reservation covers."""
        self.kept = KeptGradients(spec, memory, parts.views)

    @property
    def max_contributions(self) -> int:
        """Number of contributions that the shard holds in one step."""
        return self._spec.max_contributions

    @property
    def reserved_buffers(self) -> int:
        """Number of contribution buffers that the shard's reservation covers. Shared gradient buffers count."""
        return self.max_contributions

    @property
    def reduced(self) -> Reduced | None:
        """The mean gradient. None: not computed yet."""
        return self.mean.reduced

    # ---- checks of pushes ----

    def check_rank(self, dp_rank: int) -> None:
        """Raises InvalidRequestError unless a data rank may push to this shard."""
        if not 0 <= dp_rank < self._spec.dp:
            raise InvalidRequestError(f"dp_rank is {dp_rank}, but {self._spec.what} has {self._spec.dp} data ranks")

    def check_sum(self, header: shard_pb2.ReduceScatterHeader) -> None:
        """Raises unless a push of the sum of several ranks' gradients can become a contribution.

        Raises:
            InvalidRequestError: The ranks are no reduction group, or the push has what a sum cannot have.
            StepStateError: The shard has gradients of earlier steps, which belong to single ranks.
        """
        what, layout, dp = self._spec.what, self._spec.layout, self._spec.dp
        if layout.contributors_per_item > 1:
            raise InvalidRequestError(
                f"{what} belongs to several pipeline stages or context-parallel ranks: each rank must push by itself"
            )
        ranks = [summed.dp_rank for summed in header.summed]
        own = [summed.epoch for summed in header.summed if summed.dp_rank == header.dp_rank]
        if not self.order.is_group(ranks) or ranks[-1] >= dp or own != [header.context.epoch]:
            raise InvalidRequestError(
                f"{what}: summed names the ranks {ranks[:20]}; expected a reduction group, in ascending order, of "
                f"{dp} data ranks in groups of {self.order.groups or dp}, with rank {header.dp_rank} under "
                f"epoch {header.context.epoch}"
            )
        if header.part or header.copy or header.wire_dtype or header.dropped_indices:
            raise InvalidRequestError(
                f"{what}: a sum of several ranks is part 0 as stored, without copy and dropped_indices; got part "
                f"{header.part}, copy {header.copy}, wire_dtype {header.wire_dtype}, "
                f"{len(header.dropped_indices)} dropped_indices"
            )
        parameters = [layout.parameters[index] for index in header.parameter_indices]
        if small := next((parameter for parameter in parameters if parameter.item_size < 4), None):
            raise InvalidRequestError(
                f"{what}: a sum of several ranks has parameter {small.name!r} in {small.dtype}: each rank must "
                "push its own gradient, because the server adds 16-bit gradients in float32 and rounds once"
            )
        if self.kept.ranks:
            raise StepStateError(
                f"{what} has gradients of earlier steps of ranks {sorted(self.kept.ranks)}: each rank must "
                "push its own gradient"
            )

    # ---- contributions ----

    def contributions_of(self, contributor: int, attempt: int, *, copy: bool) -> Contributions:
        """Returns where the contribution of an attempt belongs: to the twins, unless the twin was chosen already."""
        chosen = contributor in self.contributions.by_rank and self.contributions.attempt(contributor) == attempt
        return self.twins if copy and not chosen else self.contributions

    async def add_part(
        self, header: shard_pb2.ReduceScatterHeader, memory: ContributionMemory, checksum: int | None
    ) -> None:
        """Adds the next part of a contribution, and discards the mean. Runs in ``HostedRun.exclusively``.

        Part 0 starts a contribution, from the contributor's kept gradient if there is one.

        Args:
            header: Header of the push that contains the part, checked by ``Push``.
            memory: The complete part. The contribution claims the memory of part 0.
            checksum: Checksum of the part's stream. None: the part came through shared memory.
        """
        views = LazyViews(memory.buffer, self._parts.views) if memory.views is None else memory.views
        numbers = self._parts.numbers_of("parameter_indices", tuple(header.parameter_indices))
        dropped = self._parts.numbers_of("dropped_indices", tuple(header.dropped_indices))
        contributor = self._spec.layout.contributor(header.dp_rank, header.pp_rank, header.cp_rank)
        contributions = self.contributions_of(contributor, header.attempt, copy=header.copy)
        if contributions is self.contributions and contributor in self.counted:
            self.discard_reduced()
        if header.part == 0:
            # The replaced contribution belongs to an older attempt or another lease: parts of two trainers are never
            # added. It is dropped before the claim, so that its quota is free.
            summed = {each.dp_rank: each.epoch for each in header.summed}
            for rank in summed or (contributor,):
                contributions.drop(rank)
            epoch, attempt = header.context.epoch, header.attempt
            first = Contribution(epoch, attempt, memory.claim(), views, memory.release, set(numbers), summed=summed)
            contributions.add(contributor, first)
            if (kept := self.kept.find(contributor, excluding=dropped)) is not None:
                await uninterrupted(self._memory.in_thread(lambda: first.compute_add_kept(kept)))
            first.count_part(checksum)
        else:
            contribution = contributions.by_rank[contributor]
            contribution.drop(dropped)

            async def add() -> None:
                await self._memory.in_thread(lambda: contribution.compute_add(views, sorted(numbers)))
                contribution.count_part(checksum)

            await uninterrupted(add())

    def choose(self, attempts: Mapping[int, int]) -> None:
        """Replaces contributions by those of twins that count instead, and drops all other twins.

        Args:
            attempts: The attempt that counts, by data rank.
        """
        for contributor in list(self.twins.by_rank):
            if self.twins.attempt(contributor) == attempts.get(self._spec.dp_rank_of(contributor)):
                self.discard_reduced()
                self.contributions.drop(contributor)
                self.contributions.add(contributor, self.twins.take(contributor))
        self.twins.clear()

    def count_only(self, dp_rank: int) -> None:
        """Sets the data rank whose contribution the next step of an asynchronous run applies."""
        counted = frozenset(self._spec.contributors_of(dp_rank))
        if counted != self.counted:
            self.discard_reduced()
            self.counted = counted

    def drop_older(self, dp_rank: int, attempt: int) -> None:
        """Drops a data rank's contributions and twins of older attempts, and the mean if it contains them."""
        own = self._spec.contributors_of(dp_rank)
        for contributor in own:
            self.twins.drop_older(contributor, attempt)
        dropped = [contributor for contributor in own if self.contributions.drop_older(contributor, attempt)]
        if self.counted.intersection(dropped) or self.mean.from_former:
            self.discard_reduced()

    def drop(self) -> None:
        """Drops all contributions and their mean."""
        self.discard_reduced()
        self.contributions.clear()
        self.twins.clear()

    def end_step(self) -> None:
        """Drops what an update has applied."""
        self.discard_reduced()
        self.contributions.end_step(self.counted)

    def kept_numbers(self, groups: Sequence[int] | None) -> frozenset[int]:
        """Numbers of the segments whose gradient is kept for a later step.

        Args:
            groups: The group of each parameter of the unit. None: no parameter is optimised.
        """
        if groups is None or KEPT_GROUP not in groups:
            return frozenset()
        at = enumerate(self._parts.segments)
        return frozenset(number for number, segment in at if groups[segment.parameter_index] == KEPT_GROUP)

    # ---- the mean ----

    @property
    def seems_complete(self) -> bool:
        """True if there is no mean yet and as many parts have arrived as in the last step."""
        if self._spec.asynchronous:
            return False
        return self.reduced is None and self.contributions.seem_complete(self.max_contributions)

    @property
    def awaits_reduction(self) -> bool:
        """True if ``reduce`` has to compute the mean."""
        return self.reduced is None or self.reduced.skipped

    async def reduce(self) -> Reduced:
        """Computes the mean of the contributions. Returns the same result when repeated.

        Raises:
            NonFiniteError: The mean has NaN or infinity. The error names the parameter and the ranks.
        """
        if self.awaits_reduction:
            await self.reduce_alone()
        assert self.reduced is not None
        if self.reduced.non_finite is not None:
            raise await self._memory.in_thread(partial(self.compute_non_finite_error, self.reduced.non_finite))
        return self.reduced

    async def reduce_alone(self) -> None:
        """Computes the mean of the contributions of this shard only; see ``reduce_shards``."""
        found = sorted(self._gradients().items())
        await self.mean.compute(found, self.order, self._mean_file(found), self.compute)

    def begin_small(self) -> SmallReduction | None:
        """Returns how to compute the mean together with those of other shards; see ``MeanGradient.begin_small``."""
        found = sorted(self._gradients().items())
        return self.mean.begin_small(found, self._mean_file(found))

    def skip_reduction(self) -> None:
        """Sets a mean without gradients, for a step that is skipped.

        The contributions stay until the commit, so ``reduce`` can still be called.
        """
        if self.reduced is not None and self.reduced.skipped:
            return  # keeps what trainers staged for the step
        self.discard_reduced()
        self.mean.set_empty(skipped=True)

    def set_no_mean(self) -> None:
        """Records that the primary has no mean gradient of the step. What was received otherwise stays."""
        if self.reduced is None or not self.reduced.skipped:
            self.mean.set(None, (), skipped=True)

    def discard_reduced(self) -> None:
        """Discards the mean gradient, and what trainers staged from it."""
        self.mean.discard()
        self._partitions.invalidate()

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Does tensor work on the shard: at once if the shard is small, else in a thread."""
        return work() if self._spec.size_bytes <= MAX_BYTES else await self._memory.in_thread(work)

    def compute_non_finite_error(self, number: int) -> NonFiniteError:
        """Returns an error that names the ranks whose gradient of a segment is not finite."""
        name = self._spec.layout.parameters[self._parts.segments[number].parameter_index].name
        found = [
            str(self._spec.dp_rank_of(each))
            for contributor, contribution in sorted(self._gradients().items())
            if (gradient := contribution.gradient(number)) is not None and not bool(torch.isfinite(gradient).all())
            for each in contribution.summed or (contributor,)
        ]
        ranks = list(dict.fromkeys(found))
        whose = f"of logical dp rank {', '.join(ranks)}" if ranks else "summed over all ranks (overflow)"
        return NonFiniteError(
            f"the gradient of parameter {name!r} ({self._spec.what}) {whose} has NaN or infinity; nothing was updated: "
            "to skip the step, call optimizer.zero_grad() on every trainer, then optimizer.step()",
            unit=self._spec.unit,
            parameter=name,
            dp_ranks=",".join(ranks),
        )

    def _gradients(self) -> Mapping[int, Contribution]:
        """The gradient of each contributor of the step: its contribution, or its kept gradient if it pushed nothing.

        Sums of several ranks are at their lowest rank.
        """
        if self._spec.asynchronous:
            return {rank: found for rank, found in self.contributions.by_rank.items() if rank in self.counted}
        if not self.kept.ranks:
            return self.contributions.by_lowest_rank
        kept = {rank: gradient for rank in self.kept.ranks if (gradient := self.kept.find(rank)) is not None}
        return kept | self.contributions.by_lowest_rank

    # ---- the file of the mean ----

    def _mean_file(self, found: Sequence[tuple[int, Contribution]]) -> torch.Tensor | None:
        """Returns where the mean is written. None: the shard has no files, or the only gradient is the mean."""
        return self.acquire_mean_file() if found and self.max_contributions > 1 else None

    def acquire_mean_file(self) -> torch.Tensor | None:
        """Returns the file for the next mean. None: the shard has no files, or shared memory is full."""
        return None if self._files is None else self._files.acquire_mean(self.mean.filling)

    @property
    def mean_path(self) -> str:
        """Path of the shared file with the mean gradient, laid out like the shard. Empty: it is in ordinary memory."""
        mean = None if self._files is None else self._files.mean
        return mean.path if mean is not None and self.mean.in_file else ""

    @property
    def recorded_segments(self) -> list[int] | None:
        """Numbers of the segments that the next update has a gradient for. None: the gradient is not in its file."""
        if self.reduced is None:
            return None
        present = self.mean.present
        return present if self.mean.in_file or not present else None

    async def share_mean(self) -> None:
        """Puts the mean gradient into a shared file, from which a backup or the next process reads it.

        Runs in ``HostedRun.exclusively``. Does nothing without a mean gradient, or if shared memory is full.
        """
        if self.reduced is None or self._files is None or self.recorded_segments is not None:
            return
        if (file := self.acquire_mean_file()) is not None:
            await self.compute(partial(self.compute_write, file))
            self.mean.in_file = True

    def compute_write(self, file: torch.Tensor) -> None:
        """Copies the gradients to their file. uint8. [size_bytes]"""
        self.mean.compute_write(file)

    def take_up(self, file: torch.Tensor | None, prepared: PreparedRecord) -> None:
        """Continues with the mean that a former process of the server left in its file. uint8. [size_bytes]"""
        self._take_up(file, prepared)
        self.mean.in_file = self.mean.recorded = self.mean.from_former = True

    def _take_up(self, file: torch.Tensor | None, prepared: PreparedRecord) -> None:
        self.mean.take_up(file, prepared.present, skipped=prepared.skipped)


class PushedBuffers(StepGradient):
    """The next values of a shard of buffers.

    The contribution of data rank 0 contains the new values of the buffers that its work item changed. There is no mean
    and no norm, so any value is accepted.
    """

    @property
    def max_contributions(self) -> int:
        return 1

    @property
    def reserved_buffers(self) -> int:
        return 2

    async def add_part(
        self, header: shard_pb2.ReduceScatterHeader, memory: ContributionMemory, checksum: int | None
    ) -> None:
        """As ``StepGradient.add_part``. Copies values that are in memory of the trainer.

        A trainer writes its next values there as soon as the step is committed, which may be before this server has
        applied the update. For a gradient, it first gathers the unit's next version. It does not gather buffers.
        """
        if checksum is not None:
            await super().add_part(header, memory, checksum)
            return
        grant = self._memory.grant(self._spec.size_bytes, self.quota, f"the next values of {self._spec.what}")
        with grant.incoming(self._spec.size_bytes) as copy:
            await self.compute(lambda: copy.buffer.copy_(memory.buffer))
            await super().add_part(header, copy, None)

    @property
    def changed(self) -> list[int]:
        """Layout indices of the buffers that have new values, rising."""
        return [self._parts.segments[number].parameter_index for number in self._present]

    @property
    def _present(self) -> list[int]:
        contribution = self.contributions.by_rank.get(0)
        return [] if contribution is None else sorted(contribution.present)

    def check_rank(self, dp_rank: int) -> None:
        if dp_rank != 0:
            raise InvalidRequestError(
                f"dp_rank is {dp_rank}, but {self._spec.what} holds buffers, whose values come from data rank 0 only"
            )

    def check_sum(self, header: shard_pb2.ReduceScatterHeader) -> None:
        raise InvalidRequestError(f"{self._spec.what} holds buffers, whose values are not added: leave summed empty")

    @property
    def seems_complete(self) -> bool:
        """Always False: there is nothing to reduce ahead."""
        return False

    @property
    def awaits_reduction(self) -> bool:
        """Always False: buffers are not reduced."""
        return False

    async def reduce(self) -> Reduced:
        """Returns a mean without gradients."""
        self.skip_reduction()
        assert self.reduced is not None
        return self.reduced

    def skip_reduction(self) -> None:
        if self.reduced is None:
            self.mean.set_empty(skipped=False)

    def set_no_mean(self) -> None:
        self.skip_reduction()

    @property
    def recorded_segments(self) -> list[int] | None:
        present = self._present
        return present if self.mean.in_file or not present else None

    def compute_write(self, file: torch.Tensor) -> None:
        """Copies the new values to their place in memory that is laid out like the shard. Can be repeated."""
        if (contribution := self.contributions.by_rank.get(0)) is None:
            return
        for number in contribution.present:
            segment = self._parts.segments[number]
            inside = slice(segment.start_bytes - self._spec.start_bytes, segment.stop_bytes - self._spec.start_bytes)
            file[inside].copy_(contribution.buffer[inside])

    def _take_up(self, file: torch.Tensor | None, prepared: PreparedRecord) -> None:
        self.skip_reduction()
        if file is not None and prepared.present:
            taken = Contribution(0, 0, file, self._parts.views(file), _do_nothing, set(prepared.present))
            self.contributions.add(0, taken)


class MeanGradient:
    """The mean gradient of one shard. Used on the event loop.

    The mean is in a buffer of the server's memory, in a shared file, or in the only contribution.

    Args:
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
        several = any(order.divisor > 1 or len(own) > 1 for own in terms if own)
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

        The buffer is the shard's file, unless the file contains a mean or another stream fills the file.

        Args:
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


@cache
def _all_contributors(count: int) -> frozenset[int]:
    """Returns the numbers of all contributors. Shards share the set: it may be much larger than their request."""
    return frozenset(range(count))


def _do_nothing() -> None:
    pass
