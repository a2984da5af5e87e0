"""Requests of the shm transport. They arrive as rpcs; ReduceGradientBuffer may also arrive over a socket."""

from __future__ import annotations

from functools import partial

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.requests import partitions
from shardwell_server.shard.requests.pushes import Push, check_leases
from shardwell_server.shard.state.partitions import PartitionState, StagedPartition
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.transports.shm_buffers import SharedStagingBuffer
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_wire.errors import ConflictError, StaleEpochError, StepStateError
from shardwell_wire.partitions import state_places
from shardwell_wire.v1 import shard_pb2


async def locate_shard(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.LocateShardRequest, wait_s: float
) -> shard_pb2.LocateShardResponse:
    """Returns the file that holds a shard, after waiting for a version.

    Raises:
        ConflictError: The session is not open, or the shard is not in shared memory.
        ShardwellError: As ``Values.read``.
    """
    store.lease.check()
    run = store.exact_run(request)
    session = shm.session(request.transport_id, run.identity)
    shard = run.primary(request.unit, request.start_bytes if request.HasField("start_bytes") else None)
    wanted = request.version if request.HasField("version") else None
    version, source = await shard.values.read(wanted, wait_s)
    shard.values.release(source)
    live = shard.values.live
    assert live is not None
    if live.file is None:
        raise ConflictError(f"{shard.what} is not in shared memory ({live.why_not_shared}): use another transport")
    if shard.spec.asynchronous:
        raise ConflictError(
            f"{shard.what} cannot be mapped: its newest version changes while work items read it. Use another transport"
        )
    segment = shard_pb2.SharedSegment(file=session.offer(live.file.shared), size_bytes=shard.size_bytes)
    return shard_pb2.LocateShardResponse(version=version, segment=segment)


def open_gradient_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.OpenGradientBufferRequest
) -> shard_pb2.OpenGradientBufferResponse:
    """Makes a shared gradient buffer. Raises as ``ShmSession.open_gradient_buffer`` does."""
    store.lease.check()
    run = store.exact_run(request)
    session = shm.session(request.transport_id, run.identity)
    shard = run.primary(request.unit, request.start_bytes if request.HasField("start_bytes") else None)
    number, gradient_buffer = session.open_gradient_buffer(shard)
    return shard_pb2.OpenGradientBufferResponse(gradient_buffer_id=number, file=session.offer(gradient_buffer.file))


def close_shared_buffers(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.CloseSharedBuffersRequest
) -> shard_pb2.CloseSharedBuffersResponse:
    """Closes buffers of a session. Raises ConflictError if the session is not open."""
    run = store.exact_run(request)
    shm.session(request.transport_id, run.identity).close_buffers(request.buffer_ids)
    return shard_pb2.CloseSharedBuffersResponse()


async def reduce_gradient_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.ReduceGradientBufferRequest, wait_s: float
) -> shard_pb2.ReduceGradientBufferResponse:
    """Makes the gradient in a shared gradient buffer one part of a contribution. Raises as ``Push.adopt`` does.

    Raises:
        AccessError: The sender does not prove the lease on the rank.
        DuplicateError: The request id was used for another request.
        NotFoundError: This server does not hold the run or the unit.
        ConflictError: The session is not open, or has no such gradient buffer.
    """
    header = request.header
    check_leases(store, header)
    # Checked as ReduceScatter: a push may be repeated over another transport, or from another gradient buffer.
    store.requests.check_content("ReduceScatter", header.context, header)
    store.lease.check()
    run = store.exact_run(header.context)
    gradient_buffer = shm.session(request.transport_id, run.identity).gradient_buffer(request.gradient_buffer_id)
    shard = run.primary(header.unit, header.start_bytes, header.stop_bytes)
    duplicate = await Push(store, run, shard, header).adopt(gradient_buffer, wait_s)
    return shard_pb2.ReduceGradientBufferResponse(
        duplicate=duplicate, version=header.context.step, adopted=gradient_buffer.claimed
    )


