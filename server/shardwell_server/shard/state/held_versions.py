"""Older versions of one shard that work items of an asynchronous run still read."""

from __future__ import annotations

from collections.abc import Collection

import torch

from shardwell_server.shard.memory.budget import BufferQuota, Grant, Memory
from shardwell_server.shard.state.snapshots import Snapshots, VersionBytes
from shardwell_wire.errors import ShardwellError, VersionGoneError


class HeldVersions:
    """Versions of one shard that stay readable until the last work item that reads them is committed.

    They use the shard's reservation and are never evicted, unlike snapshots. Used on the event loop.

    Args:
        what: Names the shard in errors.
        unit: Name of the unit, for errors.
        memory: The server's memory.
        count: Number of versions that the shard's reservation covers.
        snapshots: Takes versions that have other readers than work items.
    """

    def __init__(self, what: str, unit: str, memory: Memory, count: int, snapshots: Snapshots) -> None:
        self._what, self._unit, self._memory, self._snapshots = what, unit, memory, snapshots
        self._quota = BufferQuota(count)
        self._held: dict[int, tuple[VersionBytes, Grant]] = {}
        self._next: tuple[torch.Tensor, Grant] | None = None
        """Memory for the next version to be held."""

    def find(self, version: int) -> VersionBytes | None:
        """Returns a held version. None if it is not held."""
        found = self._held.get(version)
        return None if found is None else found[0]

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Returns memory for the next version to be held. Returns the same memory until ``add``. [size_bytes]

        Raises:
            CapacityError: There is no memory.
        """
        if self._next is None:
            grant = self._memory.grant(size_bytes, self._quota, f"an older version of {self._what}")
            self._next = grant.acquire_buffer(size_bytes), grant
        return self._next[0]

    def add(self, version: VersionBytes) -> None:
        """Holds a version, whose bytes the caller has copied to the memory from ``allocate``."""
        assert self._next is not None
        version.buffer, grant = self._next
        self._next, self._held[version.version] = None, (version, grant)

    def keep(self, versions: Collection[int]) -> None:
        """Releases all held versions except the given ones. Those with readers become snapshots if memory is free."""
        for version in self._held.keys() - set(versions):
            found, grant = self._held[version]
            if found.readers and self._is_evictable(grant):
                del self._held[version]
                self._snapshots.add(found)
                continue
            self._release(
                version,
                VersionGoneError(
                    f"version {version} of {self._what} is no longer held: the work items that read it are committed "
                    "or have been restarted from a later version",
                    unit=self._unit,
                    version=version,
                ),
            )

    def _is_evictable(self, grant: Grant) -> bool:
        """Moves memory out of the shard's reservation, if there is other memory for it."""
        self._snapshots.evict(pinned_too=False)
        return grant.unsettle()

    def drop(self, why: ShardwellError) -> None:
        """Releases everything. Readers get the error."""
        for version in list(self._held):
            self._release(version, why)
        if self._next is not None:
            buffer, grant = self._next
            self._next = None
            self._memory.pool.release(buffer)
            grant.release()

    def _release(self, version: int, why: ShardwellError) -> None:
        found, grant = self._held.pop(version)
        found.revoked = why
        self._memory.pool.release(found.buffer)
        grant.release()
