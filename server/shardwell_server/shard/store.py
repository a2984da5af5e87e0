"""Everything one shard server holds: runs, their shards, fences, and the step in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from shardwell_server import hyperparameters
from shardwell_server.shard.contributions import PushKey
from shardwell_server.shard.memory import BufferPool, MemoryBudget
from shardwell_server.shard.unit_shard import Parameters, UnitShard
from shardwell_wire.errors import (
    IncompleteStepError,
    InvalidRequestError,
    NonFiniteError,
    NotFoundError,
    StaleEpochError,
    StepStateError,
    UnitMismatchError,
    VersionGoneError,
)
from shardwell_wire.layout import BLOCK_BYTES, UnitLayout
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class Run:
    """One run on this server."""

    name: str
    shards: dict[str, UnitShard] = field(default_factory=dict)
    """By unit name."""
    epochs: dict[int, int] = field(default_factory=dict)
    """Oldest epoch that is accepted, by logical dp rank."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Oldest attempt that is accepted in step ``attempts_step``, by logical dp rank."""
    attempts_step: int = 0
    prepared: tuple[int, bytes, shard_pb2.PrepareStepResponse] | None = None
    """Step, what was asked, and the answer."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The coordinator's rpcs on a run go one after another."""
    duplicate_count: int = 0
    differing_duplicate_count: int = 0

    def shard(self, unit: str) -> UnitShard:
        """Raises NotFoundError if the server has no shard of the unit."""
        if unit in self.shards:
            return self.shards[unit]
        known = ", ".join(sorted(self.shards)[:10])
        raise NotFoundError(
            f"run {self.name!r} has no unit {unit!r} on this server; it has {known or 'none'}", unit=unit
        )

    def check_epoch(self, dp_rank: int, epoch: int) -> None:
        """Raises StaleEpochError if a lease on a rank is over; remembers a newer one."""
        newest = self.epochs.get(dp_rank, 0)
        if epoch < newest:
            raise StaleEpochError(
                f"rank {dp_rank} of run {self.name!r}: epoch {epoch} is over, the lease has epoch {newest} now",
                dp_rank=dp_rank,
                epoch=epoch,
                newest=newest,
            )
        self.epochs[dp_rank] = epoch

    def oldest_attempt(self, dp_rank: int, step: int) -> int:
        return self.attempts.get(dp_rank, 0) if step == self.attempts_step else 0


