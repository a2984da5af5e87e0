"""What a server relays for the trainers of its host, and for how long.

Note: [Relays]
    Bytes cross the network once per host. A relay caches versions of shards in shared memory, which it fetches once for
    all trainers of its host, and adds their gradients. Every shard server with shared memory is one. On a host without
    a shard server, ``shardwell-server relay`` starts one that owns nothing.

    A relay decides nothing: it has no lease on anything, and the owners of the shards check what it sends as if the
    trainers had sent it. A trainer finds the relay of its host with FindRelay, and opens a transport to it. The relay
    keeps what it has of a run until the last of these transports ends. If it dies, the trainers talk to the servers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardwell_server.shard.memory.budget import BufferQuota, Memory
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.requests.peers import Owners
from shardwell_server.shard.requests.relayed_shards import CachedShard, RelayedGradient, RelayedShard, RelayedSums
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.contributions import ContributionMemory
from shardwell_wire.encoding.wire_dtypes import check_gather_dtype
from shardwell_wire.errors import CapacityError, ConflictError, InvalidRequestError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.sum_order import SumOrder
from shardwell_wire.model.topology import check_data_ranks, checked_groups
from shardwell_wire.v1 import shard_pb2

RunKey = tuple[RunIdentity, int]
"""A run, and how often it was rolled back: afterwards, versions have other values."""


class RelayedRun:
    """What this server relays of one run. Used on the event loop.

    Args:
        shared: Shared memory for cached shards.
        budget: The budget of cached shards.
        owners: Reads from and pushes to the owners of shards.
    """

    def __init__(
        self, identity: RunIdentity, store: ShardStore, shared: SharedMemory, budget: Memory, owners: Owners
    ) -> None:
        self._identity, self._store, self._shared, self._owners = identity, store, shared, owners
        self._budget = budget
        self.session_count = 0
        """Open transports."""
        self.sums = RelayedSums(identity, store, owners)
        self._shards: dict[tuple[str, int], RelayedShard] = {}
        self._cached: dict[tuple[str, int], CachedShard] = {}

    @property
    def cached_bytes(self) -> int:
        """Size of all cached shards."""
        return sum(cached.size_bytes for cached in self._cached.values())

    def name_unit(self, request: shard_pb2.RelayUnitRequest) -> list[CachedShard]:
        """Relays a unit from now on; returns its cached shards. Empty: they exceed the budget.

        Raises:
            InvalidRequestError: The unit or its ranges are malformed, or another trainer has named other ranges of the
                unit, or another wire dtype.
            CapacityError: There is no memory for the cached shards. None of them is cached.
        """
        layout = UnitLayout.from_proto(request.unit)
        check_gather_dtype(request.wire_dtype)
        check_data_ranks(request.dp)
        order = SumOrder(request.dp, checked_groups(request.dp, request.reduction_groups))
        ranges = _checked_ranges(layout, request)
        for start, stop in ranges:
            known = self._shards.setdefault(
                (layout.unit, start), RelayedShard(self._identity, layout, start, stop, order)
            )
            if (known.stop_bytes, known.layout) != (stop, layout):
                raise InvalidRequestError(f"{known.what}: another trainer of this host names it with another layout")
        if not request.HasField("budget_bytes"):
            return []
        keys = [(layout.unit, start) for start, _ in ranges]
        missing = [key for key in keys if key not in self._cached]
        size_bytes = sum(self._shards[key].size_bytes for key in missing)
        if size_bytes and self.cached_bytes + size_bytes > request.budget_bytes:
            return []
        self._cache(missing, request)
        found = [self._cached[key] for key in keys]
        if any(cached.wire_dtype != request.wire_dtype for cached in found):
            raise InvalidRequestError(
                f"unit {layout.unit!r} is cached in another gather_dtype for another trainer of this host: all "
                "trainers of a host must use the same gather_dtype"
            )
        return found

    def _cache(self, keys: list[tuple[str, int]], request: shard_pb2.RelayUnitRequest) -> None:
        """Caches shards: all of them, or none."""
        made: list[tuple[str, int]] = []
        try:
            for key in keys:
                self._cached[key] = self._make(self._shards[key], request)
                made.append(key)
        except CapacityError:
            for key in made:
                self._cached.pop(key).close()
            raise

    def _make(self, shard: RelayedShard, request: shard_pb2.RelayUnitRequest) -> CachedShard:
        memory = self._budget
        grant = memory.grant(shard.size_bytes, BufferQuota(0), f"{shard.what}, to cache it")
        try:
            file = self._shared.create_shard_file(shard.size_bytes, shard.what)
        except BaseException:
            grant.release()
            raise
        memory.note_shared(grant.size_bytes)
        gather = shard_pb2.GatherRequest(
            run=self._identity.name,
            run_id=self._identity.run_id,
            unit=shard.layout.unit,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
            wire_dtype=request.wire_dtype,
        )
        plan = shard.plans.plan(None, request.wire_dtype) if request.wire_dtype else None
        return CachedShard(self._identity, gather, plan, file, grant, self._store, self._owners)

    def shard(self, unit: str, start_bytes: int) -> RelayedShard:
        """Returns a shard that a trainer has named. Raises ConflictError if none has."""
        shard = self._shards.get((unit, start_bytes))
        if shard is None:
            raise ConflictError(f"unit {unit!r} has no shard from {start_bytes} at this relay: name it with RelayUnit")
        return shard

    def cached(self, unit: str, start_bytes: int) -> CachedShard:
        """Returns a cached shard. Raises ConflictError if it is not cached."""
        cached = self._cached.get((unit, start_bytes))
        if cached is None:
            raise ConflictError(f"unit {unit!r}, from byte {start_bytes}, is not cached at this relay")
        return cached

    def close(self) -> None:
        """Frees the memory, because no trainer is left."""
        self.sums.close()
        for cached in self._cached.values():
            cached.close()
        self._owners.forget(self._identity)


class RelayedSession:
    """What one trainer does at the relay, over one transport.

    Args:
        group: The ranks with which its gradients are added. Empty: none.
        rank: Its own rank.
    """

    def __init__(self, run: RelayedRun, group: tuple[int, ...], rank: int) -> None:
        self.run, self._group, self._rank = run, group, rank

    async def push(
        self, header: shard_pb2.ReduceScatterHeader, buffer: ContributionMemory
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Pushes the gradient in a shared gradient buffer; see ``RelayedSums.push``."""
        shard = self.run.shard(header.unit, header.start_bytes)
        buffer.check_adoptable(shard)
        return await self.run.sums.push(RelayedGradient(header, shard, buffer), self._group)

    def skip(self, step: int) -> None:
        """See ``RelayedSums.skip``."""
        self.run.sums.skip(self._group, step, self._rank)


