"""Which pages of privately mapped vectors this process has written, read from the kernel's page map.

See the kernel's documentation of pagemap. A page that was written is no longer a page of the mapped file.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

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
        size_bytes: Size of the mapping.
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
        return any(span.has_written_page() for span in self._spans)


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
