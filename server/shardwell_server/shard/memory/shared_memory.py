"""Memory that trainers on this host can map: files in a memory file system such as ``/dev/shm``."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwell_server.shm_folders import DEFAULT_DIRECTORY, lock_folder, remove_remains
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError
from shardwell_wire.shared_files import SERVER_FOLDER_PREFIX, file_size, open_folder, opened
from shardwell_wire.shared_segment import HEAD_BYTES, UPDATING, write_version

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


@dataclass(frozen=True, slots=True, eq=False)
class SharedBuffer:
    """A file in shared memory, and its bytes as a tensor."""

    path: str
    tensor: torch.Tensor
    """The whole file. Mapped while the tensor or a view of it exists. uint8. [size_bytes]"""

    def unlink(self) -> None:
        """Removes the file's name. The kernel frees the memory when the last mapping ends."""
        Path(self.path).unlink(missing_ok=True)


class ShardFile:
    """The parameters of one shard in shared memory: a header with their version, then the bytes."""

    def __init__(self, shared: SharedBuffer) -> None:
        self._shared = shared
        self._head = memory_at(shared.tensor.data_ptr(), HEAD_BYTES)
        self.buffer = shared.tensor[HEAD_BYTES:]
        """uint8. [size_bytes]"""
        self.show(UPDATING)

    @property
    def path(self) -> str:
        return self._shared.path

    def show(self, version: int) -> None:
        """Writes the readable version, or ``UPDATING``, into the header."""
        write_version(self._head, version)

    def close(self) -> None:
        """Marks the bytes as unreadable and removes the file's name."""
        self.show(UPDATING)
        self._shared.unlink()


class SharedMemory:
    """Makes files that this process and trainers map. The files are removed when the process ends.

    The folder of a killed server is removed by the next server. Each server locks its folder, and the kernel releases
    the lock of a dead process.

    Args:
        directory: Directory in a memory file system.
    """

    def __init__(self, directory: Path = DEFAULT_DIRECTORY) -> None:
        remove_remains(directory)
        made = Path(tempfile.mkdtemp(prefix=f".{SERVER_FOLDER_PREFIX}", dir=directory))
        with opened(open_folder(made)) as folder:
            self._lock = lock_folder(folder)
        # The folder gets the name that ``remove_remains`` looks for only after it is locked. The name is random:
        # another user who sees the temporary name could occupy a name derived from it.
        self._directory = made.rename(directory / f"{SERVER_FOLDER_PREFIX}{secrets.token_hex(8)}")
        self._reserve = ShmReserve(directory, DEFAULT_DIRECTORY)
        self._warned = False

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

    def create(self, size_bytes: int, what: str) -> SharedBuffer:
        """Makes a new file of zeros.

        Raises:
            CapacityError: The file system has no space beyond the reserve, or the process has no file descriptor.
        """
        if (problem := self._reserve.problem(file_size(size_bytes))) is not None:
            raise self._no_space(what, size_bytes, problem, errno.ENOSPC)
        path = self._directory / secrets.token_hex(8)
        try:
            mapped = _map_new(path, file_size(size_bytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in _ADVICE:
                raise
            raise self._no_space(what, size_bytes, str(error.strerror), error.errno) from error
        return SharedBuffer(str(path), torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes])

    def _advice(self, number: int) -> str:
        advice = _ADVICE[number]
        return advice + _HOW_IN_DOCKER[self._directory.parent == DEFAULT_DIRECTORY] if advice is _ENLARGE else advice

    def _no_space(self, what: str, size_bytes: int, why: str, code: int) -> CapacityError:
        """Returns the error to raise. Logs the first one only, because trainers fall back to streams."""
        error = CapacityError(
            f"{what}: {size_bytes} bytes do not fit the shared memory at {self._directory.parent} ({why}): "
            f"{self._advice(code)} or start the server with --shm-dir none"
        )
        if not self._warned:
            self._warned = True
            logger.warning("%s. The server uses ordinary memory and sockets where shared memory is full", error)
        return error

    def create_shard_file(self, size_bytes: int, what: str) -> ShardFile:
        """Makes the file for the parameters of one shard. Raises as ``create`` does."""
        return ShardFile(self.create(HEAD_BYTES + size_bytes, what))

    def close(self) -> None:
        """Removes all files. Existing mappings stay valid."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)


def _map_new(path: Path, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Allocates all pages: a later write to a page that the file system cannot provide would raise SIGBUS.
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
