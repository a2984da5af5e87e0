"""Optimizer partitions: checks of their requests, and reading and staging them over gRPC."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.memory.buffer_reuse import tensor_memory
from shardwell_server.shard.requests.client_streams import IncomingStream
from shardwell_server.shard.requests.replication import Replicator
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.partitions import PartitionState
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_server.shard.unit.values import VersionBytes
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import InvalidRequestError, NonFiniteError, StaleEpochError, StepStateError
from shardwell_wire.model.layout import Segment
from shardwell_wire.model.topology import TRAINER_PREFIX, check_state_tensor
from shardwell_wire.v1 import common_pb2, shard_pb2

MAX_NAME_LENGTH = 200

_UNNAMED_OPTIMIZER = common_pb2.OptimizerStep(algorithm=f"{TRAINER_PREFIX}optimizer")
"""Stands for the optimizer of a request that names none. The backups only need to know where it runs."""


# ---- checks ----


def check_prepared(run: HostedRun, shard: UnitShard, step: int) -> None:
    """Raises StepStateError unless a shard has the complete gradient of a step."""
    if not run.is_reduced(step) or shard.version != step:
        raise StepStateError(f"step {step} of {shard.what} is not prepared on this server: prepare it first")


def check_lease(
    run: HostedRun, shard: UnitShard, request: shard_pb2.ReadPartitionRequest | shard_pb2.StagePartitionHeader
) -> int:
    """Checks that a partition may be read or staged; returns the generation of its gradient.

    Raises:
        StaleEpochError: The lease is over.
        InvalidRequestError: The range is not the partition's.
        StepStateError: The step is not prepared.
    """
    run.fences.check_epoch(request.dp_rank, request.context.epoch)
    if request.dp_rank >= shard.dp:
        raise InvalidRequestError(f"dp_rank is {request.dp_rank}, but {shard.what} has {shard.dp} data ranks")
    start, stop = shard.partitions.bounds(request.dp_rank)
    if (request.start_bytes, request.stop_bytes) != (start, stop):
        raise InvalidRequestError(
            f"{shard.what}: the partition of data rank {request.dp_rank} is [{start}, {stop}) on this server, "
            f"got [{request.start_bytes}, {request.stop_bytes})"
        )
    check_prepared(run, shard, request.context.step)
    return shard.partitions.generation


def check_current(run: HostedRun, shard: UnitShard, header: shard_pb2.StagePartitionHeader, what: str) -> None:
    """Raises StepStateError or StaleEpochError unless new values of a partition may be staged now."""
    if check_lease(run, shard, header) != header.generation:
        raise StepStateError(f"{what}: its gradient has since been recomputed: read the partition again")
    if shard.partitions.staged_epoch(header.dp_rank) > header.context.epoch:
        raise StaleEpochError(f"{what}: the lease is over, a later lease has staged the partition")


def updated_segments(shard: UnitShard, header: shard_pb2.StagePartitionHeader, what: str) -> Sequence[Segment]:
    """Returns the segments that have new values. Raises InvalidRequestError if one is outside the partition."""
    segments = shard.layout.packed_segments(header.parameter_indices, header.start_bytes, header.stop_bytes)
    if [segment.parameter_index for segment in segments] != list(header.parameter_indices):
        raise InvalidRequestError(
            f"{what}: parameter_indices is {list(header.parameter_indices)[:10]}, expected strictly rising indices of "
            "parameters in the partition"
        )
    return segments


def check_state(shard: UnitShard, header: shard_pb2.StagePartitionHeader, what: str) -> None:
    """Raises InvalidRequestError unless the state tensors in a header are valid."""
    inside = {segment.parameter_index for segment in shard.layout.segments(header.start_bytes, header.stop_bytes)}
    seen = set()
    for tensor in header.state:
        key = (tensor.parameter_index, tensor.name)
        if key in seen or tensor.parameter_index not in inside or not 0 < len(tensor.name) <= MAX_NAME_LENGTH:
            raise InvalidRequestError(
                f"{what}: state {tensor.name[:MAX_NAME_LENGTH]!r} of parameter {tensor.parameter_index}: expected a "
                f"unique name of 1 to {MAX_NAME_LENGTH} characters, for a parameter in the partition"
            )
        seen.add(key)
        check_state_tensor(tensor, what)


def compute_check_finite(
    shard: UnitShard, segments: Sequence[Segment], values: Sequence[torch.Tensor], what: str
) -> None:
    """Raises NonFiniteError if new values have NaN or infinity. ``values``: bytes of each segment. uint8."""
    for segment, piece in zip(segments, values, strict=True):
        parameter = shard.layout.parameters[segment.parameter_index]
        dtype = getattr(torch, parameter.dtype)
        # Packed values of mixed dtypes need not be aligned.
        aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        numbers = aligned.view(dtype)
        # The sum needs one pass and is finite only if all values are finite. It may overflow even if they are.
        if not math.isfinite(numbers.sum().item()) and not bool(torch.isfinite(numbers).all()):
            raise NonFiniteError(
                f"{what}: the new value of parameter {parameter.name!r} has NaN or infinity; nothing was updated",
                unit=shard.unit,
                parameter=parameter.name,
            )


# ---- requests ----


async def read(
    store: ShardStore, request: shard_pb2.ReadPartitionRequest, wait_s: float
) -> AsyncGenerator[bytes, None]:
    """Yields the messages of a ReadPartition.

    Raises:
        InvalidRequestError: The range is not the partition's.
        StaleEpochError: The lease is over.
        StepStateError: The step is not prepared, or its gradient has been discarded.
    """
    store.lease.check()
    run = store.exact_run(request.context)
    shard = run.primary(request.unit, request.start_bytes, request.stop_bytes)
    check_lease(run, shard, request)
    version, source = await shard.values.read(request.context.step, wait_s)
    try:
        # The lease is checked again, because it may have ended during the wait.
        generation, buffer = check_lease(run, shard, request), source.buffer
        header, pieces = _content(shard, source, request, version)
        messages = chunk_streams.encode_stream(shard_pb2.ReadPartitionResponse(header=header), pieces)
        while True:
            # Checked before each message, because the memory may have been reused. See Note: [Moving versions].
            source.check()
            if shard.partitions.generation != generation or source.buffer is not buffer:
                raise StepStateError(f"the gradient of step {version} of {shard.what} has been discarded")
            if (message := next(messages, None)) is None:
                return
            yield message
    finally:
        shard.values.release(source)


async def stage(
    store: ShardStore, header: shard_pb2.StagePartitionHeader, incoming: IncomingStream
) -> shard_pb2.StagePartitionResponse:
    """Receives and stages a partition's new values and state. A broken stream has no effect.

    Raises:
        InvalidRequestError: The header does not fit the partition, or the stream is broken.
        StaleEpochError: The lease is over, or a later lease has staged the partition.
        StepStateError: The step is not prepared, or its gradient has since been recomputed.
        NonFiniteError: A value is NaN or infinity.
        CapacityError: There is no memory for the values.
    """
    store.lease.check()
    run = store.exact_run(header.context)
    shard = run.primary(header.unit, header.start_bytes, header.stop_bytes)
    what = f"partition of {shard.what}, rank {header.dp_rank}"
    check_current(run, shard, header, what)
    segments = updated_segments(shard, header, what)
    check_state(shard, header, what)
    context = header.context
    async with shard.streams.replace(f"partition {header.dp_rank}", (context.epoch,), what):
        staged = shard.partitions.allocate(
            context.epoch, segments, header.state, context.request_id, share=header.share_state, what=what
        )
        with ExitStack() as undo:
            undo.callback(shard.partitions.free, staged)

            async def accept() -> None:
                async with run.exclusively():
                    # The lease or the gradient may have changed while the stream was received, so both are checked
                    # again.
                    check_current(run, shard, header, what)
                    shard.partitions.stage(header.dp_rank, staged)
                    undo.pop_all()

            await incoming.into(staged.memory, what)
            await store.memory.in_thread(partial(compute_check_finite, shard, segments, staged.values, what))
            await uninterrupted(accept())
    return shard_pb2.StagePartitionResponse(version=context.step)


async def confirm(
    run: HostedRun, request: shard_pb2.ConfirmPartitionsRequest, replicator: Replicator
) -> shard_pb2.ConfirmPartitionsResponse:
    """Confirms that every partition of the prepared step is staged, and brings the backups to the step.

    Call within ``HostedRun.exclusively``.

    Raises:
        StepStateError: The step is not prepared.
        IncompleteStepError: A partition is not staged.
    """
    for shard in run.published:
        check_prepared(run, shard, request.context.step)
        shard.check_partitions()
    optimizer = request.optimizer if request.HasField("optimizer") else _UNNAMED_OPTIMIZER
    failed, confirmed = await replicator.bring_all(run, request.context.step, optimizer)
    return shard_pb2.ConfirmPartitionsResponse(failed_backups=failed, confirmed_backups=confirmed)


def _content(
    shard: UnitShard, source: VersionBytes, request: shard_pb2.ReadPartitionRequest, version: int
) -> tuple[shard_pb2.ReadPartitionHeader, list[memoryview]]:
    """Returns the header and the memory to send: values, gradients and state, without a copy."""
    segments = shard.layout.segments(request.start_bytes, request.stop_bytes)
    state = shard.partitions.states.get(request.dp_rank, PartitionState())
    held = bool(request.cached_request_id) and request.cached_request_id == state.request_id
    present = mean_gradients(shard, segments)
    gradients = [tensor_memory(piece) for _, piece in present]
    header = shard_pb2.ReadPartitionHeader(
        version=version,
        generation=shard.partitions.generation,
        gradient_indices=[segment.parameter_index for segment, _ in present],
        state=() if held else state.tensors,
        cache_is_current=held,
    )
    if held:
        return header, gradients
    start = shard.start_bytes
    values = [source.memory(segment.start_bytes - start, segment.stop_bytes - start) for segment in segments]
    return header, [*values, *gradients, *state.pieces]


def mean_gradients(shard: UnitShard, segments: Sequence[Segment]) -> list[tuple[Segment, torch.Tensor]]:
    """Returns the mean gradient of each segment that has one. The segments must be within the shard."""
    assert shard.gradient.reduced is not None
    present = []
    for segment in segments:
        number = shard.segment_of[segment.parameter_index]
        gradient = shard.gradient.reduced.gradients[number]
        if gradient is not None:
            first = shard.segments[number].start_element
            present.append((segment, gradient[segment.start_element - first : segment.stop_element - first]))
    return present
