"""Shared memory in which a trainer of this host updates one partition of a shard: gradients, new values, new state."""

from __future__ import annotations

import torch

from shardwell_server.shard.memory.budget import Cover, Memory, Room
from shardwell_server.shard.memory.shared_memory import SharedBuffer, SharedMemory
from shardwell_wire.errors import ConflictError
from shardwell_wire.partitions import values_offset


class StagingBuffer:
    """One trainer's, until its transport is closed. Used on the event loop.

    What its trainer writes counts only once it is staged. A trainer that was taken for lost and comes back can write
    to its own staging buffer only, and what it says of it is refused.

    Args:
        what: Names it in errors.
        bounds: The part of the partition that lies in the shard, half-open.
        memory: Whose budget it counts against.
        shared: Where it is made.

    Raises:
        CapacityError: There is no room for it.
    """

    def __init__(self, what: str, bounds: tuple[int, int], memory: Memory, shared: SharedMemory) -> None:
        self._what, self._memory, self._shared = what, memory, shared
        self._size_bytes, self._values_at = bounds[1] - bounds[0], values_offset(*bounds)
        self._file, self._room = self._make(self._values_at + self._size_bytes)
        self._state: SharedBuffer | None = None
        self._state_room: Room | None = None
        self.held = self.closed = False
        """Whether what lies on it is staged; whether its trainer is gone."""

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def gradients(self) -> torch.Tensor:
        """Laid out like the partition. uint8. [size_bytes]"""
        return self._file.tensor[: self._size_bytes]

    @property
    def values(self) -> torch.Tensor:
        """Laid out like the partition. uint8. [size_bytes]"""
        return self._file.tensor[self._values_at :]

    def room_for_state(self, size_bytes: int) -> SharedBuffer:
        """Where the new state goes.

        Raises:
            CapacityError: There is no room for it.
            ConflictError: Room was made for it by giving up this staging buffer, on which nothing is staged.
        """
        if self._state is None or self._state.tensor.numel() != size_bytes:
            self._give_up_state()
            self._state, self._state_room = self._make(size_bytes)
            if self.closed:
                self._give_up_state()
            self.check_open()
        return self._state

    def written_state(self, size_bytes: int) -> SharedBuffer | None:
        """The new state that its trainer wrote. Raises ConflictError if it was not given room for as much."""
        if not size_bytes:
            return None
        if self._state is None or self._state.tensor.numel() != size_bytes:
            raise ConflictError(f"{self._what}: the state has other tensors now: stream it")
        return self._state

    def check_open(self) -> None:
        """Raises ConflictError if it was given up."""
        if self.closed:
            raise ConflictError(f"{self._what} is not open any more: stream the partition, or open another")

    def hold(self) -> None:
        """What lies on it is staged."""
        self.held = True

    def give_back(self) -> None:
        """What was staged is used up or void: the trainer may write again, if it is still there."""
        self.held = False
        if self.closed:
            self._free()

    def take_state(self, former: SharedBuffer | None, writer: StagingBuffer | None) -> bool:
        """The state written here is the optimizer's now: takes the one before as room for the next.

        Args:
            former: The state before; None: there was none, or not in shared memory.
            writer: Whose trainer wrote it. Another one may still do so, though nobody listens: then it is not taken.

        Returns:
            Whether it was taken; else the caller frees it.
        """
        written, self._state = self._state, None
        if former is None or writer not in (None, self) or self.closed or written is None:
            self._give_up_state()
            return False
        self._state = former
        return True

    def close(self) -> None:
        """Its trainer is gone, or the room is needed: takes the names away, and gives the memory back once unused."""
        if not self.closed:
            self.closed = True
            self._file.unlink()
            if not self.held:
                self._free()

    def _free(self) -> None:
        self._give_up_state()
        self._memory.note_shared(-self._file.tensor.numel())
        self._room.give()

    def _give_up_state(self) -> None:
        if self._state is not None:
            self._state.unlink()
        if self._state_room is not None:
            self._memory.note_shared(-self._state_room.size_bytes)
            self._state_room.give()
        self._state = self._state_room = None

    def _make(self, size_bytes: int) -> tuple[SharedBuffer, Room]:
        room = self._memory.try_room(size_bytes, Cover(0), self._what)
        try:
            made = self._shared.create(size_bytes, self._what)
        except BaseException:
            room.give()
            raise
        self._memory.note_shared(size_bytes)
        return made, room
