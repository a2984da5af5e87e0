"""Reads files with secrets, which no other user may be able to read, and pipes with secrets."""

from __future__ import annotations

import os
import re
import select
import stat
import time

from shardwell_wire.errors import UsageError
from shardwell_wire.host.shared_memory import opened

_INHERITED = re.compile(r"/(?:dev|proc/self)/fd/([0-9]+)")
_PIPE_TIMEOUT_S = 30.0
"""Seconds until the process at the other end of a pipe must have written the secret and closed the pipe."""


def read_secret_file(path: str | os.PathLike[str], what: str, *, max_bytes: int) -> bytes:
    """Reads a file that belongs to this user or to root and that no other user can read.

    Args:
        path: The file. May be a symbolic link.
        what: Kind of the file in errors, such as ``token file``.
        max_bytes: Number of bytes after which the rest is ignored.

    Raises:
        UsageError: The file cannot be read, or other users can read it.
    """
    name = f"{what} {os.fspath(path)}"
    try:
        with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)) as descriptor:
            if (problem := _problem(os.fstat(descriptor))) is not None:
                raise UsageError(f"{name}: {problem}")
            return os.read(descriptor, max_bytes)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error


def inherited_pipe(path: str | os.PathLike[str]) -> int | None:
    """Returns the descriptor of a pipe that the process was started with. None: the path names something else.

    Args:
        path: Such as ``/dev/fd/3``, which shells pass for ``<(command)``.
    """
    match = _INHERITED.fullmatch(os.fspath(path))
    try:
        if match is not None and stat.S_ISFIFO(os.fstat(int(match[1])).st_mode):
            return int(match[1])
    except OSError:
        pass
    return None


def read_secret_pipe(descriptor: int, what: str, *, max_bytes: int) -> bytes:
    """Reads a pipe to its end and closes it, so that child processes do not inherit it.

    Args:
        what: Kind of the secret in errors, such as ``token file``.
        max_bytes: Number of bytes after which the rest is ignored.

    Raises:
        UsageError: The pipe was not closed at its other end in time.
    """
    data, deadline = b"", time.monotonic() + _PIPE_TIMEOUT_S
    try:
        while len(data) < max_bytes:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise UsageError(
                    f"{what} /dev/fd/{descriptor}: the pipe is still open at its other end after {_PIPE_TIMEOUT_S:g} "
                    "s: the process that writes the secret must close it"
                )
            received = os.read(descriptor, max_bytes - len(data))
            if not received:
                break
            data += received
    finally:
        os.close(descriptor)
    return data


def _problem(found: os.stat_result) -> str | None:
    user = os.geteuid()
    if not stat.S_ISREG(found.st_mode):
        return "expected a regular file"
    if user != 0 and found.st_uid not in (user, 0):
        return f"it belongs to user {found.st_uid}, expected user {user} or root"
    # A file of root may be readable by a group that root chose, as for secrets that Kubernetes mounts.
    if found.st_mode & (0o077 if found.st_uid == user else 0o027):
        return f"other users can access it (mode {stat.S_IMODE(found.st_mode):04o}): run chmod 600 on it"
    return None
