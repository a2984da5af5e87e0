"""Files of a stopped server on disk, from which its next process fills shared memory that was lost meanwhile."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardwell_wire.errors import CapacityError, CorruptDataError
from shardwell_wire.host.server_folders import FolderOwner
from shardwell_wire.host.shared_memory import open_file, open_folder, opened

logger = logging.getLogger(__name__)

_LIST = "files.json"
_PIECE_BYTES = 8 << 20
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _SavedFile:
    name: str
    size_bytes: int
    xxh3: str


class SavedFiles:
    """The files of one server in its state directory. A clean stop writes them; registration makes them obsolete.

    They are in a folder of the server, whose name contains a number that rises. The folder gets its name only when it
    is complete, so files of a process that was killed while it wrote are never read.

    Args:
        directory: The state directory. Servers may share one. Created if it does not exist.

    Raises:
        OSError: The directory cannot be created.
    """

    def __init__(self, directory: Path, owner: FolderOwner) -> None:
        self.directory, self._prefix = directory, owner.prefix
        directory.mkdir(parents=True, exist_ok=True)

    def find(self) -> Path | None:
        """Returns the newest complete folder. None: nothing is saved."""
        return max(self._folders(), key=self._number, default=None)

    def write(self, folder: Path, names: Collection[str]) -> int:
        """Saves files of a folder, durably and all or none; returns their size.

        Raises:
            OSError: A file cannot be written. Nothing is saved.
        """
        number = 1 + max(map(self._number, self._folders()), default=0)
        unfinished = self.directory / f".{self._prefix}{number}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        try:
            saved = [_copy(folder / name, unfinished / name, durable=True) for name in sorted(names)]
            content = {"format": _FORMAT, "files": [[each.name, each.size_bytes, each.xxh3] for each in saved]}
            _write_durably(unfinished / _LIST, json.dumps(content).encode())
            _sync(unfinished)
            unfinished.rename(self.directory / f"{self._prefix}{number}")
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _sync(self.directory)
        for older in self._folders():
            if self._number(older) < number:
                shutil.rmtree(older, ignore_errors=True)
        return sum(each.size_bytes for each in saved)

    def fill(self, source: Path, target: Path, *, free_bytes: int) -> None:
        """Copies saved files to a folder in shared memory.

        Args:
            source: What ``find`` returned.
            free_bytes: What shared memory offers.

        Raises:
            CapacityError: The files do not fit.
            CorruptDataError: A file is missing or damaged.
        """
        began_s = time.monotonic()
        files = self._listed(source)
        size_bytes = sum(each.size_bytes for each in files)
        if size_bytes > free_bytes:
            raise CapacityError(
                f"the saved shards of this server in {source} have {size_bytes} bytes, but the shared memory at "
                f"{target.parent} offers {free_bytes}: enlarge it, or delete the shards (shardwell-server discard)"
            )
        for each in files:
            try:
                # Shared memory does not outlast the host, so a sync would gain nothing.
                found = _copy(source / each.name, target / each.name, durable=False)
            except OSError as error:
                raise self._damaged(source, str(error)) from error
            if found != each:
                problem = f"{each.name} has {found.size_bytes} bytes with hash {found.xxh3}"
                raise self._damaged(source, f"{problem}, expected {each.size_bytes} with {each.xxh3}")
        seconds = time.monotonic() - began_s
        logger.info("read %d bytes of saved shards from %s in %.1f s", size_bytes, source, seconds)

    def remove(self) -> None:
        """Removes everything that is saved, because it is obsolete."""
        for folder in [*self._folders(), *self.directory.glob(f".{self._prefix}*")]:
            # The folder is renamed first, because a folder that is half removed must not be read.
            doomed = folder if folder.name.startswith(".") else folder.rename(folder.with_name(f".{folder.name}"))
            shutil.rmtree(doomed, ignore_errors=True)
            logger.debug("removed %s", folder)

    def _folders(self) -> Iterator[Path]:
        pattern = re.compile(rf"{re.escape(self._prefix)}\d+")
        return (path for path in self.directory.iterdir() if pattern.fullmatch(path.name))

    def _number(self, folder: Path) -> int:
        return int(folder.name.removeprefix(self._prefix))

    def _listed(self, source: Path) -> list[_SavedFile]:
        try:
            with opened(open_folder(source)) as folder, open(open_file(_LIST, folder=folder), "rb") as file:
                content: dict[str, Any] = json.load(file)
            if content["format"] != _FORMAT:
                raise ValueError(f"it has format {content['format']}, expected {_FORMAT}")
            files = [_SavedFile(str(name), int(size), str(xxh3)) for name, size, xxh3 in content["files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(source, f"{_LIST}: {error}") from error
        if odd := [each.name for each in files if each.name != Path(each.name).name]:
            raise self._damaged(source, f"{_LIST} names {odd[0]!r}, expected the name of a file")
        return files

    @staticmethod
    def _damaged(source: Path, problem: str) -> CorruptDataError:
        return CorruptDataError(
            f"cannot take up the saved shards of this server in {source}: {problem}. Repair the files, or delete the "
            "shards (shardwell-server discard)"
        )


def _copy(source: Path, target: Path, *, durable: bool) -> _SavedFile:
    """Copies a file, and returns its size and hash. Allocates the target first, so that it is complete or fails."""
    hasher, size_bytes = xxhash.xxh3_64(), 0
    with opened(open_file(source)) as reading, opened(_create(target)) as writing:
        whole_bytes = os.fstat(reading).st_size
        if whole_bytes:
            os.posix_fallocate(writing, 0, whole_bytes)
        while piece := os.read(reading, _PIECE_BYTES):
            hasher.update(piece)
            _write_all(writing, piece)
            size_bytes += len(piece)
        if durable:
            os.fsync(writing)
            with suppress(OSError):  # the pages are not read again, and other programs need the memory
                os.posix_fadvise(writing, 0, 0, os.POSIX_FADV_DONTNEED)
    return _SavedFile(source.name, size_bytes, hasher.hexdigest())


def _write_durably(path: Path, data: bytes) -> None:
    with opened(_create(path)) as writing:
        _write_all(writing, data)
        os.fsync(writing)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with opened(descriptor):
        os.fsync(descriptor)
