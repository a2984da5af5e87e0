"""Where checkpoints are stored: ``Storage``, which is a local folder, or a bucket such as ``s3://bucket/folder``.

A local folder may be a mounted network file system. Buckets are reached by fsspec. All methods block. They may be
called from any thread. ``open_storage`` opens the storage of a path or URL.

Note: [Folders that a trainer names]
    The coordinator and the shard servers open the folders that trainers name, with their own permissions. The operator
    names folders (``--checkpoint-root``), and a server opens only what is below one of them: in a cluster with a key
    nothing else, so that a trainer's token opens no other file of the server's host and connects to no other host.
    Every path below a local root is resolved before it is opened, so that a symbolic link does not lead out of it.

Note: [Writing past the page cache]
    A checkpoint is written once and read rarely. Through the page cache, the kernel copies every byte and allocates a
    page for it, on the processors that train. With ``O_DIRECT`` the device reads the memory of the process itself.
    Position, size and address must be multiples of a block. Whole blocks are therefore copied to an aligned window and
    written directly; the rest of a write, less than a block at each end, goes through the page cache. The two kinds of
    writes never touch the same block. A file system that does not support ``O_DIRECT`` gets ordinary writes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import stat
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwell_wire.errors import (
    AccessError,
    CapacityError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
)
from shardwell_wire.host.variables import variables

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
    reads = action in ("read", "list")
    if isinstance(error, FileNotFoundError) or (reads and isinstance(error, NotADirectoryError)):
        return NotFoundError(f"{where} does not exist" if reads else message, path=where)
    if code in _FULL:
        return CapacityError(f"{message}. Free space there, or keep fewer checkpoints", path=where)
    if isinstance(error, PermissionError) or code in _FORBIDDEN:
        return AccessError(f"{message}. The process needs permission to read and write there", path=where)
    return UnavailableError(message, path=where)


_TEMPORARY = ".writing-"

_BLOCK_BYTES = 4096
"""Positions and sizes of direct writes are multiples of this. Block sizes of disks and file systems divide it."""
_WINDOW_BYTES = 4 << 20
"""Size of the aligned window for direct writes."""
_LEAST_DIRECT_BYTES = 64 << 10
"""Smaller writes go through the page cache: a direct write waits for the device."""


class LocalStorage(Storage):
    """A local folder. Files and names are durable when a method returns.

    Args:
        root: Absolute path of the folder.
        within: A resolved path, outside of which nothing is opened, created or deleted: symbolic links that lead out of
            it raise AccessError. None: links are followed anywhere.
    """

    def __init__(self, root: Path, within: Path | None = None) -> None:
        self.root, self._within = root, within
        self.url = str(root)

    def below(self, path: str) -> Storage:
        return LocalStorage(self._joined(path), self._within)

    def _joined(self, path: str) -> Path:
        assert not path.startswith("/"), path
        return self.root / path

    def _at(self, path: str) -> Path:
        """Returns the place of a file or folder, which has no links if the storage is confined."""
        return self._confined(self._joined(path))

    def _entry(self, path: str) -> Path:
        """As ``_at``, but of a link itself, which can be deleted."""
        at = self._joined(path)
        return at if self._within is None else self._confined(at.parent) / at.name

    def _confined(self, path: Path) -> Path:
        if self._within is None:
            return path
        resolved = Path(os.path.realpath(path))
        if not resolved.is_relative_to(self._within):
            raise AccessError(f"{path} is or contains a link out of {self._within}, the folder for checkpoints")
        return resolved

    def _open_regular(self, path: str) -> int:
        """Returns the descriptor of a regular file. Does not wait for the other end of a pipe."""
        at = self._at(path)
        no_links = 0 if self._within is None else os.O_NOFOLLOW  # ``_at`` has resolved them
        descriptor = os.open(at, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | no_links)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CorruptDataError(f"{self.where(path)} is not a regular file", path=str(at))
            if self._within is not None and Path("/proc/self/fd").is_dir():
                self._confined(Path(f"/proc/self/fd/{descriptor}"))  # a folder may have become a link meanwhile
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def names(self, folder: str = "") -> list[str]:
        with explained("list", self.where(folder)):
            try:
                return sorted(name for name in os.listdir(self._at(folder)) if not name.startswith(_TEMPORARY))
            except FileNotFoundError:
                return []

    def size(self, path: str) -> int:
        with explained("read", self.where(path)):
            descriptor = self._open_regular(path)
            try:
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        with explained("read", self.where(path)), open(self._open_regular(path), "rb", buffering=0) as file:
            file.seek(start)
            if stop is None:
                return file.read()
            parts, wanted = [], stop - start
            while wanted > 0 and (part := file.read(wanted)):
                parts.append(part)
                wanted -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def write_whole(self, path: str, data: bytes) -> None:
        target = self._at(path)
        temporary = target.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        with explained("write", self.where(path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb", buffering=0) as file:
                    _write_all(file.fileno(), memoryview(data), 0)
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)

    def create(self, path: str, size_bytes: int) -> OutputFile:
        return _LocalFile(self._at(path), size_bytes)

    def make_folder(self, folder: str) -> None:
        with explained("create", self.where(folder)):
            path, made = self._at(folder), []
            while not path.is_dir():
                made.append(path)
                path = path.parent
            self._at(folder).mkdir(parents=True, exist_ok=True)
            for each in made:
                _sync_folder(each.parent)

    def delete(self, path: str) -> None:
        with explained("delete", self.where(path)):
            at = self._entry(path)
            at.unlink(missing_ok=True)
            if at.parent.is_dir():
                _sync_folder(at.parent)

    def delete_folder(self, folder: str) -> None:
        with explained("delete", self.where(folder)):
            at = self._entry(folder)
            while at.is_dir():
                # Another process may remove a file at the same time. Of a link, rmtree deletes nothing and raises.
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(at)
            if at.parent.is_dir():
                _sync_folder(at.parent)


class _LocalFile(OutputFile):
    """A file that is written in place: without the checkpoint's manifest nobody reads it.

    Args:
        path: The file. It must not exist, and its folder must: nobody may write to a checkpoint that was removed.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._closing = threading.Lock()
        if not path.parent.is_dir():
            raise NotFoundError(
                f"cannot write {path}: the folder {path.parent} does not exist on this host. Either the checkpoint was "
                "aborted, or the hosts do not share the folder",
                path=str(path),
            )
        with explained("write", str(path)):
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._direct = _DirectWrites.open(path) if size_bytes >= _LEAST_DIRECT_BYTES else None

    def write(self, data: Any, position: int) -> None:
        assert self._descriptor is not None, "the file is closed"
        view = memoryview(data).cast("B")
        head = -position % _BLOCK_BYTES
        whole = (len(view) - head) // _BLOCK_BYTES * _BLOCK_BYTES
        with explained("write", str(self._path)):
            if self._direct is not None and whole >= _LEAST_DIRECT_BYTES:
                _write_all(self._descriptor, view[:head], position)
                done = head + self._direct.write(view[head : head + whole], position + head)
                view, position = view[done:], position + done
            _write_all(self._descriptor, view, position)

    def finish(self) -> None:
        with explained("write", str(self._path)):
            assert self._descriptor is not None, "the file is closed"
            os.fsync(self._descriptor)
            self._close()
            _sync_folder(self._path.parent)

    def abort(self) -> None:
        if self._descriptor is not None:
            self._close()
            with contextlib.suppress(OSError):  # an incomplete checkpoint is removed later
                self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        with self._closing:
            descriptor, self._descriptor = self._descriptor, None
            direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        if descriptor is not None:
            os.close(descriptor)


