"""Checkpoints in a local folder, which may be a mounted network file system."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

from shardwell_wire.checkpoints.storage import OutputFile, Storage, explained
from shardwell_wire.errors import NotFoundError

_TEMPORARY = ".writing-"


class LocalStorage(Storage):
    """A local folder. Files and names are durable when a method returns.

    Args:
        root: Absolute path of the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def _at(self, path: str) -> Path:
        assert not path.startswith("/"), path
        return self.root / path

    def names(self, folder: str = "") -> list[str]:
        with explained("list", self.where(folder)):
            try:
                return sorted(name for name in os.listdir(self._at(folder)) if not name.startswith(_TEMPORARY))
            except FileNotFoundError:
                return []

    def size(self, path: str) -> int:
        with explained("read", self.where(path)):
            return self._at(path).stat().st_size

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        with explained("read", self.where(path)), self._at(path).open("rb", buffering=0) as file:
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
        return _LocalFile(self._at(path))

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
            self._at(path).unlink(missing_ok=True)
            if self._at(path).parent.is_dir():
                _sync_folder(self._at(path).parent)

    def delete_folder(self, folder: str) -> None:
        with explained("delete", self.where(folder)):
            while self._at(folder).is_dir():
                # Another process may remove a file at the same time.
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self._at(folder))
            if self._at(folder).parent.is_dir():
                _sync_folder(self._at(folder).parent)

    def modified(self, path: str) -> float | None:
        with explained("read", self.where(path)):
            return self._at(path).stat().st_mtime


class _LocalFile(OutputFile):
    """A file that is written in place: without the checkpoint's manifest nobody reads it.

    Args:
        path: The file. It must not exist, and its folder must: nobody may write to a checkpoint that was removed.
    """

    def __init__(self, path: Path) -> None:
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

    def write(self, data: Any, position: int) -> None:
        assert self._descriptor is not None, "the file is closed"
        with explained("write", str(self._path)):
            _write_all(self._descriptor, memoryview(data).cast("B"), position)

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
        if descriptor is not None:
            os.close(descriptor)


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
