"""Rectangular parts of tensors. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor, as tensor parallelism and sharded state dicts cut tensors."""

    whole: tuple[int, ...]
    """Shape of the tensor."""
    offsets: tuple[int, ...]
    """First index along each dim."""
    shape: tuple[int, ...]
    """Size along each dim."""

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole tensor."""
        return self.whole == self.shape

    @property
    def is_inside(self) -> bool:
        """True if the numbers describe a part: equally many dims, and no index beyond the tensor."""
        return len(self.whole) == len(self.offsets) == len(self.shape) and all(
            offset + size <= total for offset, size, total in zip(self.offsets, self.shape, self.whole, strict=True)
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices of the part in the tensor, one slice per dim."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.shape, strict=True))

    def overlaps(self, other: Box) -> bool:
        """True if two parts of one tensor have an element in common."""
        return all(
            max(ours.start, theirs.start) < min(ours.stop, theirs.stop)
            for ours, theirs in zip(self.slices, other.slices, strict=True)
        )

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Maps the elements ``[start, stop)`` of the flattened part to the flattened tensor.

        Yields:
            ``(first element, number of elements)`` of each consecutive run in the tensor.
        """
        outer, length = len(self.shape), 1
        while outer and (outer == len(self.shape) or self.shape[outer] == self.whole[outer]):
            outer -= 1
            length *= self.shape[outer]
        while start < stop:
            number, within = divmod(start, length)
            count = min(length - within, stop - start)
            yield self._first(number, outer) + within, count
            start += count

    def _first(self, number: int, outer: int) -> int:
        """Returns the first element of a run, by its number. Each run covers all dims from ``outer`` on."""
        position, stride = 0, math.prod(self.whole[outer + 1 :])
        for dim in reversed(range(outer + 1) if self.shape else range(0)):
            index = 0
            if dim < outer:
                number, index = divmod(number, self.shape[dim])
            position += (self.offsets[dim] + index) * stride
            stride *= self.whole[dim]
        return position
