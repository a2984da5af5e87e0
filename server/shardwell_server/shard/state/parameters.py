"""The parameters of one shard: where the bytes lie, which version they are, and who reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwell_server.shard.memory.budget import IncomingBuffer
from shardwell_server.shard.memory.shared_memory import Segment, SharedMemory
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import CapacityError, ShardwellError


@dataclass(eq=False)
class Parameters:
    """The bytes of one version.

    The newest version always lies in the same place, so that trainers can map it. What still reads
    the one before while the next is made reads a copy: look at ``buffer`` anew for every piece.
    """

    buffer: torch.Tensor
    """uint8. [stop_bytes - start_bytes]"""
    version: int
    """Which one; of values that are about to become one, that."""
    readers: int = 0
    """While there are any, the bytes stay as they are, here or in a copy."""
    holders: int = 0
    """Of the readers, those for whom more than one update may pass."""
    revoked: ShardwellError | None = None
    """Why the bytes may not be read any more, by those who still wanted to."""
    newest: bool = True
    """Whether no other version has taken their place, or is about to."""

    def check(self) -> None:
        """Raises what took the bytes from their readers; readers ask before every look at them."""
        if self.revoked is not None:
            raise self.revoked

    def memory(self, start: int, stop: int) -> memoryview:
        """A part of the bytes where they lie now."""
        return memory_at(self.buffer.data_ptr() + start, stop - start)


class Home:
    """Where the newest version of a shard lies for as long as there is one.

    Args:
        received: The initial values, taken over.
        shared: Where to put them if trainers shall be able to map them.
        what: Names the shard in errors.
    """

    def __init__(self, received: IncomingBuffer, shared: SharedMemory | None, what: str) -> None:
        self.buffer = received.keep()
        self.segment: Segment | None = None
        self.why_not_shared = "this server offers no shared memory"
        self._received = received
        if shared is not None:
            self._move(shared, what)

    def _move(self, shared: SharedMemory, what: str) -> None:
        try:
            self.segment = shared.create_segment(self.buffer.numel(), what)
        except CapacityError as error:
            self.why_not_shared = str(error)
            return
        self.segment.buffer.copy_(self.buffer)
        memory = self._received.room.memory
        memory.pool.give(self.buffer)
        memory.note_shared(self.buffer.numel())
        self.buffer = self.segment.buffer

    @property
    def size_bytes(self) -> int:
        """Of the shard."""
        return self.buffer.numel()

    def show(self, version: int) -> None:
        """Says to those who map the bytes which version they are, or ``UPDATING``."""
        if self.segment is not None:
            self.segment.show(version)

    def close(self) -> None:
        """Gives the memory back."""
        if self.segment is None:
            self._received.give_back()
            return
        self.segment.close()
        self._received.room.memory.note_shared(-self.buffer.numel())
        self._received.room.give()
