"""Memory that trainers of this host can map: files of a memory file system."""

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

from shardwell_server.shard.memory.shm_reserve import ShmReserve
from shardwell_server.shm_folders import DEFAULT_DIRECTORY, lock_folder, remove_remains
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import CapacityError
from shardwell_wire.shared_files import SERVER_FOLDER_PREFIX, file_size, open_folder, opened
from shardwell_wire.shared_segment import HEAD_BYTES, UPDATING, write_version

logger = logging.getLogger(__name__)

_LEAST_BYTES = 1 << 20
"""With less room than this a server does not offer shared memory."""

_ENLARGE, _MORE_FILES = "enlarge it", "raise the limit of open files (ulimit -n)"
_HOW_IN_DOCKER = {True: " (docker: shm_size)", False: " (docker compose: SHARDWELL_SHM_SIZE)"}
"""How a container gets more room in ``/dev/shm``, and in a volume that is mounted elsewhere."""
_ADVICE = {
    errno.ENOSPC: _ENLARGE,
    errno.ENOMEM: _ENLARGE,
    errno.EDQUOT: _ENLARGE,
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
}
"""What to do when there is no room, which also means: no descriptor, of which every mapped file keeps one."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedBuffer:
    """A file in shared memory, and its bytes as a tensor."""

    path: str
    tensor: torch.Tensor
    """The whole file, which is mapped as long as the tensor or a view of it lives. uint8. [size_bytes]"""

    def unlink(self) -> None:
        """Takes the file's name away: the memory is freed when nobody maps it any more."""
        Path(self.path).unlink(missing_ok=True)


class Segment:
    """The parameters of one shard in shared memory: a head with their version, then the bytes."""

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
        """Says which version can be read, or ``UPDATING``."""
        write_version(self._head, version)

    def close(self) -> None:
        """Tells those who read that there is nothing any more, and gives the memory up."""
        self.show(UPDATING)
        self._shared.unlink()


class SharedMemory:
    """Makes files that this process and trainers map; they end with it.

    What servers that were killed left behind is removed by the next one: each keeps a lock, which
    the kernel takes from the dead.

    Args:
        directory: Of a memory file system.
    """

    def __init__(self, directory: Path = DEFAULT_DIRECTORY) -> None:
        remove_remains(directory)
        made = Path(tempfile.mkdtemp(prefix=f".{SERVER_FOLDER_PREFIX}", dir=directory))
        with opened(open_folder(made)) as folder:
            self._lock = lock_folder(folder)
        # Only a folder that is locked has the name by which others look for remains. The name is new: another user who
        # sees the temporary one could take a name that follows from it.
        self._directory = made.rename(directory / f"{SERVER_FOLDER_PREFIX}{secrets.token_hex(8)}")
        self._reserve = ShmReserve(directory, DEFAULT_DIRECTORY)
        self._told = False

    def offered(self) -> bool:
        """Whether there is room for anything beyond what is left to others; the log says why not."""
        problem = self._reserve.problem(_LEAST_BYTES)
        if problem is not None:
            logger.warning(
                "no shared memory for trainers of this host, they use sockets: in %s %s: %s",
                self._directory.parent,
                problem,
                self._advice(errno.ENOSPC),
            )
        return problem is None

    def create(self, size_bytes: int, what: str) -> SharedBuffer:
        """A new file of zeros.

        Raises:
            CapacityError: The memory file system has no room beyond what is left to others, or the process no
                descriptor.
        """
        if (problem := self._reserve.problem(file_size(size_bytes))) is not None:
            raise self._no_room(what, size_bytes, problem, errno.ENOSPC)
        path = self._directory / secrets.token_hex(8)
        try:
            mapped = _map_new(path, file_size(size_bytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in _ADVICE:
                raise
            raise self._no_room(what, size_bytes, str(error.strerror), error.errno) from error
        return SharedBuffer(str(path), torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes])

    def _advice(self, number: int) -> str:
        advice = _ADVICE[number]
        return advice + _HOW_IN_DOCKER[self._directory.parent == DEFAULT_DIRECTORY] if advice is _ENLARGE else advice

    def _no_room(self, what: str, size_bytes: int, why: str, code: int) -> CapacityError:
        """What is raised; the first is logged, since trainers fall back to streams and ordinary memory."""
        error = CapacityError(
            f"{what}: no room for {size_bytes} bytes in the shared memory at {self._directory.parent} ({why}): "
            f"{self._advice(code)} or start the server with --shm-dir none"
        )
        if not self._told:
            self._told = True
            logger.warning("%s. From here on ordinary memory and sockets take its place where it is full", error)
        return error

    def create_segment(self, size_bytes: int, what: str) -> Segment:
        """Room for the parameters of one shard; raises as ``create`` does."""
        return Segment(self.create(HEAD_BYTES + size_bytes, what))

    def close(self) -> None:
        """Removes all files; what is mapped stays until it is unmapped."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)


def _map_new(path: Path, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Room is taken now: a write to a page that the file system cannot provide would kill the process.
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
