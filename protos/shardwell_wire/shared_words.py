"""Words in shared memory, which other processes read while they change, or after their writer was killed."""

from __future__ import annotations

_BYTES = 8
_ALL_BITS = (1 << 8 * _BYTES) - 1


def store_word(place: memoryview, word: int) -> None:
    """Stores a signed or unsigned word of native byte order at an aligned place, with one store of the processor.

    ``struct.pack_into`` needs two: it clears the bytes first. Another process may read the 0, and a process that is
    killed in between leaves it.
    """
    place[:_BYTES].cast("Q")[0] = word & _ALL_BITS
