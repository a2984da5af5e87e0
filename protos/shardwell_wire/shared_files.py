"""Opens files and folders that other processes made or named, after checking whose they are.

Note: Who may crash or overwrite whom. A process that maps a file dies of SIGBUS when somebody truncates it, and what is
written to a mapping changes the file. Both are harmless between processes of one user, who may end and trace each
other anyway. They must not be possible between users. Every file that is mapped therefore belongs to the user of this
process, and lies in a folder that this user alone can enter. Nothing that a peer names is created or truncated.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

SERVER_FOLDER_PREFIX = "shardwell-"
"""Names of the folders in which shard servers keep files that trainers map begin with it."""

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""A symbolic link is not followed; a FIFO or device that appears after the check does not block."""

_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


class UntrustedFileError(PermissionError):
    """A file or folder is not what it should be, and was not used."""


def open_folder(path: str | os.PathLike[str]) -> int:
    """Opens a folder that only the user of this process can enter; returns its descriptor.

    Raises:
        UntrustedFileError: It is no folder, belongs to another user, or others can enter it.
        OSError: It cannot be opened.
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
    """Opens a regular file of this user, which is neither a link nor linked elsewhere; returns its descriptor.

    Args:
        path: Of the file; a name without separators if ``folder`` is given.
        write: Whether it is opened for reading and writing.
        create: Make the file, readable by this user alone, if there is none. Only for names that no peer chose.
        size_bytes: How large it must be. None: any size.
        folder: Descriptor of the folder that contains it.

    Raises:
        UntrustedFileError: It is something else, another user's, writable by others, or of another size.
        OSError: It cannot be opened.
    """
    name = os.fspath(path)
    if folder is not None and (not name or "/" in name or name in (".", "..")):
        raise UntrustedFileError(errno.EPERM, "expected the plain name of a file, without separators", name)
    flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
    return _open(name, flags, folder, lambda found: _file_problem(found, size_bytes))


def open_in_folder(path: str, *, write: bool = False, size_bytes: int | None = None) -> int:
    """``open_file`` for a path that a peer named: also checks the folder, as ``open_folder`` does."""
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
    """The folder of a file that a shard server offers to map.

    Raises:
        UntrustedFileError: The path is not absolute and plain, or its folder is not named like a server's.
    """
    pure = PurePosixPath(path)
    if not pure.is_absolute() or str(pure) != path or ".." in pure.parts:
        raise UntrustedFileError(errno.EPERM, "expected an absolute path without '..'", path)
    if not pure.parent.name.startswith(SERVER_FOLDER_PREFIX):
        message = f"expected a file in a shard server's folder, whose name begins with {SERVER_FOLDER_PREFIX!r}"
        raise UntrustedFileError(errno.EPERM, message, path)
    return str(pure.parent)


def require_folder(path: str, folder: str) -> str:
    """Returns ``path`` if it names a file in ``folder``; raises UntrustedFileError otherwise."""
    if server_folder(path) != folder:
        raise UntrustedFileError(
            errno.EPERM, f"expected a file in {folder}, where the shard server keeps its own", path
        )
    return path


def file_size(size_bytes: int) -> int:
    """Size of the file that holds so many bytes: nothing cannot be mapped, so an empty buffer has one byte."""
    return max(size_bytes, 1)


def _open(name: str, flags: int, folder: int | None, problem: Callable[[os.stat_result], str | None]) -> int:
    # Looked at before it is opened, too: opening a device can have effects, and a socket cannot be opened at all.
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
    return _owner_problem(found, stat.S_ISDIR, "a folder", 0o077)


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
    access = "use" if forbidden == 0o077 else "write to"
    return f"expected {kind} of user {user} that no other user can {access}, found {actual}"
