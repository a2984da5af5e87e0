"""Temporary folders. The folder of a killed process is removed when the next such folder is created."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwell_wire.host.shared_memory import open_file, open_folder, opened

PREFIX = "shardwell_tmp-"
"""Prefix of the folders' names."""
_LOCK = ".shardwell_lock"


class TemporaryFolder:
    """A new folder that only this user can enter, in the temporary directory of the environment.

    The process holds a lock on a file in its folder. The kernel releases the lock when the process ends for any reason.
    The next process of the same user that creates such a folder in the same directory then removes the old one.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        directory = Path(tempfile.gettempdir())
        remove_remains()
        # The folder gets its final name, which remove_remains() looks for, only once it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=directory))
        with opened(open_folder(made)) as folder:
            self._lock = open_file(_LOCK, write=True, create=True, folder=folder)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(directory / made.name.removeprefix("."))

    def remove(self) -> None:
        """Removes the folder and its contents. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields the path of a ``TemporaryFolder``, which is removed at the end of the block."""
    made = TemporaryFolder()
    try:
        yield made.path
    finally:
        made.remove()


def remove_remains() -> None:
    """Removes the folders of processes that ended without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Skips folders that are in use, belong to another user, or are being removed by another process.
        with (
            suppress(OSError),
            opened(open_folder(path)) as folder,
            opened(open_file(_LOCK, write=True, folder=folder)) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
