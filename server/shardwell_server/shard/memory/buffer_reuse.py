"""Buffers: their reuse, the memory outside reservations, and that of messages that clients have not read yet."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from shardwell_server.serving.limits import close_connection
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError


class BufferPool:
    """Pool of byte tensors. Used on the event loop only.

    Idle buffers are kept, within the limit, for the next caller that asks for their size. Reuse matters: page faults
    make filling a fresh allocation ten times slower than memcpy.

    Args:
        limit_bytes: Idle buffers are freed when acquired buffers, idle buffers and ``elsewhere_bytes`` exceed this.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.taken_bytes = 0
        """Size of all acquired buffers."""
        self.idle_bytes = 0
        self.elsewhere_bytes = 0
        """Memory that counts against the limit but is not in this pool: optimizer state and shared memory."""
        self._limit_bytes = limit_bytes
        self._idle: dict[int, list[torch.Tensor]] = {}

    def acquire(self, size_bytes: int) -> torch.Tensor:
        """Returns a buffer with undefined content. [size_bytes]

        Raises:
            CapacityError: The operating system has no memory.
        """
        idle = self._idle.get(size_bytes)
        if idle:
            buffer = idle.pop()
            self.idle_bytes -= size_bytes
        else:
            buffer = _allocate(size_bytes)
        self.taken_bytes += size_bytes
        self._free_excess()
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Returns a buffer to the pool. The caller must not use it afterwards."""
        size_bytes = buffer.numel()
        self.taken_bytes -= size_bytes
        if size_bytes:
            self._idle.setdefault(size_bytes, []).append(buffer)
            self.idle_bytes += size_bytes
        self._free_excess()

    def detach(self, buffer: torch.Tensor) -> None:
        """Stops counting an acquired buffer. The caller counts it elsewhere."""
        self.taken_bytes -= buffer.numel()

    def attach(self, buffer: torch.Tensor) -> None:
        """Counts memory that was acquired elsewhere. The caller releases it to the pool."""
        self.taken_bytes += buffer.numel()

    def release_detached(self, buffer: torch.Tensor) -> None:
        """Returns a detached buffer to the pool."""
        self.attach(buffer)
        self.release(buffer)

    def trim(self) -> None:
        """Frees all idle buffers."""
        self._idle.clear()
        self.idle_bytes = 0

    def _free_excess(self) -> None:
        while self.idle_bytes and self.taken_bytes + self.elsewhere_bytes + self.idle_bytes > self._limit_bytes:
            size_bytes = max(size for size, idle in self._idle.items() if idle)
            self._idle[size_bytes].pop()
            self.idle_bytes -= size_bytes


def _allocate(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(
            f"the operating system refused to allocate {size_bytes} bytes, which --memory-budget allows: lower the "
            "budget to what this process may use"
        ) from error


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor, which keeps the tensor alive."""
    assert tensor.is_contiguous()
    return memory_at(tensor.data_ptr(), tensor.nbytes, owner=tensor)


