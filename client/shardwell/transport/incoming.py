"""Memory for the stream of one fetch, and what a trainer makes of the stream."""

from __future__ import annotations

from collections.abc import Callable

from shardwell_wire.v1 import shard_pb2

Place = Callable[[shard_pb2.GatherHeader], memoryview]
"""Returns the memory for the stream that a header announces. Called again if a fetch is repeated."""


def into(memory: memoryview) -> Place:
    """Returns a ``Place`` for a stream whose size is known."""
    return lambda _: memory


class Incoming:
    """The stream of one fetch. For one thread at a time.

    Args:
        memory: Memory for the whole stream.
        use: Called with the whole stream once it is complete.
    """

    base: shard_pb2.StreamBase | None = None
    """What this trainer has of the stream. None: it accepts no deltas."""

    def __init__(self, memory: memoryview, use: Callable[[memoryview], None] = lambda _: None) -> None:
        self._memory, self._use = memory, use
        self.received_bytes = 0
        """Size of what arrives in place of the stream, or the stream."""

    def place(self, version: int, deltas: shard_pb2.StreamDeltas | None) -> memoryview:
        """Returns the memory for what the server sends.

        Args:
            version: The version of the stream.
            deltas: From the header. None: the header has none.

        Raises:
            CorruptDataError: The deltas are not of the stream that this trainer has.
        """
        self.received_bytes = len(self._memory)
        return self._memory

    def finish(self) -> None:
        """Uses the stream, which has arrived and been checked.

        Raises:
            CorruptDataError: The deltas are malformed, or do not give the stream.
        """
        self._use(self._memory)
