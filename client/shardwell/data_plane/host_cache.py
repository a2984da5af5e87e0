"""Weights that trainers of one host fetch once for all of them: files in memory that each maps.

A file holds one shard, in the format of the servers' own segments: a head with the version, then the
bytes. Whoever needs a version first takes the file's lock, shows that it is changing, has the bytes
written straight into it, and shows the version; the others wait and read the same memory. If the one who
fetches dies, the kernel takes its lock away, the file still says that it is changing, and the next fetches.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwell.data_plane.host_folder import MEMORY, HostFolder, locked, polls, try_lock, unlock
from shardwell.transport.shared_vector import SegmentPlace, map_shared
from shardwell_wire.errors import DeadlineError, UnavailableError, VersionGoneError
from shardwell_wire.quantization_blocks import bytes_tensor
from shardwell_wire.shared_files import open_file, open_in_folder, opened
from shardwell_wire.shared_segment import HEAD_BYTES, UPDATING, read_version, write_version

logger = logging.getLogger(__name__)

Fetch = Callable[[memoryview], object]
"""Writes all bytes of a version to memory of the shard's size, waiting until the version exists."""

_FORMAT = 1
_ADMISSION, _NEW, _SUFFIX = "admission", "new", ".shard"
_NEWEST_OFFSET = 8
_ADMISSION_LIMIT_S = 30.0


@dataclass(slots=True)
class CacheUse:
    """What all shards of one trainer's cache have in common. Thread-safe."""

    wait_limit_s: float
    """How long to wait for another trainer that fetches."""
    hit_bytes: int = 0
    """Of shards that were of the version wanted, or came to be while another trainer fetched them."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for anything any more."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_hit(self, size_bytes: int) -> None:
        """Adds a shard that did not have to be fetched."""
        with self._lock:
            self.hit_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Which bytes of which unit, and how they are rounded: what two trainers must agree on to share them."""

    unit_index: int
    start_bytes: int
    stop_bytes: int
    dtype: str
    """How 32-bit floats travelled."""

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def file_name(self) -> str:
        return f"{self.unit_index}-{self.start_bytes}-{self.stop_bytes}-{self.dtype}{_SUFFIX}"


class CachedShard:
    """One shard in the cache. Thread-safe.

    Args:
        path: Its file, which is there.
        unit: Name of the unit, for errors.
        shard: Which part of the unit.
        use: Of the cache.

    Raises:
        OSError: The file cannot be mapped.
    """

    def __init__(self, path: Path, unit: str, shard: ShardRange, use: CacheUse) -> None:
        self.place = SegmentPlace(str(path), shard.start_bytes, shard.stop_bytes)
        self._unit, self._size_bytes, self._use = unit, shard.size_bytes, use
        size_bytes = HEAD_BYTES + shard.size_bytes
        with opened(open_in_folder(str(path), write=True, size_bytes=size_bytes)) as descriptor:
            memory = map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self._head, self._bytes = memory[:HEAD_BYTES], memory[HEAD_BYTES:]

    def ensure(self, version: int, fetch: Fetch) -> int:
        """Returns the version once the file shows it; fetches it unless somebody else does.

        Raises:
            VersionGoneError: Somebody has needed a newer one.
            DeadlineError: Another trainer has been fetching for too long.
            UnavailableError: The cache was closed meanwhile.
            ShardwellError: What ``fetch`` met; the next to come tries again.
        """
        if self._shows(version) or not self._fetch_in_turn(version, fetch):
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
        """The version wanted was found without waiting."""
        self._use.count_hit(self._size_bytes)

    def _fetch_in_turn(self, version: int, fetch: Fetch) -> bool:
        """Waits for the lock, or until another has fetched the version; returns whether it was fetched here."""
        # A lock belongs to the open file: opened anew, it also keeps two threads of this process apart.
        descriptor = open_in_folder(self.place.path, write=True)
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
            raise UnavailableError(f"unit {self._unit!r}: this trainer left the host's cache", unit=self._unit)
        raise DeadlineError(
            f"waited {self._use.wait_limit_s:.0f} s for another trainer of this host, which fetches version {version} "
            f"of unit {self._unit!r} into {self.place.path}",
            unit=self._unit,
            version=version,
        )

    def _fetch(self, version: int, fetch: Fetch) -> bool:
        if self._shows(version):
            return False
        # Versions only rise: a trainer that is behind could otherwise bring back one that others were reading
        # before, and they would not notice that there was another in between.
        if struct.unpack_from("<q", self._head, _NEWEST_OFFSET)[0] > version:
            raise self._gone(version)
        struct.pack_into("<q", self._head, _NEWEST_OFFSET, version)
        write_version(self._head, UPDATING)
        fetch(self._bytes)
        write_version(self._head, version)
        return True

    def _shows(self, version: int) -> bool:
        return read_version(self._head) == version

    def _gone(self, version: int) -> VersionGoneError:
        return VersionGoneError(
            f"version {version} of unit {self._unit!r} was replaced in this host's cache by a newer one: the step was "
            "committed without this trainer",
            unit=self._unit,
            version=version,
        )


