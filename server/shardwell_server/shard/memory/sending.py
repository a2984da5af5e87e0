"""Memory for messages that clients have not read yet: limited for all of them and per connection."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shardwell_server.shard.memory.connections import close_connection
from shardwell_wire.errors import CapacityError

logger = logging.getLogger(__name__)

STALL_LIMIT_S = 30.0
"""A reader that does not take a message for this long loses its connection."""

PRESSED_LIMIT_S = 10.0
"""The same while other streams wait for memory."""

_MAX_WAITING = 4096
_MAX_WAITING_PER_PEER = 512
_SWEEP_S = 1.0


@dataclass(eq=False)
class _Message:
    """One message that is being sent, or waits to be."""

    peer: str
    size_bytes: int
    since_s: float = 0.0
    turn: asyncio.Future[None] | None = field(default=None, repr=False)


class Sending:
    """Counts what is sent but not read yet; streams wait for room, in order. Used on the event loop.

    gRPC keeps a message, and a copy of it, until the client's flow control lets it go. A client that never reads so
    holds one message per stream, for as many streams as it opens.

    Nothing frees that memory as long as the connection is open, not even the end of the rpc on the server. The
    connection of a reader that stalls is therefore closed.

    Args:
        limit_bytes: For all connections together.
        close: Closes the connection of a peer; returns whether it was found.
    """

    def __init__(self, limit_bytes: int, close: Callable[[str], bool] = close_connection) -> None:
        self.limit_bytes = limit_bytes
        self.peer_limit_bytes = max(1, limit_bytes // 4)
        self.used_bytes = 0
        self._used_by: Counter[str] = Counter()
        self._sent: dict[_Message, None] = {}
        """What is being sent, oldest first."""
        self._waiting: deque[_Message] = deque()
        self._waiting_by: Counter[str] = Counter()
        self._sweeper: asyncio.TimerHandle | None = None
        self._close = close

    @asynccontextmanager
    async def message(self, size_bytes: int, peer: str, wait_s: float) -> AsyncIterator[None]:
        """Room for one message while the block makes it and hands it to the client.

        If the client does not take the message in time its connection is closed, and gRPC cancels the task that is in
        the block.

        Args:
            size_bytes: What the message takes, with copies. More than the limits is taken when nothing else is held.
            peer: The connection.
            wait_s: How long to wait for room.

        Raises:
            CapacityError: There was no room in time, or too many streams wait already.
        """
        message = _Message(peer, size_bytes)
        if self._waiting or not (self._fits(message) and self._fits_peer(message)):
            await self._wait(message, wait_s)
        else:
            self._begin(message)
        try:
            yield
        finally:
            self._end(message)

    def _fits(self, message: _Message) -> bool:
        return not self.used_bytes or self.used_bytes + message.size_bytes <= self.limit_bytes

    def _fits_peer(self, message: _Message) -> bool:
        own = self._used_by.get(message.peer, 0)
        return not own or own + message.size_bytes <= self.peer_limit_bytes

    def _begin(self, message: _Message) -> None:
        loop = asyncio.get_running_loop()
        message.since_s = loop.time()
        self.used_bytes += message.size_bytes
        self._used_by[message.peer] += message.size_bytes
        self._sent[message] = None
        if self._sweeper is None:
            self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    def _end(self, message: _Message) -> None:
        del self._sent[message]
        self.used_bytes -= message.size_bytes
        self._used_by[message.peer] -= message.size_bytes
        if not self._used_by[message.peer]:
            del self._used_by[message.peer]
        if self._waiting:
            self._admit()

    async def _wait(self, message: _Message, wait_s: float) -> None:
        waiting, own = len(self._waiting), self._waiting_by.get(message.peer, 0)
        if waiting >= _MAX_WAITING or own >= _MAX_WAITING_PER_PEER:
            raise CapacityError(
                f"{waiting} streams, {own} of them of this connection, wait for "
                f"their readers already; the limits are {_MAX_WAITING} and {_MAX_WAITING_PER_PEER}: read the streams "
                "that are open before opening more"
            )
        message.turn = asyncio.get_running_loop().create_future()
        self._waiting.append(message)
        self._waiting_by[message.peer] += 1
        self._admit()
        try:
            async with asyncio.timeout(wait_s):
                await message.turn
        except BaseException as error:
            if message in self._sent:  # its turn came at the moment it gave up
                self._end(message)
            else:
                self._leave(message)
            if not isinstance(error, TimeoutError):
                raise
            own = self._used_by.get(message.peer, 0)
            raise CapacityError(
                f"waited {wait_s:.1f} s to send a message of {message.size_bytes} bytes: readers have not taken "
                f"{self.used_bytes} bytes yet, {own} of them of this connection; the limits are "
                f"{self.limit_bytes} and {self.peer_limit_bytes}: read the streams that are open, or ask for smaller "
                "chunks",
                limit_bytes=self.limit_bytes,
            ) from None

    def _leave(self, message: _Message) -> None:
        self._waiting.remove(message)
        self._waiting_by[message.peer] -= 1
        if not self._waiting_by[message.peer]:
            del self._waiting_by[message.peer]

    def _admit(self) -> None:
        """Begins what fits, oldest first; a connection that is at its own limit does not hold up the others."""
        for message in list(self._waiting):
            assert message.turn is not None
            if message.turn.done() or not self._fits_peer(message):
                continue  # cancelled a moment ago, it leaves by itself; or its connection has enough
            if not self._fits(message):
                return
            self._leave(message)
            self._begin(message)
            message.turn.set_result(None)

    def _sweep(self) -> None:
        """Closes the connections of readers that take nothing."""
        loop = asyncio.get_running_loop()
        limit_s = PRESSED_LIMIT_S if self._waiting else STALL_LIMIT_S
        stalled = {}
        for message in self._sent:
            if loop.time() - message.since_s < limit_s:
                break
            stalled[message.peer] = loop.time() - message.since_s
        for peer, stalled_s in stalled.items():
            if self._close(peer):
                logger.warning(
                    "closed the connection of %s: it has not read for %.0f s and holds %d of %d bytes for messages",
                    peer,
                    stalled_s,
                    self._used_by.get(peer, 0),
                    self.limit_bytes,
                )
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep) if self._sent else None
