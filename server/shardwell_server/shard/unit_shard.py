"""One shard of one unit: its parameters and their version, and the step in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwell_server.shard import segments
from shardwell_server.shard.contributions import Contributions
from shardwell_server.shard.memory import BufferPool
from shardwell_server.shard.norms import block_squares, exact_partials
from shardwell_server.shard.optimizer import ShardOptimizer
from shardwell_server.shard.reduction import mean_in_rank_order
from shardwell_wire.errors import DeadlineError, NonFiniteError, NotFoundError, StepStateError, VersionGoneError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2


@dataclass
class Parameters:
    """The bytes of one version, or of the next one while nobody reads them."""

    buffer: torch.Tensor
    """uint8. [stop_bytes - start_bytes]"""
    readers: int = 0
    """Gathers that are sending it; while there are any it is not written."""


@dataclass(frozen=True)
class Reduced:
    """The mean gradient of the step, by segment number; absent where no rank had one."""

    gradients: Mapping[int, torch.Tensor]
    buffer: torch.Tensor | None
    """What was taken from the pool for it."""
    square_partials: list[float]
    max_abs: float


@dataclass
class Receiving:
    """An unfinished stream of a rank's gradient."""

    cancel: Callable[[], object]


class UnitShard:
    """One shard. All methods run on the event loop but those named ``compute_*``, which run in a thread.

    Args:
        run: Name of the run.
        layout: Of the unit.
        index: Of the unit in the run.
        start_bytes: Half-open range of the flat vector.
        stop_bytes: Its end.
        dp: Logical data ranks.
        pool: Where buffers come from.
    """

    def __init__(
        self, run: str, layout: UnitLayout, index: int, start_bytes: int, stop_bytes: int, dp: int, pool: BufferPool
    ) -> None:
        self.run, self.layout, self.index, self.dp = run, layout, index, dp
        self.start_bytes, self.stop_bytes = start_bytes, stop_bytes
        self.segments = layout.segments(start_bytes, stop_bytes)
        self.segment_of = {segment.parameter_index: number for number, segment in enumerate(self.segments)}
        self.version: int | None = None
        self.parameters: Parameters | None = None
        self.initial_epoch = -1
        """Under which the values that wait for publication came."""
        self.contributions = Contributions()
        self.receiving: dict[int, Receiving] = {}
        self.reduced: Reduced | None = None
        self.optimizer: ShardOptimizer | None = None
        self.dropped = False
        self._pool = pool
        self._updating = False
        self._changed = asyncio.Condition()

    @property
    def unit(self) -> str:
        return self.layout.unit

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def what(self) -> str:
        """Names the shard in errors."""
        return f"unit {self.unit!r} of run {self.run!r}"

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parts of parameters in a buffer of this shard's bytes, by segment number."""
        return segments.views(buffer, self.layout, self.segments, self.start_bytes)

    # ---- reading ----

    async def read(self, version: int | None, wait_s: float) -> tuple[int, Parameters]:
        """The bytes of a version, held until ``release``.

        Args:
            version: None: the newest there is.
            wait_s: How long to wait for it to exist.

        Raises:
            VersionGoneError: It has been overwritten.
            DeadlineError: It does not exist yet.
            NotFoundError: The run was deleted meanwhile.
        """

        def ready() -> bool:
            return self.dropped or (
                not self._updating and self.version is not None and (version is None or self.version >= version)
            )

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(ready), wait_s)
            except TimeoutError:
                wanted = "any version" if version is None else f"version {version}"
                raise DeadlineError(
                    f"waited {wait_s:.1f} s for {wanted} of {self.what}; the newest is {self.version}",
                    unit=self.unit,
                    version=version,
                    newest=self.version,
                ) from None
        if self.dropped:
            raise NotFoundError(f"run {self.run!r} was deleted", run=self.run)
        assert self.version is not None and self.parameters is not None
        if version is not None and version < self.version:
            raise VersionGoneError(
                f"version {version} of {self.what} has been overwritten by version {self.version}",
                unit=self.unit,
                version=version,
                newest=self.version,
            )
        self.parameters.readers += 1
        return self.version, self.parameters

    async def publish(self) -> None:
        """Makes the initial values version 0."""
        async with self._changed:
            self.version = 0
            self._changed.notify_all()

    async def drop(self) -> None:
        """Forgets everything; those who wait are told."""
        async with self._changed:
            self.dropped = True
            self._changed.notify_all()
        for receiving in list(self.receiving.values()):
            receiving.cancel()
        self.give_back(self.contributions.clear())
        self.forget_reduced()
        if self.parameters is not None:
            last, self.parameters = self.parameters, None
            if last.readers == 0:
                self._pool.give(last.buffer)

    # ---- reducing ----

    def compute_reduced(self, with_max_abs: bool) -> Reduced:
        """Adds the ranks in order and takes the mean.

        Raises:
            NonFiniteError: The mean has NaN or infinity.
        """
        ranks = sorted(self.contributions.by_rank)
        buffer = self._pool.take(self.size_bytes) if self.dp > 1 and ranks else None
        gradients: dict[int, torch.Tensor] = {}
        terms: list[float] = []
        max_abs = 0.0
        outs = self.views(buffer) if buffer is not None else [None] * len(self.segments)
        try:
            for number, segment in enumerate(self.segments):
                parts = [
                    part
                    for rank in ranks
                    if (part := self.contributions.by_rank[rank].gradients.get(number)) is not None
                ]
                if not parts:
                    continue
                out = outs[number]
                mean = mean_in_rank_order(parts, self.dp, parts[0] if out is None else out)
                own = block_squares(mean, segment.start_bytes)
                if not all(map(_is_finite, own)) and not bool(torch.isfinite(mean).all()):
                    raise self._non_finite(number)
                gradients[number] = mean
                terms += own
                if with_max_abs:
                    max_abs = max(max_abs, float(mean.abs().max()))
        except BaseException:
            if buffer is not None:
                self._pool.give(buffer)
            raise
        return Reduced(gradients, buffer, exact_partials(terms), max_abs)

    def _non_finite(self, number: int) -> NonFiniteError:
        name = self.layout.parameters[self.segments[number].parameter_index].name
        guilty = [
            rank
            for rank, contribution in sorted(self.contributions.by_rank.items())
            if number in contribution.gradients and not bool(torch.isfinite(contribution.gradients[number]).all())
        ]
        whose = f"of logical dp rank {', '.join(map(str, guilty))}" if guilty else "summed over all ranks (overflow)"
        return NonFiniteError(
            f"the gradient of parameter {name!r} ({self.what}) {whose} has NaN or infinity; nothing was updated: "
            "optimizer.zero_grad() on every trainer and optimizer.step() skip the step",
            unit=self.unit,
            parameter=name,
            dp_ranks=",".join(map(str, guilty)),
        )

    def forget_reduced(self) -> None:
        """The step's mean gradient is void, or used up."""
        if self.reduced is not None and self.reduced.buffer is not None:
            self._pool.give(self.reduced.buffer)
        self.reduced = None

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            self._pool.give(buffer)

    # ---- updating ----

    async def update(
        self,
        run_in_thread: Callable[[Callable[[], Parameters]], Awaitable[Parameters]],
        step: int,
        optimizer: common_pb2.OptimizerStep,
        clip_coefficient: float,
    ) -> None:
        """Makes version ``step + 1`` of version ``step`` and the reduced gradient; once.

        Raises:
            StepStateError: The step was not reduced here, or is not the next.
        """
        if self.version == step + 1:
            return
        if self.version != step or self.reduced is None:
            raise StepStateError(
                f"{self.what} is at version {self.version} and "
                f"{'has' if self.reduced else 'has no'} reduced gradient: cannot be updated for step {step}",
                unit=self.unit,
            )
        self._updating = True
        try:
            parameters = await run_in_thread(lambda: self.compute_update(optimizer, clip_coefficient))
            self.parameters, self.version = parameters, step + 1
        finally:
            self._updating = False
        self.forget_reduced()
        self.give_back(self.contributions.clear())
        async with self._changed:
            self._changed.notify_all()

    def release(self, parameters: Parameters) -> None:
        """A reader is done."""
        parameters.readers -= 1
        if parameters is not self.parameters and parameters.readers == 0:
            self._pool.give(parameters.buffer)

    def compute_update(self, optimizer: common_pb2.OptimizerStep, clip_coefficient: float) -> Parameters:
        """Applies the optimizer, in place unless somebody is reading; returns the new parameters."""
        assert self.parameters is not None and self.reduced is not None
        if self.optimizer is None:
            self.optimizer = ShardOptimizer(optimizer.algorithm, self.views(self.parameters.buffer))
        parameters = self.parameters
        if parameters.readers:
            parameters = Parameters(self._pool.take(self.size_bytes))
            parameters.buffer.copy_(self.parameters.buffer)
            self.optimizer.rebind(self.views(parameters.buffer))
        groups = {unit.unit_index: unit.group_indices for unit in optimizer.units}.get(self.index)
        chosen = [-1 if groups is None else groups[segment.parameter_index] for segment in self.segments]
        gradients = [self.reduced.gradients.get(number) for number in range(len(self.segments))]
        self.optimizer.step(gradients, optimizer.groups, chosen, clip_coefficient)
        return parameters


def _is_finite(value: float) -> bool:
    return value - value == 0.0
