"""One shard of one unit: its values, the gradient of the step in flight, and how an update makes the next version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import TypeVar

import torch

from shardwell_server import optimizer_checks
from shardwell_server.shard.arithmetic.optimizer_content import OptimizerContent
from shardwell_server.shard.arithmetic.reduction import Reduced
from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_server.shard.arithmetic.small_reductions import MAX_BYTES, SmallReduction
from shardwell_server.shard.concurrency import InThread, OpenStreams, uninterrupted
from shardwell_server.shard.memory.budget import BufferQuota, Grant, IncomingBuffer, Memory
from shardwell_server.shard.memory.shared_memory import ShardFile, SharedMemory
from shardwell_server.shard.state.applied_optimizer import AppliedOptimizer
from shardwell_server.shard.state.contributions import Contribution, ContributionMemory, Contributions
from shardwell_server.shard.state.encoded_versions import EncodedVersions
from shardwell_server.shard.state.joint_undo import ChangedRange
from shardwell_server.shard.state.kept_gradients import KeptGradients
from shardwell_server.shard.state.mean_gradient import MeanGradient
from shardwell_server.shard.state.partitions import Partitions
from shardwell_server.shard.state.replication import Backups, Replica
from shardwell_server.shard.state.shard_files import ShardFiles
from shardwell_server.shard.state.shard_record import PreparedRecord
from shardwell_server.shard.state.shard_spec import Role, ShardSpec, segment_views, shaped
from shardwell_server.shard.state.snapshots import Snapshots
from shardwell_server.shard.state.values import LiveBuffer, Values
from shardwell_wire.errors import (
    InvalidRequestError,
    NonFiniteError,
    ShardwellError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.optimizers import KEPT_GROUP
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.stream_plan import RangePlans
from shardwell_wire.sum_order import SumOrder
from shardwell_wire.v1 import common_pb2, shard_pb2

Result = TypeVar("Result")

_INDICES_KEPT = 8
"""Most sets of parameters of a shard whose segments are kept: pushes name the same ones in every step."""


class UnitShard:
    """One shard of a unit of parameters. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        spec: Run, unit and range of the shard.
        memory: The server's memory budget.
        shared: Shared memory for the parameters, if trainers on this host may map them.
        files: Files from which another process of the server can take up the shard. None: nothing outlives the process.
    """

    def __init__(
        self,
        spec: ShardSpec,
        memory: Memory,
        shared: SharedMemory | None = None,
        role: Role = Role.PRIMARY,
        files: ShardFiles | None = None,
    ) -> None:
        self.spec, self.role = spec, role
        self.unchanging = asyncio.Lock()
        """Held while the committed state is updated, and by readers of all of it outside ``HostedRun.exclusively``."""
        self.backups = Backups()
        """Backups on other servers, if this shard is a primary."""
        self.replica: Replica | None = None
        """What this shard has of the step in flight, if it is a backup."""
        self.updated_by_trainers = False
        """True if trainers ran the optimizer of the last update."""
        self.out_of_sync = ""
        """Why this shard, a backup, can never become a primary. Empty: it can."""
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
        """Returns the numbers of the segments of parameters, given by layout index. Raises InvalidRequestError unless
        the indices exist and rise."""
        self.values = Values(self.what, self.unit, memory, shared, spec.held_versions)
        self.counted = _all_contributors(spec.max_contributions)
        """Contributors of the next step. In an asynchronous run those of one data rank, named by PrepareStep."""
        self.streams = OpenStreams()
        """Streams being received: initial values, contributions by rank, and optimizer partitions."""
        self.contributions = Contributions()
        self.copies = Contributions()
        """Contributions of copies of late work items, apart until ``choose`` decides which trainer's counts."""
        starts = [segment.start_bytes for segment in self.segments]
        self.mean = MeanGradient(memory, self.size_bytes, starts, self.views)
        self.partitions = Partitions(spec, memory, shared)
        self.applied = AppliedOptimizer(spec, memory, self.partitions, files, self._parameters)
        self.initial_quota, self.contribution_quota = BufferQuota(1), BufferQuota(self.max_contributions)
        self.reader_copies = Snapshots(self.what, self.unit, memory)
        """Averages and replaced encodings that still have readers. ``Values`` has the snapshots of older versions."""
        self.encoded = EncodedVersions(self.plans, spec.start_bytes, memory, self.reader_copies)
        self.kept = KeptGradients(
            lambda count: memory.reserve_kept(spec.memory_key, count * self.size_bytes),
            lambda: memory.pool.acquire(self.size_bytes),
            memory.pool.release,
            self.views,
        )
        self._memory, self._files = memory, files

    @property
    def max_contributions(self) -> int:
        """Number of contributions that the shard holds in one step."""
        return self.spec.max_contributions

    @property
    def version(self) -> int | None:
        """The newest published version. None before the initial values are published."""
        return self.values.version

    @property
    def optimizer(self) -> ShardOptimizer | None:
        """The optimizer with its state. None before the first update is prepared."""
        return self.applied.optimizer

    @property
    def reduced(self) -> Reduced | None:
        """The mean gradient of the step in flight. None: not computed yet."""
        return self.mean.reduced

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Splits a buffer of this shard's bytes into segments, by segment number."""
        return segment_views(buffer, self.layout, self.segments, self.start_bytes)

    def check_range(self, start_bytes: int, stop_bytes: int) -> None:
        """Raises InvalidRequestError if the range of a stream differs from the shard's."""
        if (start_bytes, stop_bytes) != (self.start_bytes, self.stop_bytes):
            raise InvalidRequestError(
                f"{self.what}: this server owns [{self.start_bytes}, {self.stop_bytes}), "
                f"got [{start_bytes}, {stop_bytes})"
            )

    def _find_numbers(self, indices: tuple[int, ...]) -> frozenset[int]:
        count = len(self.layout.parameters)
        if any(one >= other for one, other in pairwise(indices)) or (indices and indices[-1] >= count):
            raise InvalidRequestError(
                f"{self.what}: parameters are named by the indices {list(indices[:10])}, expected strictly rising "
                f"numbers below {count}"
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

    def evict(self) -> None:
        """Releases everything that can be recreated or reread."""
        self.encoded.discard()
        self.reader_copies.evict()
        self.values.evict()
        self.partitions.evict()

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

    def drop(self, why: ShardwellError) -> None:
        """Releases everything. Waiting callers, readers and senders get the error."""
        self.streams.end_all(why)
        self.drop_contributions()
        self.kept.drop()
        self.partitions.close()
        self.encoded.discard()
        self.reader_copies.drop(why)
        if self._files is not None:
            self._files.close()
        self.values.drop(why)

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
        views = self.views(memory.buffer) if memory.views is None else memory.views
        numbers = self.numbers_of(tuple(header.parameter_indices))
        dropped = self.numbers_of(tuple(header.dropped_indices))
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
        if self._files is None or self.max_contributions == 1 or not found:
            return None
        return self._files.acquire_mean(self)

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

    # ---- updating ----

    def check_update(self, step: int, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None) -> None:
        """Raises if ``update`` cannot make version ``step + 1``.

        Args:
            step: The step.
            optimizer: The step's optimizer, valid by itself.
            groups: The group of each parameter of the unit. None: no parameter is optimised.

        Raises:
            StepStateError: The step is not reduced, or is not the next step.
            InvalidRequestError: The optimizer does not fit the unit.
            ConflictError: The optimizer's state belongs to another algorithm.
        """
        self.values.check_not_dropped()
        if self.version != step or self.reduced is None:
            raise StepStateError(
                f"{self.what} cannot be updated for step {step}: it is at version {self.version} and has "
                f"{'a' if self.reduced else 'no'} reduced gradient",
                unit=self.unit,
            )
        if runs_on_trainers(optimizer.algorithm):
            self.check_partitions()
        if groups is not None and len(groups) != len(self.layout.parameters):
            raise InvalidRequestError(
                f"{self.what} has {len(self.layout.parameters)} parameters, but the optimizer names groups "
                f"for {len(groups)}"
            )
        if self.kept_numbers(groups) and self.contributions.has_sums:
            raise InvalidRequestError(
                f"{self.what} has sums of several ranks' gradients, which cannot be kept for a later step: several "
                "optimizers in turn need gradient_reduction='direct'"
            )
        if groups is not None:
            optimizer_checks.check_fit(optimizer, groups, self.layout, (self.start_bytes, self.stop_bytes))

    def check_partitions(self) -> None:
        """Raises IncompleteStepError unless the partitions of all data ranks are staged."""
        self.partitions.check_staged()

    async def prepare_update(
        self, in_thread: InThread, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, key: bytes
    ) -> None:
        """Allocates the memory that ``update`` will need. Readers see no change.

        Args:
            in_thread: Runs tensor work in a thread.
            optimizer: The step's optimizer, checked by ``check_update``.
            groups: The group of each parameter of the unit. None: no parameter is optimised.
            key: ``optimizer_checks.allocation_key`` of the optimizer.

        Raises:
            CapacityError: The memory does not fit the budget, or the operating system has none.
        """
        if (numbers := self.kept_numbers(groups)) and self.contributions.by_rank:
            self.kept.reserve(self.contributions.by_rank, numbers)
        if runs_on_trainers(optimizer.algorithm):
            return  # staged values have their memory already
        assert self.reduced is not None
        present, chosen = [gradient is not None for gradient in self.reduced.gradients], self._chosen_groups(groups)
        work = partial(self._compute, in_thread)
        if await self.applied.prepare(present, optimizer, chosen, key, work) and self._files is not None:
            self._files.save(self)

    def _parameters(self) -> list[torch.Tensor]:
        """Returns the parameters in their shapes, by segment number."""
        assert self.values.live is not None
        views = zip(self.views(self.values.live.buffer), self.segments, strict=True)
        return [shaped(part, self.layout, segment) for part, segment in views]

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
        """Makes version ``step + 1`` from version ``step`` and the mean gradient.

        After an error, the same call finishes the update. Until then, neither version can be read. If ``hold`` is True,
        version ``step`` stays readable, because a work item reads it.
        """
        await self.prepare_update(in_thread, optimizer, groups, key)
        self.encoded.supersede()
        self.reader_copies.supersede()
        changes = self.changes_values(optimizer, groups)
        async with self.values.becoming(step + 1, in_thread, changes=changes, hold=hold):
            await self._compute(in_thread, lambda: self.compute_update(optimizer, groups, clip_coefficient, key))
        if runs_on_trainers(optimizer.algorithm):
            self.partitions.settle()
        self._end_step()
        self.updated_by_trainers = runs_on_trainers(optimizer.algorithm)
        self.applied.note_size()

    def _end_step(self) -> None:
        self.discard_reduced()
        self.contributions.end_step(self.counted)
        self.replica = None

    # ---- updating together with other shards ----

    def joinable(self, groups: Sequence[int] | None, key: bytes) -> ShardOptimizer | None:
        """Returns the optimizer if ``JointUpdates`` can make the next version: it changes nothing but small tensors.

        Args:
            groups: The group of each parameter of the unit. None: no parameter is optimised.
            key: ``optimizer_checks.allocation_key`` of the optimizer.
        """
        optimizer = self.optimizer
        if optimizer is None or self.reduced is None or self.size_bytes > MAX_BYTES or not self.values.is_unread:
            return None
        if self.unchanging.locked() or self.kept.ranks or self.kept_numbers(groups):
            return None
        present = [gradient is not None for gradient in self.reduced.gradients]
        if not optimizer.is_prepared(present, self._chosen_groups(groups), key) or optimizer.joint_parts is None:
            return None
        return optimizer if self._files is None or self._files.can_save_update(self) else None

    def changed_ranges(self) -> Iterator[ChangedRange]:
        """Yields what a joint update changes."""
        assert self.optimizer is not None and self.optimizer.joint_parts is not None
        file, files = self.values_file, self._files
        for part in self.optimizer.joint_parts:
            yield ChangedRange.of(part.values, *(() if file is None else (file.name, file.offset_of(part.values))))
        for tensor in self.optimizer.changed_state():
            yield ChangedRange.of(tensor) if files is None else files.range_of(tensor)
        if file is not None:
            address, size_bytes, offset = file.step_word_range
            yield ChangedRange(address, size_bytes, file.name, offset)

    def begin_joint_update(self, version: int) -> None:
        """Begins to change the values in place: neither this nor the next version can be read."""
        self.encoded.supersede()
        self.reader_copies.supersede()
        self.values.begin_unread(version)

    def save_joint_update(self, version: int) -> None:
        """Describes the updated state, for the next process."""
        if self._files is not None:
            self._files.save_update(self, version)

    def end_joint_update(self, version: int, *, changes: bool) -> None:
        """Publishes the next version."""
        self.values.end_in_place(version, changes=changes)
        self._end_step()
        self.updated_by_trainers = False

    def changes_values(self, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None) -> bool:
        """True if the update of the reduced step may change a value of the shard."""
        if runs_on_trainers(optimizer.algorithm):
            return True
        assert self.reduced is not None
        chosen = zip(self.reduced.gradients, self._chosen_groups(groups), strict=True)
        return any(gradient is not None and group >= 0 for gradient, group in chosen)

    def compute_update(
        self, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, clip_coefficient: float, key: bytes
    ) -> None:
        """Applies the optimizer, or the values that trainers staged, in place."""
        assert self.reduced is not None and self.values.live is not None and self.version is not None
        numbers = self.kept_numbers(groups)
        files = self._files
        if numbers or self.kept.ranks:
            # Gradients are kept before the next version becomes readable, because trainers then overwrite their
            # gradient buffers. They are kept before the optimizer runs, because keeping is idempotent and an optimizer
            # step is not.
            self.kept.compute_keep(self.contributions.by_rank, numbers)
        if runs_on_trainers(optimizer.algorithm):
            if files is not None:
                files.remove_record()
            self.partitions.compute_apply(self.values.live.buffer)
        else:
            assert self.optimizer is not None
            progress = None if files is None else files.progress(self)
            chosen = self._chosen_groups(groups)
            self.optimizer.step(self.reduced.gradients, optimizer, chosen, clip_coefficient, key, progress)
        if files is not None:
            files.save(self, self.version + 1)

    # ---- files that outlive the process ----

    @property
    def is_described(self) -> bool:
        """False if the shard has state that its record cannot describe."""
        return self.role is Role.PRIMARY and not (self.kept.ranks or self.partitions.states)

    @property
    def recorded_segments(self) -> list[int] | None:
        """Numbers of the segments that the next update has a gradient for. None: the gradient is not in its file."""
        if self.reduced is None:
            return None
        present = self.mean.present
        return present if self.mean.in_file or not present else None

    def record(self) -> None:
        """Describes the shard's state, from which another process of the server can then continue."""
        if self._files is not None:
            self._files.save(self)

    async def record_prepared(self, in_thread: InThread) -> None:
        """As ``record``, once the gradients of a step are reduced. Repeated calls have no effect."""
        if self._files is None or self.mean.recorded:
            return
        if self.recorded_segments is None and (file := self._files.acquire_mean(self)) is not None:
            await self._write_mean(in_thread, file)
        self._files.save(self)
        self.mean.recorded = True

    @property
    def mean_path(self) -> str:
        """Path of the shared file with the mean gradient, laid out like the shard. Empty: it is in ordinary memory."""
        mean = None if self._files is None else self._files.mean
        return mean.path if mean is not None and self.mean.in_file else ""

    async def share_mean(self, in_thread: InThread) -> None:
        """Puts the mean gradient into a shared file, so that a backup on this host reads it there. Runs in
        ``HostedRun.exclusively``. Does nothing without a mean gradient, or if shared memory is full."""
        if self.reduced is None or self._files is None or self.recorded_segments is not None:
            return
        if (file := self._files.acquire_mean(self)) is not None:
            await uninterrupted(self._write_mean(in_thread, file))

    async def _write_mean(self, in_thread: InThread, file: torch.Tensor) -> None:
        await self._compute(in_thread, partial(self.compute_write_mean, file))
        self.mean.in_file = True

    def compute_write_mean(self, file: torch.Tensor) -> None:
        """Copies the gradients to their file. uint8. [size_bytes]"""
        self.mean.compute_write(file)

    @property
    def values_file(self) -> ShardFile | None:
        """The file of the values. None: they are in ordinary memory."""
        return None if self.values.live is None else self.values.live.file

    @property
    def shared_files(self) -> list[str]:
        """Names of the files from which another process of the server can take up the shard."""
        values = [] if self.values_file is None else [self.values_file.name]
        return values if self._files is None else [*values, *self._files.names]

    def take_up_values(self, file: ShardFile, version: int, grant: Grant) -> None:
        """Continues with the values of a former process; see ``Values.take_up``.

        Args:
            file: The values.
            version: Their version.
            grant: The memory's grant in the server's budget.
        """
        self.values.take_up(LiveBuffer.from_file(file, grant), version)

    def take_up(self, content: OptimizerContent, mean: torch.Tensor | None, prepared: PreparedRecord | None) -> None:
        """Continues with the state of a former process, after its values.

        Args:
            content: The optimizer's state.
            mean: The mean gradient's file. uint8. [size_bytes]
            prepared: The prepared step. None: there was none.
        """
        self.applied.take_up(content)
        if prepared is not None:
            self._take_up_gradients(mean, prepared)
            self.mean.in_file = self.mean.recorded = self.mean.from_former = True

    def _take_up_gradients(self, mean: torch.Tensor | None, prepared: PreparedRecord) -> None:
        self.mean.take_up(mean, prepared.present, skipped=prepared.skipped)

    def compute_averages(self, out: torch.Tensor) -> None:
        """Writes the shard's bytes with averages in place of values. [size_bytes]"""
        assert self.values.live is not None
        out.copy_(self.values.live.buffer)
        self.applied.compute_averages(self.views(out))

    def _chosen_groups(self, groups: Sequence[int] | None) -> list[int]:
        """The group of each segment's parameter. -1: not optimised."""
        return [-1 if groups is None else groups[segment.parameter_index] for segment in self.segments]

    def kept_numbers(self, groups: Sequence[int] | None) -> frozenset[int]:
        """Numbers of the segments whose gradient is kept for a later step."""
        if groups is None or KEPT_GROUP not in groups:
            return frozenset()
        at = enumerate(self.segments)
        return frozenset(number for number, segment in at if groups[segment.parameter_index] == KEPT_GROUP)

    # ---- roles ----

    def check_primary(self) -> None:
        """Raises UnavailableError if this shard is a backup or has moved, so that trainers must not use it."""
        if self.role is not Role.PRIMARY:
            has = "has a backup of" if self.role is Role.BACKUP else "is no longer the primary of"
            raise UnavailableError(
                f"this server {has} {self.what}: ask the coordinator which server has the primary, and try again there",
                unit=self.unit,
            )

    def retire(self) -> None:
        """Rejects all later requests of trainers and all later steps: another server owns the shard."""
        self.role = Role.RETIRED

    def promote(self) -> None:
        """Makes a backup the primary. The prepared step stays, if there is one: its update may be due."""
        self.role = Role.PRIMARY
        self.record()

    def begin_replica(self, replica: Replica) -> None:
        """Starts to collect what the primary sends under a new generation. Drops what was sent earlier."""
        self.drop_replica()
        self.replica = replica

    def drop_replica(self) -> None:
        """Drops what a backup has of the step in flight."""
        self.drop_contributions()
        self.replica = None

    def has_prepared(self, step: int) -> bool:
        """True if this shard received the prepared step as a backup, and can apply it."""
        return self.replica is not None and self.replica.step == step and self.replica.confirmed

    def mark_out_of_sync(self, reason: str) -> None:
        """Records that this backup has missed a step. Its memory stays reserved until it is released or built anew."""
        self.out_of_sync = self.out_of_sync or reason
        self.drop_replica()

    # ---- importing ----

    def allocate_values(self) -> None:
        """Allocates the memory of the first version of a shard whose state is imported. Its padding is zero.

        Raises:
            CapacityError: The operating system has no memory.
        """
        grant = self._memory.grant(self.size_bytes, self.initial_quota, f"imported values of {self.what}")
        received = IncomingBuffer(grant.acquire_buffer(self.size_bytes), grant)
        received.buffer.zero_()
        self.values.accept_initial(self.values.initial_epoch, received)


@cache
def _all_contributors(count: int) -> frozenset[int]:
    """Returns the numbers of all contributors. Shards share the set: it may be much larger than their request."""
    return frozenset(range(count))


def first_non_finite(views: Sequence[torch.Tensor]) -> int | None:
    """Returns the number of the first tensor that has NaN or infinity. None: all are finite."""
    return next((number for number, view in enumerate(views) if not bool(torch.isfinite(view).all())), None)
