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
from dataclasses import dataclass

import torch

from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2
from shardwell_wire.wire_dtypes import WireDType, applied, round_trip_


@dataclass(slots=True)
class _Residual:
    """What is left out of one parameter's gradient for one rank, as of two moments."""

    committed: torch.Tensor | None = None
    """When the step began. [numel]"""
    pending: torch.Tensor | None = None
    """After the pushes of this step so far; None: there was none. [numel]"""
    spare: torch.Tensor | None = None
    """Memory for the next ``pending``."""

    def promote(self) -> None:
        if self.pending is not None:
            self.committed, self.pending, self.spare = self.pending, None, self.committed

    def drop(self) -> None:
        if self.pending is not None:
            self.pending, self.spare = None, self.pending


class ErrorFeedback:
    """Residuals of one trainer's pushes, by unit, parameter and logical dp rank.

    A work item that is begun anew starts from the residuals of the step's beginning, so what it pushes is
    the same again. That takes two copies, in float32, of every parameter that is pushed, for each rank
    that this trainer plays.

    Not thread-safe: for the training thread, as the store that it belongs to.

    Args:
        wire_dtype: How float32 gradients travel.
    """

    def __init__(self, wire_dtype: WireDType) -> None:
        self._wire_dtype = wire_dtype
        self._residuals: dict[int, dict[tuple[int, int], _Residual]] = {}

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
            What to push instead, of the same shapes. A gradient that travels as it is stored is returned itself.
        """
        return {
            index: self._compensate(unit_index, layout, dp_rank, index, gradient)
            for index, gradient in gradients.items()
        }

    def reset(self, dp_rank: int) -> None:
        """The rank's work item is begun anew, here or elsewhere: its pushes in this step count no more."""
        for residual in self._residuals.get(dp_rank, {}).values():
            residual.drop()

    def commit(self) -> None:
        """The step is committed with what was pushed. Forgets ranks that had no push in it: others play them."""
        for dp_rank, residuals in list(self._residuals.items()):
            if not any(residual.pending is not None for residual in residuals.values()):
                del self._residuals[dp_rank]
            for residual in residuals.values():
                residual.promote()

    def _compensate(
        self, unit_index: int, layout: UnitLayout, dp_rank: int, index: int, gradient: torch.Tensor
    ) -> torch.Tensor:
        if applied(self._wire_dtype, layout.parameters[index].dtype) == common_pb2.WIRE_DTYPE_UNSPECIFIED:
            return gradient
        residual = self._residuals.setdefault(dp_rank, {}).setdefault((unit_index, index), _Residual())
        left_out = residual.committed if residual.pending is None else residual.pending
        flat = gradient.view(-1)
        pushed = flat if left_out is None else flat + left_out
        if residual.pending is None:
            residual.pending, residual.spare = residual.spare, None
        if residual.pending is None:
            residual.pending = torch.empty_like(pushed)
        round_trip_(pushed, layout.starts[index], self._wire_dtype, residual.pending)
        torch.sub(pushed, residual.pending, out=residual.pending)
        # The servers refuse a push that is not finite; it must not spoil the next one, too.
        residual.pending.nan_to_num_(0.0, 0.0, 0.0)
        return pushed.view_as(gradient)
