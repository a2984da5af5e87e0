"""Where checkpoints are stored: a local folder, or a bucket, such as ``s3://bucket/folder``.

All methods block. They may be called from any thread.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwell_wire.errors import (
    AccessError,
    CapacityError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class OutputFile(ABC):
    """A file that is being written. It becomes visible, or complete, with ``finish``."""

    @abstractmethod
    def write(self, data: Any, position: int) -> None:
        """Writes bytes at a position. Called by any thread, in any order."""

    @abstractmethod
    def finish(self) -> None:
        """Makes the file durable under its name."""

    @abstractmethod
    def abort(self) -> None:
        """Removes what was written. Never raises. Harmless to repeat, and after ``finish``."""


class Storage(ABC):
    """A folder, local or remote. Paths are relative to it and separated by ``/``.

    Every method raises:

    - NotFoundError: the file does not exist.
    - CapacityError: the disk is full, or a quota is exhausted.
    - AccessError: permissions or credentials are missing.
    - UnavailableError: the storage cannot be reached, or reported another error.
    """

    url: str
    """The folder, as paths in errors start."""
    window_bytes = 8 << 20
    """Bytes that one read of a large file should take."""

    def where(self, path: str) -> str:
        """Returns a path with the folder, for messages."""
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    @abstractmethod
    def below(self, path: str) -> Storage:
        """Returns a folder of this one, with the same restrictions."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Returns the names of files and folders in a folder, sorted. Empty if it does not exist."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Returns the size of a file in bytes."""

    @abstractmethod
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes ``[start, stop)`` of a file; less at its end."""

    @abstractmethod
    def write_whole(self, path: str, data: bytes) -> None:
        """Replaces a file atomically and durably: a reader finds the old content or the new one."""

    @abstractmethod
    def create(self, path: str, size_bytes: int) -> OutputFile:
        """Starts a file of known size. An unfinished file may be visible, and is never complete.

        Raises:
            NotFoundError: The storage has folders, and that of the file does not exist.
        """

    @abstractmethod
    def make_folder(self, folder: str) -> None:
        """Creates a folder and its parents, if the storage has folders. It may exist."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Deletes a file durably. It may be missing."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Deletes a folder with everything in it. It may be missing."""

    def modified(self, path: str) -> float | None:
        """Returns when a file or folder changed last, in seconds since 1970; None if the storage does not know."""
        return None


@contextmanager
def explained(action: str, where: str, translate: Callable[[Exception], Exception] | None = None) -> Iterator[None]:
    """Turns errors of a storage into Shardwell's.

    Args:
        action: What failed, such as ``read``.
        where: The file.
        translate: Replaces an error of the storage's library by an OSError, where this is known.
    """
    try:
        yield
    except ShardwellError:
        raise
    except Exception as error:
        found = translate(error) if translate is not None else error
        if translate is None and not isinstance(error, OSError):
            raise
        raise _explain(action, where, found) from error


def _explain(action: str, where: str, error: Exception) -> ShardwellError:
    code = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    message = f"cannot {action} {where}: {reason}"
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{where} does not exist" if action in ("read", "list") else message, path=where)
    if code in _FULL:
        return CapacityError(f"{message}. Free space there, or keep fewer checkpoints", path=where)
    if isinstance(error, PermissionError) or code in _FORBIDDEN:
        return AccessError(f"{message}. The process needs permission to read and write there", path=where)
    return UnavailableError(message, path=where)
