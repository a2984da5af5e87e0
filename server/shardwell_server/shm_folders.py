"""Folders in shared memory that belong to shard servers, and what is left of those whose server was killed."""

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
    """Locks a new folder, given by its descriptor, until the process ends; returns what holds the lock."""
    return _lock(folder, create=True)


def remove_remains(directory: Path) -> None:
    """Removes the folders of this user's servers that are not there any more: the kernel takes the lock from the dead.

    Anybody can make a folder of such a name, and put a FIFO where the lock should be: neither is opened.
    """
    for path in directory.glob(f"{SERVER_FOLDER_PREFIX}*"):
        try:
            with opened(open_folder(path)) as folder, opened(_lock(folder)):
                shutil.rmtree(path)
        except OSError:
            continue  # it lives, is another user's, or is being made or removed at this moment
        logger.info("removed %s, which a server that was killed left behind", path)


def _lock(folder: int, *, create: bool = False) -> int:
    """Takes the lock of a folder; returns the descriptor that holds it. Raises OSError if that is not possible."""
    held = open_file(_LOCK, create=create, folder=folder)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(held)
        raise
    return held
