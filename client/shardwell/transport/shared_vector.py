"""A unit's flat vector in shared memory of servers or of the relay, mapped into this process.

The mapping is private. The kernel's page map tells which of its pages this process has written: a page that was written
is no longer a page of the mapped file.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shardwell.memory.device_copies import register, unregister
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.host.shared_memory import HEAD_BYTES, UPDATING, open_in_folder, opened, write_version
from shardwell_wire.model.layout import BLOCK_BYTES

_PRESENT, _SWAPPED, _SHARED_OR_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
"""Bits of an entry of the page map."""

_PAGE_MAP, _ENTRY_BYTES = "/proc/self/pagemap", 8

_MAX_GAP_PAGES, _MAX_SPAN_PAGES = 512, 8192
"""Ranges that are at most this far apart are read in one piece, of at most this many pages."""

CAN_READ = os.access(_PAGE_MAP, os.R_OK)
"""False in containers that hide the page map."""


class PageRange:
    """Consecutive pages of one private mapping of files.

    Args:
        address: Start of the mapping, a multiple of the page size.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self.first, self.count = address // mmap.PAGESIZE, -(-size_bytes // mmap.PAGESIZE)

    def written(self) -> npt.NDArray[np.intp]:
        """Returns the numbers of the written pages, counted from the first page of the range."""
        return np.flatnonzero(_own_pages(_read(self.first, self.count)))


class WrittenPages:
    """Tells quickly whether any page of many ranges was written. Neighbouring ranges are read together."""

    def __init__(self) -> None:
        self._ranges: Sequence[PageRange] = ()
        self._spans: list[_Span] = []

    def exist(self, ranges: Sequence[PageRange]) -> bool:
        """Returns whether a page of any of the ranges was written."""
        if ranges != self._ranges:
            self._ranges, self._spans = ranges, _merge(ranges)
        for span in self._spans:  # noqa: SIM110 - a generator takes longer, and every commit comes here
            if span.has_written_page():
                return True
        return False


class _Span:
    """Pages that are read in one piece: those of several ranges, and the pages between them."""

    def __init__(self, ranges: Iterable[PageRange]) -> None:
        ranges = list(ranges)
        self._first = ranges[0].first
        self._count = ranges[-1].first + ranges[-1].count - self._first
        self._belongs = np.zeros(self._count, dtype=np.bool_)
        """Whether a page belongs to a range. [count]"""
        for each in ranges:
            self._belongs[each.first - self._first :][: each.count] = True
        self._clean = b""
        """The last page map that showed no written page."""

    def has_written_page(self) -> bool:
        page_map = _read(self._first, self._count)
        if page_map == self._clean:
            return False
        if bool((_own_pages(page_map) & self._belongs).any()):
            return True
        self._clean = page_map
        return False


def _merge(ranges: Iterable[PageRange]) -> list[_Span]:
    groups: list[list[PageRange]] = []
    for each in sorted((each for each in ranges if each.count), key=lambda each: each.first):
        last = groups[-1] if groups else []
        if (
            last
            and each.first - (last[-1].first + last[-1].count) <= _MAX_GAP_PAGES
            and each.first + each.count - last[0].first <= _MAX_SPAN_PAGES
        ):
            last.append(each)
        else:
            groups.append([each])
    return [_Span(group) for group in groups]


def _own_pages(page_map: bytes) -> npt.NDArray[np.bool_]:
    """Returns which pages are private to this process. bool. [pages]"""
    entries = np.frombuffer(page_map, np.uint64)
    # A page that the kernel is migrating counts as swapped.
    own: npt.NDArray[np.bool_] = ((entries & (_PRESENT | _SWAPPED)) != 0) & ((entries & _SHARED_OR_FILE) == 0)
    return own


def _read(first: int, count: int) -> bytes:
    return os.pread(_descriptor(os.getpid()), count * _ENTRY_BYTES, first * _ENTRY_BYTES)


