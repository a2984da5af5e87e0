"""A step on one server: fence, prepare, update. Call each function within ``HostedRun.exclusively``."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Set
from functools import partial

from shardwell_server import optimizer_checks
from shardwell_server.shard.requests.replication import Replicator, status_of
from shardwell_server.shard.shard_spec import Role
from shardwell_server.shard.state.runs import HostedRun, PreparedStep, reduce_shards
from shardwell_server.shard.unit.step_gradient import PushedBuffers
from shardwell_server.shard.unit.unit_shard import StepUpdate, UnitShard
from shardwell_wire import fault_points
from shardwell_wire.errors import (
    IncompleteStepError,
    InvalidRequestError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
)
from shardwell_wire.model.topology import runs_on_trainers
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)


def fence(run: HostedRun, request: shard_pb2.FenceRequest) -> None:
    """Rejects older epochs and attempts from now on, and drops the contributions of older attempts."""
    step = request.context.step
    risen = run.fences.raise_all(step, request.ranks)
    if run.rank_versions is not None:
        for fenced in request.ranks:
            if fenced.HasField("version"):
                run.rank_versions.raise_to(fenced.dp_rank, fenced.version)
        _release_held(run)
    for shard in run.shards.values():
        if risen and shard.role is Role.BACKUP and shard.version == step:
            shard.drop_step()  # the primary sends the new gradient
        for rank, attempt in risen:
            if shard.version == step:
                shard.gradient.drop_older(rank, attempt)
        for fenced in request.ranks:
            rank = fenced.dp_rank
            at = step if run.rank_versions is None else run.rank_versions.of(rank)
            oldest = (run.fences.epoch(rank), run.fences.attempt(rank, at))
            over = StaleEpochError(f"{shard.what}, rank {rank}: the lease or attempt is over")
            for contributor in shard.spec.contributors_of(rank):
                shard.streams.end(contributor, oldest, over)
    # The reduced gradient may contain a contribution that was dropped.
    if run.prepared is not None and run.is_prepared(step) and any(run.prepared.applies(rank) for rank, _ in risen):
        run.clear_prepared()
    fault_points.reach("server.fence.after", step=step)


async def prepare(
    run: HostedRun, request: shard_pb2.PrepareStepRequest, replicator: Replicator
) -> shard_pb2.PrepareStepResponse:
    """Confirms the contributions of a step, reduces them, and brings the backups to the step. Idempotent.

    A step stays prepared after a rejected request or a request for another norm, because it may be committed already.
    If the request names the optimizer that is expected to update the step, the memory for it is allocated.

    Raises:
        IncompleteStepError: Contributions are missing, or more arrived than the manifest names.
        NonFiniteError: A gradient is not finite.
        StepStateError: The step is not the next step.
        InvalidRequestError: The manifest does not fit the run.
    """
    step, manifest, norm = request.context.step, _manifest(request), (request.norm_type, request.norm_bound)
    if not min(norm) >= 0:
        raise InvalidRequestError(
            f"norm_type and norm_bound are {norm}, expected numbers above 0, or 0 for no norm and for no bound"
        )
    former = run.prepared
    is_known = former is not None and (former.step, former.manifest) == (step, manifest)
    attempts = {rank.dp_rank: rank.attempt for rank in request.ranks}
    if not is_known:
        _check_complete(run, request)
        _allocate_held(run, step, attempts.keys())
        # Pushes are rejected from here on.
        run.prepared = PreparedStep(step, manifest, attempts, norm, None)
    reduced = former.answer if former is not None and is_known and former.norm == norm else None
    if reduced is None:
        try:
            reduced = await _reduce(run, request)
        except BaseException:
            if run.prepared is not former:
                run.clear_prepared()
            raise
        run.prepared = PreparedStep(step, manifest, attempts, norm, reduced)
    answer, optimizer = shard_pb2.PrepareStepResponse(), request.optimizer if request.HasField("optimizer") else None
    answer.CopyFrom(reduced)
    if optimizer is not None:
        try:
            await _allocate(run, step, optimizer)
            answer.update_ready = True
        except ShardwellError as error:
            # The error is not raised here, because the step may be committed with another optimizer. Otherwise
            # PrepareUpdate raises it.
            logger.info("cannot prepare the update of step %d of run %r: %s", step, run.name, error)
    if optimizer is None or not runs_on_trainers(optimizer.algorithm):  # otherwise ConfirmPartitions does this
        failed, confirmed = await replicator.bring_all(run, step, optimizer)
        answer.failed_backups.extend(failed)
        answer.confirmed_backups.extend(confirmed)
    fault_points.reach("server.prepare.after", step=step)
    return answer


async def _reduce(run: HostedRun, request: shard_pb2.PrepareStepRequest) -> shard_pb2.PrepareStepResponse:
    """Reduces every shard unless it is reduced already, and returns the norms."""
    answer, shards = shard_pb2.PrepareStepResponse(version=request.context.step), run.published
    if not request.skip:
        # Small shards are reduced together, because a call for each would take longer than its sum.
        await reduce_shards([shard for shard in shards if shard.gradient.awaits_reduction])
    for shard in shards:
        if isinstance(shard.gradient, PushedBuffers) and (changed := shard.gradient.changed):
            answer.buffers.add(unit_index=shard.index, buffer_indices=changed)
        if request.skip:
            shard.gradient.skip_reduction()
        else:
            reduced = await shard.gradient.reduce()
            norm = shard_pb2.UnitNorm(unit_index=shard.index, square_partials=reduced.square_partials)
            if request.norm_type == math.inf:
                norm.max_abs = min(await shard.memory.in_thread(reduced.max_abs), request.norm_bound or math.inf)
            elif request.norm_type:
                starts = [segment.start_bytes for segment in shard.segments]
                powers = partial(reduced.power_partials, starts, request.norm_type, request.norm_bound or None)
                norm.power_partials.extend(await shard.memory.in_thread(powers))
            answer.units.append(norm)
        # From here on, a new process of this server can go on with the prepared step.
        await shard.record_prepared()
    return answer


async def prepare_update(
    run: HostedRun, request: shard_pb2.PrepareUpdateRequest, replicator: Replicator
) -> shard_pb2.PrepareUpdateResponse:
    """Checks the optimizer of a prepared step and allocates the memory that ``update`` will need, also on the backups.

    Does nothing on a server that has no primary of the run.

    Raises:
        StepStateError: The step is not prepared.
        InvalidRequestError: The optimizer cannot be applied.
        CapacityError: There is no memory for the update.
    """
    optimizer_checks.validate(request.optimizer)
    step = request.context.step
    if not run.published:
        return shard_pb2.PrepareUpdateResponse()
    _require_prepared(run, step)
    await _allocate(run, step, request.optimizer)
    failed, confirmed = await replicator.bring_all(run, step, request.optimizer)
    return shard_pb2.PrepareUpdateResponse(failed_backups=failed, confirmed_backups=confirmed)


async def _allocate(run: HostedRun, step: int, optimizer: common_pb2.OptimizerStep) -> None:
    asked = StepUpdate.of(step, optimizer)
    for shard in run.published:
        if shard.version != step + 1:
            shard.check_update(asked)
            await shard.prepare_update(asked)


async def update(run: HostedRun, request: shard_pb2.UpdateRequest) -> shard_pb2.UpdateResponse:
    """Applies a committed step to every primary, in the given order, and then to the backups.

    A backup that lacks the step is out of sync from then on, and named in the response. Idempotent: shards that are
    already updated are skipped. After any other error than those below, a shard may be half updated; repeating the
    request finishes the update.

    Raises:
        StepStateError: A shard is not prepared; nothing was changed.
        InvalidRequestError: The optimizer cannot be applied; nothing was changed.
        CapacityError: There is no memory for the optimizer state of a shard; that shard was not changed.
    """
    optimizer_checks.validate(request.optimizer)
    step, clip = request.context.step, request.clip_coefficient
    if not math.isfinite(clip) or clip < 0.0:
        raise InvalidRequestError(f"clip_coefficient is {clip}, expected a finite number of at least 0")
    place = {index: number for number, index in enumerate(request.unit_order)}

    def in_order(shards: Iterable[UnitShard]) -> list[UnitShard]:
        # A shard whose update was interrupted comes first, because neither of its versions can be read. Buffers come
        # next, because trainers wait for their new version before they continue.
        left = (shard for shard in shards if shard.version != step + 1)
        return sorted(left, key=lambda shard: (not shard.values.updating, *shard.update_order(place)))

    waiting = in_order(run.published)
    # A shard that was promoted after the step was prepared received the prepared step as a backup.
    if not all(shard.has_prepared(step) for shard in waiting):
        _require_prepared(run, step)
    asked = StepUpdate.of(step, request.optimizer, clip)
    for shard in waiting:
        shard.check_update(asked)
    if run.rank_versions is not None:
        run.rank_versions.update(request.rank_versions)
    run.kept_versions = frozenset(request.kept_versions)
    _release_held(run)
    fault_points.reach("server.update.before", step=step)
    left = deque((*waiting, *in_order(_able_backups(run, asked))))
    run.joint_updates.begin_step()

    def may_change(shard: UnitShard) -> bool:
        """True if an update needs neither wait for a checkpoint nor keep the version."""
        return not run.is_captured(shard) and not _is_read(run, shard, step)

    while left:
        updated = run.joint_updates.update(left, asked, may_change)
        if not updated:
            updated = [left.popleft()]
            await _update_alone(run, updated[0], asked)
        for shard in updated:
            fault_points.reach("server.update.between_shards", step=step, unit=shard.index)
    if run.prepared is None or run.prepared.step <= step:  # a repeated request may arrive after the next PrepareStep
        run.clear_prepared()
    fault_points.reach("server.update.after", step=step)
    stale = [status_of(shard, shard.placement, shard.out_of_sync) for shard in run.backups if shard.out_of_sync]
    primaries = [shard for shard in run.published if shard.version == step + 1]
    lost = {kept for kept in run.kept_versions for shard in primaries if shard.values.held.find(kept) is None}
    return shard_pb2.UpdateResponse(version=step + 1, stale_backups=stale, lost_versions=sorted(lost))


async def _update_alone(run: HostedRun, shard: UnitShard, asked: StepUpdate) -> None:
    await run.before_update(shard)
    async with shard.unchanging:
        _release_held_of(run, shard)
        for_readers = asked.step not in _read_by_items(run, shard)
        await shard.update(asked, hold=_is_read(run, shard, asked.step), for_readers=for_readers)


def _is_read(run: HostedRun, shard: UnitShard, version: int) -> bool:
    """True if a version must stay readable after the next one exists."""
    return version in run.kept_versions or version in _read_by_items(run, shard)


def _read_by_items(run: HostedRun, shard: UnitShard) -> Set[int]:
    """Returns the versions that work items of an asynchronous run read of a primary that holds parameters."""
    if run.rank_versions is None or shard.role is not Role.PRIMARY or shard.layout.holds_buffers:
        return frozenset()
    return run.rank_versions.needed(shard.dp)


def _allocate_held(run: HostedRun, step: int, ranks: Set[int]) -> None:
    """Allocates the memory in which an update keeps the version of a step for the work items that still read it.

    Args:
        ranks: The ranks whose work items the step commits.

    Raises:
        CapacityError: There is no memory.
    """
    if run.rank_versions is None:
        return
    for shard in run.published:
        if any(run.rank_versions.of(rank) == step for rank in range(shard.dp) if rank not in ranks):
            shard.values.held.allocate(shard.size_bytes)


def _release_held(run: HostedRun) -> None:
    """Releases older versions that are not kept for readers, and that no work item of an asynchronous run reads."""
    if run.rank_versions is None and not run.kept_versions:
        return
    for shard in (*run.published, *run.backups):
        if not shard.unchanging.locked():  # otherwise a backup may be receiving the versions: its update releases them
            _release_held_of(run, shard)


def _release_held_of(run: HostedRun, shard: UnitShard) -> None:
    shard.values.held.keep(run.kept_versions | _read_by_items(run, shard))


def _able_backups(run: HostedRun, asked: StepUpdate) -> list[UnitShard]:
    """Returns the backups that can apply a committed step. The others of that version are out of sync."""
    able, step = [], asked.step
    for shard in run.backups:
        is_updated = shard.version is not None and shard.version > step  # by later steps, too, if the request is late
        if is_updated or shard.out_of_sync:
            continue
        try:
            if not shard.has_prepared(step):
                raise StepStateError(f"step {step} was committed, and the primary has not confirmed it here")
            shard.check_update(asked)
            able.append(shard)
        except ShardwellError as error:
            shard.mark_out_of_sync(str(error))
            logger.warning("the backup of %s is out of sync: %s", shard.what, error)
    return able


def _require_prepared(run: HostedRun, step: int) -> None:
    if not run.is_reduced(step):
        raise StepStateError(f"step {step} of run {run.name!r} cannot be updated: it is not prepared on this server")


def _check_complete(run: HostedRun, request: shard_pb2.PrepareStepRequest) -> None:
    """Raises unless every shard has the contributions in the manifest. Chooses between the trainers of copied items."""
    step, expected = request.context.step, _expected(run, request)
    lines, found = [], set()
    for shard in run.published:
        if shard.version != step:
            raise StepStateError(f"step {step} cannot be prepared: {shard.what} is at version {shard.version}")
        if run.rank_versions is not None:
            (rank,) = request.ranks
            shard.gradient.check_rank(rank.dp_rank)
            shard.gradient.count_only(rank.dp_rank)
        elif shard.dp != request.dp:
            raise InvalidRequestError(f"dp is {request.dp}, but {shard.what} was reserved with {shard.dp} data ranks")
        found.add(shard.index)
        # A late item may have two contributions. The manifest names the attempt that counts.
        shard.gradient.choose({rank.dp_rank: rank.attempt for rank in request.ranks})
        differences = shard.gradient.contributions.differences(
            expected.get(shard.index, {}), shard.gradient.counted, shard.spec.name_of
        )
        lines += [f"unit {shard.unit!r}: {line}" for line in differences]
    lines += [f"unit {index}: this server has no shard of the unit" for index in expected if index not in found]
    if lines:
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise IncompleteStepError(f"step {step} of run {run.name!r}: {'; '.join(lines[:5])}{more}", step=step)


def _expected(run: HostedRun, request: shard_pb2.PrepareStepRequest) -> dict[int, dict[int, tuple[int, int]]]:
    """Returns ``(attempt, part_count)`` by unit index and contributor. Omits units and contributors without a part."""
    named = {manifest.dp_rank for manifest in request.ranks}
    if run.rank_versions is not None:
        if (len(request.ranks), request.dp) != (1, 1):
            raise InvalidRequestError(
                f"step {request.context.step} of run {run.name!r}: expected dp=1 and the manifest of one data rank, "
                f"because the run is asynchronous, got dp={request.dp} and manifests of ranks {sorted(named)[:10]}"
            )
    elif len(named) != request.dp or max(named, default=0) >= request.dp:
        raise InvalidRequestError(
            f"step {request.context.step} of run {run.name!r}: expected one manifest from each of {request.dp} data "
            f"ranks, got manifests of ranks {sorted(named)[:10]}"
        )
    layouts = {shard.index: shard.layout for shard in run.published}
    expected: dict[int, dict[int, tuple[int, int]]] = {}
    for manifest in request.ranks:
        for unit in manifest.units:
            found, layout = expected.setdefault(unit.unit_index, {}), layouts.get(unit.unit_index)
            contributor = (
                manifest.dp_rank if layout is None else layout.contributor(manifest.dp_rank, unit.pp_rank, unit.cp_rank)
            )
            if contributor in found:
                raise InvalidRequestError(f"the manifests name unit {unit.unit_index}, rank {manifest.dp_rank}, twice")
            if unit.part_count:
                found[contributor] = (manifest.attempt, unit.part_count)
    return {index: found for index, found in expected.items() if found}


def _manifest(request: shard_pb2.PrepareStepRequest) -> bytes:
    """Returns the request without its context, norm and optimizer, in serialised form."""
    copy = shard_pb2.PrepareStepRequest()
    copy.CopyFrom(request)
    copy.ClearField("context")
    copy.ClearField("norm_type")
    copy.ClearField("norm_bound")
    copy.ClearField("optimizer")
    return copy.SerializeToString(deterministic=True)
