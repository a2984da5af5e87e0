"""Credentials of a cluster: a token that every rpc carries as ``authorization: Bearer TOKEN``.

Both ends use the ``Credentials`` class. All other code treats credentials as opaque.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwell_wire.errors import UsageError
from shardwell_wire.shared_files import opened

TOKEN_FILE_VARIABLE = "SHARDWELL_TOKEN_FILE"
"""Environment variable with the path of the cluster's token file."""

_HEADER, _SCHEME = "authorization", "Bearer"
_TOKEN_BYTES, _MAX_FILE_BYTES = 32, 1024
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secret that all members of a cluster share. Without a token, every caller is admitted."""

    token: str = field(default="", repr=False)
    """The token of the cluster. Empty: the cluster has none."""

    def __bool__(self) -> bool:
        return bool(self.token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that clients send with every rpc."""
        return ((_HEADER, f"{_SCHEME} {self.token}"),) if self.token else ()

    @property
    def header(self) -> str:
        """The metadata as one header line, for other programs such as ``grpcurl -H``."""
        return ", ".join(f"{name}: {value}" for name, value in self.metadata)

    def problem(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Returns why the metadata of an rpc is rejected; None if the caller is admitted."""
        if not self.token:
            return None
        shown = [value for name, value in metadata if name == _HEADER]
        if not shown:
            return "the rpc carries no token, which this cluster requires"
        if len(shown) > 1:
            return f"the rpc carries {len(shown)} {_HEADER} headers, expected one"
        given = shown[0] if isinstance(shown[0], bytes) else shown[0].encode()
        if not hmac.compare_digest(given, f"{_SCHEME} {self.token}".encode()):
            return "the rpc carries another token than this cluster's"
        return None


NO_CREDENTIALS = Credentials()


def new_credentials() -> Credentials:
    """Returns credentials with a new random token."""
    return Credentials(secrets.token_urlsafe(_TOKEN_BYTES))


def read_token_file(path: str | os.PathLike[str]) -> Credentials:
    """Reads the token of a cluster from a file.

    Args:
        path: A file that belongs to this user or to root and that no other user can read. May be a symbolic link.

    Raises:
        UsageError: The file cannot be read, other users can read it, or it does not contain a token.
    """
    try:
        with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)) as descriptor:
            found = os.fstat(descriptor)
            if (problem := _file_problem(found)) is not None:
                raise UsageError(f"token file {os.fspath(path)}: {problem}")
            text = os.read(descriptor, _MAX_FILE_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise UsageError(f"token file {os.fspath(path)} cannot be read: {error.strerror}") from error
    if not _TOKEN.fullmatch(text):
        # The message does not show the text, which may be a secret with a typing error.
        raise UsageError(
            f"token file {os.fspath(path)}: expected one line with a token of 16 to 512 letters, digits or "
            "characters of '._~+/=-'; `openssl rand -hex 32` creates one"
        )
    return Credentials(text)


def _file_problem(found: os.stat_result) -> str | None:
    user = os.geteuid()
    if not stat.S_ISREG(found.st_mode):
        return "expected a regular file"
    if user != 0 and found.st_uid not in (user, 0):
        return f"it belongs to user {found.st_uid}, expected user {user} or root"
    # A file of root may be readable by a group that root chose, as for secrets that Kubernetes mounts.
    if found.st_mode & (0o077 if found.st_uid == user else 0o027):
        return f"other users can access it (mode {stat.S_IMODE(found.st_mode):04o}): run chmod 600 on it"
    return None
