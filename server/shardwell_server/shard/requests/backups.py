"""A backup's side: it receives the committed state and every step from its primary, and becomes a primary itself.

See Note: [When a backup has a step] in ``replication.py``. Receiving and confirming take no lock of a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import xxhash

from shardwell_server import optimizer_checks
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.buffer_reuse import tensor_memory
from shardwell_server.shard.requests.client_streams import IncomingStream
from shardwell_server.shard.requests.steps import fence
from shardwell_server.shard.shard_spec import ROLES, Role
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.contributions import Contribution
from shardwell_server.shard.unit.partitions import StagedPartition
from shardwell_server.shard.unit.portable_state import begin_import, export, finish_import, read_content
from shardwell_server.shard.unit.unit_shard import Backup, ReceivedStep, StepUpdate, UnitShard
from shardwell_wire import fault_points
from shardwell_wire.errors import InvalidRequestError, NotFoundError, ShardwellError, StaleEpochError, StepStateError
from shardwell_wire.host.shared_memory import file_size, open_in_folder, opened, server_folder
from shardwell_wire.v1 import shard_pb2

_REPLICATED_EPOCH = 0
"""Epoch of contributions and partitions that the primary sent: it has checked the leases."""

_GRADIENT = shard_pb2.STEP_CONTENT_GRADIENT
_CONTRIBUTIONS = shard_pb2.STEP_CONTENT_CONTRIBUTIONS
_PARTITIONS = shard_pb2.STEP_CONTENT_PARTITIONS


# ---- the committed state ----


async def receive_state(
    store: ShardStore, header: shard_pb2.ReceiveShardStateHeader, incoming: IncomingStream
) -> shard_pb2.ReceiveShardStateResponse:
    """Receives the committed state of a shard into a reserved backup. A broken stream leaves an empty backup.

    A reservation takes one complete state. Later steps reach the backup by ``ReplicateStep`` only.

    Raises:
        ShardwellError: As ``find_backup``.
        StepStateError: The backup has a state already.
        InvalidRequestError: The state does not fit the shard, or the stream is broken.
        CapacityError: There is no memory for the state.
    """
    run = store.exact_run(header.context)
    former, version = find_backup(run, header.target), header.context.step
    if former.version is not None:
        # This may be a late stream of a copy that was repeated since, and the backup has had steps.
        raise StepStateError(
            f"the backup of {former.what} has version {former.version} under reservation {former.placement} already: "
            "reserve it again to copy it again",
            unit=former.unit,
        )
    what, held = f"state of {former.what}", list(header.held_versions)
    if sorted(set(held)) != held or len(held) > former.spec.held_versions or (held and held[-1] >= version):
        raise InvalidRequestError(
            f"{what}: held_versions is {held[:10]}, expected at most {former.spec.held_versions} rising versions below "
            f"{version}"
        )
    content = read_content(former, header)
    tensors = [*(tensor for part in content.parts for tensor in part.state.values())]
    tensors += [tensor for partition in content.partitions for tensor in partition.data]
    # Before memory is allocated: a header of a few bytes can describe any size.
    store.memory.check_import(former.spec.memory_key, sum(tensor.nbytes for tensor in tensors), what)
    shard = store.empty(run, former)  # drops what an older stream fills, which ends that stream
    shard.backups.placement = header.target.placement
    async with shard.streams.replace("state", (header.target.placement,), what):
        destination = begin_import(shard, content)
        tensors = [tensor for _, tensor in destination.tensors()]
        tensors += [shard.values.held.receive(older, shard.size_bytes) for older in held]
        await incoming.into([tensor_memory(tensor) for tensor in tensors], what)
        finish_import(shard, version)
    run.kept_versions |= set(held)  # until the next update names them
    return shard_pb2.ReceiveShardStateResponse(version=version)


def find_backup(run: HostedRun, target: shard_pb2.BackupTarget) -> UnitShard:
    """Returns the backup that a primary names.

    Raises:
        NotFoundError: This server does not have the shard.
        StaleEpochError: The shard is a primary here, or has another reservation, or follows a later primary.
    """
    shard = run.exact_shard(target.shard)
    if shard.role is not Role.BACKUP:
        raise StaleEpochError(
            f"this server has no backup of {shard.what}: it is {shard.role.value} here", unit=shard.unit
        )
    if shard.placement != target.reservation:
        raise StaleEpochError(
            f"the backup of {shard.what} has reservation {shard.placement}, not {target.reservation}", unit=shard.unit
        )
    if target.placement < shard.backups.placement:
        raise StaleEpochError(
            f"the backup of {shard.what} follows the primary of relocation {shard.backups.placement}, and the sender "
            f"is that of relocation {target.placement}",
            unit=shard.unit,
        )
    return shard


# ---- steps ----


async def receive_step(
    store: ShardStore, header: shard_pb2.ReplicateStepHeader, incoming: IncomingStream, wait_s: float
) -> shard_pb2.ReplicateStepResponse:
    """Receives a part of what the update of a step needs. A broken stream has no effect.

    Raises:
        ShardwellError: As ``find_backup``.
        DeadlineError: The backup has not reached the version that the step reads.
        StepStateError: The backup is out of sync.
        StaleEpochError: Content of a later generation has arrived.
        InvalidRequestError: The header does not fit the shard, or the stream is broken.
        CapacityError: There is no memory.
    """
    run = store.exact_run(header.context)
    shard, step = find_backup(run, header.target), header.context.step
    if header.content not in _ALLOCATE:
        raise InvalidRequestError(f"content is {header.content}, expected a StepContent")
    check_in_sync(shard)
    await shard.values.wait_for(step, wait_s)
    order = (header.target.placement, header.generation)
    what = f"step {step} of the backup of {shard.what}"
    # A retry ends the stream that it replaces. Different contents of one generation arrive concurrently.
    async with shard.streams.replace(f"step {header.content}", order, what):
        open_step(run, shard, header, step)
        with ExitStack() as undo:
            memory, accept = _ALLOCATE[header.content](store.memory, shard, header, what, undo)
            is_in_file = header.content == _GRADIENT and bool(header.path)
            await incoming.into([] if is_in_file else memory, what)
            if is_in_file:
                numbers = _numbers(shard, header.gradient_indices, what)
                starts = [shard.segments[number].start_bytes - shard.start_bytes for number in numbers]
                await store.memory.in_thread(partial(_read_file, header.path, shard.size_bytes, starts, memory))
            arrived = open_step(run, shard, header, step)  # the content may not be wanted any more
            arrived.confirmed = False
            accept()
            arrived.contents.add(header.content)
            undo.pop_all()
    return shard_pb2.ReplicateStepResponse(generation=header.generation)


def open_step(
    run: HostedRun, shard: UnitShard, content: shard_pb2.ReplicateStepHeader | shard_pb2.BackupToConfirm, step: int
) -> ReceivedStep:
    """Returns what has arrived of a generation. A new generation drops what was received earlier.

    Raises:
        StaleEpochError: As ``find_backup``; or content of a later generation has arrived.
        StepStateError: The backup is out of sync, or not at the version that the step reads.
    """
    if find_backup(run, content.target) is not shard:
        raise StaleEpochError(f"the backup of {shard.what} is built anew", unit=shard.unit)
    check_in_sync(shard)
    if shard.version != step or shard.values.updating:
        raise StepStateError(
            f"the backup of {shard.what} is at version {shard.version}, but the step reads version {step}",
            unit=shard.unit,
        )
    arrived, order = shard.received_step, (content.target.placement, content.generation)
    if arrived is not None and arrived.order > order:
        raise StaleEpochError(
            f"generation {content.generation} of the gradient of {shard.what} was replaced by {arrived.generation}",
            unit=shard.unit,
        )
    if arrived is None or arrived.order < order:
        arrived = ReceivedStep(step, *order)
        shard.begin_step(arrived)
        shard.backups.placement = content.target.placement
    return arrived


def check_in_sync(shard: UnitShard) -> None:
    """Raises StepStateError if a backup has missed a step."""
    if shard.out_of_sync:
        raise StepStateError(f"the backup of {shard.what} is out of sync: {shard.out_of_sync}", unit=shard.unit)


async def confirm(store: ShardStore, request: shard_pb2.ConfirmBackupsRequest) -> shard_pb2.ConfirmBackupsResponse:
    """Confirms that backups have a step, and allocates the memory of the update if the optimizer is known.

    Backups that cannot apply the step are named in the response.

    Raises:
        NotFoundError: This server does not have the run.
        InvalidRequestError: The optimizer is not valid.
    """
    run, response = store.exact_run(request.context), shard_pb2.ConfirmBackupsResponse()
    update = None
    if request.HasField("optimizer"):
        optimizer_checks.validate(request.optimizer)
        update = StepUpdate.of(request.context.step, request.optimizer)
    for item in request.backups:
        reference = item.target.shard
        try:
            await _confirm(store, run, request.context.step, item, update)
        except ShardwellError as error:
            response.failed_backups.add(
                unit_index=found[0].index if (found := run.shards_of(reference.unit)) else 0,
                start_bytes=reference.start_bytes,
                stop_bytes=reference.stop_bytes,
                placement=item.target.reservation,
                error=str(error),
            )
    return response


async def _confirm(
    store: ShardStore, run: HostedRun, step: int, item: shard_pb2.BackupToConfirm, update: StepUpdate | None
) -> None:
    shard = find_backup(run, item.target)
    async with shard.unchanging:
        arrived = open_step(run, shard, item, step)
        missing = set(item.contents) - arrived.contents
        if missing:
            known = dict(zip(shard_pb2.StepContent.values(), shard_pb2.StepContent.keys(), strict=True))
            names = ", ".join(sorted(known.get(content, f"content {content}") for content in missing))
            raise StepStateError(f"the backup of {shard.what} lacks {names} of step {step}", unit=shard.unit)
        if _GRADIENT not in item.contents:
            shard.gradient.set_no_mean()
        if update is not None:
            if not update.runs_on_trainers or _PARTITIONS in item.contents:
                shard.check_update(update)
            await shard.prepare_update(update)
        await shard.record_prepared()
        # Content of a later generation may have arrived meanwhile.
        if open_step(run, shard, item, step) is not arrived:
            raise StaleEpochError(f"the gradient of {shard.what} has since been replaced", unit=shard.unit)
        arrived.confirmed = True


# ---- the contents of a step ----


def _numbers(shard: UnitShard, indices: Sequence[int], what: str) -> list[int]:
    """Returns the segments of parameters. Raises InvalidRequestError if one is unknown or the order is wrong."""
    found = [shard.segment_of[index] for index in indices if index in shard.segment_of]
    if len(found) != len(indices) or sorted(set(found)) != found:
        raise InvalidRequestError(
            f"{what}: parameter indices are {list(indices)[:10]}, expected strictly rising indices of parameters in "
            "the shard"
        )
    return found


def _read_file(path: str, size_bytes: int, starts: Sequence[int], memory: Sequence[memoryview]) -> None:
    """Copies ranges of a file of another server's shared memory. See Note: [Trust between users].

    The primary may write the next gradient into the file meanwhile. It then ignores the acknowledgement of this one.

    Raises:
        NotFoundError: The file is not on this host, or is not trusted.
    """
    try:
        server_folder(path)
        with opened(open_in_folder(path, size_bytes=file_size(size_bytes))) as descriptor:
            for start, target in zip(starts, memory, strict=True):
                done = 0
                while done < len(target):
                    count = os.preadv(descriptor, [target[done:]], start + done)
                    if not count:
                        raise OSError(f"it ends at byte {start + done}")
                    done += count
    except OSError as error:
        raise NotFoundError(f"cannot read {path!r}, a file of the primary's server: {error}") from error


_Allocated = tuple[list[memoryview], Callable[[], None]]
"""Memory that a stream fills, and a function that makes its content that of the step."""


def _allocate_gradient(
    memory: Memory, shard: UnitShard, header: shard_pb2.ReplicateStepHeader, what: str, undo: ExitStack
) -> _Allocated:
    numbers, mean = _numbers(shard, header.gradient_indices, what), shard.gradient.mean
    buffer, views = mean.acquire(numbers, shard.gradient.acquire_mean_file)
    undo.callback(mean.release, buffer)
    return [tensor_memory(view) for view in views], partial(mean.set, buffer, numbers)


def _allocate_contributions(
    memory: Memory, shard: UnitShard, header: shard_pb2.ReplicateStepHeader, what: str, undo: ExitStack
) -> _Allocated:
    received: list[tuple[int, Contribution]] = []
    count = shard.gradient.max_contributions
    for sent in header.contributions:
        if sent.contributor >= count:
            raise InvalidRequestError(f"contributor is {sent.contributor}, but {shard.what} has {count} contributors")
        numbers = _numbers(shard, sent.parameter_indices, what)
        own = memory.grant(shard.size_bytes, shard.gradient.quota, what).incoming(shard.size_bytes)
        undo.callback(own.release)
        views = shard.views(own.buffer)
        contribution = Contribution(_REPLICATED_EPOCH, 0, own.buffer, views, own.release, set(numbers))
        received.append((sent.contributor, contribution))

    def accept() -> None:
        shard.gradient.contributions.clear()
        for contributor, contribution in received:
            shard.gradient.contributions.add(contributor, contribution)

    return [tensor_memory(each.views[number]) for _, each in received for number in sorted(each.present)], accept


def _allocate_partitions(
    memory: Memory, shard: UnitShard, header: shard_pb2.ReplicateStepHeader, what: str, undo: ExitStack
) -> _Allocated:
    staged: list[tuple[int, StagedPartition]] = []
    for sent in header.partitions:
        shard.gradient.check_rank(sent.dp_rank)
        segments = shard.layout.packed_segments(sent.parameter_indices, *shard.partitions.bounds(sent.dp_rank))
        if [segment.parameter_index for segment in segments] != list(sent.parameter_indices):
            raise InvalidRequestError(f"{what}: a parameter is not in the partition of data rank {sent.dp_rank}")
        partition = shard.partitions.allocate(
            _REPLICATED_EPOCH, segments, sent.state, sent.request_id, share=True, what=what
        )
        undo.callback(shard.partitions.free, partition)
        staged.append((sent.dp_rank, partition))

    def accept() -> None:
        shard.partitions.invalidate()
        for rank, partition in staged:
            shard.partitions.stage(rank, partition)

    return [piece for _, partition in staged for piece in partition.memory], accept


_ALLOCATE = {_GRADIENT: _allocate_gradient, _CONTRIBUTIONS: _allocate_contributions, _PARTITIONS: _allocate_partitions}


# ---- roles ----


async def promote(run: HostedRun, request: shard_pb2.PromoteShardsRequest) -> None:
    """Makes backups primaries, raises fences, and sets the backups of the new primaries. Idempotent.

    Call within ``HostedRun.exclusively``.

    A backup of the version that the step in flight reads becomes a primary without gradients: what it has of the step
    is dropped, because work items have new attempts. A backup of the version before must have the prepared step, whose
    update is due.

    Raises:
        NotFoundError: This server does not have a shard.
        StepStateError: A backup is out of sync. Nothing was changed.
    """
    step = request.context.step
    shards = [run.exact_shard(reference) for reference in request.shards]
    for shard in shards:
        if shard.role is Role.BACKUP:
            _check_promotable(shard, step)
    backups: dict[tuple[str, int], list[Backup]] = {(shard.unit, shard.start_bytes): [] for shard in shards}
    for entry in request.backups:
        key = entry.shard.unit, entry.shard.start_bytes
        if key in backups:
            backups[key].append(Backup(entry.server_id, entry.address, entry.placement))
    fault_points.reach("server.promote.before", step=step)
    for shard in shards:
        was_backup = shard.role is Role.BACKUP
        if was_backup:
            if shard.version == step:
                shard.drop_step()
            else:
                await shard.record_prepared()  # no other server has the step that is about to be applied
            shard.take_role(Role.PRIMARY)
        if was_backup or request.placement > shard.backups.placement:
            shard.backups.take_over(request.placement, backups[shard.unit, shard.start_bytes])
    fence(run, shard_pb2.FenceRequest(context=request.context, ranks=request.fences))
    fault_points.reach("server.promote.after", step=step)


def _check_promotable(shard: UnitShard, step: int) -> None:
    if shard.out_of_sync:
        problem = shard.out_of_sync
    elif shard.version == step or (shard.version == step - 1 and shard.has_prepared(step - 1)):
        return
    elif shard.version is None:
        problem = "it has no values yet"
    else:
        problem = f"it is at version {shard.version} without the prepared step, and step {step} is in flight"
    raise StepStateError(f"the backup of {shard.what} cannot become the primary: {problem}", unit=shard.unit)


def release(store: ShardStore, run: HostedRun, request: shard_pb2.ReleaseShardsRequest) -> None:
    """Drops shards of any role whose reservation is not later than the request's. Unknown shards are ignored.

    Call within ``HostedRun.exclusively``.
    """
    for reference in request.shards:
        shard = run.shards.get((reference.unit, reference.start_bytes))
        if shard is not None and shard.stop_bytes == reference.stop_bytes and shard.placement <= request.placement:
            store.release_shard(run, shard)


async def hash_shards(run: HostedRun, request: shard_pb2.HashShardsRequest) -> shard_pb2.HashShardsResponse:
    """Returns the hashes of all published shards: of values, averages and optimizer state.

    Call within ``HostedRun.exclusively``.

    Backups that are being built, and shards that are released meanwhile, are left out.

    Raises:
        StepStateError: A primary is not at the expected version, or its update is being repeated.
    """
    response = shard_pb2.HashShardsResponse()
    shards = sorted((*run.published, *run.backups), key=lambda shard: (shard.index, shard.start_bytes))
    for shard in shards:
        if request.HasField("version") and shard.role is Role.PRIMARY and shard.version != request.version:
            raise StepStateError(
                f"{shard.what} is at version {shard.version}, expected {request.version}: try again", unit=shard.unit
            )
        async with shard.unchanging:
            # The shard may have been released while this call waited for the lock.
            if run.shards.get((shard.unit, shard.start_bytes)) is not shard or shard.version is None:
                continue
            found = response.shards.add(
                unit=shard.unit,
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
                role=ROLES[shard.role],
                version=shard.version or 0,
            )
            for name, tensor in export(shard).tensors():
                parameter, what, _ = name.split("|")
                memory = tensor_memory(tensor)
                xxh3 = await shard.memory.in_thread(partial(xxhash.xxh3_64_intdigest, memory))
                found.tensors.add(parameter=parameter, name=what, xxh3=xxh3)
    return response