async def open_staging_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.OpenStagingBufferRequest
) -> shard_pb2.OpenStagingBufferResponse:
    """Copies the gradient of a partition into a staging buffer of the trainer.

    Raises:
        InvalidRequestError: The range is not the partition's.
        StaleEpochError: The lease is over, or a later lease has staged the partition.
        StepStateError: The step is not prepared, or its gradient has been discarded.
        CapacityError: The buffer does not fit the memory budget or the shared memory.
        ConflictError: The optimizer's state is not in shared memory, or the buffer was evicted.
    """
    read = request.partition
    store.lease.check()
    run = store.exact_run(read.context)
    session = shm.session(request.transport_id, run.identity)
    shard = run.primary(read.unit, read.start_bytes, read.stop_bytes)
    generation = partitions.check_lease(run, shard, read)
    if shard.partitions.staged_epoch(read.dp_rank) > read.context.epoch:
        raise StaleEpochError(
            f"partition of {shard.what}, rank {read.dp_rank}: the lease is over, a later lease has staged it"
        )
    state = shard.partitions.states.get(read.dp_rank, PartitionState())
    if state.pooled:
        raise ConflictError(
            f"the optimizer state of {shard.what}, rank {read.dp_rank}, is not in shared memory: stream the partition"
        )
    number, staging_buffer = session.acquire_staging_buffer(shard, read.dp_rank)
    new_state = staging_buffer.allocate_state(state.data.numel()) if state.shared is not None else None
    present = partitions.mean_gradients(shard, shard.layout.segments(read.start_bytes, read.stop_bytes))

    def compute_copy() -> None:
        for segment, gradient in present:
            start = segment.start_bytes - read.start_bytes
            staging_buffer.gradients[start : start + segment.size_bytes].view(gradient.dtype).copy_(gradient)

    await store.in_thread(compute_copy)
    # During the copy, the gradient may have been discarded and its memory reused.
    if partitions.check_lease(run, shard, read) != generation:
        raise StepStateError(f"the gradient of step {read.context.step} of {shard.what} has been discarded")
    staging_buffer.check_open()
    header = shard_pb2.ReadPartitionHeader(
        version=read.context.step,
        generation=generation,
        gradient_indices=[segment.parameter_index for segment, _ in present],
        state=state.tensors,
    )
    return shard_pb2.OpenStagingBufferResponse(
        header=header,
        staging_buffer_id=number,
        file=session.offer(staging_buffer.file),
        state_file="" if state.shared is None else session.offer(state.shared),
        new_state_file="" if new_state is None else session.offer(new_state),
    )


async def stage_staging_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.StageStagingBufferRequest
) -> shard_pb2.StageStagingBufferResponse:
    """Stages the values and state in a staging buffer. Raises as ``partitions.stage`` does.

    Raises:
        ConflictError: The buffer is closed, or the state does not fit it.
    """
    header = request.header
    store.lease.check()
    run = store.exact_run(header.context)
    session = shm.session(request.transport_id, run.identity)
    shard = run.primary(header.unit, header.start_bytes, header.stop_bytes)
    staging_buffer = session.staging_buffer(request.staging_buffer_id, shard, header.dp_rank)
    what = f"partition of {shard.what}, rank {header.dp_rank}"
    partitions.check_current(run, shard, header, what)
    segments = partitions.updated_segments(shard, header, what)
    partitions.check_state(shard, header, what)
    values = [
        staging_buffer.values[segment.start_bytes - header.start_bytes : segment.stop_bytes - header.start_bytes]
        for segment in segments
    ]

    async def accept() -> None:
        # Checked again: the lease or the gradient may have changed while the values were checked.
        partitions.check_current(run, shard, header, what)
        staging_buffer.check_open()
        state = _written_state(shard, staging_buffer, header)
        staged = StagedPartition(header.context.epoch, segments, values, state, staging_buffer.release)
        shard.partitions.stage(header.dp_rank, staged)
        staging_buffer.mark_staged()

    await store.in_thread(partial(partitions.compute_check_finite, shard, segments, values, what))
    await uninterrupted(run.exclusively(accept))
    return shard_pb2.StageStagingBufferResponse(version=header.context.step)


def _written_state(
    shard: UnitShard, staging_buffer: SharedStagingBuffer, header: shard_pb2.StagePartitionHeader
) -> PartitionState:
    before = shard.partitions.states.get(header.dp_rank, PartitionState())
    if list(header.state) != list(before.tensors):
        raise ConflictError(
            f"the optimizer state of {shard.what}, rank {header.dp_rank}, now has other tensors: stream the partition"
        )
    shared = staging_buffer.written_state(state_places(header.state)[1])
    data = PartitionState().data if shared is None else shared.tensor
    return PartitionState(tuple(header.state), data, shared, staging_buffer, header.context.request_id)
