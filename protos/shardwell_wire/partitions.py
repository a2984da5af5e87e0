"""Which part of a unit each data rank updates when the optimizer runs on the trainers. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardwell_wire.layout import BLOCK_BYTES, DTYPE_NAMES, ITEM_SIZES, align
from shardwell_wire.v1 import shard_pb2

TRAINER_PREFIX = "trainer/"
"""Begins ``OptimizerStep.algorithm`` of optimizers that run on the trainers."""


def runs_on_trainers(algorithm: str) -> bool:
    """Whether trainers stage new values by this algorithm; else the servers work them out."""
    return algorithm.startswith(TRAINER_PREFIX)


def partition_of(size_bytes: int, dp: int, dp_rank: int) -> tuple[int, int]:
    """The half-open range of a unit's flat vector that is a data rank's partition; may be empty.

    Args:
        size_bytes: Length of the flat vector.
        dp: Logical data ranks.
        dp_rank: One of them.
    """
    # The same ranges as ``cut`` with equal weights, in constant time: servers ask for the partitions of thousands of
    # ranks.
    used = min(dp, max(1, size_bytes // BLOCK_BYTES))
    return _even_bound(size_bytes, used, dp_rank), _even_bound(size_bytes, used, dp_rank + 1)


def _even_bound(size_bytes: int, used: int, dp_rank: int) -> int:
    """Where a data rank's partition begins when the first ``used`` ranks share the vector evenly."""
    if dp_rank >= used:
        return size_bytes
    return min(size_bytes, round(size_bytes * float(dp_rank) / used / BLOCK_BYTES) * BLOCK_BYTES)


def part_in(size_bytes: int, dp: int, dp_rank: int, start_bytes: int, stop_bytes: int) -> tuple[int, int]:
    """The part of a partition that lies in the shard ``[start_bytes, stop_bytes)``; empty ones have equal bounds."""
    start, stop = partition_of(size_bytes, dp, dp_rank)
    low = max(start, start_bytes)
    return low, max(low, min(stop, stop_bytes))


def state_size(tensor: shard_pb2.StateTensor) -> int:
    """Bytes of a state tensor in a stream.

    Raises:
        KeyError: It is of no known dtype.
    """
    return math.prod(tensor.shape) * ITEM_SIZES[DTYPE_NAMES[tensor.dtype]]


def state_places(tensors: Iterable[shard_pb2.StateTensor]) -> tuple[list[tuple[int, int]], int]:
    """Where state tensors lie in memory, each aligned as parameters are.

    Returns:
        The half-open range of each, in bytes, and the size of it all.

    Raises:
        KeyError: One is of no known dtype.
    """
    ranges, stop = [], 0
    for tensor in tensors:
        start = align(stop)
        stop = start + state_size(tensor)
        ranges.append((start, stop))
    return ranges, stop


def values_offset(start_bytes: int, stop_bytes: int) -> int:
    """Where the values of the partition part ``[start_bytes, stop_bytes)`` begin on its staging buffer, after the
    gradients."""
    return align(stop_bytes - start_bytes, BLOCK_BYTES)
