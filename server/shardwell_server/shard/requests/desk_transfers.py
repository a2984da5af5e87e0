"""How a trainer of this host finds a slice of a prepared step in shared memory, and stages what it lays there."""

from __future__ import annotations

from functools import partial

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.lanes.shm_lane import ShmLane
from shardwell_server.shard.memory.slice_desks import Desk
from shardwell_server.shard.requests.slice_checks import (
    check_lease,
    check_state,
    check_wanted,
    compute_check_finite,
    updated_segments,
)
from shardwell_server.shard.requests.slice_transfers import gradients_of
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.slices import SliceState, StagedSlice
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import ConflictError, StaleEpochError, StepStateError
from shardwell_wire.slices import state_places
from shardwell_wire.v1 import shard_pb2


async def open_desk(
    store: ShardStore, run: Run, lane: ShmLane, request: shard_pb2.ReadSliceRequest
) -> shard_pb2.OpenDeskResponse:
    """Lays the gradient of a slice on the trainer's desk, which is made if there is none that is free.

    Raises:
        InvalidRequestError: The range is not the slice's.
        StaleEpochError: The lease is over, or what a later one sent is here.
        StepStateError: The step is not prepared, or not any more.
        CapacityError: There is no room for a desk.
        ConflictError: The optimizer's state is not in shared memory, or others needed the room.
    """
    shard = run.shard(request.unit)
    generation = check_lease(run, shard, request)
    if shard.slices.staged_epoch(request.dp_rank) > request.context.epoch:
        raise StaleEpochError(f"{shard.what}, rank {request.dp_rank}: the lease is over, a later one has staged it")
    state = shard.slices.states.get(request.dp_rank, SliceState())
    if state.pooled:
        raise ConflictError(f"{shard.what}: the state of rank {request.dp_rank} is not in shared memory: stream it")
    number, desk = lane.desk(shard, request.dp_rank)
    new_state = desk.room_for_state(state.data.numel()) if state.shared is not None else None
    present = gradients_of(shard, shard.layout.segments(request.start_bytes, request.stop_bytes))

    def compute_lay() -> None:
        for segment, gradient in present:
            start = segment.start_bytes - request.start_bytes
            desk.gradients[start : start + segment.size_bytes].view(gradient.dtype).copy_(gradient)

    await store.in_thread(compute_lay)
    # The gradient may have become void, and its memory another's, while it was copied.
    if check_lease(run, shard, request) != generation:
        raise StepStateError(f"{shard.what}: the gradient of step {request.context.step} is void, or used up")
    desk.check_open()
    header = shard_pb2.ReadSliceHeader(
        version=request.context.step,
        generation=generation,
        gradient_indices=[segment.parameter_index for segment, _ in present],
        state=state.tensors,
    )
    return shard_pb2.OpenDeskResponse(
        header=header,
        desk=number,
        path=desk.path,
        state_path="" if state.shared is None else state.shared.path,
        new_state_path="" if new_state is None else new_state.path,
    )


async def stage_desk(store: ShardStore, run: Run, desk: Desk, header: shard_pb2.StageSliceHeader) -> None:
    """Stages what lies on a desk; raises as ``slice_transfers.stage`` does.

    Raises:
        ConflictError: The desk was given up, or the state does not fit it.
    """
    shard = run.shard(header.unit)
    what = f"slice of {shard.what}, rank {header.dp_rank}"
    check_wanted(run, shard, header, what)
    segments = updated_segments(shard, header, what)
    check_state(shard, header, what)
    values = [
        desk.values[segment.start_bytes - header.start_bytes : segment.stop_bytes - header.start_bytes]
        for segment in segments
    ]

    async def accept() -> None:
        check_wanted(run, shard, header, what)
        desk.check_open()
        state = _written_state(shard, desk, header)
        staged = StagedSlice(header.context.epoch, segments, values, state, desk.give_back)
        shard.slices.stage(header.dp_rank, staged)
        desk.hold()

    await store.in_thread(partial(compute_check_finite, shard, segments, values, what))
    await uninterrupted(run.alone(accept))


def _written_state(shard: UnitShard, desk: Desk, header: shard_pb2.StageSliceHeader) -> SliceState:
    before = shard.slices.states.get(header.dp_rank, SliceState())
    if list(header.state) != list(before.tensors):
        raise ConflictError(f"{shard.what}: the state of rank {header.dp_rank} has other tensors now: stream it")
    shared = desk.written_state(state_places(header.state)[1])
    data = SliceState().data if shared is None else shared.tensor
    return SliceState(tuple(header.state), data, shared, desk, header.context.request_id)
