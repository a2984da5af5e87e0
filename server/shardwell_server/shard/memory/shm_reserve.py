"""What a server leaves free in ``/dev/shm``, which every program of the host uses."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 0.25
_LEAST_BYTES, _MOST_BYTES = 128 << 20, 2 << 30
"""DataLoader workers hand over batches there, and die with SIGBUS when it is full. Docker's default is 64 MiB."""


class ShmReserve:
    """Free space that a server does not take.

    Args:
        directory: Where the server makes files.
        common: The directory that other programs use. A server that has a file system of its own fills it.
    """

    def __init__(self, directory: Path, common: Path) -> None:
        self._directory = directory
        total_bytes = _sizes(directory)[0]
        shared = common.is_dir() and directory.stat().st_dev == common.stat().st_dev
        self.size_bytes = int(min(max(total_bytes * _SHARE, _LEAST_BYTES), _MOST_BYTES)) if shared else 0
        self.total_bytes = total_bytes

    def problem(self, size_bytes: int) -> str | None:
        """Why a file of a size is not to be made; None: there is room."""
        if not self.size_bytes:
            return None
        free_bytes = _sizes(self._directory)[1]
        if free_bytes - size_bytes >= self.size_bytes:
            return None
        return (
            f"{free_bytes} of {self.total_bytes} bytes are free, of which {self.size_bytes} are left to other "
            "programs, such as DataLoader workers"
        )


def _sizes(directory: Path) -> tuple[int, int]:
    """Bytes of a file system: in all, and free for this user."""
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
