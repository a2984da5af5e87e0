"""How a trainer reads a slice of a prepared step and stages new values for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

import torch

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.memory import Cover
from shardwell_server.shard.parameters import Parameters
from shardwell_server.shard.runs import Run
from shardwell_server.shard.slices import SliceState, StagedSlice
from shardwell_server.shard.store import ShardStore
from shardwell_server.shard.streams import IncomingStream
from shardwell_server.shard.unit_shard import UnitShard
from shardwell_wire import codec
from shardwell_wire.errors import InvalidRequestError, NonFiniteError, StaleEpochError, StepStateError
from shardwell_wire.layout import Segment
from shardwell_wire.slices import state_size
from shardwell_wire.v1 import shard_pb2

MAX_NAME_LENGTH = 200

_Request = shard_pb2.ReadSliceRequest | shard_pb2.StageSliceHeader


async def read(store: ShardStore, request: shard_pb2.ReadSliceRequest, wait_s: float) -> AsyncIterator[bytes]:
    """Yields the messages of a ReadSlice.

    Raises:
        InvalidRequestError: The range is not the slice's.
        StaleEpochError: The lease is over.
        StepStateError: The step is not prepared, or not any more.
    """
    run = store.run(request.context.run)
    shard = run.shard(request.unit)
    _check(run, shard, request)
    version, parameters = await shard.values.read(request.context.step, wait_s)
    try:
        generation, buffer = _check(run, shard, request), parameters.buffer
        header, pieces = _content(shard, parameters, request, version)
        messages = codec.encode_stream(shard_pb2.ReadSliceResponse(header=header), pieces)
        while True:
            # Asked before every look: afterwards the memory may be another's.
            parameters.check()
            if shard.slices.generation != generation or parameters.buffer is not buffer:
                raise StepStateError(f"{shard.what}: the gradient of step {version} is void, or used up")
            if (message := next(messages, None)) is None:
                return
            yield message
    finally:
        shard.values.release(parameters)


async def stage(
    store: ShardStore, header: shard_pb2.StageSliceHeader, incoming: IncomingStream
) -> shard_pb2.StageSliceResponse:
    """Receives a slice's new values and state; keeps nothing of a stream that is not complete and correct.

    Raises:
        InvalidRequestError: What is announced does not fit the slice, or the stream is broken.
        StaleEpochError: The lease is over, or what a later one sent is here.
        StepStateError: The step is not prepared, or its gradient is another by now.
        NonFiniteError: A value is NaN or infinity.
        CapacityError: There is no room for it.
    """
    run = store.run(header.context.run)
    shard = run.shard(header.unit)
    what = f"slice of {shard.what}, rank {header.dp_rank}"
    _check_wanted(run, shard, header, what)
    segments = _updated_segments(shard, header, what)
    _check_state(shard, header, what)

    async def take() -> None:
        sizes = sum(segment.size_bytes for segment in segments), sum(map(state_size, header.state))
        room, is_staged = store.memory.try_room(sum(sizes), Cover(0), what), False
        values, state = (torch.empty(size, dtype=torch.uint8) for size in sizes)

        async def accept() -> None:
            nonlocal is_staged
            _check_wanted(run, shard, header, what)
            shard.slices.stage(
                header.dp_rank,
                StagedSlice(header.context.epoch, segments, values, SliceState(tuple(header.state), state), room),
            )
            run.fences.raise_epoch(header.dp_rank, header.context.epoch)
            is_staged = True

        try:
            await incoming.into([codec.memory_at(part.data_ptr(), part.numel()) for part in (values, state)], what)
            await store.in_thread(partial(_compute_check_finite, shard, segments, values, what))
            await uninterrupted(run.alone(accept))
        finally:
            if not is_staged:
                room.give()

    await shard.streams.replace(f"slice {header.dp_rank}", (header.context.epoch,), what, take)
    return shard_pb2.StageSliceResponse(version=header.context.step)


async def confirm(run: Run, request: shard_pb2.ConfirmSlicesRequest) -> shard_pb2.ConfirmSlicesResponse:
    """Says that every slice of the prepared step is staged; goes ``Run.alone``.

    Raises:
        StepStateError: The step is not prepared.
        IncompleteStepError: A slice is not staged.
    """
    for shard in run.shards.values():
        _check_prepared(run, shard, request.context.step)
        shard.slices.check_staged()
    return shard_pb2.ConfirmSlicesResponse()


def _check_prepared(run: Run, shard: UnitShard, step: int) -> None:
    prepared = run.prepared
    if prepared is None or prepared.step != step or prepared.answer is None or shard.version != step:
        raise StepStateError(f"step {step} of {shard.what} is not prepared here: its gradient is not complete")


def _check(run: Run, shard: UnitShard, request: _Request) -> int:
    """Raises what keeps a slice from being read or staged; returns the generation of its gradient."""
    run.fences.check_epoch(request.dp_rank, request.context.epoch)
    if request.dp_rank >= shard.dp:
        raise InvalidRequestError(f"dp_rank {request.dp_rank}: {shard.what} has {shard.dp} data ranks")
    start, stop = shard.slices.bounds(request.dp_rank)
    if (request.start_bytes, request.stop_bytes) != (start, stop):
        raise InvalidRequestError(
            f"{shard.what}: the slice of data rank {request.dp_rank} is [{start}, {stop}) here, "
            f"got [{request.start_bytes}, {request.stop_bytes})"
        )
    _check_prepared(run, shard, request.context.step)
    return shard.slices.generation


def _check_wanted(run: Run, shard: UnitShard, header: shard_pb2.StageSliceHeader, what: str) -> None:
    if _check(run, shard, header) != header.generation:
        raise StepStateError(f"{what}: the gradient that it was computed from is void: read it again")
    if shard.slices.staged_epoch(header.dp_rank) > header.context.epoch:
        raise StaleEpochError(f"{what}: the lease is over, a later one has staged it")


def _content(
    shard: UnitShard, parameters: Parameters, request: shard_pb2.ReadSliceRequest, version: int
) -> tuple[shard_pb2.ReadSliceHeader, list[memoryview]]:
    """What is sent, as views of where it lies."""
    assert shard.reduced is not None
    segments = shard.layout.segments(request.start_bytes, request.stop_bytes)
    state = shard.slices.states.get(request.dp_rank, SliceState())
    present = [(segment, piece) for segment in segments if (piece := _gradient(shard, segment)) is not None]
    header = shard_pb2.ReadSliceHeader(
        version=version,
        generation=shard.slices.generation,
        gradient_indices=[segment.parameter_index for segment, _ in present],
        state=state.tensors,
    )
    return header, [
        *(parameters.memory(*_place(shard, segment)) for segment in segments),
        *(codec.memory_at(piece.data_ptr(), piece.nbytes) for _, piece in present),
        codec.memory_at(state.data.data_ptr(), state.data.numel()),
    ]


def _gradient(shard: UnitShard, segment: Segment) -> torch.Tensor | None:
    """The part of a parameter's mean gradient that lies in a segment, which is inside one of the shard's."""
    assert shard.reduced is not None
    number = shard.segment_of[segment.parameter_index]
    gradient = shard.reduced.gradients[number]
    if gradient is None:
        return None
    first = shard.segments[number].start_element
    return gradient[segment.start_element - first : segment.stop_element - first]


def _place(shard: UnitShard, segment: Segment) -> tuple[int, int]:
    return segment.start_bytes - shard.start_bytes, segment.stop_bytes - shard.start_bytes


def _updated_segments(shard: UnitShard, header: shard_pb2.StageSliceHeader, what: str) -> Sequence[Segment]:
    """The segments with new values; raises InvalidRequestError if one is not in the slice."""
    segments = shard.layout.packed_segments(header.parameter_indices, header.start_bytes, header.stop_bytes)
    if [segment.parameter_index for segment in segments] != list(header.parameter_indices):
        raise InvalidRequestError(
            f"{what}: parameter_indices {list(header.parameter_indices)[:10]} must rise and lie in the slice"
        )
    return segments


def _check_state(shard: UnitShard, header: shard_pb2.StageSliceHeader, what: str) -> None:
    here = {segment.parameter_index for segment in shard.layout.segments(header.start_bytes, header.stop_bytes)}
    seen = set()
    for tensor in header.state:
        key = (tensor.parameter_index, tensor.name)
        if key in seen or tensor.parameter_index not in here or not 0 < len(tensor.name) <= MAX_NAME_LENGTH:
            raise InvalidRequestError(
                f"{what}: state {tensor.name[:MAX_NAME_LENGTH]!r} of parameter {tensor.parameter_index}: expected a "
                f"name of 1 to {MAX_NAME_LENGTH} characters, once per parameter, of a parameter in the slice"
            )
        seen.add(key)
        try:
            state_size(tensor)
        except KeyError:
            raise InvalidRequestError(f"{what}: state {tensor.name!r} is of unknown dtype {tensor.dtype}") from None


def _compute_check_finite(shard: UnitShard, segments: Sequence[Segment], values: torch.Tensor, what: str) -> None:
    for segment, piece in zip(segments, _pieces(segments, values), strict=True):
        parameter = shard.layout.parameters[segment.parameter_index]
        # A copy: packed values of mixed dtypes need not be aligned.
        if not bool(torch.isfinite(piece.clone().view(getattr(torch, parameter.dtype))).all()):
            raise NonFiniteError(
                f"{what}: the new value of parameter {parameter.name!r} has NaN or infinity; nothing was updated",
                unit=shard.unit,
                parameter=parameter.name,
            )


def _pieces(segments: Sequence[Segment], values: torch.Tensor) -> Iterator[torch.Tensor]:
    position = 0
    for segment in segments:
        yield values[position : position + segment.size_bytes]
        position += segment.size_bytes
