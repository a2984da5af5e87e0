"""Requests of the coordinator that change roles: promotion and release of shards; and hashes that compare copies.

Call each function within ``HostedRun.exclusively``.
"""

from __future__ import annotations

from functools import partial

import xxhash

from shardwell_server.shard.concurrency import InThread
from shardwell_server.shard.requests import steps
from shardwell_server.shard.requests.peers import tensor_memory
from shardwell_server.shard.shard_spec import ROLES, Role
from shardwell_server.shard.state.portable_state import export
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import Backup, UnitShard
from shardwell_wire import fault_points
from shardwell_wire.errors import NotFoundError, StepStateError
from shardwell_wire.v1 import shard_pb2


async def promote(run: HostedRun, in_thread: InThread, request: shard_pb2.PromoteShardsRequest) -> None:
    """Makes backups primaries, raises fences, and sets the backups of the new primaries. Idempotent.

    A backup of the version that the step in flight reads becomes a primary without gradients: what it has of the step
    is dropped, because work items have new attempts. A backup of the version before must have the prepared step, whose
    update is due.

    Raises:
        NotFoundError: This server does not have a shard.
        StepStateError: A backup is out of sync. Nothing was changed.
    """
    step = request.context.step
    shards = [_exact(run, reference) for reference in request.shards]
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
                await shard.record_prepared(in_thread)  # no other server has the step that is about to be applied
            shard.take_role(Role.PRIMARY)
        if was_backup or request.placement > shard.backups.placement:
            shard.backups.take_over(request.placement, backups[shard.unit, shard.start_bytes])
    steps.fence(run, shard_pb2.FenceRequest(context=request.context, ranks=request.fences))
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
    """Drops shards of any role whose reservation is not later than the request's. Unknown shards are ignored."""
    for reference in request.shards:
        shard = run.shards.get((reference.unit, reference.start_bytes))
        if shard is not None and shard.stop_bytes == reference.stop_bytes and shard.placement <= request.placement:
            store.release_shard(run, shard)


async def hash_shards(
    run: HostedRun, in_thread: InThread, request: shard_pb2.HashShardsRequest
) -> shard_pb2.HashShardsResponse:
    """Returns the hashes of all published shards: of values, averages and optimizer state.

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
                xxh3 = await in_thread(partial(xxhash.xxh3_64_intdigest, memory))
                found.tensors.add(parameter=parameter, name=what, xxh3=xxh3)
    return response


def _exact(run: HostedRun, reference: shard_pb2.ShardReference) -> UnitShard:
    shard = run.shard(reference.unit, reference.start_bytes, reference.stop_bytes)
    if shard.spec.reference != (reference.unit, reference.start_bytes, reference.stop_bytes):
        raise NotFoundError(
            f"this server has [{shard.start_bytes}, {shard.stop_bytes}) of {shard.what}, not [{reference.start_bytes}, "
            f"{reference.stop_bytes})",
            unit=shard.unit,
        )
    return shard
