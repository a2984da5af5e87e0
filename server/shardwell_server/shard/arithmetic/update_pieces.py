"""Divides an update into pieces that are applied exactly once, even if one fails or the process ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell_wire import fault_points
from shardwell_wire.layout import BLOCK_BYTES

SLICE_BYTES = 256 * BLOCK_BYTES
"""Size of the slices in which element-wise algorithms update the values of a part. Kernels give the same bits for any
cut at a multiple of 64 bytes."""


MAX_JOINT = 64
"""Most parts that one piece changes together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an update."""

    run: Callable[[], object]
    """Applies the piece."""
    changed: Sequence[Tensor] = ()
    """Contiguous tensors that ``run`` changes. Empty: ``run`` can be repeated."""
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
        before = [] if piece.atomic else [(tensor, tensor.clone()) for tensor in piece.changed]
        try:
            piece.run()
        except BaseException:
            for tensor, copy in before:
                tensor.copy_(copy)
            raise
        self._done += 1


def apply(pieces: Iterable[Piece], progress: Progress) -> None:
    """Applies the remaining pieces of an update. After an error, call it again with the same pieces."""
    for number, piece in enumerate(pieces):
        if number >= progress.done:
            progress.run(piece)
            fault_points.reach("server.update.middle", piece=number)


def joint(sizes: Iterable[int]) -> Iterator[int]:
    """Divides consecutive small parts into groups that one piece changes together; yields the size of each group.

    Args:
        sizes: Bytes that the update of each part changes.
    """
    count = total = 0
    for size in sizes:
        if count and (total + size > SLICE_BYTES or count == MAX_JOINT):
            yield count
            count = total = 0
        count, total = count + 1, total + size
    if count:
        yield count


def joint_bytes(total_bytes: int) -> int:
    """Returns the most bytes that one piece of several parts changes, if all parts together have this size."""
    return min(total_bytes, SLICE_BYTES)


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
        # torch rejects bounds beyond the range of the dtype. Such bounds clip nothing.
        bound = min(self.value, torch.finfo(gradient.dtype).max)
        return clipped.clamp(-bound, bound) if clipped is gradient else clipped.clamp_(-bound, bound)

    def apply_all(self, gradients: list[Tensor]) -> list[Tensor]:
        """Returns the clipped gradients, as ``apply`` does for each."""
        if self.value is not None:
            return [self.apply(gradient) for gradient in gradients]
        return gradients if self.coefficient == 1.0 else list(torch._foreach_mul(gradients, self.coefficient))
