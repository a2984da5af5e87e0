"""What a lossy push left out of a gradient, added to the next one (Seide et al. 2014, "1-bit SGD").

With error feedback the sum of what was pushed follows the sum of the gradients: the two differ by one
push's rounding error, however many steps there were.

It is for those who ask for it, because it makes trainers remember something. What is left out lives in
the trainer alone and dies with it: whoever takes over a rank begins with nothing left out. No gradient is
lost then but that rounding error; yet the weights are no longer bit for bit those of a run in which
nothing failed. They still are when the same trainer computes a work item anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from shardwell.data_plane.encoded_gradients import EncodedGradients
from shardwell.memory.buffer_pool import BufferPool
from shardwell_wire.codec import memory_at
from shardwell_wire.layout import UnitLayout
from shardwell_wire.quantization_blocks import scratch_values
from shardwell_wire.stream_plan import InParameters, RangePlans, Slice
from shardwell_wire.wire_dtypes import AS_STORED, WireDtype, applied

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
        self._touched: set[int] = set()
        """Parameters of which ``_pending`` was written at some time; those of the others are zero in both."""
        self.pushed: set[int] = set()
        """Parameters that were pushed in this step: of them ``_pending`` counts."""

    def place(self, index: int) -> slice:
        """Where a parameter lies in these vectors."""
        start = self._layout.starts[index] // _ITEM_BYTES
        return slice(start, start + self._layout.parameters[index].numel)

    def before(self, index: int) -> torch.Tensor:
        """What was left out of a parameter's gradients before the next push. [numel]"""
        return (self._pending if index in self.pushed else self._committed)[self.place(index)]

    def after(self, part: Slice) -> torch.Tensor:
        """Where what the next push leaves out of some values is written. [part.numel]"""
        return self._pending[part.start_bytes // _ITEM_BYTES : part.stop_bytes // _ITEM_BYTES]

    def touch(self, indices: Iterable[int]) -> None:
        """What a push leaves out of these parameters is about to be written, whether it will count or not."""
        self._touched.update(indices)

    def promote(self) -> None:
        """The step is committed."""
        if not self.pushed:
            return
        for place in map(self.place, self._touched - self.pushed):
            self._pending[place].copy_(self._committed[place])
        self._committed, self._pending = self._pending, self._committed
        self.pushed = set()

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
        buffers: For what travels.
    """

    def __init__(self, wire_dtype: WireDtype, buffers: BufferPool) -> None:
        self._wire_dtype, self._buffers = wire_dtype, buffers
        self._plans: dict[int, RangePlans] = {}
        """Of whole units."""
        self._residuals: dict[int, dict[int, _Residual]] = {}

    def encode(
        self, unit_index: int, layout: UnitLayout, dp_rank: int, gradients: Mapping[int, torch.Tensor]
    ) -> EncodedGradients | None:
        """Encodes gradients with what was left out before added, and notes what is left out now.

        Args:
            unit_index: The unit.
            layout: Of the unit.
            dp_rank: The logical rank whose work item this is one part of.
            gradients: By parameter index; whole, contiguous, on the CPU, without a graph. Each [numel]. Not changed.

        Returns:
            What to push; None if all of them travel as they are stored.
        """
        lossy = {index for index in gradients if applied(self._wire_dtype, layout.parameters[index].dtype)}
        if not lossy:
            return None
        if unit_index not in self._plans:
            self._plans[unit_index] = RangePlans(layout, 0, layout.size_bytes)
        of_rank = self._residuals.setdefault(dp_rank, {})
        if unit_index not in of_rank:
            of_rank[unit_index] = _Residual(layout)
        residual, indices = of_rank[unit_index], tuple(sorted(gradients))
        plan = self._plans[unit_index].plan(indices, self._wire_dtype)
        buffer = self._buffers.acquire(plan.size_bytes)
        source = InParameters(gradients)
        before = InParameters({index: residual.before(index) for index in lossy})
        residual.touch(lossy)
        for part in plan.slices:
            if part.kind == AS_STORED:
                part.encode(source.of(part), buffer)
            else:
                _encode_compensated(part, source, before, buffer, residual.after(part))
        residual.pushed |= lossy
        return EncodedGradients(
            indices,
            self._wire_dtype,
            memory_at(buffer.data_ptr(), plan.size_bytes, buffer),
            sum(gradient.nbytes for gradient in gradients.values()),
            partial(self._buffers.release, buffer),
        )

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


def _encode_compensated(
    part: Slice, source: InParameters, before: InParameters, stream: torch.Tensor, lost: torch.Tensor
) -> None:
    """Encodes the sum of values and of what was left out before; writes to ``lost`` what that leaves out."""
    values = scratch_values(part.numel)
    for piece in part.parts:
        place = values if len(part.parts) == 1 else values[piece.of_slice]
        torch.add(source.piece(part, piece), before.piece(part, piece), out=place)
    part.encode(values, stream)
    part.decode(stream, lost)
    # The servers refuse a push that is not finite; it must not spoil the next one, too: its errors are 0.
    torch.sub(values, lost, out=lost).nan_to_num_(0.0, 0.0, 0.0)
