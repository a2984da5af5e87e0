"""Optimizer partitions: the part of a unit that each data rank updates if the optimizer runs on the trainers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.layout import BLOCK_BYTES, DTYPE_NAMES, ITEM_SIZES, MAX_DIMS, MAX_UNIT_BYTES, align
from shardwell_wire.v1 import shard_pb2

TRAINER_PREFIX = "trainer/"
"""Prefix of ``OptimizerStep.algorithm`` for optimizers that run on the trainers."""


def runs_on_trainers(algorithm: str) -> bool:
    """Returns whether an optimizer runs on the trainers. Others run on the shard servers."""
    return algorithm.startswith(TRAINER_PREFIX)


def partition_of(size_bytes: int, dp: int, dp_rank: int) -> tuple[int, int]:
    """Returns a data rank's partition as a half-open range of a unit's flat vector. May be empty.

    Args:
        size_bytes: Size of the flat vector.
        dp: Number of logical data ranks.
        dp_rank: The data rank.
    """
    # The same ranges as ``cut`` with equal weights, in constant time: servers compute them for thousands of ranks.
    used = min(dp, max(1, size_bytes // BLOCK_BYTES))
    return _even_bound(size_bytes, used, dp_rank), _even_bound(size_bytes, used, dp_rank + 1)


def _even_bound(size_bytes: int, used: int, dp_rank: int) -> int:
    """Returns the start of a data rank's partition if the first ``used`` ranks share the vector evenly."""
    if dp_rank >= used:
        return size_bytes
    return min(size_bytes, round(size_bytes * float(dp_rank) / used / BLOCK_BYTES) * BLOCK_BYTES)


def part_in(size_bytes: int, dp: int, dp_rank: int, start_bytes: int, stop_bytes: int) -> tuple[int, int]:
    """Returns the intersection of a partition and the shard ``[start_bytes, stop_bytes)``. May be empty."""
    start, stop = partition_of(size_bytes, dp, dp_rank)
    low = max(start, start_bytes)
    return low, max(low, min(stop, stop_bytes))


def state_size(tensor: shard_pb2.StateTensor) -> int:
    """Returns the size of a state tensor in a stream, in bytes. Raises KeyError if its dtype is unknown."""
    return math.prod(tensor.shape) * ITEM_SIZES[DTYPE_NAMES[tensor.dtype]]


def check_state_tensor(tensor: shard_pb2.StateTensor, what: str) -> None:
    """Raises InvalidRequestError unless a state tensor in a request has a known dtype and a possible size.

    Args:
        tensor: The tensor.
        what: Names what the tensor belongs to, in errors.
    """
    if len(tensor.shape) > MAX_DIMS:  # before the size is computed: the product of many sizes takes long
        raise InvalidRequestError(
            f"{what}: state {tensor.name!r} has {len(tensor.shape)} dimensions, expected at most {MAX_DIMS}"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise InvalidRequestError(f"{what}: state {tensor.name!r} has the unknown dtype {tensor.dtype}")
    if not all(0 <= size <= MAX_UNIT_BYTES for size in tensor.shape) or state_size(tensor) > MAX_UNIT_BYTES:
        raise InvalidRequestError(
            f"{what}: state {tensor.name!r} has shape {list(tensor.shape)}, expected at most {MAX_UNIT_BYTES} bytes"
        )


def state_places(tensors: Iterable[shard_pb2.StateTensor]) -> tuple[list[tuple[int, int]], int]:
    """Returns the layout of state tensors in shared memory, aligned like parameters.

    Returns:
        The half-open byte range of each tensor, and the total size in bytes.

    Raises:
        KeyError: A dtype is unknown.
    """
    ranges, stop = [], 0
    for tensor in tensors:
        start = align(stop)
        stop = start + state_size(tensor)
        ranges.append((start, stop))
    return ranges, stop


def values_offset(start_bytes: int, stop_bytes: int) -> int:
    """Returns the offset of the values, after the gradients, in a staging buffer for ``[start_bytes, stop_bytes)``."""
    return align(stop_bytes - start_bytes, BLOCK_BYTES)
