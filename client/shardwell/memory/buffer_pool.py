"""A pool of reusable buffers: page faults make a fresh allocation ten times slower than memcpy."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwell_wire.chunk_streams import memory_at

_MAPPED_BYTES = 1 << 20
"""Size from which buffers are mapped directly: in the heaps they would leave holes when they are freed."""


class BufferPool:
    """A pool of byte buffers. Thread-safe.

    Args:
        limit_bytes: How many bytes of idle buffers are kept. Buffers that are released beyond the limit are freed.
        one_larger: Also keep one buffer that is larger than the whole limit, unless the limit is 0, until a buffer of
            another size is acquired. Repeated use of the same size then reuses its pages. The buffer is freed before
            the other one is allocated, so both never exist at once.
    """

    def __init__(self, limit_bytes: int, *, one_larger: bool = False) -> None:
        self._limit_bytes, self._idle_bytes, self._one_larger = limit_bytes, 0, one_larger
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._larger: torch.Tensor | None = None
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle buffers."""
        with self._lock:
            return self._idle_bytes + (0 if self._larger is None else self._larger.numel())

    def set_limit(self, limit_bytes: int) -> None:
        """Changes the limit, and frees all idle buffers."""
        self._limit_bytes = limit_bytes
        self.trim()

    @contextmanager
    def acquired(self, size_bytes: int) -> Iterator[memoryview]:
        """Context with a buffer of arbitrary content. [size_bytes]"""
        buffer = self.acquire(size_bytes)
        try:
            yield memory_at(buffer.data_ptr(), size_bytes, buffer)
        finally:
            self.release(buffer)

    def acquire(self, size_bytes: int) -> torch.Tensor:
        """Returns a buffer of arbitrary content, to pass to ``release`` later. uint8. [size_bytes]"""
        with self._lock:
            larger, self._larger = self._larger, None  # always: both buffers must not exist at the same time
            if larger is not None and larger.numel() == size_bytes:
                return larger
            if idle := self._idle.get(size_bytes):
                self._idle_bytes -= size_bytes
                return idle.pop()
        del larger  # frees the memory before the next allocation
        return _mapped(size_bytes) if size_bytes >= _MAPPED_BYTES else torch.empty(size_bytes, dtype=torch.uint8)

    def release(self, buffer: torch.Tensor) -> None:
        """Returns a buffer to the pool; the caller must not use it any longer."""
        size_bytes = buffer.numel()
        with self._lock:
            if self._idle_bytes + size_bytes <= self._limit_bytes:
                self._idle_bytes += size_bytes
                self._idle.setdefault(size_bytes, []).append(buffer)
            elif self._one_larger and size_bytes > self._limit_bytes > 0:
                self._larger = buffer

    def trim(self) -> None:
        """Frees all idle buffers."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes, self._larger = 0, None


def _mapped(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