class HostCache:
    """The cache of one run on one host, as one trainer uses it.

    A unit is cached if it fits the budget when the first trainer declares it; the others find its files and
    use them, whatever they declared before and whatever budget they have. So trainers of different pipeline
    stages, which hold different units, keep to one budget together.

    Args:
        run_key: Tells this run from all others, also from a former one of its name.
        budget_bytes: What all units in the cache may take together.
        wait_limit_s: How long to wait for another trainer that fetches.
        directory: Of a memory file system.

    Raises:
        OSError: There is no shared memory to be used.
    """

    def __init__(
        self, run_key: tuple[object, ...], budget_bytes: int, *, wait_limit_s: float, directory: Path = MEMORY
    ) -> None:
        key = hashlib.sha256(repr((_FORMAT, *run_key)).encode()).hexdigest()[:24]
        self._use, self._budget_bytes = CacheUse(wait_limit_s), budget_bytes
        self._folder = HostFolder(key, directory)

    def admit(
        self, unit: str, shards: Mapping[int, ShardRange], *, beyond_budget: bool = False
    ) -> dict[int, CachedShard]:
        """Takes shards of a unit in: all of them, or none if they exceed the budget or the memory.

        Args:
            unit: Its name, for messages.
            shards: By any number that the caller knows them by, which the result has too.
            beyond_budget: Whether the memory alone decides.
        """
        try:
            with locked(self._folder.path / _ADMISSION, _ADMISSION_LIMIT_S, self._use.closed):
                missing = [shard for shard in shards.values() if not self._path(shard).exists()]
                if not (beyond_budget or self._fits(missing, unit)):
                    return {}
                self._make(missing)
            return {number: CachedShard(self._path(shard), unit, shard, self._use) for number, shard in shards.items()}
        except OSError as error:
            self._budget_bytes = 0  # the next units would meet the same
            logger.warning(
                "host cache: unit %r does not go into %s (%s): it and units that are not there yet are fetched by "
                "every trainer for itself; enlarge the shared memory (docker: shm_size) or lower host_cache_bytes",
                unit,
                self._folder.path.parent,
                error,
            )
            return {}

    @property
    def hit_bytes(self) -> int:
        """What was found instead of fetched."""
        return self._use.hit_bytes

    def close(self) -> None:
        """Leaves the cache, also for threads that wait for another trainer; the last trainer removes it."""
        self._use.closed.set()
        self._folder.close()

    def _path(self, shard: ShardRange) -> Path:
        return self._folder.path / shard.file_name

    def _fits(self, missing: list[ShardRange], unit: str) -> bool:
        """Whether shards that have no file are within the budget; whoever calls holds the admission lock."""
        used = sum(file.stat().st_size - HEAD_BYTES for file in self._folder.path.glob(f"*{_SUFFIX}"))
        wanted = sum(shard.size_bytes for shard in missing)
        if wanted and used + wanted > self._budget_bytes:
            logger.info("host cache: unit %r is not cached: %d bytes are taken, it has %d", unit, used, wanted)
            return False
        return True

    def _make(self, missing: list[ShardRange]) -> None:
        """Makes files for shards that have none; whoever calls holds the admission lock."""
        made: list[Path] = []
        try:
            for shard in missing:
                made.append(self._create(shard))
        except OSError:
            for path in made:
                path.unlink()
            raise

    def _create(self, shard: ShardRange) -> Path:
        """A file that shows no version; it gets its name when it is complete."""
        new, path = self._folder.path / _NEW, self._path(shard)
        new.unlink(missing_ok=True)  # of one who died while making it
        descriptor = open_file(new, write=True, create=True)
        try:
            # Room is taken now: a write to a page that the file system cannot provide would kill the process.
            os.posix_fallocate(descriptor, 0, HEAD_BYTES + shard.size_bytes)
            os.pwrite(descriptor, struct.pack("<qq", UPDATING, UPDATING), 0)
        except OSError as error:
            new.unlink()
            if error.errno == errno.ENOSPC:
                raise OSError(errno.ENOSPC, f"{shard.size_bytes} bytes do not fit", str(path)) from error
            raise
        finally:
            os.close(descriptor)
        return new.rename(path)
