"""Sums the squares of gradients for the Euclidean norm. See Note: [Norms] in ``reduction.py``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress

import torch

from shardwell_wire.layout import BLOCK_BYTES

SLICE_BYTES = 256 << 10
"""Size of the slices that are summed, divided and squared together, while they are in the cache."""


class _Workspace(threading.local):
    """Memory of one thread for the values of one slice in fp64. A new allocation each time would cost page faults."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float64)

    def double(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of at most one slice in fp64. The result is valid until the next call."""
        if values.dtype == torch.float64:
            return values
        if self._memory.numel() < values.numel():
            self._memory = torch.empty(values.numel(), dtype=torch.float64)
        return self._memory[: values.numel()].copy_(values)


_workspace = _Workspace()


@dataclass(frozen=True, slots=True)
class SquarePlan:
    """How the squares of adjacent segments are summed, by block of the flat vector.

    Blocks that lie within one segment are squared together, as rows. In the others, each segment's part has a sum of
    its own.
    """

    numel: int
    """Number of elements from the start of the first segment to the end of the last."""
    row: int
    """Number of elements of a block."""
    base: int
    """Number of elements of the flat vector before the first segment, in a vector of these elements only."""
    row_count: int
    """Number of whole blocks."""
    is_own: bytes
    """1 for each whole block that lies within one segment, 0 for the others."""
    parts: Sequence[tuple[int, Sequence[slice]]]
    """Parts of segments in other blocks, by length."""

    def slices(self) -> Iterator[tuple[slice, tuple[int, int, int]]]:
        """Yields the slices of the vector that are reduced together.

        Each comes with the first element and the end of its whole blocks, and the number of whole blocks before.
        """
        base, row, step, stop = self.base, self.row, SLICE_BYTES // BLOCK_BYTES * self.row, 0
        first_block = -(-base // row)
        while stop < self.numel:
            start, stop = stop, min(self.numel, (base + stop) // step * step + step - base)
            low, high = -(-(base + start) // row), (base + stop) // row
            yield slice(start, stop), (low * row - base, high * row - base, low - first_block)

    def compute_norms(self, values: torch.Tensor, rows: tuple[int, int, int], norms: torch.Tensor) -> None:
        """Computes the norms of the whole blocks of one slice.

        Args:
            values: The vector. [numel]
            rows: See ``slices``.
            norms: Receives the norms. fp64. [row_count]
        """
        start, stop, number = rows
        if start < stop:
            own = _workspace.double(values[start:stop]).view(-1, self.row)
            torch.linalg.vector_norm(own, 2.0, dim=1, out=norms[number : number + own.shape[0]])

    def squares(self, values: torch.Tensor, norms: torch.Tensor) -> list[float]:
        """Returns one sum of squares for each part of a segment in one block.

        Args:
            values: The vector. [numel]
            norms: The norms of all whole blocks. fp64. [row_count]
        """
        found: list[float] = list(compress(norms.tolist(), self.is_own))
        for length, places in self.parts:
            rows = torch.cat([values[here] for here in places]).view(-1, length)
            found += torch.linalg.vector_norm(rows, 2.0, dim=1, dtype=torch.float64).tolist()
        return [norm * norm for norm in found]


@lru_cache(1024)
def square_plan(first_bytes: tuple[int, ...], numels: tuple[int, ...], item_size: int) -> SquarePlan:
    """Returns the plan of adjacent segments.

    Args:
        first_bytes: First byte of each segment in the flat vector. The segments do not overlap and are not empty.
        numels: Number of elements of each segment.
        item_size: Size of an element.
    """
    row, base = BLOCK_BYTES // item_size, first_bytes[0] // item_size
    starts = [first // item_size - base for first in first_bytes]
    numel = starts[-1] + numels[-1]
    first_block, end_block = -(-base // row), (base + numel) // row
    is_own = bytearray(max(0, end_block - first_block))
    parts: dict[int, list[slice]] = {}
    for start, count in zip(starts, numels, strict=True):
        stop = start + count
        low, high = -(-(base + start) // row), (base + stop) // row
        if low < high:
            is_own[low - first_block : high - first_block] = b"\1" * (high - low)
        head_stop = min(stop, low * row - base)
        for begin, end in ((start, head_stop), (max(head_stop, high * row - base), stop)):
            if begin < end:
                parts.setdefault(end - begin, []).append(slice(begin, end))
    return SquarePlan(numel, row, base, len(is_own), bytes(is_own), list(parts.items()))
