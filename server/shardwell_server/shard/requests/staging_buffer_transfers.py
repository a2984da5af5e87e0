"""How a trainer of this host finds a partition of a prepared step in shared memory, and stages what it lays there."""

from __future__ import annotations

from functools import partial

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.memory.staging_buffers import StagingBuffer
from shardwell_server.shard.requests.partition_checks import (
    check_lease,
    check_state,
    check_wanted,
    compute_check_finite,
    updated_segments,
)
from shardwell_server.shard.requests.partition_transfers import gradients_of
from shardwell_server.shard.state.partitions import PartitionState, StagedPartition
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_wire.errors import ConflictError, StaleEpochError, StepStateError
from shardwell_wire.partitions import state_places
from shardwell_wire.v1 import shard_pb2


async def open_staging_buffer(
    store: ShardStore, run: Run, transport: ShmTransport, request: shard_pb2.ReadPartitionRequest
) -> shard_pb2.OpenStagingBufferResponse:
    """Lays the gradient of a partition on the trainer's staging buffer, which is made if there is none that is free.

    Raises:
        InvalidRequestError: The range is not the partition's.
        StaleEpochError: The lease is over, or what a later one sent is here.
        StepStateError: The step is not prepared, or not any more.
        CapacityError: There is no room for a staging buffer.
        ConflictError: The optimizer's state is not in shared memory, or others needed the room.
    """
    shard = run.shard(request.unit)
    generation = check_lease(run, shard, request)
    if shard.partitions.staged_epoch(request.dp_rank) > request.context.epoch:
        raise StaleEpochError(f"{shard.what}, rank {request.dp_rank}: the lease is over, a later one has staged it")
    state = shard.partitions.states.get(request.dp_rank, PartitionState())
    if state.pooled:
        raise ConflictError(f"{shard.what}: the state of rank {request.dp_rank} is not in shared memory: stream it")
    number, staging_buffer = transport.staging_buffer(shard, request.dp_rank)
    new_state = staging_buffer.room_for_state(state.data.numel()) if state.shared is not None else None
    present = gradients_of(shard, shard.layout.segments(request.start_bytes, request.stop_bytes))

    def compute_lay() -> None:
        for segment, gradient in present:
            start = segment.start_bytes - request.start_bytes
            staging_buffer.gradients[start : start + segment.size_bytes].view(gradient.dtype).copy_(gradient)

    await store.in_thread(compute_lay)
    # The gradient may have become void, and its memory another's, while it was copied.
    if check_lease(run, shard, request) != generation:
        raise StepStateError(f"{shard.what}: the gradient of step {request.context.step} is void, or used up")
    staging_buffer.check_open()
    header = shard_pb2.ReadPartitionHeader(
        version=request.context.step,
        generation=generation,
        gradient_indices=[segment.parameter_index for segment, _ in present],
        state=state.tensors,
    )
    return shard_pb2.OpenStagingBufferResponse(
        header=header,
        staging_buffer_id=number,
        path=staging_buffer.path,
        state_path="" if state.shared is None else state.shared.path,
        new_state_path="" if new_state is None else new_state.path,
    )


async def stage_staging_buffer(
    store: ShardStore, run: Run, staging_buffer: StagingBuffer, header: shard_pb2.StagePartitionHeader
) -> None:
    """Stages what lies on a staging buffer; raises as ``partition_transfers.stage`` does.

    Raises:
        ConflictError: The staging buffer was given up, or the state does not fit it.
    """
    shard = run.shard(header.unit)
    what = f"partition of {shard.what}, rank {header.dp_rank}"
    check_wanted(run, shard, header, what)
    segments = updated_segments(shard, header, what)
    check_state(shard, header, what)
    values = [
        staging_buffer.values[segment.start_bytes - header.start_bytes : segment.stop_bytes - header.start_bytes]
        for segment in segments
    ]

    async def accept() -> None:
        check_wanted(run, shard, header, what)
        staging_buffer.check_open()
        state = _written_state(shard, staging_buffer, header)
        staged = StagedPartition(header.context.epoch, segments, values, state, staging_buffer.give_back)
        shard.partitions.stage(header.dp_rank, staged)
        staging_buffer.hold()

    await store.in_thread(partial(compute_check_finite, shard, segments, values, what))
    await uninterrupted(run.alone(accept))


def _written_state(
    shard: UnitShard, staging_buffer: StagingBuffer, header: shard_pb2.StagePartitionHeader
) -> PartitionState:
    before = shard.partitions.states.get(header.dp_rank, PartitionState())
    if list(header.state) != list(before.tensors):
        raise ConflictError(f"{shard.what}: the state of rank {header.dp_rank} has other tensors now: stream it")
    shared = staging_buffer.written_state(state_places(header.state)[1])
    data = PartitionState().data if shared is None else shared.tensor
    return PartitionState(tuple(header.state), data, shared, staging_buffer, header.context.request_id)
