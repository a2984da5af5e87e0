"""Memory that trainers on this host can map: files in a memory file system such as ``/dev/shm``, and sealed buffers.

Trainers receive descriptors of both; see Note: [Descriptors, not paths] in ``shardwell_wire/host/shared_memory.py``.
"""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import mmap
import os
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from shardwell_server.shard.memory.saved_files import SavedFiles
from shardwell_wire import fault_points
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError, ConflictError
from shardwell_wire.host.server_folders import (
    DEFAULT_DIRECTORY,
    KEPT_S,
    RECORD_SUFFIX,
    FolderOwner,
    LockedFolder,
    find_in_use,
    has_ended,
    make_folder,
    remove_remains,
    size_of,
    take_folder,
    write_whole,
)
from shardwell_wire.host.shared_memory import (
    HEAD_BYTES,
    UPDATING,
    file_size,
    open_file,
    open_folder,
    opened,
    read_version,
    write_version,
)

logger = logging.getLogger(__name__)

_MIN_FREE_BYTES = 1 << 20
"""A server with less free space than this does not offer shared memory."""

_RESERVED_SHARE = 0.25
_MIN_RESERVED_BYTES, _MAX_RESERVED_BYTES = 128 << 20, 2 << 30
"""Free space that is left to other programs. DataLoader workers pass batches through ``/dev/shm`` and die with SIGBUS
when it is full. Docker's default size is 64 MiB."""

_ENLARGE, _MORE_FILES = "enlarge it", "raise the limit of open files (ulimit -n)"
_HOW_IN_DOCKER = {True: " (docker: shm_size)", False: " (docker compose: SHARDWELL_SHM_SIZE)"}
"""How to enlarge ``/dev/shm`` of a container (True), or a volume mounted elsewhere (False)."""
_ADVICE = {
    errno.ENOSPC: _ENLARGE,
    errno.ENOMEM: _ENLARGE,
    errno.EDQUOT: _ENLARGE,
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
}
"""What the user can do, by error number. Every mapped file uses one file descriptor."""

_NOTED_EVERY_S = 3600.0
"""Much less than ``server_folders.KEPT_S``, after which the folder of a dead server is removed."""

_ENDING_S, _ENDING_PAUSE_S = 10.0, 0.05
"""How long a process that has been killed may take to end, and the pause between two looks."""

_PROGRESS_AT, _STEP_AT = 64, 72
"""Positions of the progress word and of the step word in the header of a shard's file: another cache line than the
version."""


class ShmReserve:
    """Free space of a memory file system that a server leaves to other programs.

    Args:
        directory: Directory in which the server makes files.
        common: Directory that other programs use. A server with a file system of its own may fill it.
    """

    def __init__(self, directory: Path, common: Path) -> None:
        self._directory = directory
        total_bytes = _total_and_free_bytes(directory)[0]
        shared = common.is_dir() and directory.stat().st_dev == common.stat().st_dev
        reserved_bytes = int(min(max(total_bytes * _RESERVED_SHARE, _MIN_RESERVED_BYTES), _MAX_RESERVED_BYTES))
        self.size_bytes = reserved_bytes if shared else 0
        self.total_bytes = total_bytes

    @property
    def free_bytes(self) -> int:
        """Size of the files that may still be made."""
        return max(0, _total_and_free_bytes(self._directory)[1] - self.size_bytes)

    def problem(self, size_bytes: int) -> str | None:
        """Returns why a file of this size must not be made. None if it fits."""
        if not self.size_bytes:
            return None
        free_bytes = _total_and_free_bytes(self._directory)[1]
        if free_bytes - size_bytes >= self.size_bytes:
            return None
        return (
            f"{free_bytes} of {self.total_bytes} bytes are free, of which {self.size_bytes} are left to other "
            "programs, such as DataLoader workers"
        )


def _total_and_free_bytes(directory: Path) -> tuple[int, int]:
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 0x8