@functools.cache
def _descriptor(process_id: int) -> int:
    """Returns a descriptor of the page map of this process, which is opened once.

    Args:
        process_id: This process. After a fork, the parent's descriptor would show the parent's pages.
    """
    return os.open(_PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)


_PROT_NONE, _MAP_FIXED = 0, 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

CAN_MAP = mmap.PAGESIZE == BLOCK_BYTES and CAN_READ
"""Whether shards can be read in place. Shards start at multiples of 4096 bytes, so pages must have this size to map
shards side by side. The page map, which containers may hide, is needed to detect writes."""


class OpenFile(Protocol):
    """Opens a file that other processes write, for reading; returns its descriptor. Raises OSError."""

    def __call__(self, name: str, /, *, size_bytes: int) -> int: ...


@dataclass(frozen=True, slots=True)
class SegmentLocation:
    """The file of a shared segment, of a server or of the relay, and its range of the flat vector."""

    file: str
    """The path of the file, or the name by which its server knows it."""
    start_bytes: int
    stop_bytes: int
    open: OpenFile = field(default=open_in_folder, compare=False)


_fence = threading.Lock()


def order_loads() -> None:
    """Orders all earlier loads of this thread before all later loads, also on processors that reorder loads."""
    with _fence:
        pass  # no earlier load moves after this release of the lock
    with _fence:
        pass  # no later load moves before this acquisition of the lock


