"""Has the C library give freed layers back to the system.

By default glibc raises the size from which it maps memory directly to that of the largest block
freed so far, so layers soon come from its heaps, where they leave holes that the network's buffers
settle in: a trainer then keeps several times the layers in flight (docs/memory.md has the numbers).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""From glibc's malloc.h."""

_MMAP_THRESHOLD_BYTES = 4 << 20
"""Layers are larger; messages and most activations, which are wanted again at once, are smaller."""

_NUM_ARENAS = 2
"""Background threads share heaps instead of keeping one each."""


@functools.cache
def give_freed_layers_back() -> None:
    """Sets it up for this process, once; MALLOC_* in the environment has precedence. No-op elsewhere."""
    if sys.platform != "linux" or any(key.startswith(("MALLOC_", "GLIBC_TUNABLES")) for key in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
