"""Temporary folders that do not stay behind: those of a killed process are removed when the next folder is made."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwell_wire.shared_files import open_file, open_folder, opened

PREFIX = "shardwell_tmp-"
"""How the names of the folders begin."""
_LOCK = ".shardwell_lock"


class TemporaryFolder:
    """A new folder that only this user can enter, in the temporary directory of the environment.

    Each folder has a file that its process keeps locked. The kernel unlocks it when the process ends, however that
    happens; then any process of the same user that makes a folder in the same directory removes it.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        directory = Path(tempfile.gettempdir())
        remove_remains()
        # It gets the name that others look for once it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=directory))
        with opened(open_folder(made)) as folder:
            self._lock = open_file(_LOCK, write=True, create=True, folder=folder)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(directory / made.name.removeprefix("."))

    def remove(self) -> None:
        """Removes the folder and what is in it. Harmless to repeat."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A ``TemporaryFolder`` that is removed at the end of the block."""
    made = TemporaryFolder()
    try:
        yield made.path
    finally:
        made.remove()


def remove_remains() -> None:
    """Removes the folders whose process has ended without doing so."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # It is in use, another user's, or removed by another process at this moment.
        with (
            suppress(OSError),
            opened(open_folder(path)) as folder,
            opened(open_file(_LOCK, write=True, folder=folder)) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
