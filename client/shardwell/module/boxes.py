"""Rectangular parts of tensors, as tensor parallelism and sharded states cut them. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    whole: tuple[int, ...]
    """Shape of the tensor."""
    offsets: tuple[int, ...]
    """First index along each dim."""
    shape: tuple[int, ...]
    """Size along each dim."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of it."""
        return self.whole == self.shape

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where the elements ``[start, stop)`` of the flattened part lie in the flattened tensor.

        Yields:
            ``(first element, number of elements)`` of each consecutive run.
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
        """The first element of a run, by its number; each run covers all dims from ``outer`` on."""
        position, stride = 0, math.prod(self.whole[outer + 1 :])
        for dim in reversed(range(outer + 1) if self.shape else range(0)):
            index = 0
            if dim < outer:
                number, index = divmod(number, self.shape[dim])
            position += (self.offsets[dim] + index) * stride
            stride *= self.whole[dim]
        return position


def local_box(tensor: torch.Tensor) -> Box:
    """Which part of a tensor this process holds: of a ``DTensor`` its own, else all."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return Box(shape, (0,) * len(shape), shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    local, offsets = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return Box(shape, tuple(offsets), tuple(local))