class _DirectWrites:
    """Writes whole blocks of one file without the page cache. See Note: [Writing past the page cache].

    Args:
        descriptor: The file, opened with ``O_DIRECT``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._window = mmap.mmap(-1, _WINDOW_BYTES)  # begins at a page
        self._lock = threading.Lock()
        self._supported = True

    @classmethod
    def open(cls, path: Path) -> _DirectWrites | None:
        """Opens an existing file. Returns None if the system or the file system has no direct writes."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return None
        try:
            return cls(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flag))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return None
            raise

    def write(self, data: memoryview, position: int) -> int:
        """Writes blocks at the start of a block. Returns how many bytes were written directly: all, unless the file
        system refuses direct writes of this size."""
        done = 0
        with self._lock:
            while self._supported and done < len(data):
                size_bytes = min(_WINDOW_BYTES, len(data) - done)
                self._window[:size_bytes] = data[done : done + size_bytes]
                try:
                    written = os.pwrite(self._descriptor, memoryview(self._window)[:size_bytes], position + done)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    written = 0
                done += written
                self._supported = written > 0 and written % _BLOCK_BYTES == 0
        return done

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SPOOL_VARIABLE = "SHARDWELL_SPOOL_DIR"
"""Environment variable with the local folder for files on their way to a bucket. Default: Python's temporary folder."""