class _SealedFile(io.FileIO):
    """A file without a path, whose size nobody can change. Closed when nothing refers to it."""

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedBuffer:
    """A file in shared memory, and its bytes as a tensor."""

    path: str
    """Path of the file. A name without a folder if the file has no path."""
    tensor: torch.Tensor
    """The whole file. Mapped while the tensor or a view of it exists. uint8. [size_bytes]"""
    sealed: _SealedFile | None = field(default=None, kw_only=True)
    """The file, if it has no path. Trainers may write to it."""

    @property
    def name(self) -> str:
        """Name of the file in the server's folder."""
        return self.path.rpartition("/")[2]

    def open_for_trainer(self) -> int:
        """Returns a new descriptor, read-only unless the file is sealed. Raises OSError after ``unlink``."""
        if self.sealed is None:
            return os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if self.sealed.closed:
            raise FileNotFoundError(errno.ENOENT, "the buffer is closed", self.path)
        return os.dup(self.sealed.fileno())

    def unlink(self) -> None:
        """Removes the file's name. The kernel frees the memory when the last mapping ends."""
        if self.sealed is None:
            Path(self.path).unlink(missing_ok=True)
        else:
            self.sealed.close()


class ShardFile:
    """The parameters of one shard in shared memory: a header with their version, then the bytes.

    Args:
        is_new: False for the file of a former process, whose version is kept.
    """

    def __init__(self, shared: SharedBuffer, *, is_new: bool = True) -> None:
        self._shared = shared
        self._head = memory_at(shared.tensor.data_ptr(), HEAD_BYTES, shared.tensor)
        self.buffer = shared.tensor[HEAD_BYTES:]
        """uint8. [size_bytes]"""
        self.progress = self._head[_PROGRESS_AT : _PROGRESS_AT + 8]
        """One word for the progress of an update. Trainers do not read it."""
        self.step_word = self._head[_STEP_AT : _STEP_AT + 8]
        """One word for the step that the shard has reached; see ``shard_record.py``. Trainers do not read it."""
        if is_new:
            self.show(UPDATING)

    @property
    def shared(self) -> SharedBuffer:
        """The file."""
        return self._shared

    @property
    def name(self) -> str:
        """Name of the file in the server's folder."""
        return self._shared.name

    @property
    def shown(self) -> int:
        """The readable version, or ``UPDATING``."""
        return read_version(self._head)

    def show(self, version: int) -> None:
        """Writes the readable version, or ``UPDATING``, into the header."""
        write_version(self._head, version)

    def close(self) -> None:
        """Marks the bytes as unreadable and removes the file's name."""
        self.show(UPDATING)
        self._shared.unlink()


