"""Gradients of one shard that are kept for a later step, which another optimizer makes.

The gradient of the step in flight of one shard: contributions, copies of them, kept gradients, and the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import TypeVar

import torch

from shardwell_server.shard.arithmetic.reduction import MAX_BYTES, Reduced, SmallReduction
from shardwell_server.shard.concurrency import InThread, uninterrupted
from shardwell_server.shard.gradients.contributions import Contribution, ContributionMemory, Contributions, LazyViews
from shardwell_server.shard.gradients.mean_gradient import MeanGradient
from shardwell_server.shard.memory.budget import BufferQuota, Memory
from shardwell_server.shard.optimizer.partitions import Partitions
from shardwell_server.shard.shard_spec import ShardSpec, segment_views
from shardwell_wire.encoding.streams import RangePlans
from shardwell_wire.errors import (
    CapacityError,
    InvalidRequestError,
    NonFiniteError,
    NotFoundError,
    StepStateError,
)
from shardwell_wire.model.optimizers import KEPT_GROUP
from shardwell_wire.model.sum_order import SumOrder
from shardwell_wire.v1 import shard_pb2

_NO_LEASE = 0


class KeptGradients:
    """Gradients of each rank that the last commit did not use, kept for another optimizer's step.

    A rank is the number of a contributor here, see ``UnitLayout.contributor``.
    A rank's contribution to the next step starts from its kept gradient. Kept gradients change at commits only, so work
    that is retried within a step starts from the same values.

    Args:
        reserve: Reserves memory for this many buffers. Raises CapacityError if there is none.
        acquire: Returns a buffer of the shard's size. [size_bytes]
        release: Releases a buffer.
        views: Splits a buffer into segments, by segment number.
    """

    def __init__(
        self,
        reserve: Callable[[int], None],
        acquire: Callable[[], torch.Tensor],
        release: Callable[[torch.Tensor], None],
        views: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        self._reserve, self._acquire, self._release, self._views = reserve, acquire, release, views
        self._by_rank: dict[int, Contribution] = {}
        """Every entry has a buffer. The buffer of some entries contains no gradient."""

    @property
    def size_bytes(self) -> int:
        return sum(kept.buffer.numel() for kept in self._by_rank.values())

    def find(self, dp_rank: int, *, excluding: Collection[int] = ()) -> Contribution | None:
        """Returns the kept gradient of a rank without some segments. None if nothing is left."""
        kept = self._by_rank.get(dp_rank)
        present = kept.present.difference(excluding) if kept is not None else set()
        if kept is None or not present:
            return None
        return Contribution(kept.epoch, kept.attempt, kept.buffer, kept.views, _do_nothing, present)

    def of_segment(self, number: int) -> dict[int, torch.Tensor]:
        """Returns the kept gradients of a segment by rank, rising. Each [numel]."""
        found = sorted(self._by_rank.items())
        return {rank: kept.views[number] for rank, kept in found if number in kept.present}

    def allocate(self, present: Mapping[int, set[int]]) -> dict[int, Sequence[torch.Tensor]]:
        """Allocates kept gradients that are imported; returns their memory by rank and segment, which the caller fills.

        Args:
            present: Numbers of the segments that have a kept gradient, by rank.

        Raises:
            CapacityError: There is no memory; nothing changed.
        """
        self.drop()
        numbers = set[int]().union(*present.values())
        self.reserve({rank: _placeholder(own) for rank, own in present.items()}, numbers)
        for rank, own in present.items():
            self._by_rank[rank].present = set(own)
        return {rank: self._by_rank[rank].views for rank in present}

    @property
    def ranks(self) -> set[int]:
        """Ranks that have a kept gradient."""
        return {rank for rank, kept in self._by_rank.items() if kept.present}

    def reserve(self, contributions: Mapping[int, Contribution], numbers: Collection[int]) -> None:
        """Allocates the memory that ``compute_keep`` will need.

        Args:
            contributions: The step's contributions, by rank.
            numbers: Segments to keep.

        Raises:
            CapacityError: There is no memory; nothing changed.
        """
        lacking = [
            rank
            for rank, contribution in contributions.items()
            if rank not in self._by_rank and not contribution.present.isdisjoint(numbers)
        ]
        if not lacking:
            return
        before = len(self._by_rank)
        self._reserve(before + len(lacking))
        try:
            for rank in lacking:
                buffer = self._acquire()
                self._by_rank[rank] = Contribution(_NO_LEASE, 0, buffer, self._views(buffer), _do_nothing)
        except (CapacityError, RuntimeError, MemoryError):
            for rank in lacking:
                if (kept := self._by_rank.pop(rank, None)) is not None:
                    self._release(kept.buffer)
            self._reserve(before)
            raise

    def compute_keep(self, contributions: Mapping[int, Contribution], numbers: Collection[int]) -> None:
        """Keeps some segments of a committed step's contributions. Idempotent for the same arguments.

        The contributions include the gradients that were kept before.
        """
        for rank, contribution in contributions.items():
            present = contribution.present.intersection(numbers)
            if not present and rank not in self._by_rank:
                continue
            kept = self._by_rank[rank]
            for number in present:
                kept.views[number].copy_(contribution.views[number])
            kept.present = present
        for rank, kept in self._by_rank.items():
            if rank not in contributions:
                kept.present.intersection_update(numbers)

    def drop(self) -> None:
        """Releases all kept gradients."""
        for kept in self._by_rank.values():
            self._release(kept.buffer)
        if self._by_rank:
            self._by_rank.clear()
            self._reserve(0)


def _placeholder(present: set[int]) -> Contribution:
    return Contribution(_NO_LEASE, 0, torch.empty(0, dtype=torch.uint8), (), _do_nothing, set(present))


def _do_nothing() -> None:
    pass


Result = TypeVar("Result")

_INDICES_KEPT = 8
"""Most sets of parameters of a shard whose segments are kept: pushes name the same ones in every step."""


class ShardGradients:
    """The gradients of one shard. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        spec: Run, unit and range of the shard.
        memory: The server's memory budget.
        partitions: What trainers staged from the mean.
    """

    def __init__(self, spec: ShardSpec, memory: Memory, partitions: Partitions) -> None:
        self.spec, self._memory = spec, memory
        self.run, self.layout, self.index, self.dp = spec.run, spec.layout, spec.index, spec.dp
        self.start_bytes, self.stop_bytes, self.size_bytes = spec.start_bytes, spec.stop_bytes, spec.size_bytes
        summed = 1 if spec.asynchronous else spec.dp
        self.order = SumOrder(summed, spec.reduction_groups, num_stages=len(spec.layout.pp_ranks))
        """The order in which contributions are added."""
        self.unit, self.what, self.placement = spec.unit, spec.what, spec.placement
        self.plans = RangePlans(spec.layout, spec.start_bytes, spec.stop_bytes)
        self.segments = self.plans.segments(None)
        self.segment_of = {segment.parameter_index: number for number, segment in enumerate(self.segments)}
        self.numbers_of = lru_cache(_INDICES_KEPT)(self._find_numbers)
        """Returns the numbers of the segments of the parameters that a field of a request lists by layout index. Takes
        the field's name and the indices. Raises InvalidRequestError unless the indices exist and rise."""
        self.counted = _all_contributors(spec.max_contributions)
        """Contributors of the next step. In an asynchronous run those of one data rank, named by PrepareStep."""
        self.contributions = Contributions()
        self.copies = Contributions()
        """Contributions of copies of late work items, apart until ``choose`` decides which trainer's counts."""
        starts = [segment.start_bytes for segment in self.segments]
        self.mean = MeanGradient(memory, self.size_bytes, starts, self.views)
        self.partitions = partitions
        self.contribution_quota = BufferQuota(self.max_contributions)
        self.kept = KeptGradients(
            lambda count: memory.reserve_kept(spec.memory_key, count * self.size_bytes),
            lambda: memory.pool.acquire(self.size_bytes),
            memory.pool.release,
            self.views,
        )

    @property
    def max_contributions(self) -> int:
        """Number of contributions that the shard holds in one step."""
        return self.spec.max_contributions

    @property
    def reduced(self) -> Reduced | None:
        """The mean gradient of the step in flight. None: not computed yet."""
        return self.mean.reduced

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Splits a buffer of this shard's bytes into segments, by segment number."""
        return segment_views(buffer, self.layout, self.segments, self.start_bytes)

    def check_range(self, start_bytes: int, stop_bytes: int) -> None:
        """Raises NotFoundError if the range of a stream differs from the shard's."""
        if (start_bytes, stop_bytes) != (self.start_bytes, self.stop_bytes):
            raise NotFoundError(
                f"{self.what}: this server owns [{self.start_bytes}, {self.stop_bytes}), "
                f"got [{start_bytes}, {stop_bytes}). The unit may have been cut anew",
                unit=self.unit,
            )

    def _find_numbers(self, name: str, indices: tuple[int, ...]) -> frozenset[int]:
        count = len(self.layout.parameters)
        if any(one >= other for one, other in pairwise(indices)) or (indices and indices[-1] >= count):
            raise InvalidRequestError(
                f"{self.what}: {name} is {list(indices[:10])}, expected strictly rising numbers below {count}"
            )
        return frozenset(self.segment_of[index] for index in indices if index in self.segment_of)

    def check_rank(self, dp_rank: int) -> None:
        """Raises InvalidRequestError unless a data rank may push to this shard."""
        if not 0 <= dp_rank < self.dp:
            raise InvalidRequestError(f"dp_rank is {dp_rank}, but {self.what} has {self.dp} data ranks")

    def check_sum(self, header: shard_pb2.ReduceScatterHeader) -> None:
        """Raises unless a push of the sum of several ranks' gradients can become a contribution.

        Raises:
            InvalidRequestError: The ranks are no reduction group, or the push has what a sum cannot have.
            StepStateError: The shard has gradients of earlier steps, which belong to single ranks.
        """
        if len(self.layout.pp_ranks) > 1:
            raise InvalidRequestError(f"{self.what} belongs to several pipeline stages: each rank must push by itself")
        ranks = [summed.dp_rank for summed in header.summed]
        own = [summed.epoch for summed in header.summed if summed.dp_rank == header.dp_rank]
        if not self.order.is_group(ranks) or ranks[-1] >= self.dp or own != [header.context.epoch]:
            raise InvalidRequestError(
                f"{self.what}: summed names the ranks {ranks[:20]}; expected a reduction group, in ascending order, of "
                f"{self.dp} data ranks in groups of {self.order.groups or self.dp}, with rank {header.dp_rank} under "
                f"epoch {header.context.epoch}"
            )
        if header.part or header.copy or header.wire_dtype or header.dropped_indices:
            raise InvalidRequestError(
                f"{self.what}: a sum of several ranks is part 0 as stored, without copy and dropped_indices; got part "
                f"{header.part}, copy {header.copy}, wire_dtype {header.wire_dtype}, "
                f"{len(header.dropped_indices)} dropped_indices"
            )
        parameters = [self.layout.parameters[index] for index in header.parameter_indices]
        if small := next((parameter for parameter in parameters if parameter.item_size < 4), None):
            raise InvalidRequestError(
                f"{self.what}: a sum of several ranks has parameter {small.name!r} in {small.dtype}: each rank must "
                "push its own, because the server adds 16-bit gradients in float32 and rounds once"
            )
        if self.kept.ranks:
            raise StepStateError(
                f"{self.what} has gradients of earlier steps of ranks {sorted(self.kept.ranks)}: each rank must "
                "its own gradient"
            )

    def contributions_of(self, contributor: int, attempt: int, *, copy: bool) -> Contributions:
        """Returns where the contribution of an attempt belongs: to the copies, unless the copy was chosen already."""
        chosen = contributor in self.contributions.by_rank and self.contributions.attempt(contributor) == attempt
        return self.copies if copy and not chosen else self.contributions

    def choose(self, attempts: Mapping[int, int]) -> None:
        """Replaces contributions by copies that count instead, and drops all other copies.

        Args:
            attempts: The attempt that counts, by data rank.
        """
        for contributor in list(self.copies.by_rank):
            if self.copies.attempt(contributor) == attempts.get(self.spec.dp_rank_of(contributor)):
                self.discard_reduced()
                self.contributions.drop(contributor)
                self.contributions.add(contributor, self.copies.take(contributor))
        self.copies.clear()

    # ---- contributions ----

    async def add_part(
        self,
        header: shard_pb2.ReduceScatterHeader,
        memory: ContributionMemory,
        checksum: int | None,
        in_thread: InThread,
    ) -> None:
        """Adds the next part of a contribution, and discards the mean. Runs in ``HostedRun.exclusively``.

        Part 0 starts a contribution, from the contributor's kept gradient if there is one.

        Args:
            header: Header of the push that contains the part, checked by ``Push``.
            memory: The complete part. The contribution claims the memory of part 0.
            checksum: Checksum of the part's stream. None: the part came through shared memory.
            in_thread: Runs tensor work in a thread.
        """
        views = LazyViews(memory.buffer, self.views) if memory.views is None else memory.views
        numbers = self.numbers_of("parameter_indices", tuple(header.parameter_indices))
        dropped = self.numbers_of("dropped_indices", tuple(header.dropped_indices))
        contributor = self.layout.contributor(header.dp_rank, header.pp_rank)
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
                await uninterrupted(in_thread(lambda: first.compute_add_kept(kept)))
            first.count_part(checksum)
        else:
            contribution = contributions.by_rank[contributor]
            contribution.drop(dropped)

            async def add() -> None:
                await in_thread(lambda: contribution.compute_add(views, sorted(numbers)))
                contribution.count_part(checksum)

            await uninterrupted(add())

    def drop_older(self, dp_rank: int, attempt: int) -> None:
        """Drops a data rank's contributions and copies of older attempts, and the mean if it contains them."""
        own = self.spec.contributors_of(dp_rank)
        for contributor in own:
            self.copies.drop_older(contributor, attempt)
        dropped = [contributor for contributor in own if self.contributions.drop_older(contributor, attempt)]
        if self.counted.intersection(dropped) or self.mean.from_former:
            self.discard_reduced()

    def drop_contributions(self) -> None:
        """Drops all contributions and their mean."""
        self.discard_reduced()
        self.contributions.clear()
        self.copies.clear()

    # ---- reducing ----

    def count_only(self, dp_rank: int) -> None:
        """Sets the data rank whose contribution the next step of an asynchronous run applies."""
        counted = frozenset(self.spec.contributors_of(dp_rank))
        if counted != self.counted:
            self.discard_reduced()
            self.counted = counted

    async def reduce(self, in_thread: InThread) -> Reduced:
        """Computes the mean of the contributions. Returns the same result when repeated.

        Raises:
            NonFiniteError: The mean has NaN or infinity. The error names the parameter and the ranks.
        """
        if self.awaits_reduction:
            await self.reduce_alone(in_thread)
        assert self.reduced is not None
        if self.reduced.non_finite is not None:
            raise await in_thread(partial(self.compute_non_finite_error, self.reduced.non_finite))
        return self.reduced

    @property
    def awaits_reduction(self) -> bool:
        """True if ``reduce`` has to compute the mean."""
        return self.reduced is None or self.reduced.skipped

    def skip_reduction(self) -> None:
        """Sets a mean without gradients, for a step that is skipped.

        The contributions stay until the commit, so ``reduce`` can still be called.
        """
        if self.reduced is not None and self.reduced.skipped:
            return  # keeps what trainers staged for the step
        self.discard_reduced()
        self.mean.set_empty(skipped=True)

    @property
    def seems_complete(self) -> bool:
        """True if there is no mean yet and as many parts have arrived as in the last step."""
        if self.spec.asynchronous:
            return False
        return self.reduced is None and self.contributions.seem_complete(self.max_contributions)

    async def reduce_alone(self, in_thread: InThread) -> None:
        """Computes the mean of the contributions; see ``reductions.py``."""
        found = sorted(self._gradients().items())
        await self.mean.compute(found, self.order, self._mean_file(found), partial(self._compute, in_thread))

    def begin_small_reduction(self) -> SmallReduction | None:
        """Returns how to compute the mean together with those of other shards; see ``MeanGradient.begin_small``."""
        found = sorted(self._gradients().items())
        return self.mean.begin_small(found, self._mean_file(found))

    def _mean_file(self, found: Sequence[tuple[int, Contribution]]) -> torch.Tensor | None:
        """Returns where the mean is written. None: the shard has no files, or the only gradient is the mean."""
        return self.acquire_mean_file() if found and self.max_contributions > 1 else None

    def acquire_mean_file(self) -> torch.Tensor | None:
        """Returns the file for the next mean. None: the shard has no files, or shared memory is full."""
        return None

    def _gradients(self) -> Mapping[int, Contribution]:
        """The gradient of each contributor of the step: its contribution, or its kept gradient if it pushed nothing.

        Sums of several ranks are at their lowest rank.
        """
        if self.spec.asynchronous:
            return {rank: found for rank, found in self.contributions.by_rank.items() if rank in self.counted}
        if not self.kept.ranks:
            return self.contributions.by_lowest_rank
        kept = {rank: gradient for rank in self.kept.ranks if (gradient := self.kept.find(rank)) is not None}
        return kept | self.contributions.by_lowest_rank

    async def _compute(self, in_thread: InThread, work: Callable[[], Result]) -> Result:
        return work() if self.size_bytes <= MAX_BYTES else await in_thread(work)

    def compute_non_finite_error(self, number: int) -> NonFiniteError:
        """Returns an error that names the ranks whose gradient of a segment is not finite."""
        name = self.layout.parameters[self.segments[number].parameter_index].name
        found = [
            str(self.spec.dp_rank_of(each))
            for contributor, contribution in sorted(self._gradients().items())
            if (gradient := contribution.gradient(number)) is not None and not bool(torch.isfinite(gradient).all())
            for each in contribution.summed or (contributor,)
        ]
        ranks = list(dict.fromkeys(found))
        whose = f"of logical dp rank {', '.join(ranks)}" if ranks else "summed over all ranks (overflow)"
        return NonFiniteError(
            f"the gradient of parameter {name!r} ({self.what}) {whose} has NaN or infinity; nothing was updated: to "
            "skip the step, call optimizer.zero_grad() on every trainer, then optimizer.step()",
            unit=self.unit,
            parameter=name,
            dp_ranks=",".join(ranks),
        )

    def discard_reduced(self) -> None:
        """Discards the mean gradient, and what trainers staged from it."""
        self.mean.discard()
        self.partitions.invalidate()

    def kept_numbers(self, groups: Sequence[int] | None) -> frozenset[int]:
        """Numbers of the segments whose gradient is kept for a later step."""
        if groups is None or KEPT_GROUP not in groups:
            return frozenset()
        at = enumerate(self.segments)
        return frozenset(number for number, segment in at if groups[segment.parameter_index] == KEPT_GROUP)


@cache
def _all_contributors(count: int) -> frozenset[int]:
    """Returns the numbers of all contributors. Shards share the set: it may be much larger than their request."""
    return frozenset(range(count))
