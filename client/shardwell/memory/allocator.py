"""Has the C library use freed gradients and activations again, and not return each to the system.

By default glibc maps large blocks directly and unmaps them when they are freed: every gradient of such a size then
costs the clearing of all its pages, in every step. Layers do not come from its heaps (``buffer_pool.py``,
``shared_vector.py``), so they leave no holes there. MALLOC_* or GLIBC_TUNABLES in the environment has precedence over
all of this; without glibc it does nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""From glibc's malloc.h."""

_TRIM_THRESHOLD_BYTES = 1 << 30
"""So much may lie free at the end of a heap."""

_RETURNED_BYTES, _MAX_MAPPED_COUNT = 1 << 20, 65536
"""Blocks from this size on are mapped by themselves and go when they are freed; as many as glibc has by default."""

_NUM_ARENAS = 2
"""Background threads share heaps instead of keeping one each."""


@functools.cache
def share_heaps() -> None:
    """Bounds the number of heaps of this process."""
    _set(_M_ARENA_MAX, _NUM_ARENAS)


_settled = threading.Event()
"""Whether it is decided what becomes of freed memory."""


def keep_freed_memory() -> None:
    """From now on all blocks come from the heaps, and what is freed stays there, unless it was decided otherwise.

    To be called when the first backward begins: the layers that were built before, and are on the servers now, were
    mapped directly, so the heaps have no holes of them, and what a step needs at once is what they grow to.
    """
    if not _settled.is_set():
        _settled.set()
        _set(_M_MMAP_MAX, 0)
        _set(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def return_freed_memory() -> None:
    """From now on large blocks go back to the system when they are freed, which takes time and saves memory."""
    _settled.set()
    _set(_M_MMAP_MAX, _MAX_MAPPED_COUNT)
    _set(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
    _set(_M_TRIM_THRESHOLD, _RETURNED_BYTES)


def trim() -> None:
    """Gives what lies free in the heaps back to the system, once."""
    if (malloc_trim := _of_glibc("malloc_trim")) is not None:
        malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = _of_glibc("mallopt")
    if mallopt is not None and not any(key.startswith(("MALLOC_", "GLIBC_TUNABLES")) for key in os.environ):
        mallopt(parameter, value)


def _of_glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