class Relay:
    """Relays for the trainers of this host. Used on the event loop. See Note: [Relays].

    Args:
        shared: Shared memory for cached shards.
        owners: Reads from and pushes to the owners of shards.
    """

    def __init__(self, store: ShardStore, shared: SharedMemory, owners: Owners) -> None:
        self._store, self._shared, self._owners = store, shared, owners
        self._budget = Memory(store.memory.budget_bytes)
        """As large as the server's, and apart from it: cached shards must not take what the server's shards need."""
        self._runs: dict[RunKey, RelayedRun] = {}

    @asynccontextmanager
    async def joined(self, identity: RunIdentity, session: shard_pb2.RelaySession) -> AsyncIterator[RelayedSession]:
        """Relays for one trainer while the block runs."""
        key, group = (identity, session.rollback_count), tuple(session.group)
        if list(group) != sorted(set(group)) or (group and session.dp_rank not in group):
            raise InvalidRequestError(
                f"the group {list(group)[:10]} of rank {session.dp_rank}: expected strictly rising ranks with this one"
            )
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = RelayedRun(identity, self._store, self._shared, self._budget, self._owners)
        run.session_count += 1
        if group:
            run.sums.enter(session.dp_rank)
        try:
            yield RelayedSession(run, group, session.dp_rank)
        finally:
            if group:
                run.sums.leave(session.dp_rank)
            run.session_count -= 1
            if not run.session_count:
                del self._runs[key]
                run.close()


def _checked_ranges(layout: UnitLayout, request: shard_pb2.RelayUnitRequest) -> list[tuple[int, int]]:
    starts, stops = list(request.start_bytes), list(request.stop_bytes)
    bounds = [bound for pair in zip(starts, stops, strict=False) for bound in pair]
    if len(starts) != len(stops) or bounds != sorted(bounds) or (bounds and bounds[-1] > layout.size_bytes):
        raise InvalidRequestError(
            f"unit {layout.unit!r}: the shards start at {starts[:10]} and stop at {stops[:10]}, expected rising ranges "
            f"within {layout.size_bytes} bytes"
        )
    return list(zip(starts, stops, strict=True))
