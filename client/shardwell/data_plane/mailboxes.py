"""Shared memory in which this trainer lays gradients for one shard server."""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from shardwell.data_plane.shared_vector import map_shared


@dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
    """Memory laid out like a shard, which its server maps too."""

    number: int
    memory: memoryview

    @classmethod
    def open(cls, number: int, path: str, size_bytes: int) -> Mailbox:
        """Maps a mailbox that the server made. Raises OSError if that fails."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(number, map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE))
        finally:
            os.close(descriptor)


class Mailboxes:
    """The mailboxes of one server: which are free, and which hold the step's contributions.

    Args:
        make: Opens another one for a unit.
    """

    def __init__(self, make: Callable[[str], Mailbox]) -> None:
        self._make = make
        self._free: dict[str, list[Mailbox]] = defaultdict(list)
        self._adopted: list[tuple[str, int, Mailbox]] = []
        self._lock = threading.Lock()

    def take(self, unit: str) -> Mailbox:
        """A mailbox that may be written to; a new one if all are in use."""
        with self._lock:
            if self._free[unit]:
                return self._free[unit].pop()
        return self._make(unit)

    def give(self, unit: str, mailbox: Mailbox) -> None:
        """The server does not need it any more."""
        with self._lock:
            self._free[unit].append(mailbox)

    def note_adopted(self, unit: str, dp_rank: int, mailbox: Mailbox) -> None:
        """The server holds it as a contribution of a rank, until the step is committed or the rank's work withdrawn."""
        with self._lock:
            self._adopted.append((unit, dp_rank, mailbox))

    def release(self, dp_rank: int | None = None) -> None:
        """The contributions of a rank, or of all, are used up or withdrawn."""
        with self._lock:
            kept = []
            for unit, rank, mailbox in self._adopted:
                if dp_rank is None or rank == dp_rank:
                    self._free[unit].append(mailbox)
                else:
                    kept.append((unit, rank, mailbox))
            self._adopted = kept
