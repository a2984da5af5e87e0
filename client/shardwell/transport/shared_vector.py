"""A unit's flat vector seen in place: shared memory of servers or of the host's cache, mapped into this process."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwell_wire.errors import VersionGoneError
from shardwell_wire.layout import BLOCK_BYTES
from shardwell_wire.shared_files import open_in_folder, opened
from shardwell_wire.shared_segment import HEAD_BYTES, order_loads, read_version

_PROT_NONE, _MAP_FIXED = 0, 0x10
_PRESENT, _SWAPPED, _SHARED_OR_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
"""Bits of an entry of the page map; see the kernel's documentation of pagemap."""
_PAGE_MAP = "/proc/self/pagemap"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

CAN_MAP = mmap.PAGESIZE == BLOCK_BYTES and os.access(_PAGE_MAP, os.R_OK)
"""Shards begin on multiples of 4096 bytes, so they can be mapped side by side where pages have that size; and where
the kernel does not tell which pages were written (it may be hidden from containers), a write could go unnoticed."""


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """A segment, a server's or one of the host's cache, and the range of the flat vector that it holds."""

    path: str
    start_bytes: int
    stop_bytes: int


class SharedVector:
    """Consecutive shards of a unit, side by side as in the flat vector, without a copy.

    What this process writes stays its own: the kernel copies a page before the first write to it.
    What others see cannot be changed from here.

    Args:
        unit: Its name, for errors.
        places: Shards in order and without gaps.
        exact: Whether the values are those that the servers store, not rounded.

    Raises:
        UntrustedFileError: A segment is not a file of its size that only this user can write to.
        OSError: A segment cannot be opened here.
    """

    def __init__(
        self,
        unit: str,
        places: Sequence[SegmentPlace],
        *,
        exact: bool = True,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        self._unit, self.exact, self._ask = unit, exact, ask
        self._start_bytes = places[0].start_bytes
        self._size_bytes = places[-1].stop_bytes - self._start_bytes
        self._address = _map(None, self._size_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.bytes = torch.frombuffer(_mapped(self._address, self._size_bytes), dtype=torch.uint8)
        """[size_bytes]"""
        self._heads = [self._map_segment(place) for place in places if place.stop_bytes > place.start_bytes]

    def _map_segment(self, place: SegmentPlace) -> memoryview:
        size_bytes = place.stop_bytes - place.start_bytes
        with opened(open_in_folder(place.path, size_bytes=HEAD_BYTES + size_bytes)) as descriptor:
            _map(
                self._address + place.start_bytes - self._start_bytes,
                size_bytes,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_PRIVATE | _MAP_FIXED,
                descriptor,
                HEAD_BYTES,
            )
            return map_shared(descriptor, HEAD_BYTES, mmap.PROT_READ)

    def shows(self, version: int) -> bool:
        """Whether all of it is of this version, now."""
        return all(read_version(head) == version for head in self._heads)

    def check(self, version: int) -> None:
        """Raises VersionGoneError unless it has been of one version since ``shows`` said so."""
        order_loads()
        if not self.shows(version):
            self._ask()
            raise VersionGoneError(
                f"version {version} of unit {self._unit!r} was overwritten while it was in use here: the step was "
                "committed while the weights were read. A trainer that evaluates between `step.batches` and "
                "optimizer.step() may see this, because rank 0 can commit meanwhile: evaluate after optimizer.step(). "
                "Otherwise this trainer lost its lease, and another one has computed its work",
                unit=self._unit,
                version=version,
            )

    def forget_writes(self) -> int | None:
        """Drops what this process wrote into the vector; returns where the first page of it begins, if there is one."""
        first, count = self._address // mmap.PAGESIZE, -(-self._size_bytes // mmap.PAGESIZE)
        with open(_PAGE_MAP, "rb", buffering=0) as pagemap:
            pagemap.seek(first * 8)
            entries = np.frombuffer(pagemap.read(count * 8), np.uint64)
        # A page that is being moved in memory counts as swapped for that moment.
        own = np.flatnonzero((entries & (_PRESENT | _SWAPPED)).astype(bool) & ~(entries & _SHARED_OR_FILE).astype(bool))
        if not own.size:
            return None
        _libc.madvise(self._address, self._size_bytes, mmap.MADV_DONTNEED)
        return int(own[0]) * mmap.PAGESIZE


def map_shared(descriptor: int, size_bytes: int, protection: int) -> memoryview:
    """The first bytes of a file, as long as a view of them lives. ``mmap.mmap`` would keep a file open for each."""
    if not size_bytes:
        return memoryview(bytearray())  # nothing cannot be mapped
    address = _map(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
    return memoryview(_mapped(address, size_bytes)).cast("B")


def _mapped(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Memory that is unmapped when nobody refers to it any more; not at exit, when threads may still look at it."""
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    return memory


def _map(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    mapped: int = _libc.mmap(address, size_bytes, protection, flags, descriptor, offset)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    return mapped
