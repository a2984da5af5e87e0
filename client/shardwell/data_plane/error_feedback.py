"""What a lossy push left out of a gradient, added to the next one (Seide et al. 2014, "1-bit SGD").

With error feedback the sum of what was pushed follows the sum of the gradients: the two differ by one
push's rounding error, however many steps there were.

It is for those who ask for it, because it makes trainers remember something. What is left out lives in
the trainer alone and dies with it: whoever takes over a rank begins with nothing left out. No gradient is
lost then but that rounding error; yet the weights are no longer bit for bit those of a run in which
nothing failed. They still are when the same trainer computes a work item anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2
from shardwell_wire.wire_dtypes import Piece, WireDType, applied, rounding_errors

_ITEM_BYTES = 4
"""Of float32."""


class _Residual:
    """What is left out of one unit's gradients for one rank, as of two moments: vectors laid out like the unit's.

    Args:
        layout: Of the unit.
    """

    def __init__(self, layout: UnitLayout) -> None:
        numel = layout.size_bytes // _ITEM_BYTES
        self._layout = layout
        self._committed = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._pending = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._known: set[int] = set()
        """Parameters that were pushed in some step before; of the others nothing was left out."""
        self.pushed: set[int] = set()
        """Parameters that were pushed in this step: of them ``_pending`` counts."""

    def place(self, index: int) -> slice:
        """Where a parameter lies in these vectors."""
        start = self._layout.starts[index] // _ITEM_BYTES
        return slice(start, start + self._layout.parameters[index].numel)

    def before(self, index: int) -> torch.Tensor:
        """What was left out of a parameter's gradients before the next push. [numel]"""
        return (self._pending if index in self.pushed else self._committed)[self.place(index)]

    def after(self, index: int) -> torch.Tensor:
        """Where what the next push leaves out is written. [numel]"""
        return self._pending[self.place(index)]

    def promote(self) -> None:
        """The step is committed."""
        if not self.pushed:
            return
        for place in map(self.place, self._known - self.pushed):
            self._pending[place].copy_(self._committed[place])
        self._committed, self._pending = self._pending, self._committed
        self._known, self.pushed = self._known | self.pushed, set()

    def drop(self) -> None:
        """The step's pushes so far do not count."""
        self.pushed = set()


class ErrorFeedback:
    """Residuals of one trainer's pushes, by unit and logical dp rank.

    A work item that is begun anew starts from the residuals of the step's beginning, so what it pushes is
    the same again. That takes two copies, in float32, of every unit that is pushed, for each rank
    that this trainer plays.

    Not thread-safe: for the training thread, as the store that it belongs to.

    Args:
        wire_dtype: How float32 gradients travel.
    """

    def __init__(self, wire_dtype: WireDType) -> None:
        self._wire_dtype = wire_dtype
        self._residuals: dict[int, dict[int, _Residual]] = {}

    @torch.no_grad()
    def compensate(
        self, unit_index: int, layout: UnitLayout, dp_rank: int, gradients: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Adds what was left out before, and notes what will be left out now.

        Args:
            unit_index: The unit.
            layout: Of the unit.
            dp_rank: The logical rank whose work item this is one part of.
            gradients: By parameter index; whole, contiguous, on the CPU. They are not changed.

        Returns:
            What to push instead, of the same shapes: side by side, as in the unit, so that small parameters are
            encoded together. A gradient that travels as it is stored is returned itself.
        """
        lossy = [index for index in sorted(gradients) if self._is_lossy(layout.parameters[index].dtype)]
        if not lossy:
            return dict(gradients)
        of_rank = self._residuals.setdefault(dp_rank, {})
        if unit_index not in of_rank:
            of_rank[unit_index] = _Residual(layout)
        residual = of_rank[unit_index]
        vector = torch.empty(layout.size_bytes // _ITEM_BYTES, dtype=torch.float32, device="cpu")
        flats = {index: vector[residual.place(index)] for index in lossy}
        for index, flat in flats.items():
            torch.add(gradients[index].view(-1), residual.before(index), out=flat)
        pushed = [Piece(layout.starts[index], flat) for index, flat in flats.items()]
        left_out = [Piece(layout.starts[index], residual.after(index)) for index in lossy]
        # The servers refuse a push that is not finite; it must not spoil the next one, too: its errors are 0.
        rounding_errors(pushed, self._wire_dtype, left_out)
        residual.pushed.update(lossy)
        return {
            index: flats[index].view_as(gradient) if index in flats else gradient
            for index, gradient in gradients.items()
        }

    def reset(self, dp_rank: int) -> None:
        """The rank's work item is begun anew, here or elsewhere: its pushes in this step count no more."""
        for residual in self._residuals.get(dp_rank, {}).values():
            residual.drop()

    def commit(self) -> None:
        """The step is committed with what was pushed. Forgets ranks that had no push in it: others play them."""
        for dp_rank, residuals in list(self._residuals.items()):
            if not any(residual.pushed for residual in residuals.values()):
                del self._residuals[dp_rank]
            for residual in residuals.values():
                residual.promote()

    def _is_lossy(self, dtype: str) -> bool:
        return applied(self._wire_dtype, dtype) != common_pb2.WIRE_DTYPE_UNSPECIFIED
