"""Has the C library use freed gradients again, and not return each to the system.

By default glibc maps large blocks directly and unmaps them when they are freed: every gradient then costs
the clearing of all its pages. Layers do not come from its heaps (``buffer_pool.py``, ``shared_vector.py``), so they
leave no holes there.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""From glibc's malloc.h."""

_MMAP_THRESHOLD_BYTES = 32 << 20
"""Most gradients are smaller. Glibc allows no more."""

_TRIM_THRESHOLD_BYTES = 64 << 20
"""So much may lie free at the end of a heap."""

_NUM_ARENAS = 2
"""Background threads share heaps instead of keeping one each."""


def use_freed_gradients_again() -> None:
    """Sets it up for this process; MALLOC_* in the environment has precedence. No-op without glibc."""
    if sys.platform != "linux" or any(key.startswith(("MALLOC_", "GLIBC_TUNABLES")) for key in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def trim() -> None:
    """Gives what lies free in the heaps back to the system, once."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)