class SharedVector:
    """Consecutive shards of a unit, mapped side by side as in the flat vector, without a copy.

    The mapping is private: the kernel copies a page before the first write to it, so other processes never see what
    this process writes.

    Args:
        places: Shards in order and without gaps.
        exact: Whether the segments contain the values as stored, not rounded by a lossy dtype.
        ask: Asks the coordinator; raises if this trainer cannot continue. Called when a version is gone.

    Raises:
        UntrustedFileError: The file of a segment has another size, or other users can write to it.
        OSError: A segment cannot be opened.
    """

    def __init__(
        self,
        unit: str,
        places: Sequence[SegmentLocation],
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
        self.pages = PageRange(self._address, self._size_bytes)
        """The pages of the mapping."""
        self._lock = threading.Lock()
        """Held while a segment is replaced, or registered with CUDA."""
        self._places, self._is_registered = places, False
        self._registered: torch.Tensor | None = None
        self._heads = {
            place.start_bytes: self._map_segment(place) for place in places if place.stop_bytes > place.start_bytes
        }
        self._present: tuple[memoryview, ...] | None = tuple(self._heads.values())
        """The heads, which are read without the lock; None while a segment is replaced. See ``replace``."""

    def replace(self, place: SegmentLocation) -> None:
        """Maps another file in the place of a segment, at the same address.

        The file must show the version of the segment that it replaces, or a newer one: a reader that is in the middle
        of a version then sees the same bytes, or learns from ``check`` that the version is gone.

        Raises:
            UntrustedFileError: The file has another size, or other users can write to it.
            OSError: The file cannot be opened.
        """
        if place.stop_bytes > place.start_bytes:
            with self._lock:
                # Between the new bytes and their head, the old head would vouch for bytes that it does not describe.
                self._present = None
                try:
                    self._heads[place.start_bytes] = self._map_segment(place)
                finally:
                    self._present = tuple(self._heads.values())

    def cut(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Divides the vector into other segments, which show no version until ``replace`` maps each of them."""
        with self._lock:
            nothing = memoryview(bytearray(HEAD_BYTES))
            write_version(nothing, UPDATING)
            self._heads = {start: nothing.cast("q") for start, stop in ranges if stop > start}
            self._present = tuple(self._heads.values())

    def shown(self, start_bytes: int) -> int | None:
        """Returns the version of the segment that starts at a byte; None while the segment shows none."""
        with self._lock:
            version = self._heads[start_bytes][0]
        return None if version == UPDATING else version

    @property
    def version(self) -> int | None:
        """The version that all segments show now; None if there is no such version."""
        versions = {head[0] for head in self._present_heads()}
        return versions.pop() if len(versions) == 1 and UPDATING not in versions else None

    @property
    def registered(self) -> torch.Tensor | None:
        """The bytes in memory that is registered with CUDA, if it can be. Not for a vector of several segments.

        The memory is mapped again when it is first read: the private mapping cannot be registered, see ``register``.
        """
        if not self._is_registered:
            with self._lock:
                if not self._is_registered:
                    (place,) = self._places
                    self._registered, self._is_registered = _registered(place), True
        return self._registered

    def _map_segment(self, place: SegmentLocation) -> memoryview:
        size_bytes = place.stop_bytes - place.start_bytes
        with opened(place.open(place.file, size_bytes=HEAD_BYTES + size_bytes)) as descriptor:
            _map(
                self._address + place.start_bytes - self._start_bytes,
                size_bytes,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_PRIVATE | _MAP_FIXED,
                descriptor,
                HEAD_BYTES,
            )
            return map_shared(descriptor, HEAD_BYTES, mmap.PROT_READ).cast("q")  # element 0: see ``read_version``

    def _present_heads(self) -> tuple[memoryview, ...]:
        """Returns the heads of the bytes that are mapped now. Waits while a segment is replaced."""
        heads = self._present
        while heads is None:
            with self._lock:
                heads = self._present
        return heads

    def shows(self, version: int) -> bool:
        """Whether all segments show this version now."""
        # A loop, because a generator takes twice as long and every forward comes here.
        for head in self._present or self._present_heads():  # noqa: SIM110
            if head[0] != version:
                return False
        return True

    def check(self, version: int) -> None:
        """Raises VersionGoneError unless all segments have shown ``version`` since ``shows`` returned True."""
        order_loads()
        if not self.shows(version):
            self._ask()
            raise VersionGoneError(
                f"version {version} of unit {self._unit!r} was overwritten while this trainer read it: the step was "
                "committed. If this trainer evaluated between `step.batches` and optimizer.step(), evaluate after "
                "optimizer.step() instead: rank 0 may commit before. Otherwise this trainer lost its lease, and "
                "another trainer has computed its work",
                unit=self._unit,
                version=version,
            )

    def forget_writes(self) -> int | None:
        """Discards the pages that this process wrote; returns the offset of the first, or None if there is none."""
        written = self.pages.written()
        if not written.size:
            return None
        _libc.madvise(self._address, self._size_bytes, mmap.MADV_DONTNEED)
        return int(written[0]) * mmap.PAGESIZE


def map_shared(descriptor: int, size_bytes: int, protection: int) -> memoryview:
    """Maps the start of a file until no view refers to the memory. ``mmap.mmap`` would also keep the file open."""
    if not size_bytes:
        return memoryview(bytearray())  # the kernel rejects a mapping of size 0
    address = _map(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
    return memoryview(_mapped(address, size_bytes)).cast("B")


def _registered(place: SegmentLocation) -> torch.Tensor | None:
    """Maps a segment and registers the memory with CUDA. None: it cannot be mapped or registered."""
    size_bytes = place.stop_bytes - place.start_bytes
    try:
        with opened(place.open(place.file, size_bytes=HEAD_BYTES + size_bytes)) as descriptor:
            address = _map(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, HEAD_BYTES)
    except OSError:  # the shard has moved
        return None
    memory = _mapped(address, size_bytes)
    if not register(address, size_bytes):
        return None
    # Finalizers run in reverse order, so this one runs before the memory is unmapped.
    weakref.finalize(memory, unregister, address, os.getpid()).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Returns mapped memory, unmapped when nothing refers to it; never at exit, when threads may still read it."""
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    return memory


def _map(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    mapped: int = _libc.mmap(address, size_bytes, protection, flags, descriptor, offset)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    return mapped
