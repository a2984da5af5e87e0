"""Opens files and folders that other processes created or named, after checking their owner.

Note: [Trust between users]
    A process that maps a file gets SIGBUS if another process truncates the file, and writes to a mapping change the
    file. This is harmless between processes of one user, which can kill and trace each other anyway, but must not be
    possible between users. Every file that is opened by its path therefore belongs to the user of this process, in a
    folder that only this user can list and write to. Files that a peer names are never created or truncated. Files of a
    server of another user are not opened by their paths; see Note: [Descriptors, not paths] in
    ``shared_descriptors.py``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

SERVER_FOLDER_PREFIX = "shardwell-"
"""Prefix of the folders in which shard servers create files that trainers map."""

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Symbolic links are not followed. A FIFO or device that is created after the check does not block."""

_FOLDER_BITS = 0o066
"""Permissions that other users must not have for a folder. They may enter it, to reach a server's socket."""

_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


class UntrustedFileError(PermissionError):
    """A file or folder failed the checks and was not used."""


def open_folder(path: str | os.PathLike[str]) -> int:
    """Opens a folder that only the user of this process can list and write to, and returns its descriptor.

    Raises:
        UntrustedFileError: The path is no folder, belongs to another user, or other users can list it or write to it.
        OSError: The folder cannot be opened.
    """
    name = os.fspath(path)
    return _open(name, os.O_RDONLY | os.O_DIRECTORY, None, _folder_problem)


def open_file(
    path: str | os.PathLike[str],
    *,
    write: bool = False,
    create: bool = False,
    size_bytes: int | None = None,
    folder: int | None = None,
) -> int:
    """Opens a regular file of this user that has no other links, and returns its descriptor.

    Args:
        path: Path of the file, or a name without separators if ``folder`` is given.
        write: Whether to open the file for reading and writing.
        create: Create the file, readable by this user only, if it does not exist. Do not use it for names from peers.
        size_bytes: Expected size. None: any size.
        folder: Descriptor of the folder that contains the file.

    Raises:
        UntrustedFileError: The path is no regular file, belongs to another user, is writable by other users, has other
            links, or has another size.
        OSError: The file cannot be opened.
    """
    name = os.fspath(path)
    if folder is not None and (not name or "/" in name or name in (".", "..")):
        raise UntrustedFileError(errno.EPERM, "expected the plain name of a file, without separators", name)
    flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
    return _open(name, flags, folder, lambda found: _file_problem(found, size_bytes))


def open_in_folder(path: str, *, write: bool = False, size_bytes: int | None = None) -> int:
    """As ``open_file``, for a path from a peer. Also checks the folder, as ``open_folder`` does."""
    parent, _, name = path.rpartition("/")
    folder = open_folder(parent)
    try:
        return open_file(name, write=write, size_bytes=size_bytes, folder=folder)
    finally:
        os.close(folder)


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def server_folder(path: str) -> str:
    """Returns the folder of a file that a shard server offers.

    Raises:
        UntrustedFileError: The path is not absolute and normalized, or the name of its folder lacks
            ``SERVER_FOLDER_PREFIX``.
    """
    pure = PurePosixPath(path)
    if not pure.is_absolute() or str(pure) != path or ".." in pure.parts:
        raise UntrustedFileError(errno.EPERM, "expected an absolute path without '..'", path)
    if not pure.parent.name.startswith(SERVER_FOLDER_PREFIX):
        message = f"expected a file in a shard server's folder, whose name starts with {SERVER_FOLDER_PREFIX!r}"
        raise UntrustedFileError(errno.EPERM, message, path)
    return str(pure.parent)


def file_size(size_bytes: int) -> int:
    """Returns the size of the file for a buffer. Empty files cannot be mapped, so an empty buffer has one byte."""
    return max(size_bytes, 1)


def _open(name: str, flags: int, folder: int | None, problem: Callable[[os.stat_result], str | None]) -> int:
    # The path is also checked before it is opened: opening a device can have side effects, and a socket cannot be
    # opened.
    try:
        _require(name, os.stat(name, dir_fd=folder, follow_symlinks=False), problem)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    descriptor = os.open(name, flags | _SAFE, 0o600, dir_fd=folder)
    try:
        _require(name, os.fstat(descriptor), problem)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require(name: str, found: os.stat_result, problem: Callable[[os.stat_result], str | None]) -> None:
    if (text := problem(found)) is not None:
        raise UntrustedFileError(errno.EPERM, text, name)


def _folder_problem(found: os.stat_result) -> str | None:
    return _owner_problem(found, stat.S_ISDIR, "a folder", _FOLDER_BITS)


def _file_problem(found: os.stat_result, size_bytes: int | None) -> str | None:
    if problem := _owner_problem(found, stat.S_ISREG, "a regular file", 0o022):
        return problem
    if found.st_nlink > 1:
        return f"expected a file with one name, found one with {found.st_nlink} (hard links)"
    if size_bytes is not None and found.st_size != size_bytes:
        return f"expected a file of {size_bytes} bytes, found {found.st_size}"
    return None


def _owner_problem(found: os.stat_result, is_kind: Callable[[int], bool], kind: str, forbidden: int) -> str | None:
    user = os.geteuid()
    if not is_kind(found.st_mode):
        actual = next((name for test, name in _KINDS if test(found.st_mode)), "a device")
    elif found.st_uid != user:
        actual = f"one of user {found.st_uid}"
    elif found.st_mode & forbidden:
        actual = f"one with mode {stat.S_IMODE(found.st_mode):04o}"
    else:
        return None
    access = "list or write to" if forbidden == _FOLDER_BITS else "write to"
    return f"expected {kind} of user {user} that no other user can {access}, found {actual}"