class UnreservedMemory:
    """FIFO allocator for memory outside reservations; evicts old snapshots under pressure. Used on the event loop.

    It counts bytes only; buffers come from ``BufferPool``. Four things use it: streams that replace a shard's initial
    values, parts that are added to a contribution, encodings and averages for readers, and old versions that still have
    readers. Snapshots of old versions are evicted when another caller needs memory, because their readers may be
    arbitrarily slow.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.evict: Callable[[], None] = lambda: None
        """Called before a caller waits: releases the snapshots of old versions."""
        self.discard: Callable[[], None] = lambda: None
        """Called if a snapshot does not fit: releases changes between versions, which can be computed again."""
        self._limit_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def has_waiters(self) -> bool:
        """True if a caller waits for memory."""
        return bool(self._waiting)

    def set_limit(self, limit_bytes: int) -> None:
        """Sets the limit. The caller keeps it at least as large as the largest shard."""
        self._limit_bytes = limit_bytes
        self._admit()

    def try_acquire(self, size_bytes: int, *, keep_bytes: int = 0, discarding: bool = False) -> bool:
        """Acquires memory if some is free, perhaps after ``discard``, and no caller waits. Leaves ``keep_bytes``."""
        if self._waiting or self.used_bytes + size_bytes + keep_bytes > self._limit_bytes:
            if discarding:
                self.discard()
            return discarding and self.try_acquire(size_bytes, keep_bytes=keep_bytes)
        self.used_bytes += size_bytes
        return True

    def try_acquire_evicting(self, size_bytes: int) -> bool:
        """Acquires memory if some is free now, or after old snapshots are evicted."""
        if self.try_acquire(size_bytes):
            return True
        self.evict()
        return self.try_acquire(size_bytes)

    async def acquire(self, size_bytes: int, wait_s: float, what: str) -> None:
        """Waits for memory, first come first served.

        Raises:
            CapacityError: No memory became free in time for ``what``.
        """
        if self.try_acquire_evicting(size_bytes):
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, admitted))
        try:
            async with asyncio.timeout(wait_s):
                await admitted
        except TimeoutError:
            self._stop_waiting(size_bytes, admitted)
            raise CapacityError(
                f"{what}: no buffer of {size_bytes} bytes became free within {wait_s:.1f} s; other streams use "
                f"{self.used_bytes} of {self._limit_bytes} bytes: try again, raise --memory-budget, or add shard "
                "servers"
            ) from None
        except BaseException:
            self._stop_waiting(size_bytes, admitted)
            raise

    def release(self, size_bytes: int) -> None:
        """Releases memory and admits waiting callers."""
        self.used_bytes -= size_bytes
        self._admit()

    def _stop_waiting(self, size_bytes: int, admitted: asyncio.Future[None]) -> None:
        if admitted.done() and not admitted.cancelled():
            self.release(size_bytes)  # admitted in the same loop iteration as the timeout
            return
        self._waiting.remove((size_bytes, admitted))
        self._admit()

    def _admit(self) -> None:
        # In order of arrival: small requests never overtake a large one.
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self._limit_bytes:
            size_bytes, admitted = self._waiting.popleft()
            if admitted.done():  # cancelled in this loop iteration; its task calls _stop_waiting
                self._waiting.appendleft((size_bytes, admitted))
                return
            self.used_bytes += size_bytes
            admitted.set_result(None)


logger = logging.getLogger(__name__)

STALL_LIMIT_S = 30.0
"""A connection is closed if its client does not take a message for this long."""

PRESSED_LIMIT_S = 10.0
"""The same limit while other streams wait for memory."""

_MAX_WAITING = 4096
_MAX_WAITING_PER_PEER = 512
_SWEEP_S = 1.0


@dataclass(eq=False)
class _Message:
    """One message that is being sent or waits to be sent."""

    peer: str
    size_bytes: int
    since_s: float = 0.0
    admitted: asyncio.Future[None] | None = field(default=None, repr=False)


class Sending:
    """Limits the memory of unread messages. Streams wait for memory in order. Used on the event loop.

    gRPC holds a message and a copy of it until the client's flow control admits it. A client that does not read
    therefore uses the memory of one message per open stream. Nothing frees this memory while the connection is open,
    not even the end of the rpc on the server. Therefore the connection of a stalled reader is closed.

    Args:
        limit_bytes: Limit for all connections together.
        close: Closes the connection of a peer; returns True if the connection was found.
    """

    def __init__(self, limit_bytes: int, close: Callable[[str], bool] = close_connection) -> None:
        self.limit_bytes = limit_bytes
        self.peer_limit_bytes = max(1, limit_bytes // 4)
        self.used_bytes = 0
        self._used_by: Counter[str] = Counter()
        self._sent: dict[_Message, None] = {}
        """Messages being sent, oldest first."""
        self._waiting: deque[_Message] = deque()
        self._waiting_by: Counter[str] = Counter()
        self._sweeper: asyncio.TimerHandle | None = None
        self._close = close

    @asynccontextmanager
    async def message(self, size_bytes: int, peer: str, wait_s: float) -> AsyncIterator[None]:
        """Counts one message while the block builds it and passes it to gRPC.

        If the client does not take the message in time, its connection is closed, and gRPC cancels the task that runs
        the block.

        Args:
            size_bytes: Size of the message with its copies. A message larger than the limits is admitted when no other
                message is counted.

        Raises:
            CapacityError: No memory became free in time, or too many streams wait already.
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
            self._sweeper = loop.call_later(_SWEEP_S, self._close_stalled)

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
                f"{waiting} streams wait for their readers already, {own} of them on this connection; the limits are "
                f"{_MAX_WAITING} and {_MAX_WAITING_PER_PEER}: read the open streams before opening more"
            )
        message.admitted = asyncio.get_running_loop().create_future()
        self._waiting.append(message)
        self._waiting_by[message.peer] += 1
        self._admit()
        try:
            async with asyncio.timeout(wait_s):
                await message.admitted
        except BaseException as error:
            if message in self._sent:  # admitted in the same loop iteration as the timeout
                self._end(message)
            else:
                self._stop_waiting(message)
            if not isinstance(error, TimeoutError):
                raise
            own = self._used_by.get(message.peer, 0)
            raise CapacityError(
                f"a message of {message.size_bytes} bytes could not be sent within {wait_s:.1f} s: clients have not "
                f"read {self.used_bytes} bytes yet, {own} of them on this connection; the limits are "
                f"{self.limit_bytes} and {self.peer_limit_bytes}: read the open streams, or request smaller chunks",
                limit_bytes=self.limit_bytes,
            ) from None

    def _stop_waiting(self, message: _Message) -> None:
        self._waiting.remove(message)
        self._waiting_by[message.peer] -= 1
        if not self._waiting_by[message.peer]:
            del self._waiting_by[message.peer]

    def _admit(self) -> None:
        """Admits messages that fit, oldest first. A connection at its own limit does not block other connections."""
        for message in list(self._waiting):
            assert message.admitted is not None
            if message.admitted.done() or not self._fits_peer(message):
                continue  # cancelled in this loop iteration (its task stops waiting), or at the connection's limit
            if not self._fits(message):
                return
            self._stop_waiting(message)
            self._begin(message)
            message.admitted.set_result(None)

    def _close_stalled(self) -> None:
        """Closes the connections of clients that have stopped reading."""
        loop = asyncio.get_running_loop()
        limit_s = PRESSED_LIMIT_S if self._waiting else STALL_LIMIT_S
        stalled = {}
        for message in self._sent:
            if loop.time() - message.since_s < limit_s:
                break  # all later messages are newer
            stalled[message.peer] = loop.time() - message.since_s
        for peer, stalled_s in stalled.items():
            if self._close(peer):
                logger.warning(
                    "closed the connection of %s: it has not read for %.0f s and uses %d of %d bytes for messages",
                    peer,
                    stalled_s,
                    self._used_by.get(peer, 0),
                    self.limit_bytes,
                )
        self._sweeper = loop.call_later(_SWEEP_S, self._close_stalled) if self._sent else None
