"""Divides an update into pieces that are applied exactly once, even if one fails or the process ends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell_wire import fault_points
from shardwell_wire.model.layout import BLOCK_BYTES

SLICE_BYTES = 64 * BLOCK_BYTES
"""Size of the slices in which element-wise algorithms update values."""
_CUT_BYTES = 64
"""Kernels give the same bits for any cut at a multiple of this size."""
MAX_JOINT = 64
"""Most slices of different parts that one piece changes together."""


class Changed:
    """The memory that a piece changes, as ranges of consecutive bytes. ``tensors``: contiguous tensors."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._tensors = list(tensors)  # keeps the memory
        self.ranges = list(_merged(self._tensors))
        """Address and size of each range, in bytes."""

    def save(self) -> list[bytes]:
        """Returns a copy of every range."""
        return [ctypes.string_at(address, size_bytes) for address, size_bytes in self.ranges]

    def restore(self, copies: Sequence[bytes]) -> None:
        """Copies back what ``save`` returned."""
        for (address, size_bytes), copy in zip(self.ranges, copies, strict=True):
            ctypes.memmove(address, copy, size_bytes)


def _merged(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of tensors. The few bytes between two tensors of one storage belong to their range.

    The order depends on the order of the tensors and on their places in their storages, but on no address. Another
    process has the storages at other addresses, and must find the copies in the same order.
    """
    storages: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        assert tensor.is_contiguous()
        if tensor.nbytes:
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for own in storages.values():
        own.sort(key=Tensor.data_ptr)
        start = stop = own[0].data_ptr()
        for tensor in own:
            if tensor.data_ptr() - stop >= _CUT_BYTES:
                yield start, stop - start
                start = tensor.data_ptr()
            stop = tensor.data_ptr() + tensor.nbytes
        yield start, stop - start


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an update."""

    run: Callable[[], object]
    """Applies the piece."""
    changed: Changed | None = None
    """What ``run`` changes. None: ``run`` can be repeated."""
    atomic: bool = False
    """True if ``run`` either raises before it changes anything, or completes. The process may still end within it."""


class Progress:
    """How much of one update has been applied. A piece that raises is undone from a copy."""

    def __init__(self) -> None:
        self._done = 0

    @property
    def done(self) -> int:
        """Number of pieces that have been applied."""
        return self._done

    def run(self, piece: Piece) -> None:
        """Applies the next piece. If it raises, nothing has changed."""
        changed = None if piece.atomic else piece.changed
        copies = [] if changed is None else changed.save()
        try:
            piece.run()
        except BaseException:
            if changed is not None:
                changed.restore(copies)
            raise
        self._done += 1


def apply(pieces: Iterable[Piece], progress: Progress) -> None:
    """Applies the remaining pieces of an update. After an error, call it again with the same pieces."""
    for number, piece in enumerate(pieces):
        if number >= progress.done:
            progress.run(piece)
            fault_points.reach("server.update.middle", piece=number)


def packed(tensors: Sequence[Tensor]) -> Iterator[list[tuple[int, slice]]]:
    """Divides flat tensors into the ranges that each piece changes; yields the tensor's number and each range.

    The ranges of one piece have ``SLICE_BYTES`` together, or less.
    """
    ranges: list[tuple[int, slice]] = []
    room_bytes = SLICE_BYTES
    for number, values in enumerate(tensors):
        size, start, stop = values.element_size(), 0, values.numel()
        while start < stop:
            fitting = room_bytes // _CUT_BYTES * _CUT_BYTES // size
            if not fitting or len(ranges) == MAX_JOINT:
                yield ranges
                ranges, room_bytes = [], SLICE_BYTES
                continue
            end = min(stop, start + fitting)
            ranges.append((number, slice(start, end)))
            room_bytes -= (end - start) * size
            start = end
    if ranges:
        yield ranges


def packed_bytes(total_bytes: int, tensor_count: int) -> int:
    """Returns the most bytes that one piece of several parts changes.

    Args:
        tensor_count: Number of tensors of one part that change, including its values.
    """
    return min(total_bytes, tensor_count * SLICE_BYTES)


def slice_bytes(values: Tensor) -> int:
    """Returns the size of the largest slice of a tensor."""
    return min(values.nbytes, SLICE_BYTES)


def slices(values: Tensor) -> Iterator[slice]:
    """Yields consecutive ranges of a flat tensor, each of ``SLICE_BYTES`` or less."""
    step = max(1, SLICE_BYTES // values.element_size())
    for start in range(0, values.numel(), step):
        yield slice(start, min(values.numel(), start + step))


@dataclass(frozen=True, slots=True)
class Clipping:
    """How gradients are scaled and clamped before an update."""

    coefficient: float = 1.0
    """Factor, applied first."""
    value: float | None = None
    """Largest absolute value. None: any."""

    def apply(self, gradient: Tensor) -> Tensor:
        """Returns the clipped gradient. The result is new memory, or the gradient itself if nothing is clipped."""
        clipped = gradient if self.coefficient == 1.0 else torch.mul(gradient, self.coefficient)
        if self.value is None:
            return clipped
        # torch rejects bounds beyond the range of the dtype. A bound beyond the range clips nothing.
        bound = min(self.value, torch.finfo(gradient.dtype).max)
        return clipped.clamp(-bound, bound) if clipped is gradient else clipped.clamp_(-bound, bound)

    def apply_all(self, gradients: list[Tensor]) -> list[Tensor]:
        """Returns the clipped gradients, as ``apply`` does for each."""
        if self.value is not None:
            return [self.apply(gradient) for gradient in gradients]
        return gradients if self.coefficient == 1.0 else list(torch._foreach_mul(gradients, self.coefficient))
