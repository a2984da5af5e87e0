"""How a trainer reads a partition of a prepared step and stages new values for it, as streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial

import torch

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.memory.budget import Cover
from shardwell_server.shard.requests.partition_checks import (
    check_lease,
    check_prepared,
    check_state,
    check_wanted,
    compute_check_finite,
    updated_segments,
)
from shardwell_server.shard.requests.streams import IncomingStream
from shardwell_server.shard.state.parameters import Parameters
from shardwell_server.shard.state.partitions import PartitionState, StagedPartition
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire import codec
from shardwell_wire.errors import StepStateError
from shardwell_wire.layout import Segment
from shardwell_wire.partitions import state_places
from shardwell_wire.v1 import shard_pb2


async def read(
    store: ShardStore, request: shard_pb2.ReadPartitionRequest, wait_s: float
) -> AsyncGenerator[bytes, None]:
    """Yields the messages of a ReadPartition.

    Raises:
        InvalidRequestError: The range is not the partition's.
        StaleEpochError: The lease is over.
        StepStateError: The step is not prepared, or not any more.
    """
    run = store.exact_run(request.context)
    shard = run.shard(request.unit)
    check_lease(run, shard, request)
    version, parameters = await shard.values.read(request.context.step, wait_s)
    try:
        generation, buffer = check_lease(run, shard, request), parameters.buffer
        header, pieces = _content(shard, parameters, request, version)
        messages = codec.encode_stream(shard_pb2.ReadPartitionResponse(header=header), pieces)
        while True:
            # Asked before every look: afterwards the memory may be another's.
            parameters.check()
            if shard.partitions.generation != generation or parameters.buffer is not buffer:
                raise StepStateError(f"{shard.what}: the gradient of step {version} is void, or used up")
            if (message := next(messages, None)) is None:
                return
            yield message
    finally:
        shard.values.release(parameters)


async def stage(
    store: ShardStore, header: shard_pb2.StagePartitionHeader, incoming: IncomingStream
) -> shard_pb2.StagePartitionResponse:
    """Receives a partition's new values and state; keeps nothing of a stream that is not complete and correct.

    Raises:
        InvalidRequestError: What is announced does not fit the partition, or the stream is broken.
        StaleEpochError: The lease is over, or what a later one sent is here.
        StepStateError: The step is not prepared, or its gradient is another by now.
        NonFiniteError: A value is NaN or infinity.
        CapacityError: There is no room for it.
    """
    run = store.exact_run(header.context)
    shard = run.shard(header.unit)
    what = f"partition of {shard.what}, rank {header.dp_rank}"
    check_wanted(run, shard, header, what)
    segments = updated_segments(shard, header, what)
    check_state(shard, header, what)

    async def take() -> None:
        sizes = [segment.size_bytes for segment in segments]
        room = store.memory.try_room(sum(sizes) + state_places(header.state)[1], Cover(0), what)
        buffer, is_staged = room.buffer(sum(sizes)), False
        state, values = PartitionState(), torch.split(buffer, sizes)

        def give_back() -> None:
            store.memory.pool.give(buffer)
            room.give()

        async def accept() -> None:
            nonlocal is_staged
            check_wanted(run, shard, header, what)
            shard.partitions.stage(
                header.dp_rank, StagedPartition(header.context.epoch, segments, values, state, give_back)
            )
            is_staged = True

        try:
            state = shard.partitions.make_state(header.state, header.context.request_id, share=header.share_state)
            await incoming.into([codec.memory_at(buffer.data_ptr(), buffer.numel()), *state.pieces], what)
            await store.in_thread(partial(compute_check_finite, shard, segments, values, what))
            await uninterrupted(run.alone(accept))
        finally:
            if not is_staged:
                shard.partitions.free_unsettled(state)
                give_back()

    await shard.streams.replace(f"partition {header.dp_rank}", (header.context.epoch,), what, take)
    return shard_pb2.StagePartitionResponse(version=header.context.step)


async def confirm(run: Run, request: shard_pb2.ConfirmPartitionsRequest) -> shard_pb2.ConfirmPartitionsResponse:
    """Says that every partition of the prepared step is staged; goes ``Run.alone``.

    Raises:
        StepStateError: The step is not prepared.
        IncompleteStepError: A partition is not staged.
    """
    for shard in run.published:
        check_prepared(run, shard, request.context.step)
        shard.check_partitions()
    return shard_pb2.ConfirmPartitionsResponse()


def _content(
    shard: UnitShard, parameters: Parameters, request: shard_pb2.ReadPartitionRequest, version: int
) -> tuple[shard_pb2.ReadPartitionHeader, list[memoryview]]:
    """What is sent, as views of where it lies."""
    segments = shard.layout.segments(request.start_bytes, request.stop_bytes)
    state = shard.partitions.states.get(request.dp_rank, PartitionState())
    held = bool(request.cached_request_id) and request.cached_request_id == state.request_id
    present = gradients_of(shard, segments)
    gradients = [codec.memory_at(piece.data_ptr(), piece.nbytes) for _, piece in present]
    header = shard_pb2.ReadPartitionHeader(
        version=version,
        generation=shard.partitions.generation,
        gradient_indices=[segment.parameter_index for segment, _ in present],
        state=() if held else state.tensors,
        cache_is_current=held,
    )
    if held:
        return header, gradients
    values = [parameters.memory(*_place(shard, segment)) for segment in segments]
    return header, [*values, *gradients, *state.pieces]


def gradients_of(shard: UnitShard, segments: Sequence[Segment]) -> list[tuple[Segment, torch.Tensor]]:
    """The parts of parameters' mean gradients that lie in segments, which are inside the shard's; some have none."""
    assert shard.reduced is not None
    present = []
    for segment in segments:
        number = shard.segment_of[segment.parameter_index]
        gradient = shard.reduced.gradients[number]
        if gradient is not None:
            first = shard.segments[number].start_element
            present.append((segment, gradient[segment.start_element - first : segment.stop_element - first]))
    return present


def _place(shard: UnitShard, segment: Segment) -> tuple[int, int]:
    return segment.start_bytes - shard.start_bytes, segment.stop_bytes - shard.start_bytes
