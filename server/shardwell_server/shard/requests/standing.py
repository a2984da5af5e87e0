"""Streams that stay open for as long as a client likes, such as transport sessions and pinned versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shardwell_wire.errors import CapacityError

MAX_STREAMS = 16_384
"""Of all clients together."""

MAX_STREAMS_PER_PEER = 256
"""Of one connection; a trainer needs a few."""


class StandingStreams:
    """Counts the streams that are open, for all clients and per connection. Used on the event loop."""

    def __init__(self) -> None:
        self._by_peer: Counter[str] = Counter()

    @contextmanager
    def one(self, peer: str) -> Iterator[None]:
        """Counts a stream until the block ends.

        Args:
            peer: The connection.

        Raises:
            CapacityError: Too many are open.
        """
        own, total = self._by_peer.get(peer, 0), self._by_peer.total()
        if own >= MAX_STREAMS_PER_PEER or total >= MAX_STREAMS:
            raise CapacityError(
                f"{own} transport sessions and pinned versions of this connection are open, {total} of all clients; "
                f"the limits are {MAX_STREAMS_PER_PEER} and {MAX_STREAMS}: close some before opening more"
            )
        self._by_peer[peer] += 1
        try:
            yield
        finally:
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
