"""Error feedback adds the rounding error of a lossy push to the next gradient (Seide et al. 2014, "1-bit SGD").

With error feedback the sum of the pushed gradients follows the sum of the gradients. The two differ by the rounding
error of one push, however many steps there were. With the top-k and the low-rank dtypes they also differ by what was
not pushed yet (Stich et al. 2018, "Sparsified SGD with Memory"; Vogels et al. 2019, "PowerSGD").

It is off by default, because trainers become stateful. A trainer keeps its residuals in its own memory: when another
trainer takes over a rank, that trainer starts with residuals of zero, and the weights differ from those of a run
without failures. The weights stay bit-identical if the same trainer recomputes a work item, and if the run is loaded
from a checkpoint, which contains the residuals of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwell.memory.buffers import BufferPool
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.quantization_blocks import scratch_values
from shardwell_wire.encoding.streams import InParameters, MatrixSlice, RangePlans, Slice
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype, applied
from shardwell_wire.model.layout import UnitLayout

_ITEM_BYTES = 4
"""Size of a float32."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedGradients:
    """One part of a contribution, encoded for the whole unit. Each server gets a range of the stream."""

    indices: tuple[int, ...]
    """Indices of the parameters, rising."""
    wire_dtype: WireDtype
    """The dtype in which float32 gradients travel."""
    stream: memoryview
    """The encoded gradients."""
    stored_bytes: int
    """Size of the gradients before they were encoded."""
    release: Callable[[], None]
    """Releases the memory of the stream."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedResidual:
    """The rounding errors of one parameter's gradients for one rank. Nothing changes them any more."""

    dp_rank: int
    parameter: str
    """``layout.Parameter.key``, the name of the parameter or of its part in checkpoints."""
    values: torch.Tensor
    """[numel]"""
    in_stages: bool
    """True if several pipeline stages push the parameter, each with residuals of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedResiduals:
    """All residuals of one trainer at the start of a step."""

    step: int
    dp_ranks: frozenset[int]
    """Ranks whose residuals the trainer has. Ranks and parameters without a lossy push have no tensor."""
    residuals: Sequence[CapturedResidual]


ReadResiduals = Callable[[int, UnitLayout], Mapping[int, torch.Tensor]]
"""Returns the residuals of a checkpoint by parameter index, each [numel], for a dp rank and a unit."""


class _Residual:
    """The rounding errors of one unit's gradients for one rank, in vectors laid out like the unit."""

    def __init__(self, layout: UnitLayout) -> None:
        numel = layout.size_bytes // _ITEM_BYTES
        self._layout = layout
        self._committed = torch.zeros(numel, dtype=torch.float32, device="cpu")
        """Errors at the start of the step."""
        self._pending = torch.zeros(numel, dtype=torch.float32, device="cpu")
        """Errors after the pushes of this step, for the parameters in ``pushed``."""
        self._touched: set[int] = set()
        """Parameters whose part of ``_pending`` was written in any step. The others are zero in both vectors."""
        self._captured = False
        """True if somebody reads ``_committed``, so that its memory must not be written again."""
        self.pushed: set[int] = set()
        """Parameters that were pushed in this step."""

    def range_of(self, index: int) -> slice:
        """Returns a parameter's range in the vectors."""
        start = self._layout.starts[index] // _ITEM_BYTES
        return slice(start, start + self._layout.parameters[index].numel)

    def before(self, index: int) -> torch.Tensor:
        """Returns the errors that the next push of a parameter must add. [numel]"""
        return (self._pending if index in self.pushed else self._committed)[self.range_of(index)]

    def after(self, part: Slice) -> torch.Tensor:
        """Returns the memory for the errors of the next push. [part.numel]"""
        return self._pending[part.start_bytes // _ITEM_BYTES : part.stop_bytes // _ITEM_BYTES]

    def touch(self, indices: Iterable[int]) -> None:
        """Marks parameters whose pending errors are about to be written."""
        self._touched.update(indices)

    def commit(self) -> None:
        """Makes the pending errors those of the next step."""
        if not self.pushed:
            return
        for stale in map(self.range_of, self._touched - self.pushed):
            self._pending[stale].copy_(self._committed[stale])
        former = torch.zeros_like(self._committed) if self._captured else self._committed
        self._committed, self._pending = self._pending, former
        self._captured = False
        self.pushed = set()

    def load(self, restored: Mapping[int, torch.Tensor]) -> None:
        """Sets the errors at the start of the step. Call it before the first push."""
        for index, values in restored.items():
            self._committed[self.range_of(index)].copy_(values)
        self._touched.update(restored)

    def capture(self, dp_rank: int) -> Iterable[CapturedResidual]:
        """Returns the errors at the start of the step, without a copy: the next ``commit`` leaves their memory."""
        self._captured = True
        return [
            CapturedResidual(
                dp_rank,
                self._layout.parameters[index].key,
                self._committed[self.range_of(index)],
                in_stages=len(self._layout.pp_ranks) > 1,
            )
            for index in sorted(self._touched)
        ]

    def reset(self) -> None:
        """Discards the errors of this step's pushes."""
        self.pushed = set()


class ErrorFeedback:
    """The residuals of one trainer's pushes, by unit and logical dp rank.

    A work item that is recomputed starts from the residuals at the start of the step, so it pushes the same bytes.
    This takes two float32 copies of every pushed unit for each rank that the trainer plays. For the training thread
    only, except ``capture``.

    Args:
        wire_dtype: The dtype in which float32 gradients travel.
        buffers: Memory for encoded streams.
    """

    def __init__(self, wire_dtype: WireDtype, buffers: BufferPool, step: int = 0) -> None:
        self._wire_dtype, self._buffers, self._step = wire_dtype, buffers, step
        self._plans: dict[int, RangePlans] = {}
        """Plans of whole units, keyed by unit index."""
        self._residuals: dict[int, dict[int, _Residual]] = {}
        """Keyed by dp rank and unit index."""
        self._known_ranks: frozenset[int] = frozenset()
        """Ranks whose residuals at the start of the step are known: this trainer made the pushes of the step before."""
        self._restored: ReadResiduals | None = None
        """Residuals of units that are not in ``_residuals`` yet."""
        self._restored_ranks: frozenset[int] | None = None
        """Ranks for which ``_restored`` holds. None: all, in the first step after the checkpoint."""
        self._lock = threading.Lock()
        """Held while residuals are added, exchanged or captured."""

    @property
    def step(self) -> int:
        """The step in flight."""
        return self._step

    def encode(
        self, unit_index: int, layout: UnitLayout, dp_rank: int, gradients: Mapping[int, torch.Tensor]
    ) -> EncodedGradients | None:
        """Adds the residuals to gradients, encodes the sums, and keeps the new residuals.

        Args:
            dp_rank: The logical rank whose work item the gradients belong to.
            gradients: By parameter index; whole, contiguous, on the CPU, without a graph. Not changed. Each [numel].

        Returns:
            The encoded gradients, or None if all of them travel as stored.
        """
        lossy = {index for index in gradients if applied(self._wire_dtype, layout.parameters[index])}
        if not lossy:
            return None
        if unit_index not in self._plans:
            self._plans[unit_index] = RangePlans(layout, 0, layout.size_bytes)
        residual, indices = self._residual(unit_index, layout, dp_rank), tuple(sorted(gradients))
        plan = self._plans[unit_index].plan(indices, self._wire_dtype)
        buffer = self._buffers.acquire(plan.size_bytes)
        source = InParameters(gradients)
        before = InParameters({index: residual.before(index) for index in lossy})
        with self._lock:
            residual.touch(lossy)
        for part in plan.slices:
            if part.kind == AS_STORED:
                part.encode(source.of(part), buffer)
            elif isinstance(part, MatrixSlice):
                _encode_matrix(part, source, before, buffer, residual.after(part), seed=self._step)
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

    def _residual(self, unit_index: int, layout: UnitLayout, dp_rank: int) -> _Residual:
        of_rank = self._residuals.get(dp_rank, {})
        if (residual := of_rank.get(unit_index)) is None:
            residual = _Residual(layout)
            if self._restored is not None and (self._restored_ranks is None or dp_rank in self._restored_ranks):
                residual.load(self._restored(dp_rank, layout))
            with self._lock:
                self._residuals.setdefault(dp_rank, {})[unit_index] = residual
        return residual

    def reset(self, dp_rank: int) -> None:
        """Discards the residuals of this step's pushes: the rank's work item is restarted, by any trainer."""
        for residual in self._residuals.get(dp_rank, {}).values():
            residual.reset()

    def restart(self, step: int, *, keep: bool) -> None:
        """Discards the residuals of this step's pushes. ``keep``: keep the residuals of earlier steps."""
        with self._lock:
            self._step = step
            if not keep:
                self._residuals.clear()
                self._known_ranks, self._restored = frozenset(), None
        for dp_rank in self._residuals:
            self.reset(dp_rank)

    def restore(self, restored: ReadResiduals) -> None:
        """Continues with the residuals of a checkpoint, whose version is that of the step in flight."""
        self._restored, self._restored_ranks = restored, None

    def commit(self, step: int, dp_ranks: Collection[int]) -> None:
        """Keeps the residuals of the committed step. Drops other ranks: other trainers play them now.

        Args:
            step: The step that begins.
            dp_ranks: Ranks whose work items of the step before were computed by this trainer.
        """
        with self._lock:
            self._step, self._known_ranks = step, frozenset(dp_ranks)
            restored = self._restored_ranks
            self._restored_ranks = self._known_ranks if restored is None else self._known_ranks & restored
            self._residuals = {rank: at for rank, at in self._residuals.items() if rank in self._known_ranks}
            for residuals in self._residuals.values():
                for residual in residuals.values():
                    residual.commit()

    def capture(self, step: int) -> CapturedResiduals | None:
        """Returns the residuals at the start of a step, without a copy. None: another step is in flight. Thread-safe.

        The residuals of a rank are not known before its first commit on this trainer.
        """
        with self._lock:
            if step != self._step:
                return None
            found = [
                captured
                for dp_rank in sorted(self._known_ranks)
                for _, residual in sorted(self._residuals.get(dp_rank, {}).items())
                for captured in residual.capture(dp_rank)
            ]
            return CapturedResiduals(step, self._known_ranks, found)


def _encode_compensated(
    part: Slice, source: InParameters, before: InParameters, stream: torch.Tensor, lost: torch.Tensor
) -> None:
    """Encodes the sum of gradients and residuals; writes the rounding errors to ``lost``."""
    values = scratch_values(part.numel)
    for piece in part.parts:
        out = values if len(part.parts) == 1 else values[piece.of_slice]
        torch.add(source.piece(part, piece), before.piece(part, piece), out=out)
    part.encode(values, stream)
    part.decode(stream, lost)
    # Servers reject a push that is not finite. Its errors become 0, so that they do not spoil the next push.
    torch.sub(values, lost, out=lost).nan_to_num_(0.0, 0.0, 0.0)


def _encode_matrix(
    part: MatrixSlice,
    source: InParameters,
    before: InParameters,
    stream: torch.Tensor,
    lost: torch.Tensor,
    *,
    seed: int,
) -> None:
    """Encodes the sum of a matrix and its residuals; writes what the product of its factors lacks to ``lost``."""
    values = torch.add(source.of(part), before.of(part), out=lost)
    part.encode(values, stream, seed)
    part.subtract(stream, values)
    values.nan_to_num_(0.0, 0.0, 0.0)  # as above
