"""Reuse of buffers, and the memory outside reservations."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import torch

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

    def release_detached(self, buffer: torch.Tensor) -> None:
        """Returns a detached buffer to the pool."""
        self.taken_bytes += buffer.numel()
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

    def try_acquire(self, size_bytes: int, *, keep_bytes: int = 0) -> bool:
        """Acquires memory if some is free and no caller waits for it. Leaves ``keep_bytes`` for others."""
        if self._waiting or self.used_bytes + size_bytes + keep_bytes > self._limit_bytes:
            return False
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
