"""Buffers that are used again: a fresh allocation page-faults at a tenth of memcpy's speed."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwell_wire.codec import memory_at

_MAPPED_BYTES = 1 << 20
"""Larger buffers are mapped by themselves: in the heaps they would leave holes when they are freed."""


class BufferPool:
    """Byte buffers, lent to one thread at a time.

    Args:
        idle_bytes: How much is kept for later; what is given back beyond that is freed.
    """

    def __init__(self, idle_bytes: int) -> None:
        self._limit_bytes, self._idle_bytes = idle_bytes, 0
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """What is kept for later now."""
        return self._idle_bytes

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[memoryview]:
        """A buffer with any content. [size_bytes]"""
        buffer = self.take(size_bytes)
        try:
            yield memory_at(buffer.data_ptr(), size_bytes)
        finally:
            self.give(buffer)

    def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer with any content, until ``give``. uint8. [size_bytes]"""
        with self._lock:
            if idle := self._idle.get(size_bytes):
                self._idle_bytes -= size_bytes
                return idle.pop()
        return _mapped(size_bytes) if size_bytes >= _MAPPED_BYTES else torch.empty(size_bytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back; nobody may use it any more."""
        with self._lock:
            if self._idle_bytes + buffer.numel() <= self._limit_bytes:
                self._idle_bytes += buffer.numel()
                self._idle.setdefault(buffer.numel(), []).append(buffer)

    def trim(self) -> None:
        """Frees what is idle."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0


def _mapped(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
