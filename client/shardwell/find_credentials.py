"""Finds the credentials of a cluster: in a file that the user names, or among this user's local clusters.

A local cluster publishes its key in one file per server address, in a folder that only its user can read. The
process that started the cluster holds a lock on each file. Files without a lock were left by a killed process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shardwell_wire.errors import UsageError
from shardwell_wire.host.shared_memory import open_file, open_folder, opened
from shardwell_wire.host.variables import variables
from shardwell_wire.security.credentials import (
    NO_CREDENTIALS,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Credentials,
    read_token_file,
    token_credentials,
)
from shardwell_wire.security.tls import Tls, TlsOptions
from shardwell_wire.security.tokens import ClusterKey

logger = logging.getLogger(__name__)

_FOLDER = "shardwell_tokens"
_SHARED_DIRECTORY = Path("/tmp")
"""Fixed, because TMPDIR may differ between two terminals of one user."""

_ATTEMPTS = 10
_UNFINISHED_S = 60.0
"""Seconds for which an empty file counts as being written."""


def find_credentials(address: str, token_file: str | None = None, tls: TlsOptions | None = None) -> Credentials:
    """Returns the credentials for a server.

    Args:
        address: host:port of the server. Several, with commas: those of servers of one cluster.
        token_file: File with the cluster's key or a token. None: the key of this user's local cluster at the address,
            else the token in ``SHARDWELL_TOKEN``, else the file in ``SHARDWELL_TOKEN_FILE``, else none.
        tls: TLS of the connections. None: that of the environment, except for this user's local cluster.

    Raises:
        UsageError: A file is missing or invalid, or a file with a secret is readable by other users.
    """
    if tls is None and (found := _find_local_cluster(address)) is not None:
        return read_token_file(token_file) if token_file else found
    credentials = read_token_file(token_file) if token_file else _from_environment()
    options = tls or TlsOptions.from_env()
    return credentials if options is None else replace(credentials, tls=Tls(options))


def _from_environment() -> Credentials:
    if given := os.environ.get(TOKEN_VARIABLE):
        return token_credentials(given)
    named = variables().get(TOKEN_FILE_VARIABLE)
    return read_token_file(named) if named else NO_CREDENTIALS


class PublishedCredentials:
    """Publishes a key, which other processes of this user then find by an address, until ``withdraw``.

    Args:
        address: host:port of a server on this host.
    """

    def __init__(self, address: str, key: ClusterKey) -> None:
        self._file: tuple[Path, int] | None = None
        for candidate in _candidates():
            try:
                self._file = _publish(candidate, _key(address), key)
                return
            except OSError as error:
                logger.info("the key of %s is not published in %s: %s", address, candidate, error)
        logger.warning(
            "other processes cannot look up the key of the cluster at %s, because no folder for it could be created. "
            "Set %s in their environment",
            address,
            TOKEN_FILE_VARIABLE,
        )

    def withdraw(self) -> None:
        """Removes the file. Harmless to repeat."""
        if self._file is not None:
            (path, descriptor), self._file = self._file, None
            path.unlink(missing_ok=True)
            os.close(descriptor)
            with suppress(OSError):  # other clusters have files in the folder
                path.parent.rmdir()


def _find_local_cluster(address: str) -> Credentials | None:
    """Returns credentials made from the key that a live process has published for an address."""
    patterns = [f"{_key(each)}.*" for each in address.split(",")]
    for folder in _folders():
        for path in (found for pattern in patterns for found in folder.glob(pattern)):
            try:
                with opened(open_file(path)) as descriptor:
                    is_in_use = not _lock(descriptor, fcntl.LOCK_SH)
                if is_in_use and path.stat().st_size:
                    return read_token_file(path)
            except (OSError, UsageError):
                continue  # another process removes or writes the file now
    return None


def _key(address: str) -> str:
    """Returns the file name of an address. All names of this host have the same file name."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    is_local = host.startswith("127.") or host in ("localhost", "::1", socket.gethostname())
    return f"{'localhost' if is_local else host}:{port}".replace("/", "_")


def _runtime_folder() -> list[Path]:
    """Returns the folder in ``XDG_RUNTIME_DIR`` if this user owns that directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        with suppress(OSError), opened(open_folder(runtime)):
            return [Path(runtime) / _FOLDER]
    return []


def _candidates() -> Iterator[Path]:
    """Yields folders to publish in, in order of preference."""
    yield from _runtime_folder()
    name = f"{_FOLDER}-{os.geteuid()}"
    yield _SHARED_DIRECTORY / name
    # Another user may have created the folder with the predictable name.
    with suppress(OSError):
        yield Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_SHARED_DIRECTORY))


def _folders() -> Iterator[Path]:
    """Yields the existing folders in which this user may have published credentials."""
    found = _SHARED_DIRECTORY.glob(f"{_FOLDER}-{os.geteuid()}*")
    for folder in (*_runtime_folder(), *found):
        with suppress(OSError), opened(open_folder(folder)):
            yield folder


def _publish(folder: Path, name_start: str, key: ClusterKey) -> tuple[Path, int]:
    """Writes and locks a file; returns its path and the descriptor that holds the lock."""
    for _ in range(_ATTEMPTS):
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError), opened(open_folder(folder)) as opened_folder:
            _remove_stale_files(folder)
            name = f"{name_start}.{secrets.token_hex(8)}"
            descriptor = open_file(name, write=True, create=True, folder=opened_folder)
            try:
                _lock(descriptor, fcntl.LOCK_EX)
                os.write(descriptor, f"{key.secret}\n".encode())
            except BaseException:
                os.close(descriptor)
                raise
            return folder / name, descriptor
    raise FileNotFoundError(f"other processes removed {folder} {_ATTEMPTS} times")


def _remove_stale_files(folder: Path) -> None:
    """Removes the files that killed processes have left."""
    for path in folder.iterdir():
        with suppress(OSError), opened(open_file(path, write=True)) as descriptor:
            found = os.fstat(descriptor)
            is_complete = found.st_size or time.time() - found.st_mtime > _UNFINISHED_S
            if is_complete and _lock(descriptor, fcntl.LOCK_EX):
                path.unlink()


def _lock(descriptor: int, kind: int) -> bool:
    """Locks a file without waiting; returns whether it is locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
