"""The step on one server: fenced, prepared, updated. Each of these goes ``Run.alone``."""

from __future__ import annotations

import logging
import math
from functools import partial

from shardwell_server import hyperparameters
from shardwell_server.shard.state.buffer_shard import BufferShard
from shardwell_server.shard.state.runs import PreparedStep, Run
from shardwell_server.shard.threads import InThread
from shardwell_wire.errors import (
    IncompleteStepError,
    InvalidRequestError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
)
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)


def fence(run: Run, request: shard_pb2.FenceRequest) -> None:
    """Refuses older epochs and attempts from now on; drops older attempts' contributions."""
    step = request.context.step
    risen = run.fences.raise_all(step, request.ranks)
    for shard in run.shards.values():
        for rank, attempt in risen:
            if shard.version == step:
                shard.drop_older(rank, attempt)
        for told in request.ranks:
            oldest = (run.fences.epoch(told.dp_rank), run.fences.attempt(told.dp_rank, step))
            shard.streams.end(
                told.dp_rank,
                oldest,
                StaleEpochError(f"{shard.what}, rank {told.dp_rank}: the lease or attempt is over"),
            )
    if risen and run.prepared is not None and run.prepared.step == step:
        run.unprepare()


async def prepare(
    run: Run, in_thread: InThread, request: shard_pb2.PrepareStepRequest
) -> shard_pb2.PrepareStepResponse:
    """Confirms the contributions of a step and reduces them; the same again gets the same answer.

    What is refused, and another norm of what is prepared, leave a prepared step prepared: it may be committed already.

    If the request says by which optimizer the step is likely to be updated, memory for that is allocated, too.

    Raises:
        IncompleteStepError: Contributions are missing, or there are more than named.
        NonFiniteError: A gradient is not finite.
        StepStateError: The step is not the next.
        InvalidRequestError: The manifest does not fit the run.
    """
    answer = shard_pb2.PrepareStepResponse()
    answer.CopyFrom(await _prepare(run, in_thread, request))
    if request.HasField("optimizer"):
        try:
            await _allocate(run, in_thread, request.context.step, request.optimizer)
            answer.update_ready = True
        except ShardwellError as error:
            # Told when the step is to be committed with this optimizer: it was only expected.
            logger.info("step %d of run %r is not ready to be updated: %s", request.context.step, run.name, error)
    return answer


async def _prepare(
    run: Run, in_thread: InThread, request: shard_pb2.PrepareStepRequest
) -> shard_pb2.PrepareStepResponse:
    step, asked = request.context.step, _content(request)
    if not request.norm_type >= 0:
        raise InvalidRequestError(f"norm_type is {request.norm_type}: expected a number above 0, or 0 for none")
    former = run.prepared
    if former is not None and (former.step, former.asked) == (step, asked):
        assert former.answer is not None
        if former.norm_type == request.norm_type:
            return former.answer
    else:
        _check_complete(run, request)
        run.prepared = PreparedStep(step, asked, request.norm_type, None)  # from here on pushes are refused
    try:
        answer = await _reduced(run, in_thread, request)
    except BaseException:
        if run.prepared is not former:
            run.unprepare()
        raise
    run.prepared = PreparedStep(step, asked, request.norm_type, answer)
    return answer


async def _reduced(
    run: Run, in_thread: InThread, request: shard_pb2.PrepareStepRequest
) -> shard_pb2.PrepareStepResponse:
    """Reduces every shard, unless that is done, and says what its norms are."""
    answer = shard_pb2.PrepareStepResponse(version=request.context.step)
    for shard in run.published:
        if isinstance(shard, BufferShard) and (changed := shard.changed):
            answer.buffers.add(unit_index=shard.index, buffer_indices=changed)
        if request.skip:
            shard.reduce_to_nothing()
            continue
        reduced = await shard.reduce(in_thread)
        norm = shard_pb2.UnitNorm(unit_index=shard.index, square_partials=reduced.square_partials)
        if request.norm_type == math.inf:
            norm.max_abs = await in_thread(reduced.max_abs)
        elif request.norm_type:
            starts = [segment.start_bytes for segment in shard.segments]
            norm.power_partials.extend(await in_thread(partial(reduced.power_partials, starts, request.norm_type)))
        answer.units.append(norm)
    return answer


async def prepare_update(run: Run, in_thread: InThread, request: shard_pb2.PrepareUpdateRequest) -> None:
    """Checks the optimizer of a prepared step and allocates everything that ``update`` will need.

    Raises:
        StepStateError: The step is not prepared.
        InvalidRequestError: The optimizer cannot be applied.
        CapacityError: There is no memory for it.
    """
    hyperparameters.validate(request.optimizer)
    _require_prepared(run, request.context.step)
    await _allocate(run, in_thread, request.context.step, request.optimizer)


