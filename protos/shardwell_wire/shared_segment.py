"""The head of a segment of shared memory that holds the parameters of one shard.

A segment is a file: one page whose first 8 bytes are the version that can be read now, then the
shard's bytes. A reader looks at the version before and after it reads, and again when it is done
with what it mapped: if it did not change, neither did the bytes.
"""

from __future__ import annotations

import struct

from shardwell_wire.layout import BLOCK_BYTES

HEAD_BYTES = BLOCK_BYTES
"""One page, so that the bytes can be mapped; cuts of a unit are multiples of it too."""

UPDATING = -1
"""Shown instead of a version while the next one is being made, and when there is none any more."""


def read_version(head: memoryview) -> int:
    """The version that a segment's head shows, or ``UPDATING``."""
    version: int = struct.unpack_from("<q", head, 0)[0]
    return version


def write_version(head: memoryview, version: int) -> None:
    """Shows a version, or ``UPDATING``."""
    struct.pack_into("<q", head, 0, version)
