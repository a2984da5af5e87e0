"""Memory of this process: a pool of buffers, memory that reads as NaN, and settings of the C library's allocator.

``VectorMemory`` counts the memory of all flat vectors.

A fresh allocation is ten times slower than memcpy, because of its page faults. ``BufferPool`` reuses buffers.

By default, glibc maps large blocks directly and unmaps them when they are freed. The kernel then clears all pages of
every large gradient in every step. ``keep_freed_memory`` makes glibc reuse the memory of freed gradients and
activations. The memory of units is outside the heaps (``BufferPool``, ``shared_vector.py``), where it would leave
holes. MALLOC_* and GLIBC_TUNABLES in the environment take precedence. Without glibc, these functions do nothing.

torch reads a tensor without memory at address 0, which is a segmentation fault. Autograd and parameters raise before
that (see Note: [Version counters]), but a view that the user keeps, such as ``parameter.detach()``, is an ordinary
tensor. ``nan_storage`` is for such views of freed parameters.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardwell_wire.encoding.chunk_streams import memory_at

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


@dataclass(slots=True)
class VectorMemory:
    """Counts the bytes that the flat vectors of all units take in this process, and keeps released memory for reuse."""

    pool: BufferPool = field(default_factory=lambda: BufferPool(0))
    """For vectors on the CPU."""
    live_bytes: int = 0
    peak_bytes: int = 0
    """Maximum of ``live_bytes`` so far."""
    fetching_bytes: int = 0
    """Bytes of units in the state FETCHING, without replicas."""
    kept_bytes: int = 0
    """Bytes of units in the state KEPT, without replicas."""
    freed_bytes: int = 0
    """Bytes that were released so far."""
    recent_peak_bytes: int = 0
    """Maximum of ``live_bytes`` in the step in flight. The reader starts it again with ``live_bytes``."""

    def add(self, size_bytes: int) -> None:
        """Counts memory that was allocated, or released if the number is negative."""
        self.live_bytes += size_bytes
        if size_bytes < 0:
            self.freed_bytes -= size_bytes
        elif self.live_bytes > self.recent_peak_bytes:
            self.recent_peak_bytes = self.live_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _mapped(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


_MAP_FIXED = 0x10
_CHUNK_BYTES = 2 << 20
"""Size of the physical memory, which is allocated once per process and mapped repeatedly."""

CAN_MAP = hasattr(os, "memfd_create")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_lock = threading.Lock()
_regions: list[memoryview] = []
"""Mapped regions, by rising size."""


def nan_storage(size_bytes: int) -> torch.UntypedStorage:
    """Returns a storage whose bytes are all 0xff: NaN in every floating-point dtype. Empty if mapping fails.

    All such storages share their memory. A write to one storage is lost or visible in all.
    """
    if not CAN_MAP or not size_bytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    try:
        region = _region(size_bytes)
    except OSError:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(region, dtype=torch.uint8, count=size_bytes).untyped_storage()


def _region(size_bytes: int) -> memoryview:
    """Returns a region of at least this size. Regions stay mapped until the process ends."""
    with _lock:
        if not _regions or len(_regions[-1]) < size_bytes:
            _regions.append(_map(-(-size_bytes // _CHUNK_BYTES) * _CHUNK_BYTES))
        return _regions[-1]


def _map(size_bytes: int) -> memoryview:
    descriptor = os.memfd_create("shardwell-nan", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, b"\xff" * _CHUNK_BYTES)
        address = _checked(_libc.mmap(None, size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        for start in range(0, size_bytes, _CHUNK_BYTES):
            _checked(_libc.mmap(address + start, _CHUNK_BYTES, protection, flags, descriptor, 0))
    finally:
        os.close(descriptor)
    return memory_at(address, size_bytes, None)


def _checked(address: int) -> int:
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""Constants of glibc's malloc.h."""

_TRIM_THRESHOLD_BYTES = 1 << 30
"""Free bytes at the end of a heap from which glibc returns them to the system."""

_RETURNED_BYTES, _MAX_MAPPED_COUNT = 1 << 20, 65536
"""Size from which blocks are mapped directly, and glibc's default limit of their number."""

_NUM_ARENAS = 2
"""Background threads share heaps, instead of one heap per thread."""


@functools.cache
def share_heaps() -> None:
    """Limits the number of heaps of this process."""
    _set(_M_ARENA_MAX, _NUM_ARENAS)


_settled = threading.Event()
"""Set once one of the two functions below was called: the first call decides."""


def keep_freed_memory() -> None:
    """Makes glibc allocate all blocks in the heaps, which keep freed memory; no effect after ``return_freed_memory``.

    Called when the first backward begins. Layers that were built before, and are on the servers now, were mapped
    directly and left no holes in the heaps, so the heaps grow only to the needs of a step.
    """
    if not _settled.is_set():
        _settled.set()
        _set(_M_MMAP_MAX, 0)
        _set(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def return_freed_memory() -> None:
    """Makes freed large blocks return to the system, which takes time and saves memory."""
    _settled.set()
    _set(_M_MMAP_MAX, _MAX_MAPPED_COUNT)
    _set(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
    _set(_M_TRIM_THRESHOLD, _RETURNED_BYTES)


def trim() -> None:
    """Returns the free memory of the heaps to the system, once."""
    if (malloc_trim := _of_glibc("malloc_trim")) is not None:
        malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = _of_glibc("mallopt")
    if mallopt is not None and not any(key.startswith(("MALLOC_", "GLIBC_TUNABLES")) for key in os.environ):
        mallopt(parameter, value)


@functools.cache
def _of_glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
