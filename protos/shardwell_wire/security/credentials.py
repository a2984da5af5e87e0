"""Credentials: the token that an rpc carries as ``authorization: Bearer TOKEN``, its files, and TLS.

A token file has either the key of a cluster, from which tokens are made, or one token. See ``tokens.py``. It may be a
pipe that the process was started with, such as ``/dev/fd/3``.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwell_wire.errors import UnauthenticatedError, UsageError
from shardwell_wire.security.secret_files import inherited_pipe, read_secret_file, read_secret_pipe
from shardwell_wire.security.tls import Tls
from shardwell_wire.security.tokens import LIFETIME_S, ClusterKey, Role, is_token

TOKEN_FILE_VARIABLE = "SHARDWELL_TOKEN_FILE"
"""Environment variable with the path of a token file."""

TOKEN_VARIABLE = "SHARDWELL_TOKEN"
"""Environment variable with a token. Never a key: it would be inherited by all child processes."""

_HEADER, _SCHEME = "authorization", "Bearer"
_KEY_BYTES, _MAX_FILE_BYTES = 32, 8192
_TEXT = re.compile(r"[A-Za-z0-9._~+/=%-]{16,4096}")
_MAX_KEY_LENGTH = 512


@dataclass(frozen=True)
class Credentials:
    """What a process proves itself with: a token, or tokens that it makes with the cluster's key. Thread-safe."""

    key: ClusterKey | None = field(default=None, repr=False)
    """Key of the cluster. None: this process does not have it."""
    text: str = field(default="", repr=False)
    """A token that someone else made. Empty: the key is used, if there is one."""
    role: Role = Role.OPERATOR
    """Role of the tokens that are made with the key. Not a role of one run."""
    tls: Tls | None = field(default=None, compare=False)
    """Encrypts connections and proves the identity of servers. None: connections are not encrypted."""
    _made: list[tuple[str, float]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def token(self) -> str:
        """The token to send. Empty: none."""
        if self.text or self.key is None:
            return self.text
        now, made = self.key.clock(), self._made[-1:]
        if not made or now >= made[0][1]:
            made = [(self.key.mint(self.role), now + LIFETIME_S / 2)]
            self._made[:] = made
        return made[0][0]

    def __bool__(self) -> bool:
        return bool(self.token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata to send with an rpc. Must be read for each rpc, because tokens are renewed."""
        token = self.token
        return ((_HEADER, f"{_SCHEME} {token}"),) if token else ()

    @property
    def header(self) -> str:
        """The metadata as one header line, for other programs such as ``grpcurl -H``."""
        return ", ".join(f"{name}: {value}" for name, value in self.metadata)

    def of_role(self, role: Role) -> Credentials:
        """Returns the same credentials for another role."""
        return replace(self, role=role)


NO_CREDENTIALS = Credentials()


@dataclass(frozen=True)
class MemberCredentials(Credentials):
    """Credentials of a trainer in its run: the coordinator issues and renews its token. Created by ``of``."""

    _issued: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    @staticmethod
    def of(base: Credentials) -> MemberCredentials:
        """Returns credentials that send the token of ``base`` until the coordinator has issued one."""
        return MemberCredentials(base.key, base.text, base.role, base.tls)

    @property
    def token(self) -> str:
        """The token to send. Empty: none."""
        return self._issued[-1] if self._issued else super().token

    @property
    def is_member(self) -> bool:
        """True if the coordinator has issued a token."""
        return bool(self._issued)

    def renew(self, token: str) -> None:
        """Uses a token from the coordinator. Empty: keeps the former one."""
        if token:
            self._issued[:] = [token]

    def forget(self) -> None:
        """Uses the credentials again that the trainer joins with."""
        self._issued.clear()


def token_credentials(text: str) -> Credentials:
    """Returns credentials with one token. Raises UsageError if the text is none; the message does not show it."""
    if not is_token(text) or not _TEXT.fullmatch(text):
        raise UsageError(f"{TOKEN_VARIABLE}: expected a token, as `shardwell token --run RUN` prints it, and not a key")
    return Credentials(text=text)


def token_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Returns the token that an rpc carries.

    Raises:
        UnauthenticatedError: There is none, or more than one.
    """
    shown = [value for name, value in metadata if name == _HEADER]
    if not shown:
        raise UnauthenticatedError("the rpc carries no token, which this cluster requires")
    if len(shown) > 1:
        raise UnauthenticatedError(f"the rpc carries {len(shown)} {_HEADER} headers, expected one")
    given = shown[0].decode("latin-1") if isinstance(shown[0], bytes) else shown[0]
    scheme, _, token = given.partition(" ")
    if scheme != _SCHEME:
        raise UnauthenticatedError(
            f"the rpc carries something else than a token: expected `{_HEADER}: {_SCHEME} TOKEN`"
        )
    return token


def new_key() -> ClusterKey:
    """Returns a new random key."""
    return ClusterKey(secrets.token_urlsafe(_KEY_BYTES))


def read_key_file(path: str | os.PathLike[str]) -> Credentials:
    """Reads a token file that has the key of a cluster; raises as ``read_token_file`` does, also if it has a token."""
    text = _read(path)
    if is_token(text):
        raise UsageError(
            f"token file {os.fspath(path)}: it has a token, but a server needs the cluster's key, which verifies tokens"
        )
    return Credentials(ClusterKey(text))


def read_token_file(path: str | os.PathLike[str]) -> Credentials:
    """Reads a token file. A holder of the cluster's key is an operator.

    Args:
        path: A file that belongs to this user or to root and that no other user can read. May be a symbolic link, or
            a pipe that the process was started with, such as ``/dev/fd/3``. A pipe is read once, until it is closed.

    Raises:
        UsageError: The file cannot be read, other users can read it, or it contains neither a key nor a token.
    """
    text = _read(path)
    return Credentials(text=text) if is_token(text) else Credentials(ClusterKey(text))


def _read(path: str | os.PathLike[str]) -> str:
    text = _read_bytes(os.fspath(path)).decode(errors="replace").strip()
    if not _TEXT.fullmatch(text) or (not is_token(text) and len(text) > _MAX_KEY_LENGTH):
        # The message does not show the text, which may be a secret with a typing error.
        raise UsageError(
            f"token file {os.fspath(path)}: expected one line with a token, or with a key of 16 to {_MAX_KEY_LENGTH} "
            "letters, digits or characters of '._~+/=-'; `openssl rand -hex 32` creates a key"
        )
    return text


_piped: dict[str, bytes] = {}
"""What was read from pipes, by their paths."""
_pipes_lock = threading.Lock()


def _read_bytes(path: str) -> bytes:
    with _pipes_lock:
        if path not in _piped:
            if (descriptor := inherited_pipe(path)) is None:
                return read_secret_file(path, "token file", max_bytes=_MAX_FILE_BYTES)
            _piped[path] = read_secret_pipe(descriptor, "token file", max_bytes=_MAX_FILE_BYTES)
        return _piped[path]
