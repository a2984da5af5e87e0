"""The bytes of one version of a shard, and evictable snapshots that exist only while readers use them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwell_server.shard.memory.budget import Memory
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import ShardwellError, VersionGoneError

# Note: [Moving versions]
# The newest version of a shard keeps its address, because trainers map it. When an update starts to change these bytes
# in place, readers of the former version continue in a snapshot. A reader must therefore call ``check`` and look up
# ``buffer`` again before every piece that it reads.


@dataclass(eq=False)
class VersionBytes:
    """The bytes of one version of a shard, and their readers. Used on the event loop. See Note: [Moving versions]."""

    buffer: torch.Tensor
    """uint8. [stop_bytes - start_bytes]"""
    version: int
    """Number of the version. For unpublished values, the version that they become when published."""
    readers: int = 0
    """The bytes stay unchanged while this is positive, unless they are revoked."""
    pins: int = 0
    """Number of readers that keep the version for more than one update."""
    revoked: ShardwellError | None = None
    """Why readers can no longer read the bytes."""
    newest: bool = True
    """False once another version replaces this one, or is about to."""

    def check(self) -> None:
        """Raises the reason if the bytes have been revoked. See Note: [Moving versions]."""
        if self.revoked is not None:
            raise self.revoked

    def memory(self, start: int, stop: int) -> memoryview:
        """Returns a range of the bytes at their current address."""
        return memory_at(self.buffer.data_ptr() + start, stop - start)


class Snapshots:
    """Evictable snapshots of one shard's bytes, each kept until its last reader is done.

    They use unreserved memory. Snapshots of older versions are evicted when other requests need the memory, because
    their readers may be arbitrarily slow. Used on the event loop.

    Args:
        what: Names the shard in errors.
        unit: Name of the unit, for errors.
        memory: Memory from which the snapshots were acquired.
    """

    def __init__(self, what: str, unit: str, memory: Memory) -> None:
        self._what, self._unit, self._memory = what, unit, memory
        self._snapshots: list[VersionBytes] = []

    def find(self, version: int) -> VersionBytes | None:
        """Returns the snapshot of a version. None if there is none."""
        return next((snapshot for snapshot in self._snapshots if snapshot.version == version), None)

    def add(self, snapshot: VersionBytes) -> None:
        """Adds a complete snapshot. Frees it at once if it has no reader."""
        self._snapshots.append(snapshot)
        if snapshot.readers == 0:
            self._free(snapshot)

    def release(self, snapshot: VersionBytes) -> None:
        """Ends one read of a snapshot, or of bytes that may become one."""
        snapshot.readers -= 1
        if snapshot.readers == 0 and snapshot in self._snapshots:
            self._free(snapshot)

    def supersede(self) -> None:
        """Marks all snapshots as older versions, because an update begins."""
        for snapshot in self._snapshots:
            snapshot.newest = False
        if self._memory.unreserved.has_waiters:
            self.evict()

    def evict(self, *, pinned_too: bool = True) -> None:
        """Revokes the snapshots of older versions and frees their memory."""
        for snapshot in [s for s in self._snapshots if not s.newest and (pinned_too or not s.pins)]:
            self._revoke(snapshot, self._evicted(snapshot))

    def drop(self, why: ShardwellError) -> None:
        """Revokes all snapshots. Their readers get the error."""
        for snapshot in list(self._snapshots):
            self._revoke(snapshot, why)

    def _revoke(self, snapshot: VersionBytes, why: ShardwellError) -> None:
        snapshot.revoked = why
        self._free(snapshot)

    def _free(self, snapshot: VersionBytes) -> None:
        self._snapshots.remove(snapshot)
        self._memory.release_buffer(snapshot.buffer)

    def _evicted(self, snapshot: VersionBytes) -> VersionGoneError:
        return VersionGoneError(
            f"version {snapshot.version} of {self._what} has been overwritten, and its snapshot was evicted because "
            "other requests needed the memory",
            unit=self._unit,
            version=snapshot.version,
        )
