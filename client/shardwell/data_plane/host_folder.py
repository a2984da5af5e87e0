"""A folder of shared memory that processes of one host have in common, and that goes with the last of them."""

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

from shardwell_wire.shared_files import open_file, open_folder, opened

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Where Linux keeps shared memory."""

_PREFIX, _LOCK = "shardwell_cache-", "lock"
_ENTER_LIMIT_S = 10.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.0002, 0.005


class HostFolder:
    """Made by the first process of a user that names it, removed by the last that leaves.

    Who takes part holds a shared lock on a file in it; who gets that lock alone may remove the folder. The
    kernel takes the locks of those who die, so what a killed process left behind is found by the next one.

    Args:
        key: Processes that name the same share the folder.
        directory: Of a memory file system.

    Raises:
        UntrustedFileError: Something of this name is not a folder of this user alone.
        OSError: The folder cannot be made.
    """

    def __init__(self, key: str, directory: Path = MEMORY) -> None:
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is no such folder", str(directory))
        _remove_remains(directory)
        self.path = directory / f"{_PREFIX}{os.geteuid()}-{key}"
        self._lock = self._enter()

    def _enter(self) -> int:
        give_up = time.monotonic() + _ENTER_LIMIT_S
        while time.monotonic() < give_up:
            try:
                return self._take_part()
            except (FileExistsError, FileNotFoundError, BlockingIOError):  # somebody is removing it at this moment
                time.sleep(_LONGEST_DELAY_S)
        raise OSError(errno.EBUSY, f"somebody keeps a lock on it for more than {_ENTER_LIMIT_S:.0f} s", str(self.path))

    def _take_part(self) -> int:
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
        """Leaves; removes the folder if nobody else is there. What is mapped stays until it is unmapped."""
        try:
            # A lock is given up before it is exchanged: of two that leave at once, one gets it alone.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path, self._lock)
        except BlockingIOError:
            pass  # others are there
        except OSError as error:
            logger.warning("cannot remove %s: %s", self.path, error)
        finally:
            # A process that was forked has the lock too, until it is given up here.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)


def try_lock(descriptor: int) -> bool:
    """Takes a file's lock, if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Gives a file's lock up, also for processes that were forked meanwhile."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def polls(limit_s: float, stop: threading.Event) -> Iterator[None]:
    """One turn for each look at what is waited for, with pauses, until the time is over or ``stop`` is set."""
    give_up, delay = time.monotonic() + limit_s, _FIRST_DELAY_S
    while True:
        yield
        if time.monotonic() > give_up or stop.wait(delay):
            return
        delay = min(delay * 2, _LONGEST_DELAY_S)


@contextmanager
def locked(path: Path, limit_s: float, stop: threading.Event) -> Iterator[None]:
    """Holds the lock of a file, which is made if it is not there. Raises TimeoutError, also when ``stop`` is set."""
    descriptor = open_file(path, write=True, create=True)
    try:
        for _ in polls(limit_s, stop):
            if try_lock(descriptor):
                break
        else:
            raise TimeoutError(errno.ETIMEDOUT, f"somebody keeps the lock for more than {limit_s:.0f} s", str(path))
        try:
            yield
        finally:
            unlock(descriptor)
    finally:
        os.close(descriptor)


def _require_linked(lock: int) -> None:
    """Raises FileNotFoundError if the folder of this lock was removed before the lock was taken."""
    if not os.fstat(lock).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "the folder was removed")


def _remove(path: Path, lock: int) -> None:
    """Removes the folder; ``lock`` is held alone. The lock goes last, so that a removal cut short can be finished."""
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
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # the next to come has made it anew, or is gone too
            raise


def _remove_remains(directory: Path) -> None:
    """Removes the folders of this user in which nobody is any more."""
    for path in directory.glob(f"{_PREFIX}{os.geteuid()}-*"):
        try:
            with opened(open_folder(path)) as folder:
                _remove_unused(path, folder)
        except OSError:
            continue  # somebody is in it, it is another user's, or it is being made or removed at this moment


def _remove_unused(path: Path, folder: int) -> None:
    try:
        lock = open_file(_LOCK, write=True, folder=folder)
    except FileNotFoundError:
        _remove_empty(path)
        return
    try:
        if try_lock(lock):
            _remove(path, lock)
            logger.info("removed %s, which a trainer that was killed left behind", path)
    finally:
        os.close(lock)
