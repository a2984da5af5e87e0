"""Which shards a trainer reads where they lie: in a server's shared memory, or in the cache of its host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from shardwell.data_plane.host_cache import HostCache, ShardRange
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.traffic import RemoteUnit
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell.transport.shared_vector import CAN_MAP, SegmentPlace, SharedVector
from shardwell_wire import wire_dtypes
from shardwell_wire.errors import ConflictError

logger = logging.getLogger(__name__)


class ShardsInPlace:
    """Maps shards into this process.

    Args:
        membership: This trainer's place in the run.
        config: The host cache and limits.
    """

    def __init__(self, membership: Membership, config: JoinConfig) -> None:
        self._membership, self._config = membership, config
        self._cache = self._open_cache() if config.transfers.host_cache_bytes else None

    @property
    def hit_bytes(self) -> int:
        """Bytes that were found in the host's cache."""
        return self._cache.hit_bytes if self._cache is not None else 0

    def map(self, unit: RemoteUnit, gather_dtype: str) -> RemoteUnit:
        """Maps the shards that lie in shared memory, of servers or of the host's cache: as a whole, if all do.

        Args:
            unit: Its shards are changed.
            gather_dtype: How 32-bit floats travel to here.

        Returns:
            The unit, with a vector if all of it can be read in place.
        """
        return self._map(unit, gather_dtype, beyond_budget=False)

    def map_served(self, unit: RemoteUnit) -> RemoteUnit:
        """Maps a unit whose values travel as they are stored, if all its shards lie in shared memory of servers."""
        if not CAN_MAP or not unit.layout.size_bytes:
            return unit
        try:
            places = [self._place(unit, shard) for shard in unit.shards]
            served = [place for place in places if place is not None]
            return replace(unit, vector=SharedVector(unit.layout.unit, served)) if len(served) == len(places) else unit
        except OSError as error:
            logger.warning("unit %r is fetched, not read in place: %s", unit.layout.unit, error)
            return unit

    def share_on_host(self, unit: RemoteUnit, gather_dtype: str) -> RemoteUnit:
        """``map`` with what can not be read where it is taken into the host's cache, whatever its budget."""
        self._cache = self._cache or self._open_cache()
        return self._map(unit, gather_dtype, beyond_budget=True)

    def close(self) -> None:
        """Leaves the host's cache."""
        if self._cache is not None:
            self._cache.close()

    def _map(self, unit: RemoteUnit, gather_dtype: str, *, beyond_budget: bool) -> RemoteUnit:
        if not CAN_MAP or not unit.layout.size_bytes:
            return unit
        name, exact = unit.layout.unit, not wire_dtypes.NAMES[gather_dtype]
        try:
            places = {}
            for number, shard in enumerate(unit.shards):
                if (place := self._place(unit, shard)) is not None:
                    if place.stop_bytes > place.start_bytes:
                        shard.window = SharedVector(name, [place], ask=self._membership.ask)
                    if exact:
                        places[number] = place
            others = [number for number in range(len(unit.shards)) if number not in places]
            places.update(self._cached_places(unit, others, gather_dtype, beyond_budget=beyond_budget))
            if len(places) == len(unit.shards):
                in_order = [places[number] for number in range(len(unit.shards))]
                return replace(unit, vector=SharedVector(name, in_order, exact=exact, ask=self._membership.ask))
        except OSError as error:
            logger.warning("unit %r is fetched, not read in place: %s", name, error)
        return unit

    def _place(self, unit: RemoteUnit, shard: RemoteShard) -> SegmentPlace | None:
        """Where a server of this host keeps a shard."""
        if shard.server.shm is None:
            return None
        limit_s = self._config.waits.wait_limit_s
        try:
            answer = shard.server.shm.locate(unit.layout.unit, None, timeout_s=limit_s, retry_for_s=limit_s)
        except ConflictError as error:
            logger.warning("unit %r is fetched, not read in place: %s", unit.layout.unit, error)
            return None
        return SegmentPlace(answer.segment.path, shard.start_bytes, shard.stop_bytes)

    def _cached_places(
        self, unit: RemoteUnit, numbers: Sequence[int], gather_dtype: str, *, beyond_budget: bool
    ) -> dict[int, SegmentPlace]:
        """Takes shards that cannot be read where they are into the host's cache, if they fit; returns where."""
        if self._cache is None or not numbers:
            return {}
        shards = {number: unit.shards[number] for number in numbers}
        ranges = {
            number: ShardRange(unit.index, shard.start_bytes, shard.stop_bytes, gather_dtype)
            for number, shard in shards.items()
        }
        admitted = self._cache.admit(unit.layout.unit, ranges, beyond_budget=beyond_budget)
        for number, cached in admitted.items():
            shards[number].cached = cached
        return {number: cached.place for number, cached in admitted.items()}

    def _open_cache(self) -> HostCache | None:
        config, run = self._config, self._membership.identity
        if not CAN_MAP:
            return None
        try:
            return HostCache(
                (run.name, run.run_id), config.transfers.host_cache_bytes, wait_limit_s=config.waits.wait_limit_s
            )
        except OSError as error:
            logger.warning("host cache: every trainer fetches for itself, there is no shared memory: %s", error)
            return None