_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3, "mode": "standard"}}
"""Deadlines of every request to S3, in seconds. botocore's own connect timeout is a minute."""


class ObjectStorage(Storage):
    """A folder of a bucket. ``open_storage`` checks the protocol.

    Object stores have neither folders nor renames: a file appears whole, with its upload.

    Raises:
        InvalidRequestError: fsspec does not know the protocol, or its package is not installed.
    """

    window_bytes = 32 << 20

    def __init__(self, url: str) -> None:
        import fsspec  # takes a moment, and only buckets need it

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


class _SpooledFile(OutputFile):
    """A file that is written to the local disk and uploaded at the end: buckets take no writes at a position."""

    def __init__(self, storage: ObjectStorage, path: str, size_bytes: int) -> None:
        self._storage, self._path, self._size_bytes = storage, path, size_bytes
        folder = variables().get(SPOOL_VARIABLE) or tempfile.gettempdir()
        self._where = f"the spool file in {folder} (for {storage.where(path)}; {SPOOL_VARIABLE} names another folder)"
        with explained("write", self._where):
            descriptor, name = tempfile.mkstemp(prefix="shardwell-spool-", suffix=".safetensors", dir=folder)
        self._descriptor: int | None = descriptor
        self._spool = Path(name)

    def write(self, data: Any, position: int) -> None:
        assert self._descriptor is not None, "the file is closed"
        with explained("write", self._where):
            _write_all(self._descriptor, memoryview(data).cast("B"), position)

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


ROOT_OPTION, ROOT_VARIABLE = "--checkpoint-root", "SHARDWELL_CHECKPOINT_ROOT"

_ONE_SLASH = re.compile(r"[a-z][a-z0-9+]*:/[^/]")
"""A mistyped URL."""
_PROTOCOLS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "memory": "memory",
}
"""Protocols of URLs other than ``file``, with one name for each kind of storage. fsspec knows many more, which read any
file or connect to any host."""
_MAX_SHOWN, _MAX_LENGTH = 200, 4096
_ANYWHERE = "any"
"""Value of ``--checkpoint-root``: every folder that the process can open."""


def open_storage(url: str | Path) -> Storage:
    """Returns the storage at a path or URL. Creates nothing.

    Raises:
        InvalidRequestError: The URL is not supported on this host: a package is missing, or the protocol is unknown.
    """
    if (path := local_path(str(url))) is not None:
        return LocalStorage(path)
    return ObjectStorage(str(url))


