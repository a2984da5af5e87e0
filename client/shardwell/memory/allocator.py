"""Settings of the C library's allocator: reuse the memory of freed gradients and activations.

By default, glibc maps large blocks directly and unmaps them when they are freed. The kernel then clears all pages of
every large gradient in every step. The memory of units is outside the heaps (``buffer_pool.py``, ``shared_vector.py``),
where it would leave holes. MALLOC_* and GLIBC_TUNABLES in the environment take precedence. Without glibc, these
functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading

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