class SharedMemory:
    """Makes files that this process and trainers map.

    However the process ends, the files stay if the folder has an owner and records of shards. The next process of the
    same server takes the folder up, with the files that its shards need. Each server locks its folder, and the kernel
    releases the lock of a process that has ended. See ``server_folders.py``.

    Args:
        directory: Directory in a memory file system.
        owner: The server whose next process may take up the shards. None: nothing outlives the process.
        saved: Files on disk, which are used if shared memory has no shards of the server. None: there are none.

    Raises:
        CapacityError: The saved files do not fit the shared memory.
        CorruptDataError: The saved files are damaged.
        ConflictError: Another process of the owner on this host runs, or has not ended completely.
    """

    def __init__(
        self, directory: Path = DEFAULT_DIRECTORY, owner: FolderOwner | None = None, saved: SavedFiles | None = None
    ) -> None:
        self._owner, self._saved = owner, saved
        self._reserve = ShmReserve(directory, DEFAULT_DIRECTORY)
        taken = None if owner is None else _take_folder(directory, owner)
        remove_remains(directory)
        self._folder = self._filled(directory, taken) or taken or make_folder(directory, owner)
        self._directory = self._folder.path
        self.restartable = owner is not None
        """True if the next process of this server can take up shards from the files."""
        self._warned = False
        self._noted_at = time.monotonic()

    def _filled(self, directory: Path, taken: LockedFolder | None) -> LockedFolder | None:
        """Returns a folder with the saved files. None: nothing is saved, or the folder that was taken has shards."""
        source = None if self._saved is None or (taken and taken.has_shards) else self._saved.find()
        if source is None or self._saved is None:
            return None
        if taken is not None:
            taken.remove()
        return make_folder(
            directory, self._owner, partial(self._saved.fill, source, free_bytes=self._reserve.free_bytes)
        )

    def offered(self) -> bool:
        """Returns True if there is free space beyond the reserve; logs a warning otherwise."""
        problem = self._reserve.problem(_MIN_FREE_BYTES)
        if problem is not None:
            logger.warning(
                "shared memory is disabled, trainers on this host use sockets: in %s %s: %s",
                self._directory.parent,
                problem,
                self._advice(errno.ENOSPC),
            )
        return problem is None

    def create(self, size_bytes: int, what: str, suffix: str = "") -> SharedBuffer:
        """Makes a new file of zeros.

        Args:
            suffix: End of the file's name, by which people recognise it.

        Raises:
            CapacityError: The file system has no space beyond the reserve, or the process has no file descriptor.
        """
        if (problem := self._reserve.problem(file_size(size_bytes))) is not None:
            raise self._no_space(what, size_bytes, problem, errno.ENOSPC)
        path = self._directory / f"{secrets.token_hex(8)}{suffix}"
        try:
            mapped = _map_new(path, file_size(size_bytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in _ADVICE:
                raise
            raise self._no_space(what, size_bytes, str(error.strerror), error.errno) from error
        return SharedBuffer(str(path), torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes])

    def create_sealed(self, size_bytes: int, what: str) -> SharedBuffer:
        """Makes a new buffer of zeros that a trainer may write to. It has no path and ends with this process.

        Raises:
            CapacityError: There is no memory, or the process has no file descriptor.
        """
        name = f"shardwell-{secrets.token_hex(8)}"
        try:
            descriptor = _make_sealed(name, file_size(size_bytes))
        except OSError as error:
            if error.errno not in _ADVICE:
                raise
            advice = _MORE_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else "lower --memory-budget"
            text = f"{what}: {size_bytes} bytes of shared memory cannot be allocated ({error.strerror}): {advice}"
            raise self._refusal(text) from error
        # Unlike mmap, torch does not keep a second descriptor.
        sealed, size = _SealedFile(descriptor, "r+"), file_size(size_bytes)
        try:
            mapped = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
        except BaseException:
            sealed.close()
            raise
        return SharedBuffer(name, mapped[:size_bytes], sealed=sealed)

    @property
    def folder(self) -> Path:
        """The server's folder."""
        return self._directory

    def _advice(self, number: int) -> str:
        advice = _ADVICE[number]
        return advice + _HOW_IN_DOCKER[self._directory.parent == DEFAULT_DIRECTORY] if advice is _ENLARGE else advice

    def _no_space(self, what: str, size_bytes: int, why: str, code: int) -> CapacityError:
        return self._refusal(
            f"{what}: {size_bytes} bytes do not fit the shared memory at {self._directory.parent} ({why}): "
            f"{self._advice(code)} or start the server with --shm-dir none"
        )

    def _refusal(self, text: str) -> CapacityError:
        """Returns the error to raise. Logs the first one only, because trainers fall back to streams."""
        error = CapacityError(text)
        if not self._warned:
            self._warned = True
            logger.warning("%s. The server uses ordinary memory and sockets where shared memory is full", error)
        return error

    def create_shard_file(self, size_bytes: int, what: str, suffix: str = "") -> ShardFile:
        """Makes the file for the parameters of one shard. Arguments and errors as in ``create``."""
        return ShardFile(self.create(HEAD_BYTES + size_bytes, what, suffix))

    # ---- files of a former process ----

    def open(self, name: str, size_bytes: int) -> SharedBuffer:
        """Maps a file of a former process of this server.

        Raises:
            OSError: There is no such file of this size.
        """
        with opened(open_folder(self._directory)) as folder:
            descriptor = open_file(name, write=True, size_bytes=file_size(size_bytes), folder=folder)
        with opened(descriptor):
            mapped = mmap.mmap(descriptor, file_size(size_bytes))
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes]
        return SharedBuffer(str(self._directory / name), tensor)

    def open_whole(self, name: str) -> SharedBuffer:
        """Maps a file of a former process as far as it goes. Raises OSError if there is none."""
        return self.open(name, self.size_of(name))

    def size_of(self, name: str) -> int:
        """Returns the size of a file of a former process, in bytes. It is 0 if the process was killed while it made the
        file. Raises OSError if there is none."""
        return (self._directory / name).stat().st_size

    def names(self, suffix: str) -> list[str]:
        """Returns the names of the files that end with a suffix."""
        return sorted(path.name for path in self._directory.glob(f"*{suffix}"))

    def has(self, name: str) -> bool:
        """Returns whether the folder has a file of this name."""
        return (self._directory / name).is_file()

    def records(self) -> dict[str, bytes]:
        """Returns the records of a former process, by name. See ``write_record``."""
        return {path.name: path.read_bytes() for path in self._directory.glob(f"*{RECORD_SUFFIX}")}

    def write_record(self, name: str, data: bytes) -> None:
        """Creates or replaces a record, from which the next process takes up a shard. Raises OSError."""
        write_whole(self._directory / name, data)

    def remove_record(self, name: str) -> None:
        """Removes a record. Harmless if there is none."""
        (self._directory / name).unlink(missing_ok=True)

    def note_use(self) -> None:
        """Call when a file changes in place. Renews the folder's time of change, at most once in an hour."""
        if (now := time.monotonic()) - self._noted_at > _NOTED_EVERY_S:
            self._noted_at = now
            with suppress(OSError):
                os.utime(self._directory)

    def remove_all_but(self, names: Collection[str]) -> None:
        """Removes the files of a former process, except some and the folder's own."""
        for path in self._directory.iterdir():
            if path.name not in names and path.name not in self._folder.own_files:
                path.unlink()

    # ---- the end of the process ----

    @property
    def keeps_shards(self) -> bool:
        """True if the folder has shards that the next process of this server can take up."""
        if self._owner is None or has_ended(self._owner.supervisor):
            return False
        return self._folder.has_shards

    def save(self, names: Collection[str]) -> None:
        """Writes files to disk, unless those that were taken up are still there. Logs an error: nothing is lost yet."""
        if self._saved is None:
            return
        began_s = time.monotonic()
        try:
            if self._saved.find() is not None:
                return
            size_bytes = sum((self._directory / name).stat().st_size for name in names)
            logger.info("saving %d bytes of shards in %s", size_bytes, self._saved.directory)
            self._saved.write(self._directory, names)
        except OSError as error:
            logger.error(
                "the shards of this server are not saved in %s: %s. They are in shared memory only, and end with it",
                self._saved.directory,
                error,
            )
            return
        logger.info("saved %d bytes of shards in %.1f s", size_bytes, time.monotonic() - began_s)

    def remove_saved(self) -> None:
        """Removes the files on disk. Call once the shards may change: the files are obsolete then."""
        if self._saved is not None:
            self._saved.remove()

    def close(self) -> None:
        """Leaves the files to the next process of this server, or removes them. Existing mappings stay valid."""
        if not self.keeps_shards:
            self._folder.remove()
            return
        assert self._owner is not None
        logger.info(
            "left %d shards with %d bytes in %s: the next process of %r takes them up. Another server removes them "
            "after %g hours, and `shardwell-server discard` at once",
            len(self.names(RECORD_SUFFIX)),
            size_of(self._directory),
            self._directory,
            self._owner.server_id,
            KEPT_S / 3600,
        )
        self._folder.leave()