async def _allocate(run: Run, in_thread: InThread, step: int, optimizer: common_pb2.OptimizerStep) -> None:
    groups = {unit.unit_index: unit.group_indices for unit in optimizer.units}
    key, shards = hyperparameters.allocation_key(optimizer), run.published
    for shard in shards:
        if shard.version == step + 1:
            continue
        shard.check_update(step, optimizer, groups.get(shard.index))
        await shard.prepare_update(in_thread, optimizer, groups.get(shard.index), key)


async def update(run: Run, in_thread: InThread, request: shard_pb2.UpdateRequest) -> int:
    """Applies a committed step to every shard, in the order given; returns the new version.

    Shards that have done it already are passed over, so it may be repeated. If it raises something else than the
    errors below, a shard may be half updated: the same request then finishes it.

    Raises:
        StepStateError: A shard is not ready for it; nothing was changed.
        InvalidRequestError: The optimizer cannot be applied; nothing was changed.
        CapacityError: There is no memory for the optimizer's state of a shard; that shard was not changed.
    """
    hyperparameters.validate(request.optimizer)
    step, clip = request.context.step, request.clip_coefficient
    if not math.isfinite(clip) or clip < 0.0:
        raise InvalidRequestError(f"clip_coefficient is {clip}: expected a finite number of at least 0")
    place = {index: number for number, index in enumerate(request.unit_order)}
    # Trainers wait for the buffers of the new version before they go on.
    shards = sorted(
        run.published,
        key=lambda shard: (not shard.layout.holds_buffers, place.get(shard.index, len(place)), shard.index),
    )
    waiting = [shard for shard in shards if shard.version != step + 1]
    if waiting:
        _require_prepared(run, step)
    key = hyperparameters.allocation_key(request.optimizer)
    groups = {unit.unit_index: unit.group_indices for unit in request.optimizer.units}
    for shard in waiting:
        shard.check_update(step, request.optimizer, groups.get(shard.index))
    for shard in waiting:
        await shard.update(in_thread, step, request.optimizer, groups.get(shard.index), clip, key)
    run.prepared = None
    return step + 1


def _require_prepared(run: Run, step: int) -> None:
    if run.prepared is None or run.prepared.step != step or run.prepared.answer is None:
        raise StepStateError(f"step {step} of run {run.name!r} is not prepared here: it cannot be updated")


def _check_complete(run: Run, request: shard_pb2.PrepareStepRequest) -> None:
    step, expected = request.context.step, _expected(run, request)
    lines = []
    for shard in run.published:
        if shard.version != step:
            raise StepStateError(f"{shard.what} is at version {shard.version}: step {step} cannot be prepared")
        if shard.dp != request.dp:
            raise InvalidRequestError(f"dp is {request.dp}: {shard.what} was reserved with {shard.dp} data ranks")
        differences = shard.contributions.differences(expected.pop(shard.index, {}))
        lines += [f"unit {shard.unit!r}: {line}" for line in differences]
    lines += [f"unit number {index}: this server has no shard of it" for index in expected]
    if lines:
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise IncompleteStepError(f"step {step} of run {run.name!r}: {'; '.join(lines[:5])}{more}", step=step)


def _expected(run: Run, request: shard_pb2.PrepareStepRequest) -> dict[int, dict[int, tuple[int, int]]]:
    """``(attempt, part_count)`` by unit index and rank; units and ranks without a part are left out."""
    named = {manifest.dp_rank for manifest in request.ranks}
    if len(named) != request.dp or max(named, default=0) >= request.dp:
        raise InvalidRequestError(
            f"step {request.context.step} of run {run.name!r}: expected a manifest of each of {request.dp} data ranks, "
            f"got those of {sorted(named)[:10]}"
        )
    expected: dict[int, dict[int, tuple[int, int]]] = {}
    for manifest in request.ranks:
        for unit in manifest.units:
            ranks = expected.setdefault(unit.unit_index, {})
            if manifest.dp_rank in ranks:
                raise InvalidRequestError(f"unit number {unit.unit_index}, rank {manifest.dp_rank} is named twice")
            if unit.part_count:
                ranks[manifest.dp_rank] = (manifest.attempt, unit.part_count)
    return {index: ranks for index, ranks in expected.items() if ranks}


def _content(request: shard_pb2.PrepareStepRequest) -> bytes:
    """What is to be prepared, whoever asks and for which norm."""
    copy = shard_pb2.PrepareStepRequest()
    copy.CopyFrom(request)
    copy.ClearField("context")
    copy.ClearField("norm_type")
    copy.ClearField("optimizer")
    return copy.SerializeToString(deterministic=True)