class ShardStore:
    """The state of a shard server. Used on one event loop; tensor work runs in ``threads``.

    Args:
        budget_bytes: What reservations are checked against.
        threads: Where tensor work runs.
    """

    def __init__(self, budget_bytes: int, threads: ThreadPoolExecutor) -> None:
        self.budget = MemoryBudget(budget_bytes)
        self.pool = BufferPool()
        self.runs: dict[str, Run] = {}
        self._threads = threads
        self._term = 0

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Runs tensor work without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def run(self, name: str) -> Run:
        """Raises NotFoundError if the server holds nothing of the run."""
        if name in self.runs:
            return self.runs[name]
        known = ", ".join(sorted(self.runs)[:10])
        raise NotFoundError(f"no run {name!r} on this server; it has {known or 'none'}", run=name)

    @property
    def used_bytes(self) -> int:
        """Parameters, contributions, staging and optimizer state now."""
        optimizers = (shard.optimizer for run in self.runs.values() for shard in run.shards.values())
        return self.pool.taken_bytes + sum(optimizer.size_bytes for optimizer in optimizers if optimizer is not None)

    def check_term(self, term: int) -> None:
        """Raises StaleEpochError for a coordinator that another has replaced."""
        if term < self._term:
            raise StaleEpochError(f"coordinator term {term} is over, the present one is {self._term}", epoch=self._term)
        self._term = term

    # ---- units ----

    def reserve(self, run_name: str, layout: UnitLayout, index: int, start: int, stop: int, dp: int) -> UnitShard:
        """Makes room for a shard; the same again is harmless.

        Raises:
            InvalidRequestError: The range is not one of the unit's.
            UnitMismatchError: The unit is there with another layout or range.
            CapacityError: It does not fit the budget.
        """
        if (
            not 0 <= start <= stop <= layout.size_bytes
            or start % BLOCK_BYTES
            or (stop % BLOCK_BYTES and stop != layout.size_bytes)
        ):
            raise InvalidRequestError(
                f"[{start}, {stop}) is no range of unit {layout.unit!r} of {layout.size_bytes} bytes: "
                f"expected bounds on multiples of {BLOCK_BYTES}"
            )
        if dp < 1:
            raise InvalidRequestError(f"dp is {dp}: expected at least 1")
        run = self.runs.get(run_name)
        known = run.shards.get(layout.unit) if run is not None else None
        if known is not None:
            if (known.layout, known.index, known.start_bytes, known.stop_bytes, known.dp) != (
                layout,
                index,
                start,
                stop,
                dp,
            ):
                raise UnitMismatchError(
                    f"{known.what} is here as [{known.start_bytes}, {known.stop_bytes}) of {known.layout.size_bytes} "
                    f"bytes with dp {known.dp}; another layout or range was reserved",
                    unit=layout.unit,
                )
            return known
        self.budget.reserve(run_name, layout.unit, stop - start, dp)
        run = self.runs.setdefault(run_name, Run(run_name))
        shard = UnitShard(run_name, layout, index, start, stop, dp, self.pool)
        run.shards[layout.unit] = shard
        return shard

    def accept_initial(self, shard: UnitShard, epoch: int, buffer: torch.Tensor) -> None:
        """Takes complete initial values, replacing those of an older epoch.

        Raises:
            StaleEpochError: Values of a newer epoch are here.
            NonFiniteError: A value is NaN or infinity.
        """
        if epoch < shard.initial_epoch:
            raise StaleEpochError(f"{shard.what}: epoch {epoch} is over, {shard.initial_epoch} has sent values")
        for number, view in enumerate(shard.views(buffer)):
            if not bool(torch.isfinite(view).all()):
                name = shard.layout.parameters[shard.segments[number].parameter_index].name
                raise NonFiniteError(f"the initial value of parameter {name!r} has NaN or infinity", parameter=name)
        if shard.parameters is not None:
            self.pool.give(shard.parameters.buffer)
        shard.parameters, shard.initial_epoch = Parameters(buffer), epoch

    # ---- contributions ----

    def check_push(self, run: Run, shard: UnitShard, header: shard_pb2.ReduceScatterHeader) -> None:
        """Raises what is wrong with a push before its bytes are taken."""
        key, step = PushKey(header.dp_rank, header.attempt, header.part), header.context.step
        if not 0 <= key.dp_rank < shard.dp:
            raise InvalidRequestError(f"dp_rank {key.dp_rank}: {shard.what} has {shard.dp} data ranks")
        if (header.start_bytes, header.stop_bytes) != (shard.start_bytes, shard.stop_bytes):
            raise InvalidRequestError(
                f"{shard.what}: this server owns [{shard.start_bytes}, {shard.stop_bytes}), "
                f"got [{header.start_bytes}, {header.stop_bytes})"
            )
        indices = list(header.parameter_indices)
        if sorted(set(indices)) != indices or (indices and indices[-1] >= len(shard.layout.parameters)):
            raise InvalidRequestError(
                f"{shard.what}: parameter_indices {indices} must rise and be below {len(shard.layout.parameters)}"
            )
        run.check_epoch(key.dp_rank, header.context.epoch)
        if shard.version is None:
            raise StepStateError(f"{shard.what} has no published values yet")
        if step < shard.version:
            raise VersionGoneError(f"step {step} of {shard.what} is committed: it is at version {shard.version}")
        if step > shard.version:
            raise StepStateError(f"{shard.what} is at version {shard.version}: too early for a gradient of step {step}")
        oldest = max(
            run.oldest_attempt(key.dp_rank, step),
            here.attempt if (here := shard.contributions.by_rank.get(key.dp_rank)) else 0,
        )
        if key.attempt < oldest:
            raise StaleEpochError(
                f"{shard.what}: attempt {key.attempt} of rank {key.dp_rank} is over, {oldest} has begun"
            )

    def begin_push(self, run: Run, shard: UnitShard, key: PushKey, step: int) -> bool:
        """Decides whether a push is taken; returns whether it is here already.

        Raises:
            StepStateError: The step is prepared, or an earlier part is missing.
        """
        have = shard.contributions.part_count(key.dp_rank, key.attempt)
        if key.part < have:
            run.duplicate_count += 1
            return True
        if run.prepared is not None and run.prepared[0] == step:
            raise StepStateError(f"{shard.what}: step {step} is prepared, its gradients are complete")
        if key.part > have:
            raise StepStateError(
                f"{shard.what}: part {key.part} of rank {key.dp_rank} came, but part {have} is missing before it"
            )
        self.give(shard.contributions.begin(key))
        return False

    def finish_push(
        self, run: Run, shard: UnitShard, header: shard_pb2.ReduceScatterHeader, buffer: torch.Tensor, checksum: int
    ) -> bool:
        """Takes a complete push, if it is still wanted; returns whether it was here already."""
        self.check_push(run, shard, header)
        key = PushKey(header.dp_rank, header.attempt, header.part)
        if self.begin_push(run, shard, key, header.context.step):
            self.pool.give(buffer)
            return True
        chosen = set(header.parameter_indices)
        gradients = {
            number: view
            for number, (segment, view) in enumerate(zip(shard.segments, shard.views(buffer), strict=True))
            if segment.parameter_index in chosen
        }
        if not shard.contributions.of(key).add(gradients, buffer, checksum):
            self.pool.give(buffer)
        return False

    def fence(self, run: Run, step: int, ranks: Sequence[shard_pb2.RankFence]) -> None:
        """Refuses older epochs and attempts from now on; drops older attempts' contributions."""
        if step != run.attempts_step:
            run.attempts, run.attempts_step = {}, step
        for fence in ranks:
            run.epochs[fence.dp_rank] = max(run.epochs.get(fence.dp_rank, 0), fence.epoch)
            if fence.attempt > run.attempts.get(fence.dp_rank, 0):
                run.attempts[fence.dp_rank] = fence.attempt
                for shard in run.shards.values():
                    if shard.version == step:
                        self.give(shard.contributions.drop_older(fence.dp_rank, fence.attempt))
                self._unprepare(run)

    def give(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            self.pool.give(buffer)

    def _unprepare(self, run: Run) -> None:
        run.prepared = None
        for shard in run.shards.values():
            shard.forget_reduced()

    # ---- steps ----

    async def prepare(self, run: Run, request: shard_pb2.PrepareStepRequest) -> shard_pb2.PrepareStepResponse:
        """Confirms the contributions of a step and reduces them; the same again gets the same answer.

        Raises:
            IncompleteStepError: Contributions are missing, or there are more than named.
            NonFiniteError: A gradient is not finite.
            StepStateError: The step is not the next.
        """
        step = request.context.step
        asked = _without_context(request)
        if run.prepared is not None and run.prepared[:2] == (step, asked):
            return run.prepared[2]
        self._unprepare(run)
        self._check_complete(run, request)
        response = shard_pb2.PrepareStepResponse(version=step)
        run.prepared = (step, b"", response)
        try:
            for shard in run.shards.values():
                reduced = await self.in_thread(partial(shard.compute_reduced, request.with_max_abs))
                shard.reduced = reduced
                norm = shard_pb2.UnitNorm(
                    unit_index=shard.index, square_partials=reduced.square_partials, max_abs=reduced.max_abs
                )
                response.units.append(norm)
        except BaseException:
            self._unprepare(run)
            raise
        run.prepared = (step, asked, response)
        return response

    def _check_complete(self, run: Run, request: shard_pb2.PrepareStepRequest) -> None:
        step, lines = request.context.step, []
        counts = {
            manifest.dp_rank: {unit.unit_index: unit.part_count for unit in manifest.units}
            for manifest in request.ranks
        }
        attempts = {manifest.dp_rank: manifest.attempt for manifest in request.ranks}
        for shard in run.shards.values():
            if shard.version != step:
                raise StepStateError(f"{shard.what} is at version {shard.version}: step {step} cannot be prepared")
            expected = {rank: (attempts[rank], counts[rank].get(shard.index, 0)) for rank in counts}
            lines += [f"unit {shard.unit!r}: {line}" for line in shard.contributions.differences(expected, counts)]
        if lines:
            more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise IncompleteStepError(f"step {step} of run {run.name!r}: {'; '.join(lines[:5])}{more}", step=step)

    async def update(self, run: Run, request: shard_pb2.UpdateRequest) -> int:
        """Applies a committed step to every shard, in the order given; returns the new version.

        Raises:
            StepStateError: A shard is not ready for it.
            InvalidRequestError: The optimizer cannot be applied.
        """
        hyperparameters.validate(request.optimizer)
        step = request.context.step
        place = {index: number for number, index in enumerate(request.unit_order)}
        shards = sorted(run.shards.values(), key=lambda shard: (place.get(shard.index, len(place)), shard.index))
        for shard in shards:
            if shard.optimizer is not None:
                shard.optimizer.check_algorithm(request.optimizer.algorithm)
            await shard.update(self.in_thread, step, request.optimizer, request.clip_coefficient)
        run.prepared = None
        return step + 1

    async def drop(self, name: str) -> int:
        """Forgets a run; returns the bytes of the budget that are free again."""
        run = self.runs.get(name)
        if run is None:
            return 0
        async with run.lock:
            for shard in run.shards.values():
                await shard.drop()
            self.runs.pop(name, None)
            freed = self.budget.release(name)
            self.pool.trim()
        return freed


def _without_context(request: shard_pb2.PrepareStepRequest) -> bytes:
    copy = shard_pb2.PrepareStepRequest()
    copy.CopyFrom(request)
    copy.ClearField("context")
    return copy.SerializeToString(deterministic=True)
