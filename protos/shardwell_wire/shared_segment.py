"""The head of a segment of shared memory that holds the parameters of one shard.

A segment is a file: one page whose first 8 bytes are the version that can be read now, then the
shard's bytes. A reader looks at the version before and after it reads, and again when it is done
with what it mapped: if it did not change, neither did the bytes.

Note: Memory ordering
    This is a sequence lock. The writer stores ``UPDATING`` before the first byte of the next version and
    the new version after the last one; it hands the work to another thread and back in between, which
    orders these stores. The reader must not load the version before its last load of the bytes:
    ``order_loads`` sees to that. Both sides load and store the word in one piece (native ``q``, aligned),
    so nobody sees half a version.
"""

from __future__ import annotations

import struct
import threading

from shardwell_wire.layout import BLOCK_BYTES

HEAD_BYTES = BLOCK_BYTES
"""One page, so that the bytes can be mapped; cuts of a unit are multiples of it too."""

UPDATING = -1
"""Shown instead of a version while the next one is being made, and when there is none any more."""

_WORD = struct.Struct("@q")
_fence = threading.Lock()


def read_version(head: memoryview) -> int:
    """The version that a segment's head shows, or ``UPDATING``."""
    version: int = _WORD.unpack_from(head, 0)[0]
    return version


def write_version(head: memoryview, version: int) -> None:
    """Shows a version, or ``UPDATING``."""
    _WORD.pack_into(head, 0, version)


def order_loads() -> None:
    """Completes all loads of this thread before any later one, on processors that reorder loads, too."""
    with _fence:
        pass  # No earlier load moves past this release ...
    with _fence:
        pass  # ... and no later one before this acquire.
