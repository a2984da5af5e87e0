"""The host cache: shards that the trainers of one host fetch once for all of them, in files in shared memory.

Note: [Host folder]
    Each process that uses the folder holds a shared lock on a file in it. A process that gets this lock exclusively may
    remove the folder. The kernel releases the locks of dead processes, so the next process removes their folder.

Note: [Cache files]
    A file contains one shard in the format of the servers' segments: a head with the version, then the bytes. The
    trainer that needs a version first locks the file, marks it as changing, fetches the bytes straight into it, and
    sets the version. The others wait and read the same memory. If the fetching trainer dies, the kernel releases its
    lock, the file is still marked as changing, and the next trainer fetches.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardwell.transport.shared_vector import SegmentLocation, map_shared
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.errors import DeadlineError, UnavailableError, VersionGoneError
from shardwell_wire.host.shared_memory import (
    HEAD_BYTES,
    UPDATING,
    open_file,
    open_folder,
    open_in_folder,
    opened,
    read_version,
    store_word,
    write_version,
)

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Where Linux mounts shared memory."""

_PREFIX, _LOCK = "shardwell_cache-", "lock"
_ENTER_LIMIT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005


class HostFolder:
    """A folder of shared memory that processes of one user and host share. See Note: [Host folder].

    The first process creates the folder, and the last one removes it.

    Args:
        key: Processes with the same key share the folder.
        directory: A folder of a memory file system.

    Raises:
        UntrustedFileError: The path is not a folder that only this user can use.
        OSError: The folder cannot be created.
    """

    def __init__(self, key: str, directory: Path = MEMORY) -> None:
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is no such folder", str(directory))
        _remove_abandoned(directory)
        self.path = directory / f"{_PREFIX}{os.geteuid()}-{key}"
        self._lock = self._enter()

    def _enter(self) -> int:
        """Creates the folder if necessary; returns the lock file's descriptor."""
        deadline = time.monotonic() + _ENTER_LIMIT_S
        while time.monotonic() < deadline:
            try:
                return self._try_enter()
            except (FileExistsError, FileNotFoundError, BlockingIOError):  # another process is removing the folder
                time.sleep(_LONGEST_PAUSE_S)
        raise OSError(
            errno.EBUSY, f"another process locked the folder for more than {_ENTER_LIMIT_S:.0f} s", str(self.path)
        )

    def _try_enter(self) -> int:
        self.path.mkdir(mode=0o700, exist_ok=True)
        with opened(open_folder(self.path)) as folder:
            lock = open_file(_LOCK, write=True, create=True, folder=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _require_linked(lock)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def close(self) -> None:
        """Leaves the folder, and removes it if no other process uses it. Mapped memory stays until it is unmapped."""
        try:
            # The kernel drops a shared lock before it grants an exclusive one. If two processes leave at once, one of
            # them gets the exclusive lock.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path, self._lock)
        except BlockingIOError:
            pass  # other processes use the folder
        except OSError as error:
            logger.warning("cannot remove %s: %s", self.path, error)
        finally:
            # Unlock explicitly: a forked process shares the open file, and with it the lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)


def try_lock(descriptor: int) -> bool:
    """Locks a file exclusively; returns False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlocks a file, also for forked processes that share the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def polls(limit_s: float, stop: threading.Event) -> Iterator[None]:
    """Yields once per poll, with growing pauses, until ``limit_s`` has passed or ``stop`` is set."""
    deadline, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while True:
        yield
        if time.monotonic() > deadline or stop.wait(pause_s):
            return
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


@contextmanager
def locked(path: Path, limit_s: float, stop: threading.Event) -> Iterator[None]:
    """Holds the lock of a file, created if missing. Raises TimeoutError after ``limit_s`` or when ``stop`` is set."""
    descriptor = open_file(path, write=True, create=True)
    try:
        for _ in polls(limit_s, stop):
            if try_lock(descriptor):
                break
        else:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process holds the lock for more than {limit_s:.0f} s", str(path)
            )
        try:
            yield
        finally:
            unlock(descriptor)
    finally:
        os.close(descriptor)


def _require_linked(lock: int) -> None:
    """Raises FileNotFoundError if the folder was removed before its lock was acquired."""
    if not os.fstat(lock).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "the folder was removed")


def _remove(path: Path, lock: int) -> None:
    """Removes a folder whose lock is held exclusively. The lock file goes last, so the removal can be resumed."""
    _require_linked(lock)
    for file in path.iterdir():
        if file.name != _LOCK:
            file.unlink(missing_ok=True)
    (path / _LOCK).unlink()
    _remove_empty(path)


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # another process has created or removed it again
            raise


def _remove_abandoned(directory: Path) -> None:
    """Removes this user's folders that no process uses any more."""
    for path in directory.glob(f"{_PREFIX}{os.geteuid()}-*"):
        try:
            with opened(open_folder(path)) as folder:
                _remove_unused(path, folder)
        except OSError:
            continue  # in use, of another user, or being created or removed


def _remove_unused(path: Path, folder: int) -> None:
    try:
        lock = open_file(_LOCK, write=True, folder=folder)
    except FileNotFoundError:
        _remove_empty(path)
        return
    try:
        if try_lock(lock):
            _remove(path, lock)
            logger.info("removed %s, which a killed trainer left behind", path)
    finally:
        os.close(lock)


Fetch = Callable[[memoryview, int | None], object]
"""Writes all bytes of a version to memory of the shard's size, waiting until the version exists. Also gets the version
that the memory has now. None: it has no complete version."""

_FORMAT = 1
_ADMISSION, _NEW, _SUFFIX = "admission", "new", ".shard"
_NEWEST_OFFSET = 8
_ADMISSION_LIMIT_S = 30.0


@dataclass(slots=True)
class CacheUse:
    """State that all shards of one trainer's cache share. Thread-safe."""

    wait_limit_s: float
    """How long to wait for another trainer's fetch."""
    hit_bytes: int = 0
    """Bytes of shards that this trainer did not have to fetch."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when waiting threads must stop."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_hit(self, size_bytes: int) -> None:
        """Adds a shard that did not have to be fetched."""
        with self._lock:
            self.hit_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class CacheKey:
    """A range of a unit and its rounding. Two trainers share a file if their keys are equal."""

    unit_index: int
    start_bytes: int
    stop_bytes: int
    dtype: str
    """The dtype in which float32 values travelled."""

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def file_name(self) -> str:
        return f"{self.unit_index}-{self.start_bytes}-{self.stop_bytes}-{self.dtype}{_SUFFIX}"


class CachedShard:
    """One shard in the cache. Thread-safe. See Note: [Cache files].

    Args:
        path: The existing file.
        unit: Name of the unit, for errors.
        key: The range of the unit.
        use: State of the cache.

    Raises:
        OSError: The file cannot be mapped.
    """

    def __init__(self, path: Path, unit: str, key: CacheKey, use: CacheUse) -> None:
        self.location = SegmentLocation(str(path), key.start_bytes, key.stop_bytes)
        self._unit, self._size_bytes, self._use = unit, key.size_bytes, use
        size_bytes = HEAD_BYTES + key.size_bytes
        with opened(open_in_folder(str(path), write=True, size_bytes=size_bytes)) as descriptor:
            memory = map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self._head, self._bytes = memory[:HEAD_BYTES], memory[HEAD_BYTES:]

    def ensure(self, version: int, fetch: Fetch) -> int:
        """Waits until the file shows a version, or fetches the version; returns it.

        Raises:
            VersionGoneError: Another trainer has fetched a newer version.
            DeadlineError: Another trainer's fetch takes too long.
            UnavailableError: The cache was closed meanwhile.
            ShardwellError: The error of ``fetch``. The next caller fetches again.
        """
        if self._shows(version) or not self._fetch_or_wait(version, fetch):
            self.count_hit()
        return version

    def read(self, version: int, target: memoryview, fetch: Fetch) -> int:
        """Copies a version to ``target``; raises as ``ensure``. [size_bytes]"""
        self.ensure(version, fetch)
        bytes_tensor(target).copy_(bytes_tensor(self._bytes))
        if not self._shows(version):
            raise self._gone(version)
        return version

    def count_hit(self) -> None:
        """Counts a version that did not have to be fetched."""
        self._use.count_hit(self._size_bytes)

    def _fetch_or_wait(self, version: int, fetch: Fetch) -> bool:
        """Waits for the lock, or until another trainer has fetched the version; returns whether this call fetched."""
        # A lock belongs to an open file. Opening the file again also excludes other threads of this process.
        descriptor = open_in_folder(self.location.file, write=True)
        try:
            for _ in polls(self._use.wait_limit_s, self._use.closed):
                if self._shows(version):
                    return False
                if try_lock(descriptor):
                    try:
                        return self._fetch(version, fetch)
                    finally:
                        unlock(descriptor)
        finally:
            os.close(descriptor)
        if self._use.closed.is_set():
            raise UnavailableError(f"unit {self._unit!r}: this trainer left the host cache", unit=self._unit)
        raise DeadlineError(
            f"version {version} of unit {self._unit!r} was not in the host cache after {self._use.wait_limit_s:.0f} s: "
            f"another trainer of this host is fetching it into {self.location.file}",
            unit=self._unit,
            version=version,
        )

    def _fetch(self, version: int, fetch: Fetch) -> bool:
        """Fetches a version while the lock is held; returns False if another trainer has fetched it."""
        if self._shows(version):
            return False
        # Versions only rise. If a late trainer restored an older version, its readers would not notice that the
        # memory had changed in between.
        if struct.unpack_from("<q", self._head, _NEWEST_OFFSET)[0] > version:
            raise self._gone(version)
        former = read_version(self._head)
        store_word(self._head[_NEWEST_OFFSET:], version)
        write_version(self._head, UPDATING)
        fetch(self._bytes, None if former == UPDATING else former)
        write_version(self._head, version)
        return True

    def _shows(self, version: int) -> bool:
        return read_version(self._head) == version

    def _gone(self, version: int) -> VersionGoneError:
        return VersionGoneError(
            f"version {version} of unit {self._unit!r} was replaced by a newer one in the host cache: the step was "
            "committed without this trainer",
            unit=self._unit,
            version=version,
        )


class HostCache:
    """One trainer's view of the cache of one run on one host.

    A unit is cached if it fits the budget when the first trainer declares it. The other trainers use its files,
    whatever their own budget is. Trainers of different pipeline stages hold different units and so share one budget.

    Args:
        run_key: Identifies the run, also among deleted runs of the same name.
        budget_bytes: Limit of all cached units together.
        wait_limit_s: How long to wait for another trainer's fetch.
        directory: A folder of a memory file system.

    Raises:
        OSError: Shared memory cannot be used.
    """

    def __init__(
        self, run_key: tuple[object, ...], budget_bytes: int, *, wait_limit_s: float, directory: Path = MEMORY
    ) -> None:
        key = hashlib.sha256(repr((_FORMAT, *run_key)).encode()).hexdigest()[:24]
        self._use, self._budget_bytes = CacheUse(wait_limit_s), budget_bytes
        self._folder = HostFolder(key, directory)

    def admit(
        self, unit: str, shards: Mapping[int, CacheKey], *, beyond_budget: bool = False
    ) -> dict[int, CachedShard]:
        """Adds shards of a unit to the cache: all of them, or none if they exceed the budget or the memory.

        Args:
            unit: Name of the unit, for messages.
            shards: Keys by any number that the caller chooses. The result has the same numbers.
            beyond_budget: Whether to ignore the budget.
        """
        try:
            with locked(self._folder.path / _ADMISSION, _ADMISSION_LIMIT_S, self._use.closed):
                missing = [key for key in shards.values() if not self._path(key).exists()]
                if not (beyond_budget or self._fits(missing, unit)):
                    return {}
                self._make(missing)
            return {number: CachedShard(self._path(key), unit, key, self._use) for number, key in shards.items()}
        except OSError as error:
            self._budget_bytes = 0  # the next units would fail in the same way
            logger.warning(
                "host cache: unit %r does not fit into %s (%s): every trainer fetches this unit and units that are not "
                "cached yet by itself; enlarge the shared memory (docker: shm_size) or lower host_cache_bytes",
                unit,
                self._folder.path.parent,
                error,
            )
            return {}

    @property
    def hit_bytes(self) -> int:
        """Bytes that this trainer did not have to fetch."""
        return self._use.hit_bytes

    def close(self) -> None:
        """Leaves the cache and stops threads that wait for another trainer. The last trainer removes the files."""
        self._use.closed.set()
        self._folder.close()

    def _path(self, key: CacheKey) -> Path:
        return self._folder.path / key.file_name

    def _fits(self, missing: list[CacheKey], unit: str) -> bool:
        """Whether shards without a file fit the budget. The caller holds the admission lock."""
        used = sum(file.stat().st_size - HEAD_BYTES for file in self._folder.path.glob(f"*{_SUFFIX}"))
        wanted = sum(key.size_bytes for key in missing)
        if wanted and used + wanted > self._budget_bytes:
            logger.info("host cache: unit %r is not cached: %d bytes are in use, the unit has %d", unit, used, wanted)
            return False
        return True

    def _make(self, missing: list[CacheKey]) -> None:
        """Creates the files of shards without one. The caller holds the admission lock."""
        made: list[Path] = []
        try:
            for key in missing:
                made.append(self._create(key))
        except OSError:
            for path in made:
                path.unlink()
            raise

    def _create(self, key: CacheKey) -> Path:
        """Creates a file that shows no version. The file gets its name when it is complete."""
        new, path = self._folder.path / _NEW, self._path(key)
        new.unlink(missing_ok=True)  # left by a process that died here
        descriptor = open_file(new, write=True, create=True)
        try:
            # Allocate now: a write to a page that the file system cannot provide kills the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, HEAD_BYTES + key.size_bytes)
            os.pwrite(descriptor, struct.pack("<qq", UPDATING, UPDATING), 0)
        except OSError as error:
            new.unlink()
            if error.errno == errno.ENOSPC:
                raise OSError(errno.ENOSPC, f"{key.size_bytes} bytes do not fit", str(path)) from error
            raise
        finally:
            os.close(descriptor)
        return new.rename(path)
