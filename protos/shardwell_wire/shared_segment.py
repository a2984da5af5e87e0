"""The header of a shared-memory segment, which contains the parameters of one shard.

A segment is a file. The first 8 bytes of its first page are the readable version, and the bytes of the shard follow the
page. A reader loads the version before and after it reads, and again when it releases a mapping: if the version did not
change, the bytes did not change either.

Note: [Memory ordering]
    The version is a sequence lock. The writer stores ``UPDATING`` before the first byte of the next version, and the
    new version after the last byte. Another thread writes the bytes in between; passing the work between the threads
    orders the stores. The reader must load the version after its last load of the bytes, which ``order_loads`` ensures.
    Both sides access the version as one aligned native word, so no torn version is visible. See ``store_word``.
"""

from __future__ import annotations

import struct
import threading

from shardwell_wire.layout import BLOCK_BYTES
from shardwell_wire.shared_words import store_word

HEAD_BYTES = BLOCK_BYTES
"""Size of the header: one page, so that the shard can be mapped. Shards are cut at multiples of this size too."""

UPDATING = -1
"""Stored instead of a version while the next version is written, and after the shard is removed."""

_WORD = struct.Struct("@q")
_fence = threading.Lock()


def read_version(head: memoryview) -> int:
    """Returns the version in a segment's header, or ``UPDATING``."""
    version: int = _WORD.unpack_from(head, 0)[0]
    return version


def write_version(head: memoryview, version: int) -> None:
    """Stores a version, or ``UPDATING``, in a segment's header."""
    store_word(head, version)


def order_loads() -> None:
    """Orders all earlier loads of this thread before all later loads, also on processors that reorder loads."""
    with _fence:
        pass  # no earlier load moves after this release of the lock
    with _fence:
        pass  # no later load moves before this acquisition of the lock
