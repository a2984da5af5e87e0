"""Reads files with secrets, which no other user may be able to read."""

from __future__ import annotations

import os
import stat

from shardwell_wire.errors import UsageError
from shardwell_wire.shared_files import opened


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
