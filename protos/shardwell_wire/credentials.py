"""Credentials of a cluster: a token that every rpc carries as ``authorization: Bearer TOKEN``, and its TLS.

Both ends use the ``Credentials`` class. All other code treats credentials as opaque.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwell_wire.errors import UsageError
from shardwell_wire.secret_files import read_secret_file
from shardwell_wire.tls import Tls

TOKEN_FILE_VARIABLE = "SHARDWELL_TOKEN_FILE"
"""Environment variable with the path of the cluster's token file."""

_HEADER, _SCHEME = "authorization", "Bearer"
_TOKEN_BYTES, _MAX_FILE_BYTES = 32, 1024
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process needs to use a cluster. Without a token, every caller is admitted."""

    token: str = field(default="", repr=False)
    """The token of the cluster. Empty: the cluster has none."""
    tls: Tls | None = field(default=None, compare=False)
    """Encrypts connections and proves the identity of servers. None: connections are not encrypted."""

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
    text = read_secret_file(path, "token file", max_bytes=_MAX_FILE_BYTES).decode(errors="replace").strip()
    if not _TOKEN.fullmatch(text):
        # The message does not show the text, which may be a secret with a typing error.
        raise UsageError(
            f"token file {os.fspath(path)}: expected one line with a token of 16 to 512 letters, digits or "
            "characters of '._~+/=-'; `openssl rand -hex 32` creates one"
        )
    return Credentials(text)
