"""Shared memory in which this trainer lays gradients for one shard server."""

from __future__ import annotations

import mmap
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from shardwell.transport.shared_vector import map_shared
from shardwell_wire.shared_files import file_size, open_in_folder, opened


@dataclass(frozen=True, slots=True, eq=False)
class GradientBuffer:
    """Memory laid out like a shard, which its server maps too."""

    number: int
    memory: memoryview

    @classmethod
    def open(cls, number: int, path: str, size_bytes: int) -> GradientBuffer:
        """Maps a gradient buffer that the server made.

        Raises:
            UntrustedFileError: It is not a file of that size that only this user can write to.
            OSError: It cannot be mapped.
        """
        with opened(open_in_folder(path, write=True, size_bytes=file_size(size_bytes))) as descriptor:
            return cls(number, map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE))


class GradientBuffers:
    """The gradient buffers of one server: which are free, and which hold gradients of the step.

    Args:
        make: Opens another one for a unit.
    """

    def __init__(self, make: Callable[[str], GradientBuffer]) -> None:
        self._make = make
        self._free: dict[str, list[GradientBuffer]] = defaultdict(list)
        self._taken: dict[GradientBuffer, tuple[str, int]] = {}
        """Unit and rank of those in use; after Ctrl-C, or behind a part that failed, some are never handed over."""
        self._lock = threading.Lock()

    def take(self, unit: str, dp_rank: int) -> GradientBuffer:
        """A gradient buffer for a rank's gradient, until ``give`` or ``release``; a new one if all are in use."""
        with self._lock:
            gradient_buffer = self._free[unit].pop() if self._free[unit] else None
        gradient_buffer = gradient_buffer or self._make(unit)
        with self._lock:
            self._taken[gradient_buffer] = unit, dp_rank
        return gradient_buffer

    def give(self, gradient_buffer: GradientBuffer) -> None:
        """The server does not need it any more, before the step is over. Harmless if it is free."""
        with self._lock:
            self._free_up(gradient_buffer)

    def release(self, dp_rank: int | None = None) -> None:
        """The contributions of a rank, or of all, are used up or withdrawn."""
        with self._lock:
            for gradient_buffer, (_, rank) in list(self._taken.items()):
                if dp_rank is None or rank == dp_rank:
                    self._free_up(gradient_buffer)

    def _free_up(self, gradient_buffer: GradientBuffer) -> None:
        unit, _ = self._taken.pop(gradient_buffer, (None, None))
        if unit is not None:
            self._free[unit].append(gradient_buffer)
