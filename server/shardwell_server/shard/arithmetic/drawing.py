"""Random initial values that a server draws itself, the same wherever a parameter is cut.

A parameter's elements are drawn in blocks of ``BLOCK_ELEMENTS``; a block is a function of the seed, the
stream's name and its number, so a shard that begins in the middle of a parameter starts with the block
that its first element lies in. Every element takes one 64-bit number of the generator, Philox4x64-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), whose stream numpy guarantees.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import initialization_pb2

BLOCK_ELEMENTS = 1 << 14
"""Part of what decides the values: another number gives others."""

Transform = Callable[[torch.Tensor], torch.Tensor]
"""Numbers in (0, 1) to values; both float64. [numel] -> [numel]"""


def check(draw: initialization_pb2.ParameterDraw, name: str) -> None:
    """Raises InvalidRequestError for a distribution that does not exist."""
    distribution = draw.distribution
    kind = distribution.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError(f"the initial values of parameter {name!r} have no distribution", parameter=name)
    problem = _problem(distribution, kind)
    if not problem and draw.zero_start > draw.zero_stop:
        problem = f"elements [{draw.zero_start}, {draw.zero_stop}) are to be 0, expected start <= stop"
    if problem:
        raise InvalidRequestError(f"the {kind} initial values of parameter {name!r}: {problem}", parameter=name)


def _problem(distribution: initialization_pb2.Distribution, kind: str) -> str | None:
    if kind == "constant":
        return None if math.isfinite(distribution.constant) else f"expected a finite value, got {distribution.constant}"
    if kind == "uniform":
        low, high = distribution.uniform.low, distribution.uniform.high
        finite = math.isfinite(low) and math.isfinite(high)
        return None if finite and low <= high else f"expected finite low <= high, got [{low}, {high})"
    normal = distribution.normal
    if not (math.isfinite(normal.mean) and math.isfinite(normal.standard_deviation)) or normal.standard_deviation < 0:
        return f"expected a finite mean and deviation >= 0, got {normal.mean} and {normal.standard_deviation}"
    low, high = _bounds(normal)
    if not low < high:
        return f"expected low < high, got [{low}, {high})"
    if normal.standard_deviation and not _share_below(normal, low) < _share_below(normal, high):
        return (
            f"[{low}, {high}) is so far from mean {normal.mean} with deviation {normal.standard_deviation} "
            "that no value lies there"
        )
    return None


def fill(target: torch.Tensor, first_element: int, draw: initialization_pb2.ParameterDraw) -> None:
    """Draws some consecutive elements of a parameter.

    Args:
        target: Receives them. [numel]
        first_element: Number of the first one in the flattened parameter.
        draw: Checked.
    """
    _fill_all(target, first_element, draw)
    target[max(0, draw.zero_start - first_element) : max(0, draw.zero_stop - first_element)].zero_()


def _fill_all(target: torch.Tensor, first_element: int, draw: initialization_pb2.ParameterDraw) -> None:
    if draw.distribution.WhichOneof("kind") == "constant":
        target.copy_(torch.tensor(draw.distribution.constant, dtype=torch.float64))  # fill_ would refuse an overflow
        return
    transform, key = _transform(draw.distribution), stream_key(draw.seed, draw.stream)
    stop = first_element + target.numel()
    for block in range(first_element // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
        begin = block * BLOCK_ELEMENTS
        low, high = max(begin, first_element), min(begin + BLOCK_ELEMENTS, stop)
        values = transform(torch.from_numpy(_uniform(key, block, high - begin)[low - begin :]))
        target[low - first_element : high - first_element].copy_(values)


def stream_key(seed: int, stream: str) -> int:
    """The generator's key, of 128 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=16).digest(), "little")


def _uniform(key: int, block: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The first numbers of a block, in the open interval (0, 1). [count]"""
    raw = np.random.Philox(key=key, counter=block << 64).random_raw(count)
    return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _transform(distribution: initialization_pb2.Distribution) -> Transform:
    if distribution.WhichOneof("kind") == "uniform":
        low, high = distribution.uniform.low, distribution.uniform.high
        return lambda numbers: low + (high - low) * numbers
    normal = distribution.normal
    mean, deviation = normal.mean, normal.standard_deviation
    bottom, top = _bounds(normal)
    below = _share_below(normal, bottom) if deviation else 0.0
    within = _share_below(normal, top) - below if deviation else 1.0
    return lambda numbers: (torch.special.ndtri(below + within * numbers) * deviation + mean).clamp_(bottom, top)


def _bounds(normal: initialization_pb2.Normal) -> tuple[float, float]:
    low = normal.low if normal.HasField("low") else -math.inf
    return low, normal.high if normal.HasField("high") else math.inf


def _share_below(normal: initialization_pb2.Normal, bound: float) -> float:
    """How much of the distribution lies below a bound, before it is cut off."""
    return 0.5 * math.erfc((normal.mean - bound) / normal.standard_deviation / math.sqrt(2))
