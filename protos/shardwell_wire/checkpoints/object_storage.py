"""Checkpoints in a bucket, by fsspec. Imported on use: fsspec takes a moment to import."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import fsspec

from shardwell_wire.checkpoints.storage import OutputFile, Storage, explained
from shardwell_wire.errors import InvalidRequestError, NotFoundError

SPOOL_VARIABLE = "SHARDWELL_SPOOL_DIR"
"""Environment variable with the local folder for files on their way to a bucket. Default: Python's temporary folder."""

_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3, "mode": "standard"}}
"""Deadlines of every request to S3, in seconds. botocore's own connect timeout is a minute."""


class ObjectStorage(Storage):
    """A folder of a bucket. ``open_storage`` checks the protocol.

    Object stores have neither folders nor renames: a file appears whole, with its upload.

    Args:
        url: URL of the folder.

    Raises:
        InvalidRequestError: fsspec does not know the protocol, or its package is not installed.
    """

    window_bytes = 32 << 20

    def __init__(self, url: str) -> None:
        self.url = url
        protocol = url.split("://", maxsplit=1)[0]
        options: dict[str, Any] = {"use_listings_cache": False}
        if protocol in ("s3", "s3a") and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
            options["config_kwargs"] = _S3_TIMEOUTS
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            extra = " (pip install 'shardwell[s3]')" if protocol in ("s3", "s3a") else ""
            raise InvalidRequestError(
                f"{url}: this host lacks the package for {protocol}://: {error}{extra}"
            ) from error
        except ValueError as error:
            raise InvalidRequestError(f"{url}: {error}") from error

    def below(self, path: str) -> Storage:
        return ObjectStorage(self.where(path))

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def names(self, folder: str = "") -> list[str]:
        with explained("list", self.where(folder), _as_os_error):
            path = self._path(folder)
            try:
                found = self._files.ls(path, detail=False)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error.__cause__):  # not an empty folder: its name may be misspelled
                    raise NotFoundError(f"cannot list {self.where(folder)}: {error}", path=self.url) from error
                return []
            inside = {str(each).rstrip("/") for each in found} - {path}  # some stores list the folder itself
            return sorted(each.rsplit("/", maxsplit=1)[-1] for each in inside)

    def size(self, path: str) -> int:
        with explained("read", self.where(path), _as_os_error):
            return int(self._files.info(self._path(path))["size"])

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            return b""
        with explained("read", self.where(path), _as_os_error):
            return bytes(self._files.cat_file(self._path(path), start=start or None, end=stop))

    def write_whole(self, path: str, data: bytes) -> None:
        with explained("write", self.where(path), _as_os_error):
            self._make_parents(path)
            self._files.pipe_file(self._path(path), data)

    def create(self, path: str, size_bytes: int) -> OutputFile:
        return _SpooledFile(self, path, size_bytes)

    def upload(self, source: Path, path: str) -> None:
        """Uploads a local file, in parts if it is large."""
        with explained("upload", self.where(path), _as_os_error):
            self._make_parents(path)
            self._files.put_file(str(source), self._path(path))

    def _make_parents(self, path: str) -> None:
        # In buckets this would try to create the bucket, which is an administrator's work.
        if not _is_bucket(self._files):
            self._files.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)

    def make_folder(self, folder: str) -> None:
        with explained("create", self.where(folder), _as_os_error):
            self._make_parents(f"{folder}/x" if folder else "x")

    def delete(self, path: str) -> None:
        with explained("delete", self.where(path), _as_os_error):
            try:
                self._files.rm_file(self._path(path))
            except FileNotFoundError:
                return

    def delete_folder(self, folder: str) -> None:
        with explained("delete", self.where(folder), _as_os_error):
            path = self._path(folder)
            try:
                # Not ``rm(recursive=True)``, which takes characters such as ``[`` for patterns.
                for file in self._files.find(path):
                    self._files.rm_file(file)
                if not _is_bucket(self._files):
                    self._files.rmdir(path)
            except FileNotFoundError:
                return

    def modified(self, path: str) -> float | None:
        return None


class _SpooledFile(OutputFile):
    """A file that is written to the local disk and uploaded at the end: buckets take no writes at a position.

    Args:
        storage: The storage.
        path: Path of the file in the storage.
        size_bytes: Size of the file.
    """

    def __init__(self, storage: ObjectStorage, path: str, size_bytes: int) -> None:
        self._storage, self._path, self._size_bytes = storage, path, size_bytes
        folder = os.environ.get(SPOOL_VARIABLE) or tempfile.gettempdir()
        self._where = f"the spool file in {folder} (for {storage.where(path)}; {SPOOL_VARIABLE} names another folder)"
        with explained("write", self._where):
            descriptor, name = tempfile.mkstemp(prefix="shardwell-spool-", suffix=".safetensors", dir=folder)
        self._descriptor: int | None = descriptor
        self._spool = Path(name)

    def write(self, data: Any, position: int) -> None:
        assert self._descriptor is not None, "the file is closed"
        with explained("write", self._where):
            rest = memoryview(data).cast("B")
            while len(rest):
                written = os.pwrite(self._descriptor, rest, position)
                rest, position = rest[written:], position + written

    def finish(self) -> None:
        self._storage.upload(self._spool, self._path)
        self.abort()

    def abort(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            self._spool.unlink(missing_ok=True)


def _is_bucket(files: Any) -> bool:
    protocols = files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)
    return bool({"s3", "gs", "abfs", "az"} & set(protocols))


def _as_os_error(error: Exception) -> Exception:
    """Returns the OSError that an error of a store's library stands for, or the error."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return error
    text = f"{type(error).__name__}: {error}"
    if "Credential" in text or "AccessDenied" in text or "SignatureDoesNotMatch" in text or "InvalidAccessKey" in text:
        return PermissionError(errno.EACCES, str(error))
    if "NoSuchBucket" in text or "NoSuchKey" in text:
        return FileNotFoundError(errno.ENOENT, str(error))
    if "QuotaExceeded" in text or "InsufficientStorage" in text or "StorageFull" in text:
        return OSError(errno.ENOSPC, str(error))
    return error
