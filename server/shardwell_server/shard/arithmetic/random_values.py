"""Random initial values that a server draws, independent of how a parameter is cut.

The elements of a parameter are drawn in blocks of ``BLOCK_ELEMENTS``. A block is a function of the seed, the name of
the stream and the block's number, so a shard that starts in the middle of a parameter starts with the block of its
first element. Every element takes one 64-bit number from the generator Philox4x64-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), whose stream numpy guarantees.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import Box
from shardwell_wire.v1 import initialization_pb2

BLOCK_ELEMENTS = 1 << 14
"""Part of the format: another block size would give other values."""

Transform = Callable[[torch.Tensor], torch.Tensor]
"""Maps numbers in (0, 1) to values, both float64. [numel] -> [numel]"""


def check(draw: initialization_pb2.ParameterDraw, name: str) -> None:
    """Raises InvalidRequestError if the distribution is invalid."""
    distribution = draw.distribution
    kind = distribution.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError(
            f"the initial values of parameter {name!r} have no distribution: expected constant, uniform or normal",
            parameter=name,
        )
    problem = _problem(distribution, kind)
    if not problem and draw.zero_start > draw.zero_stop:
        problem = f"expected zero_start <= zero_stop, got [{draw.zero_start}, {draw.zero_stop})"
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
    if normal.standard_deviation and not _probability_below(normal, low) < _probability_below(normal, high):
        return (
            f"expected an interval with positive probability, got [{low}, {high}) for mean {normal.mean} and deviation "
            f"{normal.standard_deviation}"
        )
    return None


def fill(target: torch.Tensor, first_element: int, draw: initialization_pb2.ParameterDraw, box: Box) -> None:
    """Draws consecutive elements of a parameter, or of a part of it.

    Args:
        target: Receives the elements. [numel]
        first_element: Index of the first element in the flattened part.
        draw: Passed ``check``. Its indices count elements of the whole parameter.
    """
    source, position = _Source(draw), 0
    for start, count in box.runs(first_element, first_element + target.numel()):
        run = target[position : position + count]
        source.fill(run, start)
        run[max(0, draw.zero_start - start) : max(0, draw.zero_stop - start)].zero_()
        position += count


class _Source:
    """The values of one whole parameter. Keeps the block that was used last: a part may have many short runs in it.

    Args:
        draw: Distribution, seed and stream.
    """

    def __init__(self, draw: initialization_pb2.ParameterDraw) -> None:
        self._constant: torch.Tensor | None = None
        self._number = -1
        self._block = torch.empty(0)
        if draw.distribution.WhichOneof("kind") == "constant":
            self._constant = torch.tensor(draw.distribution.constant, dtype=torch.float64)
        else:
            self._transform, self._key = _transform(draw.distribution), stream_key(draw.seed, draw.stream)

    def fill(self, target: torch.Tensor, first: int) -> None:
        """Writes the elements from ``first`` on. [numel]"""
        if self._constant is not None:
            target.copy_(self._constant)  # fill_ would raise on overflow
            return
        stop = first + target.numel()
        for number in range(first // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
            begin = number * BLOCK_ELEMENTS
            low, high = max(begin, first), min(begin + BLOCK_ELEMENTS, stop)
            target[low - first : high - first].copy_(self._values(number, high - begin)[low - begin : high - begin])

    def _values(self, number: int, count: int) -> torch.Tensor:
        """Returns at least the first ``count`` values of a block."""
        if self._number != number:
            self._block = torch.empty(0)
        if self._block.numel() < count:
            # A part usually needs the rest of the block next. A block that is needed once is drawn as far as needed.
            drawn = BLOCK_ELEMENTS if self._number == number else count
            self._number, self._block = number, self._transform(torch.from_numpy(_uniform(self._key, number, drawn)))
        return self._block


def stream_key(seed: int, stream: str) -> int:
    """Returns the 128-bit key of the generator."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=16).digest(), "little")


def _uniform(key: int, block: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns the first numbers of a block, in the open interval (0, 1). [count]"""
    # Each block has its own range of the 256-bit counter. The upper 53 bits of a number make a double; adding one half
    # excludes 0.
    raw = np.random.Philox(key=key, counter=block << 64).random_raw(count)
    return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _transform(distribution: initialization_pb2.Distribution) -> Transform:
    if distribution.WhichOneof("kind") == "uniform":
        low, high = distribution.uniform.low, distribution.uniform.high
        return lambda numbers: low + (high - low) * numbers
    normal = distribution.normal
    mean, deviation = normal.mean, normal.standard_deviation
    bottom, top = _bounds(normal)
    below = _probability_below(normal, bottom) if deviation else 0.0
    within = _probability_below(normal, top) - below if deviation else 1.0
    return lambda numbers: (torch.special.ndtri(below + within * numbers) * deviation + mean).clamp_(bottom, top)


def _bounds(normal: initialization_pb2.Normal) -> tuple[float, float]:
    low = normal.low if normal.HasField("low") else -math.inf
    return low, normal.high if normal.HasField("high") else math.inf


def _probability_below(normal: initialization_pb2.Normal, bound: float) -> float:
    """Returns the probability of a value below a bound, before truncation."""
    return 0.5 * math.erfc((normal.mean - bound) / normal.standard_deviation / math.sqrt(2))
