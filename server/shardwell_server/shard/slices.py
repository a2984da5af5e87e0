"""The slices of one shard that trainers update: what is staged for the next version, and the optimizers' state.

Staged values and state take effect with the update of a committed step, together. Until then they may be
replaced, and they are void when the gradient that they were computed from is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwell_server.shard.memory import Room
from shardwell_wire.errors import IncompleteStepError
from shardwell_wire.layout import Segment
from shardwell_wire.slices import part_in
from shardwell_wire.v1 import shard_pb2


@dataclass(frozen=True)
class SliceState:
    """An optimizer's state of one slice, opaque to the server."""

    tensors: Sequence[shard_pb2.StateTensor] = ()
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """The tensors' bytes, one after the other. uint8. [size_bytes]"""


@dataclass(frozen=True)
class StagedSlice:
    """What a trainer sent for one slice."""

    epoch: int
    segments: Sequence[Segment]
    """Of the parameters that have new values."""
    values: torch.Tensor
    """Their bytes, one after the other. uint8."""
    state: SliceState
    room: Room


class Slices:
    """Of one shard. Used on the event loop; methods named ``compute_*`` run in a thread.

    Args:
        what: Names the shard in errors.
        unit_bytes: Length of the unit's flat vector.
        start_bytes: Half-open range of the shard.
        stop_bytes: Its end.
        dp: Logical data ranks.
    """

    def __init__(self, what: str, unit_bytes: int, start_bytes: int, stop_bytes: int, dp: int) -> None:
        self.generation = 0
        """Of the gradient that values are computed from."""
        self.states: dict[int, SliceState] = {}
        """By dp rank, as of the newest version."""
        self._what, self._start_bytes = what, start_bytes
        self._bounds = [part_in(unit_bytes, dp, rank, start_bytes, stop_bytes) for rank in range(dp)]
        self._staged: dict[int, StagedSlice] = {}

    @property
    def state_bytes(self) -> int:
        """What the optimizers' state takes."""
        return sum(state.data.numel() for state in self.states.values())

    def bounds(self, dp_rank: int) -> tuple[int, int]:
        """The half-open part of a rank's slice that lies here."""
        return self._bounds[dp_rank]

    def staged_epoch(self, dp_rank: int) -> int:
        """Under which epoch the values of a rank's slice were staged; -1 if they are not."""
        staged = self._staged.get(dp_rank)
        return -1 if staged is None else staged.epoch

    def stage(self, dp_rank: int, staged: StagedSlice) -> None:
        """Takes what a trainer sent, in place of what is there."""
        self._drop(dp_rank)
        self._staged[dp_rank] = staged

    def check_staged(self) -> None:
        """Raises IncompleteStepError unless every slice is staged."""
        missing = [rank for rank, (start, stop) in enumerate(self._bounds) if start < stop and rank not in self._staged]
        if missing:
            ranks = ", ".join(map(str, missing))
            raise IncompleteStepError(f"{self._what}: the slice of data rank {ranks} is not staged", ranks=ranks)

    def compute_apply(self, home: torch.Tensor) -> None:
        """Copies the staged values to their places in the shard. uint8. [stop_bytes - start_bytes]"""
        for staged in self._staged.values():
            position = 0
            for segment in staged.segments:
                begin = segment.start_bytes - self._start_bytes
                home[begin : begin + segment.size_bytes] = staged.values[position : position + segment.size_bytes]
                position += segment.size_bytes

    def settle(self) -> None:
        """The staged values are in place: their state is the optimizers' from now on."""
        self.states.update({rank: staged.state for rank, staged in self._staged.items()})
        self.void()

    def void(self) -> None:
        """The gradient is another from now on, or gone: what is staged is dropped."""
        self.generation += 1
        for dp_rank in list(self._staged):
            self._drop(dp_rank)

    def _drop(self, dp_rank: int) -> None:
        if (staged := self._staged.pop(dp_rank, None)) is not None:
            staged.room.give()