class CheckpointRoots:
    """The folders below which a server may open checkpoints. See Note: [Folders that a trainer names].

    Args:
        roots: Absolute paths and URLs. None: every folder.
        is_server: True if the server is a process of its own, where ``memory:`` would be another place than for the
            other servers.

    Raises:
        ValueError: A root is neither an absolute path nor a URL that ``open_storage`` supports.
    """

    def __init__(self, roots: Sequence[str] | None = None, *, is_server: bool = False) -> None:
        for root in roots or ():
            if "://" not in root and not os.path.isabs(root):
                raise ValueError(
                    f"{ROOT_OPTION} {root!r}: expected an absolute path, or a URL such as s3://bucket/folder"
                )
            try:
                local_path(root)
            except InvalidRequestError as error:
                raise ValueError(f"{ROOT_OPTION}: {error}") from error
        self._roots = None if roots is None else tuple(roots)
        self._is_server = is_server

    @classmethod
    def from_option(cls, option: str, *, is_protected: bool) -> CheckpointRoots:
        """Returns the roots that an operator has named.

        Args:
            option: Paths and URLs, separated by commas; or ``any``. Empty: none was named, so a cluster without a key
                opens every folder, and one with a key opens none.
            is_protected: Whether the cluster has a key.

        Raises:
            ValueError: See above.
        """
        roots = [part.strip() for part in option.split(",") if part.strip()]
        if _ANYWHERE in roots or not (roots or is_protected):
            return cls(is_server=True)
        return cls(roots, is_server=True)

    def open(self, url: str) -> Storage:
        """Returns the storage at a path or URL, which then opens nothing outside of the root. Creates nothing.

        Raises:
            AccessError: The folder is not below a root.
            InvalidRequestError: See ``open_storage``.
        """
        path = local_path(url)
        if self._is_server and url.startswith("memory:"):
            raise InvalidRequestError(
                f"checkpoint folder {_shown(url)}: memory: is the memory of one process. Name a folder or a bucket "
                "that the coordinator and all shard servers reach"
            )
        if self._roots is None:
            return open_storage(url)
        if path is not None:
            path = Path(os.path.normpath(path))
            for root in filter(None, map(local_path, self._roots)):
                resolved = Path(os.path.realpath(root))
                if path.is_relative_to(root) or path.is_relative_to(resolved):
                    return LocalStorage(path, resolved)
        elif any(_is_below(url, root) for root in self._roots):
            return open_storage(url)
        raise AccessError(self._refusal(url), url=url)

    def _refusal(self, url: str) -> str:
        where = f"the option {ROOT_OPTION} ({ROOT_VARIABLE}) of the coordinator and of all shard servers"
        if not self._roots:
            return (
                f"checkpoint folder {_shown(url)}: this cluster has tokens, and its operator has named no folder for "
                f"checkpoints. Ask the operator to name one with {where}, such as {ROOT_OPTION} /checkpoints or "
                f"{ROOT_OPTION} s3://bucket/folder"
            )
        return (
            f"checkpoint folder {_shown(url)} is not below {' or '.join(self._roots)}: name a folder below it, or ask "
            f"the operator to change {where}"
        )


def _shown(url: str) -> str:
    return repr(url if len(url) <= _MAX_SHOWN else f"{url[:_MAX_SHOWN]}...")


def _is_below(url: str, root: str) -> bool:
    """Returns whether a URL of a bucket is a folder below another one, or this folder itself."""
    if "://" not in root:
        return False
    (kind, rest), (root_kind, root_rest) = (each.rstrip("/").split("://", maxsplit=1) for each in (url, root))
    parts = rest.split("/")
    is_plain = not {"", ".", ".."} & set(parts) and not set("?#\\") & set(rest)
    is_inside = rest == root_rest or rest.startswith(f"{root_rest}/")
    return is_plain and is_inside and _PROTOCOLS.get(kind) == _PROTOCOLS.get(root_kind)


def local_path(url: str) -> Path | None:
    """Returns the local path that a path or ``file:`` URL means; None for URLs of buckets.

    Raises:
        InvalidRequestError: The URL is empty or too long, has an unknown protocol, or chains several.
    """
    if not 0 < len(url) <= _MAX_LENGTH or not url.isprintable():
        raise InvalidRequestError(
            f"checkpoint folder {_shown(url)}: expected a path or a URL such as s3://bucket/folder, of at most "
            f"{_MAX_LENGTH} printable characters"
        )
    if _ONE_SLASH.match(url):
        raise InvalidRequestError(
            f"checkpoint folder {_shown(url)}: a URL has two slashes after its protocol, such as s3://bucket/folder. "
            f"The local folder of this name is ./{url}"
        )
    for prefix in ("file://", "local://"):
        if url.startswith(prefix) and "::" not in url:
            return Path(url.removeprefix(prefix)).absolute()
    if "://" not in url and "::" not in url:
        return Path(url).expanduser().absolute()
    if "::" in url or url.split("://", maxsplit=1)[0] not in _PROTOCOLS:
        raise InvalidRequestError(
            f"checkpoint folder {_shown(url)}: expected a path, or a URL that starts with file://, s3://, gs:// or "
            "az://, without '::'"
        )
    return None


def absolute(url: str | Path) -> str:
    """Returns a path or URL that means the same in other working directories. Raises as ``local_path``."""
    path = local_path(str(url))
    return str(url) if path is None else str(path)


def check_writable(storage: Storage) -> None:
    """Writes and removes a small file, so that a folder that cannot be written is reported early.

    Raises:
        ShardwellError: See ``Storage``.
    """
    name = f".probe-{uuid.uuid4().hex}"
    storage.make_folder("")
    storage.write_whole(name, b"shardwell")
    storage.delete(name)
