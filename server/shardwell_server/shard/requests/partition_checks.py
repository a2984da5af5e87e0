"""What keeps a trainer from reading a partition, or from staging it, whichever way the bytes go."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import InvalidRequestError, NonFiniteError, StaleEpochError, StepStateError
from shardwell_wire.layout import MAX_DIMS, Segment
from shardwell_wire.partitions import state_size
from shardwell_wire.v1 import shard_pb2

MAX_NAME_LENGTH = 200


def check_prepared(run: Run, shard: UnitShard, step: int) -> None:
    """Raises StepStateError unless a shard has the complete gradient of a step."""
    prepared = run.prepared
    if prepared is None or prepared.step != step or prepared.answer is None or shard.version != step:
        raise StepStateError(f"step {step} of {shard.what} is not prepared here: its gradient is not complete")


def check_lease(
    run: Run, shard: UnitShard, request: shard_pb2.ReadPartitionRequest | shard_pb2.StagePartitionHeader
) -> int:
    """Raises what keeps a partition from being read or staged; returns the generation of its gradient."""
    run.fences.check_epoch(request.dp_rank, request.context.epoch)
    if request.dp_rank >= shard.dp:
        raise InvalidRequestError(f"dp_rank {request.dp_rank}: {shard.what} has {shard.dp} data ranks")
    start, stop = shard.partitions.bounds(request.dp_rank)
    if (request.start_bytes, request.stop_bytes) != (start, stop):
        raise InvalidRequestError(
            f"{shard.what}: the partition of data rank {request.dp_rank} is [{start}, {stop}) here, "
            f"got [{request.start_bytes}, {request.stop_bytes})"
        )
    check_prepared(run, shard, request.context.step)
    return shard.partitions.generation


def check_wanted(run: Run, shard: UnitShard, header: shard_pb2.StagePartitionHeader, what: str) -> None:
    """Raises what keeps new values of a partition from being staged now."""
    if check_lease(run, shard, header) != header.generation:
        raise StepStateError(f"{what}: the gradient that it was computed from is void: read it again")
    if shard.partitions.staged_epoch(header.dp_rank) > header.context.epoch:
        raise StaleEpochError(f"{what}: the lease is over, a later one has staged it")


def updated_segments(shard: UnitShard, header: shard_pb2.StagePartitionHeader, what: str) -> Sequence[Segment]:
    """The segments with new values; raises InvalidRequestError if one is not in the partition."""
    segments = shard.layout.packed_segments(header.parameter_indices, header.start_bytes, header.stop_bytes)
    if [segment.parameter_index for segment in segments] != list(header.parameter_indices):
        raise InvalidRequestError(
            f"{what}: parameter_indices {list(header.parameter_indices)[:10]} must rise and lie in the partition"
        )
    return segments


def check_state(shard: UnitShard, header: shard_pb2.StagePartitionHeader, what: str) -> None:
    """Raises InvalidRequestError unless what a header says of the state makes sense."""
    here = {segment.parameter_index for segment in shard.layout.segments(header.start_bytes, header.stop_bytes)}
    seen = set()
    for tensor in header.state:
        key = (tensor.parameter_index, tensor.name)
        if key in seen or tensor.parameter_index not in here or not 0 < len(tensor.name) <= MAX_NAME_LENGTH:
            raise InvalidRequestError(
                f"{what}: state {tensor.name[:MAX_NAME_LENGTH]!r} of parameter {tensor.parameter_index}: expected a "
                f"name of 1 to {MAX_NAME_LENGTH} characters, once per parameter, of a parameter in the partition"
            )
        seen.add(key)
        if len(tensor.shape) > MAX_DIMS:
            raise InvalidRequestError(
                f"{what}: state {tensor.name!r} has {len(tensor.shape)} dimensions, more than {MAX_DIMS}"
            )
        try:
            state_size(tensor)
        except KeyError:
            raise InvalidRequestError(f"{what}: state {tensor.name!r} is of unknown dtype {tensor.dtype}") from None


def compute_check_finite(
    shard: UnitShard, segments: Sequence[Segment], values: Sequence[torch.Tensor], what: str
) -> None:
    """Raises NonFiniteError if new values have NaN or infinity.

    Args:
        shard: Whose values.
        segments: Which.
        values: The bytes of each. uint8.
        what: Names the partition in errors.
    """
    for segment, piece in zip(segments, values, strict=True):
        parameter = shard.layout.parameters[segment.parameter_index]
        dtype = getattr(torch, parameter.dtype)
        # Packed values of mixed dtypes need not be aligned.
        aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        numbers = aligned.view(dtype)
        # A sum is one pass over them, and finite only if they are; it may overflow where they are, too.
        if not math.isfinite(numbers.sum().item()) and not bool(torch.isfinite(numbers).all()):
            raise NonFiniteError(
                f"{what}: the new value of parameter {parameter.name!r} has NaN or infinity; nothing was updated",
                unit=shard.unit,
                parameter=parameter.name,
            )
