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
