"""Folders of shard servers in shared memory, and removal of the folders of killed servers."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path

from shardwell_wire.shared_files import SERVER_FOLDER_PREFIX, open_file, open_folder, opened

logger = logging.getLogger(__name__)

DEFAULT_DIRECTORY = Path("/dev/shm")
_LOCK = "lock"


def lock_folder(folder: int) -> int:
    """Locks a new folder, given by its descriptor, until the process ends; returns the lock's descriptor."""
    return _lock(folder, create=True)


def remove_remains(directory: Path) -> None:
    """Removes the folders of this user's servers that have ended. The kernel releases the lock of a dead process.

    Another user can make a folder with such a name, or put a FIFO in place of the lock file. Neither is opened.
    """
    for path in directory.glob(f"{SERVER_FOLDER_PREFIX}*"):
        try:
            with opened(open_folder(path)) as folder, opened(_lock(folder)):
                shutil.rmtree(path)
        except OSError:
            continue  # its server runs, or another user owns it, or another process is making or removing it
        logger.info("removed %s, the folder of a killed server", path)


def _lock(folder: int, *, create: bool = False) -> int:
    """Locks a folder; returns the descriptor that holds the lock. Raises OSError if the lock is taken."""
    held = open_file(_LOCK, create=create, folder=folder)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(held)
        raise
    return held
