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
        limit_bytes: How much is kept for later; what is given back beyond that is freed.
        one_larger: Also keep one buffer that alone is larger than the limit, unless that is 0, until one of another
            size is taken: whoever uses that size again and again finds its pages, and as it goes before another
            buffer comes, it never lies idle beside what took its place.
    """

    def __init__(self, limit_bytes: int, *, one_larger: bool = False) -> None:
        self._limit_bytes, self._idle_bytes, self._one_larger = limit_bytes, 0, one_larger
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._larger: torch.Tensor | None = None
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """What is kept for later now."""
        with self._lock:
            return self._idle_bytes + (0 if self._larger is None else self._larger.numel())

    def set_limit(self, limit_bytes: int) -> None:
        """Keeps so much from now on, and frees what is idle."""
        self._limit_bytes = limit_bytes
        self.trim()

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[memoryview]:
        """A buffer with any content. [size_bytes]"""
        buffer = self.take(size_bytes)
        try:
            yield memory_at(buffer.data_ptr(), size_bytes, buffer)
        finally:
            self.give(buffer)

    def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer with any content, until ``give``. uint8. [size_bytes]"""
        with self._lock:
            larger, self._larger = self._larger, None
            if larger is not None and larger.numel() == size_bytes:
                return larger
            if idle := self._idle.get(size_bytes):
                self._idle_bytes -= size_bytes
                return idle.pop()
        del larger  # before there is another one
        return _mapped(size_bytes) if size_bytes >= _MAPPED_BYTES else torch.empty(size_bytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back; nobody may use it any more."""
        size_bytes = buffer.numel()
        with self._lock:
            if self._idle_bytes + size_bytes <= self._limit_bytes:
                self._idle_bytes += size_bytes
                self._idle.setdefault(size_bytes, []).append(buffer)
            elif self._one_larger and size_bytes > self._limit_bytes > 0:
                self._larger = buffer

    def trim(self) -> None:
        """Frees what is idle."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes, self._larger = 0, None


def _mapped(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
