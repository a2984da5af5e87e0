"""One shard of one unit: its values, the gradient of the step in flight, and how the next version is made of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from shardwell_server import hyperparameters
from shardwell_server.shard.arithmetic.reduction import Reduced, reduce_shard
from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_server.shard.concurrency import OpenStreams
from shardwell_server.shard.memory.budget import Cover, Memory
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_server.shard.state import segments
from shardwell_server.shard.state.contributions import Contribution, Contributions
from shardwell_server.shard.state.encoded_versions import EncodedVersions
from shardwell_server.shard.state.kept_gradients import KeptGradients
from shardwell_server.shard.state.partitions import Partitions
from shardwell_server.shard.state.reader_copies import ReaderCopies
from shardwell_server.shard.state.values import Values
from shardwell_server.shard.threads import InThread
from shardwell_wire.errors import (
    CapacityError,
    InvalidRequestError,
    NonFiniteError,
    NotFoundError,
    StepStateError,
)
from shardwell_wire.layout import UnitLayout
from shardwell_wire.optimizers import KEPT_GROUP
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.stream_plan import RangePlans
from shardwell_wire.v1 import common_pb2

Result = TypeVar("Result")

_SMALL_BYTES = 64 << 10


class UnitShard:
    """One shard. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        run: The run.
        layout: Of the unit.
        index: Of the unit in the run.
        start_bytes: Half-open range of the flat vector.
        stop_bytes: Its end.
        dp: Logical data ranks.
        memory: Where buffers come from.
        shared: Where parameters lie, if trainers shall be able to map them.
        placement: Number of the placement that the shard belongs to.
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
        self.run, self.layout, self.index, self.dp = run, layout, index, dp
        self.placement = placement
        self.start_bytes, self.stop_bytes = start_bytes, stop_bytes
        self.plans = RangePlans(layout, start_bytes, stop_bytes)
        self.segments = self.plans.segments(None)
        self.segment_of = {segment.parameter_index: number for number, segment in enumerate(self.segments)}
        self.values = Values(self.what, self.unit, memory, shared)
        self.streams = OpenStreams()
        """Of initial values and, by rank, of contributions."""
        self.contributions = Contributions()
        self.reduced: Reduced | None = None
        self.partitions = Partitions(self.what, layout.size_bytes, start_bytes, stop_bytes, dp, memory, shared)
        self.optimizer: ShardOptimizer | None = None
        self.optimizer_bytes = 0
        self.initial_cover, self.contribution_cover = Cover(1), Cover(dp)
        self.copies = ReaderCopies(self.what, self.unit, memory)
        self.encoded = EncodedVersions(self.plans, start_bytes, memory, self.copies)
        self.kept = KeptGradients(
            lambda count: memory.reserve_kept(str(self.run), self.unit, count * self.size_bytes),
            lambda: memory.pool.take(self.size_bytes),
            memory.pool.give,
            self.views,
        )
        self._memory = memory

    @property
    def version(self) -> int | None:
        """The newest that can be read."""
        return self.values.version

    @property
    def unit(self) -> str:
        return self.layout.unit

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def what(self) -> str:
        """Names the shard in errors."""
        return f"unit {self.unit!r} of run {self.run.name!r}"

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parts of parameters in a buffer of this shard's bytes, by segment number."""
        return segments.views(buffer, self.layout, self.segments, self.start_bytes)

    def check_range(self, start_bytes: int, stop_bytes: int) -> None:
        """Raises InvalidRequestError if a stream is of another range than the shard's."""
        if (start_bytes, stop_bytes) != (self.start_bytes, self.stop_bytes):
            raise InvalidRequestError(
                f"{self.what}: this server owns [{self.start_bytes}, {self.stop_bytes}), "
                f"got [{start_bytes}, {stop_bytes})"
            )

    def make_room(self) -> None:
        """Gives back what can be done without."""
        self.encoded.forget()
        self.copies.make_room()
        self.values.make_room()
        self.partitions.make_room()

    def drop(self, why: NotFoundError) -> None:
        """Forgets everything; those who wait, read or send are told why."""
        self.streams.end_all(why)
        self.drop_contributions()
        self.kept.drop()
        self.partitions.close()
        self.encoded.forget()
        self.copies.drop(why)
        self.values.drop(why)

    def check_rank(self, dp_rank: int) -> None:
        """Raises InvalidRequestError unless a data rank may push to this shard."""
        if not 0 <= dp_rank < self.dp:
            raise InvalidRequestError(f"dp_rank {dp_rank}: {self.what} has {self.dp} data ranks")

    # ---- reducing ----

    async def reduce(self, in_thread: InThread) -> Reduced:
        """Adds the contributions in rank order and takes the mean, unless that is done.

        Raises:
            NonFiniteError: It has NaN or infinity; names the parameter and the ranks.
        """
        if self.reduced is None or self.reduced.skipped:
            self.reduced = await self._reduce(in_thread)
        if self.reduced.non_finite is not None:
            raise await in_thread(partial(self.compute_blame, self.reduced.non_finite))
        return self.reduced

    def reduce_to_nothing(self) -> None:
        """Leaves the step without a gradient, unless that is done.

        Contributions stay until the commit: ``reduce`` looks at them again.
        """
        if self.reduced is not None and self.reduced.skipped:
            return  # what was staged for the step counts on
        self.forget_reduced()
        self.reduced = Reduced([None] * len(self.segments), None, [], skipped=True)

    async def reduce_ahead(self, in_thread: InThread) -> None:
        """Does the work of ``reduce`` if everything seems to be here, before it is asked for.

        Contributions stay as they are: if another part comes, or one is withdrawn, it is done again.
        """
        if self.seems_complete:
            self.reduced = await self._reduce(in_thread)

    @property
    def seems_complete(self) -> bool:
        """Whether the step's gradient could be reduced, as far as one can tell from the last step, and is not yet."""
        return self.reduced is None and self.contributions.seem_complete(self.dp)

    async def _reduce(self, in_thread: InThread) -> Reduced:
        ranks = [contribution for _, contribution in sorted(self._gradients().items())]
        terms = [
            [gradient for rank in ranks if (gradient := rank.gradient(number)) is not None]
            for number in range(len(self.segments))
        ]
        buffer = self._memory.pool.take(self.size_bytes) if self.dp > 1 and ranks else None
        try:
            outs = None if buffer is None else self.views(buffer)
            starts = [segment.start_bytes for segment in self.segments]
            work = partial(reduce_shard, terms, self.dp, outs, starts, buffer=buffer)
            return await self._work(in_thread, work)
        except BaseException:
            if buffer is not None:
                self._memory.pool.give(buffer)
            raise

    def _gradients(self) -> Mapping[int, Contribution]:
        """The gradient of each rank that has one: what it pushed in the step, or what was kept if it pushed nothing."""
        if not self.kept.ranks:
            return self.contributions.by_rank
        kept = {rank: gradient for rank in self.kept.ranks if (gradient := self.kept.of(rank)) is not None}
        return kept | self.contributions.by_rank

    async def _work(self, in_thread: InThread, work: Callable[[], Result]) -> Result:
        """Does tensor work on the whole shard; a small one's takes less than waking a thread."""
        return work() if self.size_bytes <= _SMALL_BYTES else await in_thread(work)

    def compute_blame(self, number: int) -> NonFiniteError:
        """Says whose gradient of a segment is not finite."""
        name = self.layout.parameters[self.segments[number].parameter_index].name
        guilty = [
            str(rank)
            for rank, contribution in sorted(self._gradients().items())
            if (gradient := contribution.gradient(number)) is not None and not bool(torch.isfinite(gradient).all())
        ]
        whose = f"of logical dp rank {', '.join(guilty)}" if guilty else "summed over all ranks (overflow)"
        return NonFiniteError(
            f"the gradient of parameter {name!r} ({self.what}) {whose} has NaN or infinity; nothing was updated: "
            "optimizer.zero_grad() on every trainer and optimizer.step() skip the step",
            unit=self.unit,
            parameter=name,
            dp_ranks=",".join(guilty),
        )

    def forget_reduced(self) -> None:
        """The step's mean gradient is void, or used up."""
        if self.reduced is not None and self.reduced.buffer is not None:
            self._memory.pool.give(self.reduced.buffer)
        self.reduced = None
        self.partitions.void()

    def drop_older(self, dp_rank: int, attempt: int) -> None:
        """Drops a rank's contribution, and with it the mean, if it is of an older attempt."""
        if self.contributions.drop_older(dp_rank, attempt):
            self.forget_reduced()

    def drop_contributions(self) -> None:
        """Gives back all contributions and their mean."""
        self.forget_reduced()
        self.contributions.clear()

    # ---- updating ----

    def check_update(self, step: int, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None) -> None:
        """Raises what keeps ``update`` from making version ``step + 1``.

        Args:
            step: The step.
            optimizer: Valid by itself.
            groups: The group of each parameter of the unit; None: none is optimised.

        Raises:
            StepStateError: The step was not reduced here, or is not the next.
            InvalidRequestError: The optimizer does not fit the unit.
            ConflictError: The optimizer's state is another algorithm's.
        """
        self.values.check_whole()
        if self.version != step or self.reduced is None:
            raise StepStateError(
                f"{self.what} is at version {self.version} and {'has a' if self.reduced else 'has no'} reduced "
                f"gradient: it cannot be updated for step {step}",
                unit=self.unit,
            )
        if runs_on_trainers(optimizer.algorithm):
            self.check_partitions()
        if groups is not None and len(groups) != len(self.layout.parameters):
            raise InvalidRequestError(
                f"{self.what} has {len(self.layout.parameters)} parameters, but the optimizer names groups "
                f"for {len(groups)}"
            )
        if groups is not None:
            hyperparameters.check_fit(optimizer, groups, self.layout, (self.start_bytes, self.stop_bytes))

    def check_partitions(self) -> None:
        """Raises IncompleteStepError unless the partitions of all data ranks are staged."""
        self.partitions.check_staged()

    async def prepare_update(
        self, in_thread: InThread, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, key: bytes
    ) -> None:
        """Allocates the memory that ``update`` still lacks. Readers see no change.

        Args:
            in_thread: Where it is done.
            optimizer: Checked by ``check_update``.
            groups: The group of each parameter of the unit; None: none is optimised.
            key: ``hyperparameters.allocation_key`` of the optimizer.

        Raises:
            CapacityError: It does not fit the budget, or the system has no memory for it.
        """
        if (numbers := self._kept_numbers(groups)) and self.contributions.by_rank:
            self.kept.make_room(self.contributions.by_rank, numbers)
        if runs_on_trainers(optimizer.algorithm):
            return  # what trainers staged is here already
        assert self.reduced is not None and self.values.home is not None
        present, chosen = [gradient is not None for gradient in self.reduced.gradients], self._chosen_groups(groups)
        if self.optimizer is None:
            parts = zip(self.views(self.values.home.buffer), self.segments, strict=True)
            self.optimizer = ShardOptimizer([segments.shaped(part, self.layout, segment) for part, segment in parts])
        applied = self.optimizer
        if applied.is_prepared(present, chosen, key):
            return
        state_bytes = 0
        try:
            state_bytes, workspace_bytes = applied.needs(present, optimizer, chosen)
            self._memory.reserve_optimizer(
                str(self.run), self.unit, self.partitions.state_bytes + state_bytes, workspace_bytes
            )
            await self._work(in_thread, lambda: applied.prepare(present, optimizer, chosen, key))
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise CapacityError(
                f"the system gave no memory for the optimizer's state of {self.what}, {state_bytes or 'some'} bytes, "
                "which --memory-budget has room for. The step is not committed: lower the budget to what this process "
                "may use, add shard servers, or use an optimizer with less state",
                unit=self.unit,
                needed_bytes=state_bytes,
            ) from error
        finally:
            self._note_optimizer()

    async def update(
        self,
        in_thread: InThread,
        step: int,
        optimizer: common_pb2.OptimizerStep,
        groups: Sequence[int] | None,
        clip_coefficient: float,
        key: bytes,
    ) -> None:
        """Makes version ``step + 1`` of version ``step`` and the reduced gradient.

        If it raises, the same call finishes the update; until then nobody can read values of neither version.
        """
        await self.prepare_update(in_thread, optimizer, groups, key)
        self.encoded.forget()
        self.copies.supersede()
        async with self.values.becoming(step + 1, in_thread):
            await self._work(in_thread, lambda: self.compute_update(optimizer, groups, clip_coefficient, key))
        if runs_on_trainers(optimizer.algorithm):
            self.partitions.settle()
        self.forget_reduced()
        self.contributions.end_step()
        self._note_optimizer()

    def compute_update(
        self, optimizer: common_pb2.OptimizerStep, groups: Sequence[int] | None, clip_coefficient: float, key: bytes
    ) -> None:
        """Applies the optimizer in place, or what trainers staged."""
        assert self.reduced is not None and self.values.home is not None
        numbers = self._kept_numbers(groups)
        if numbers or self.kept.ranks:
            # Before anybody can read the next version: then trainers write to their gradient buffers again. And
            # before the
            # optimizer: this can be repeated, a step of the optimizer that has succeeded can not.
            self.kept.compute_keep(self.contributions.by_rank, numbers)
        if runs_on_trainers(optimizer.algorithm):
            self.partitions.compute_apply(self.values.home.buffer)
        else:
            assert self.optimizer is not None
            self.optimizer.step(self.reduced.gradients, optimizer, self._chosen_groups(groups), clip_coefficient, key)

    def check_averaged(self) -> None:
        """Raises StepStateError if there are no averages to read."""
        if self.optimizer is None or not self.optimizer.averages.has_started:
            raise StepStateError(
                f"{self.what} has no moving average: set optimizer.ema_decay before a step", unit=self.unit
            )

    def compute_averages(self, out: torch.Tensor) -> None:
        """Writes the shard with averages in the place of values. [size_bytes]"""
        assert self.optimizer is not None and self.values.home is not None
        out.copy_(self.values.home.buffer)
        for number, view in enumerate(self.views(out)):
            average = self.optimizer.averages[number]
            if average is not None:
                view.copy_(average.reshape(-1))

    def _chosen_groups(self, groups: Sequence[int] | None) -> list[int]:
        """The group of each segment's parameter; -1: not optimised."""
        return [-1 if groups is None else groups[segment.parameter_index] for segment in self.segments]

    def _kept_numbers(self, groups: Sequence[int] | None) -> frozenset[int]:
        """The segments whose gradient is kept for a later step."""
        if groups is None or KEPT_GROUP not in groups:
            return frozenset()
        at = enumerate(self.segments)
        return frozenset(number for number, segment in at if groups[segment.parameter_index] == KEPT_GROUP)

    def _note_optimizer(self) -> None:
        self.optimizer_bytes = self.partitions.state_bytes + (
            0 if self.optimizer is None else self.optimizer.size_bytes
        )
        self._memory.note_optimizer(str(self.run), self.unit, self.optimizer_bytes)


def first_non_finite(views: Sequence[torch.Tensor]) -> int | None:
    """The number of the first tensor that has NaN or infinity."""
    return next((number for number, view in enumerate(views) if not bool(torch.isfinite(view).all())), None)
