"""Tells the C library what to do with large blocks that are freed: give them back, or have them used again.

By default glibc raises the size from which it maps memory directly to that of the largest block
freed so far, so layers soon come from its heaps, where they leave holes that the network's buffers
settle in: a trainer then keeps several times the layers in flight (docs/memory.md has the numbers).
Where layers are read in place nothing of the kind is allocated: what is large are gradients, which are
wanted again at once, and memory that is given back costs the clearing of every page of it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""From glibc's malloc.h."""

_LAYER_BYTES = 4 << 20
"""Layers are larger; messages and most activations, which are wanted again at once, are smaller."""

_GRADIENT_BYTES = 32 << 20
"""Most gradients are smaller. Glibc allows no more."""

_NUM_ARENAS = 2
"""Background threads share heaps instead of keeping one each."""


def give_freed_layers_back() -> None:
    """From now on layers that are freed go back to the system; for a trainer that fetches them."""
    _set(_LAYER_BYTES, 128 << 10)


def use_freed_gradients_again() -> None:
    """From now on gradients that are freed are kept for the next ones; for a trainer that reads layers in place."""
    _set(_GRADIENT_BYTES, 4 * _GRADIENT_BYTES)


def _set(mmap_threshold_bytes: int, trim_threshold_bytes: int) -> None:
    """MALLOC_* in the environment has precedence. No-op elsewhere than on Linux with glibc."""
    if sys.platform != "linux" or any(key.startswith(("MALLOC_", "GLIBC_TUNABLES")) for key in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mmap_threshold_bytes)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold_bytes)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