def _take_folder(directory: Path, owner: FolderOwner) -> LockedFolder | None:
    """Returns the folder that a former process of the server left. None: there is none.

    The lock of a process that was killed is released late: the kernel first unmaps its memory. Without the folder, this
    process would start without the shards, and their runs would lose them.
    """
    deadline = time.monotonic() + _ENDING_S
    while (used := find_in_use(directory, owner)) is not None:
        if time.monotonic() > deadline:
            raise ConflictError(
                f"server {owner.server_id!r}: another process on this host has this id and holds {used}, the folder of "
                f"the server's shards, for {_ENDING_S:g} s: give every server its own id (--id, SHARDWELL_ID), or stop "
                "that process first",
                server=owner.server_id,
            )
        time.sleep(_ENDING_PAUSE_S)
    taken = take_folder(directory, owner)
    if taken is None:
        logger.info(
            "no former process of %r with the coordinator at %s has left a folder in %s",
            owner.server_id,
            owner.coordinator,
            directory,
        )
    return taken


def new_record_name() -> str:
    """Returns the name of a new record."""
    return f"{secrets.token_hex(8)}{RECORD_SUFFIX}"


def _make_sealed(name: str, size_bytes: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # kernels before 6.3
            raise
        descriptor = os.memfd_create(name, flags)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)  # as in ``_map_new``
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _map_new(path: Path, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fault_points.reach("server.file.created", suffix=path.suffix)
        # Allocates all pages: a later write to a page that the file system cannot provide would raise SIGBUS.
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
