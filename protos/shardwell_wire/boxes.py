"""Rectangular parts of tensors. Imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_left
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

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.shape)

    @property
    def whole_numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.whole)

    def inside(self, other: Box) -> Box:
        """Returns a part that lies within another part of the same tensor, as a part of the other part."""
        offsets = tuple(ours - theirs for ours, theirs in zip(self.offsets, other.offsets, strict=True))
        return Box(other.shape, offsets, self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Returns what two parts of one tensor have in common. None: nothing."""
        if not self.numel or not other.numel or not self.overlaps(other):
            return None
        first = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = ((ours.stop, theirs.stop) for ours, theirs in zip(self.slices, other.slices, strict=True))
        return Box(self.whole, tuple(first), tuple(min(pair) - begin for pair, begin in zip(ends, first, strict=True)))

    def position(self, element: int) -> int:
        """Returns the place in the flattened tensor of an element of the flattened part."""
        return next(self.runs(element, element + 1))[0]

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


def common_runs(
    ours: Box, our_range: tuple[int, int], theirs: Box, their_range: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Finds the elements that ranges of two parts of one tensor have in common.

    Args:
        ours: A part of the tensor.
        our_range: Half-open range of elements of this part, flattened.
        theirs: Another part of the same tensor.
        their_range: Half-open range of elements of the other part, flattened.

    Yields:
        ``(first element in our part, first element in the other part, number of elements)`` of each run of elements
        that is consecutive in both flattened parts, in rising order.
    """
    if ours == theirs:
        start, stop = max(our_range[0], their_range[0]), min(our_range[1], their_range[1])
        if start < stop:
            yield start, start, stop - start
        return
    if (common := ours.intersection(theirs)) is None:
        return
    sides = (common.inside(ours), our_range), (common.inside(theirs), their_range)
    # Positions rise with the elements of the common part, so each range contains consecutive elements of it.
    bounds = [[bisect_left(range(common.numel), at, key=side.position) for at in limits] for side, limits in sides]
    start, stop = max(first for first, _ in bounds), min(last for _, last in bounds)
    left, right = (side.runs(start, max(start, stop)) for side, _ in sides)
    mine = other = (0, 0)
    while start < stop:
        mine = mine if mine[1] else next(left)
        other = other if other[1] else next(right)
        count = min(mine[1], other[1])
        yield mine[0], other[0], count
        mine, other = ((first + count, rest - count) for first, rest in (mine, other))
        start += count
