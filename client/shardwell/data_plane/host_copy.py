"""A shard in shared memory of this host that its server does not have: at the host's relay, or in this process.

The file has the format of the servers' segments: a head with the version, then the bytes. While the relay lives, it
fetches each version once for all trainers of the host. If the relay dies, this trainer fetches into memory of its own,
which is mapped in the place of the relay's.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwell.transport.base import ShardAddress
from shardwell.transport.relay_connection import RelayConnection
from shardwell.transport.shared_vector import SegmentLocation, SharedVector, map_shared, order_loads
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.errors import DeadlineError, VersionGoneError
from shardwell_wire.host.shared_memory import HEAD_BYTES, UPDATING, opened, read_version, write_version

Fetch = Callable[[memoryview, int | None], object]
"""Writes all bytes of a version to memory of the shard's size, waiting until the version exists. Also gets the version
that the memory has now. None: it has no complete version."""


@dataclass(slots=True)
class HostCopies:
    """What all copies of one trainer have in common. Thread-safe."""

    accepts_deltas: bool = False
    """Whether the relay may receive deltas against the version that it has."""
    count_deltas: Callable[..., None] = lambda **_: None
    """See ``DeltaCache.count``."""
    hit_bytes: int = 0
    """Bytes of shards that this trainer did not have to fetch."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_hit(self, size_bytes: int) -> None:
        """Adds a shard that did not have to be fetched."""
        with self._lock:
            self.hit_bytes += size_bytes


class HostCopy:
    """One shard in shared memory of this host. Thread-safe.

    Args:
        common: What all copies have in common.
        relay: The relay that fetches the shard. None: this process does.
        location: Where the relay has the shard. None: memory of this process is made for it.

    Raises:
        OSError: The memory cannot be mapped.
    """

    vector: SharedVector | None = None
    """The unit's vector, of which the shard is a part, if the unit is read in place."""

    def __init__(
        self,
        address: ShardAddress,
        common: HostCopies,
        relay: RelayConnection | None = None,
        location: SegmentLocation | None = None,
    ) -> None:
        self._address, self._common, self.relay = address, common, relay
        self._size_bytes = address.stop_bytes - address.start_bytes
        self._newest = -1
        self._fetching = threading.Lock()
        """Held while this process fetches a version."""
        if location is None:
            self.location = self._make_own()
        else:
            self.location = location
            self._map()

    @property
    def is_relayed(self) -> bool:
        """Whether a relay that lives fetches the shard."""
        return self.relay is not None and not self.relay.is_lost

    def shows(self, version: int) -> bool:
        """Returns whether the memory has a version now."""
        return read_version(self._head) == version

    def count_hit(self) -> None:
        """Counts a version that did not have to be fetched."""
        self._common.count_hit(self._size_bytes)

    def await_relay(self, version: int, wait_s: float) -> int:
        """Waits until the relay has a version; returns the version.

        Raises:
            RelayLostError: The relay is gone.
            DeadlineError: The version does not exist yet, or takes longer.
            ShardwellError: The error of the shard's owner.
        """
        relay = self.relay
        assert relay is not None
        answer = relay.read(self._address, version, wait_s=wait_s, accepts_deltas=self._common.accepts_deltas)
        if not answer.present:
            raise DeadlineError(
                f"version {version} of unit {self._address.layout.unit!r} is not at the relay {relay.address} yet",
                unit=self._address.layout.unit,
                version=version,
            )
        if answer.stream_bytes:
            self._common.count_deltas(stream_bytes=answer.stream_bytes, received_bytes=answer.received_bytes)
        if not answer.received_bytes:
            self.count_hit()
        return version

    def leave_relay(self) -> None:
        """Fetches into memory of this process from now on, because the relay is gone.

        Raises:
            OSError: There is no memory.
        """
        with self._fetching:
            if self.relay is None:
                return
            former, head, shown = self._bytes, self._head, read_version(self._head)
            location = self._make_own()
            if shown != UPDATING:  # this process may be in the middle of the version
                bytes_tensor(self._bytes).copy_(bytes_tensor(former))
                order_loads()
                if read_version(head) == shown:  # a relay that was only silent may have gone on
                    self._newest = shown
                    write_version(self._head, shown)
            if self.vector is not None:
                self.vector.replace(location)
            self.location, self.relay = location, None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which the memory keeps its version: this process has left the relay, and fetches nothing."""
        self.leave_relay()
        with self._fetching:
            yield

    def fetch(self, version: int, fetch: Fetch) -> int:
        """Fetches a version into the memory of this process, unless it is there; returns the version.

        Raises:
            VersionGoneError: The memory has a newer version.
            ShardwellError: The error of ``fetch``.
        """
        with self._fetching:
            if self.shows(version):
                self.count_hit()
                return version
            if self._newest > version:
                raise self._gone(version)
            former, self._newest = read_version(self._head), version
            write_version(self._head, UPDATING)
            fetch(self._bytes, None if former == UPDATING else former)
            write_version(self._head, version)
        return version

    def copy_to(self, version: int, target: memoryview) -> int:
        """Copies a version that the memory shows; returns the version.

        Raises:
            VersionGoneError: A newer version has replaced it.
        """
        bytes_tensor(target).copy_(bytes_tensor(self._bytes))
        if not self.shows(version):
            raise self._gone(version)
        return version

    def _make_own(self) -> SegmentLocation:
        """Makes memory of this process for the shard, which shows no version; returns where it is."""
        descriptor, size_bytes = os.memfd_create("shardwell-copy", os.MFD_CLOEXEC), HEAD_BYTES + self._size_bytes
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # writes to memory that does not exist would kill
            memory = map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(descriptor)
            raise
        self._head, self._bytes = memory[:HEAD_BYTES], memory[HEAD_BYTES:]
        write_version(self._head, UPDATING)
        file = _OwnFile(descriptor)
        return SegmentLocation("memory of this process", self._address.start_bytes, self._address.stop_bytes, file.open)

    def _map(self) -> None:
        size_bytes = HEAD_BYTES + self._size_bytes
        with opened(self.location.open(self.location.file, size_bytes=size_bytes)) as descriptor:
            memory = map_shared(descriptor, size_bytes, mmap.PROT_READ)
        self._head, self._bytes = memory[:HEAD_BYTES], memory[HEAD_BYTES:]

    def _gone(self, version: int) -> VersionGoneError:
        unit = self._address.layout.unit
        return VersionGoneError(
            f"version {version} of unit {unit!r} was replaced by a newer one on this host: the step was committed "
            "without this trainer",
            unit=unit,
            version=version,
        )


class _OwnFile:
    """A descriptor of memory of this process, closed when nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def open(self, name: str, /, *, size_bytes: int) -> int:
        """See ``OpenFile``."""
        return os.dup(self._descriptor)
