"""A folder of shared memory that processes of one host meet in, and locks on its files.

Note: [Host folder]
    Each process that uses the folder holds a shared lock on a file in it. A process that gets this lock exclusively may
    remove the folder. The kernel releases the locks of dead processes, so the next process removes their folder.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwell_wire.host.shared_memory import open_file, open_folder, opened

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Where Linux mounts shared memory."""

_PREFIX, _LOCK = "shardwell_cache-", "lock"
_ENTER_LIMIT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005


class HostFolder:
    """A folder of shared memory that processes of one user and host share. See Note: [Host folder].

    The first process creates the folder, and the last one removes it.

    Args:
        key: Processes with the same key share the folder.
        directory: A folder of a memory file system.

    Raises:
        UntrustedFileError: The path is not a folder that only this user can use.
        OSError: The folder cannot be created.
    """

    def __init__(self, key: str, directory: Path = MEMORY) -> None:
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is no such folder", str(directory))
        _remove_abandoned(directory)
        self.path = directory / f"{_PREFIX}{os.geteuid()}-{key}"
        self._lock = self._enter()

    def _enter(self) -> int:
        """Creates the folder if necessary; returns the lock file's descriptor."""
        deadline = time.monotonic() + _ENTER_LIMIT_S
        while time.monotonic() < deadline:
            try:
                return self._try_enter()
            except (FileExistsError, FileNotFoundError, BlockingIOError):  # another process is removing the folder
                time.sleep(_LONGEST_PAUSE_S)
        raise OSError(
            errno.EBUSY, f"another process locked the folder for more than {_ENTER_LIMIT_S:.0f} s", str(self.path)
        )

    def _try_enter(self) -> int:
        self.path.mkdir(mode=0o700, exist_ok=True)
        with opened(open_folder(self.path)) as folder:
            lock = open_file(_LOCK, write=True, create=True, folder=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _require_linked(lock)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def close(self) -> None:
        """Leaves the folder, and removes it if no other process uses it. Mapped memory stays until it is unmapped."""
        try:
            # The kernel drops a shared lock before it grants an exclusive one. If two processes leave at once, one of
            # them gets the exclusive lock.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path, self._lock)
        except BlockingIOError:
            pass  # other processes use the folder
        except OSError as error:
            logger.warning("cannot remove %s: %s", self.path, error)
        finally:
            # Closing the file is not enough to unlock it: a forked process shares the open file, and with it the lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)


def try_lock(descriptor: int) -> bool:
    """Locks a file exclusively; returns False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlocks a file, also for forked processes that share the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def polls(limit_s: float, stop: threading.Event) -> Iterator[None]:
    """Yields once per poll, with growing pauses, until ``limit_s`` has passed or ``stop`` is set."""
    deadline, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while True:
        yield
        if time.monotonic() > deadline or stop.wait(pause_s):
            return
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


@contextmanager
def locked(path: Path, limit_s: float, stop: threading.Event) -> Iterator[None]:
    """Holds the lock of a file, created if missing. Raises TimeoutError after ``limit_s`` or when ``stop`` is set."""
    descriptor = open_file(path, write=True, create=True)
    try:
        for _ in polls(limit_s, stop):
            if try_lock(descriptor):
                break
        else:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process holds the lock for more than {limit_s:.0f} s", str(path)
            )
        try:
            yield
        finally:
            unlock(descriptor)
    finally:
        os.close(descriptor)


def _require_linked(lock: int) -> None:
    """Raises FileNotFoundError if the folder was removed before its lock was acquired."""
    if not os.fstat(lock).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "the folder was removed")


def _remove(path: Path, lock: int) -> None:
    """Removes a folder whose lock is held exclusively. The lock file goes last, so the removal can be resumed."""
    _require_linked(lock)
    for file in path.iterdir():
        if file.name != _LOCK:
            file.unlink(missing_ok=True)
    (path / _LOCK).unlink()
    _remove_empty(path)


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # another process has created or removed it again
            raise


def _remove_abandoned(directory: Path) -> None:
    """Removes this user's folders that no process uses any more."""
    for path in directory.glob(f"{_PREFIX}{os.geteuid()}-*"):
        try:
            with opened(open_folder(path)) as folder:
                _remove_unused(path, folder)
        except OSError:
            continue  # in use, of another user, or being created or removed


def _remove_unused(path: Path, folder: int) -> None:
    try:
        lock = open_file(_LOCK, write=True, folder=folder)
    except FileNotFoundError:
        _remove_empty(path)
        return
    try:
        if try_lock(lock):
            _remove(path, lock)
            logger.info("removed %s, which a killed trainer left behind", path)
    finally:
        os.close(lock)
