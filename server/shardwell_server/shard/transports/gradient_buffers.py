"""Shared memory in which a trainer of this host lays gradients, and that becomes contributions as it is."""

from __future__ import annotations

import torch

from shardwell_server.shard.memory.budget import Room
from shardwell_server.shard.memory.shared_memory import SharedBuffer
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import ConflictError, InvalidRequestError, StepStateError


class GradientBuffer:
    """One buffer, laid out like a shard, that belongs to one trainer until its transport is closed.

    It is never lent to another trainer: one that was taken for lost and comes back may write into its
    own gradient buffers only, and what it says of them is refused.

    Args:
        shard: Whose gradients it takes.
        shared: Its memory.
        room: What covers it in the server's budget.
    """

    def __init__(self, shard: UnitShard, shared: SharedBuffer, room: Room) -> None:
        self._shard, self._shared, self._room = shard, shared, room
        self._held = self._closed = False
        room.memory.note_shared(room.size_bytes)

    @property
    def path(self) -> str:
        return self._shared.path

    @property
    def buffer(self) -> torch.Tensor:
        """uint8. [stop_bytes - start_bytes]"""
        return self._shared.tensor

    @property
    def held(self) -> bool:
        """Whether it is a contribution now."""
        return self._held

    def check(self, shard: UnitShard) -> None:
        """Raises unless it can become a contribution to this shard now."""
        if self._closed:
            raise ConflictError(f"the gradient buffer for {self._shard.what} is closed: its transport is")
        if shard is not self._shard:
            raise InvalidRequestError(f"the gradient buffer is for {self._shard.what}, not for {shard.what}")
        if self._held:
            raise StepStateError(f"the gradient buffer for {self._shard.what} is a contribution: take another one")

    def keep(self) -> torch.Tensor:
        """It becomes a contribution."""
        self._held = True
        self._room.settle()
        return self.buffer

    def give_back(self) -> None:
        """The contribution is used up or void: the trainer may write again, if it is still there."""
        self._held = False
        if self._closed:
            self._free()

    def close(self) -> None:
        """The trainer is gone: takes the file's name away, and the memory as soon as no contribution needs it."""
        self._shared.unlink()
        self._closed = True
        if not self._held:
            self._free()

    def _free(self) -> None:
        self._room.memory.note_shared(-self._room.size_bytes)
        self._room.give()
