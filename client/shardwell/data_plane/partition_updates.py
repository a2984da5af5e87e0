"""Updates optimizer partitions on the trainer. Threads read the next partition and stage the last one meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait

from shardwell.data_plane.shard import RemoteShard, RemoteUnit
from shardwell.data_plane.transfers import DaemonThreads
from shardwell.transport.partition_transfers import CachedPartition, PartitionLocation, PartitionSegment
from shardwell.transport.resending import REQUEST, SHARED_TRANSFER, Operation
from shardwell_wire.model.topology import part_in
from shardwell_wire.v1 import common_pb2

_AHEAD_COUNT, _BEHIND_COUNT = 3, 3
"""Segments that are being read, and that are being staged, while one is updated. The numbers bound the memory."""

MakeContext = Callable[[], common_pb2.RequestContext]


class RemotePartition:
    """The segment of one data rank's optimizer partition that one server owns.

    If the server shares memory, the segment is updated in that memory. Otherwise this trainer may cache the values and
    the state that it staged. The next step then fetches only the gradient, if the server confirms the cached version.

    Args:
        location: Where the segment is; not empty.
        shard: The shard that contains the segment.
        timeout_s: Deadline of reading or staging.
    """

    def __init__(self, unit_index: int, location: PartitionLocation, shard: RemoteShard, timeout_s: float) -> None:
        self.unit_index = unit_index
        self._location, self._shard, self._timeout_s = location, shard, timeout_s
        self._cached: CachedPartition | None = None

    @property
    def cached_bytes(self) -> int:
        """Size of the cached values and state."""
        return 0 if self._cached is None else self._cached.part.kept_bytes

    @property
    def _is_shared(self) -> bool:
        return self._shard.server.shares_partitions(self._shard.address)

    @property
    def _operation(self) -> Operation:
        return SHARED_TRANSFER if self._is_shared else REQUEST

    def read(self, context: common_pb2.RequestContext) -> PartitionSegment:
        """Returns the segment of a prepared step, to be updated in place; raises as ``ShardClient.read_partition``."""
        cached, self._cached = self._cached, None  # the update is about to change it
        return self._shard.owner.run(
            lambda server, _: server.read_partition(
                self._shard.address, self._location, context, timeout_s=self._timeout_s, cached=cached
            ),
            self._operation,
        )

    def cacheable_bytes(self, part: PartitionSegment) -> int:
        """Returns how many bytes of a segment ``stage`` can cache."""
        return 0 if self._is_shared else part.kept_bytes

    def stage(self, make_context: MakeContext, part: PartitionSegment, *, cache: bool) -> None:
        """Stages new values and state; raises as ``ShardClient.stage_partition``.

        Args:
            make_context: Returns the context of a new request.
            part: The segment that ``read`` returned, updated.
            cache: Whether to cache values and state until the next step.
        """
        request_id = self._shard.owner.run(
            lambda server, _: server.stage_partition(
                self._shard.address, self._location, make_context, part, timeout_s=self._timeout_s
            ),
            self._operation,
        )
        if cache and not self._is_shared:
            self._cached = CachedPartition(request_id, part)
            part.gradients = {}


class PartitionUpdates:
    """Updates the optimizer partitions of data ranks, unit by unit.

    Args:
        dp: Number of logical data ranks.
        timeout_s: Deadline of reading or staging one segment.
    """

    def __init__(self, dp: int, timeout_s: float) -> None:
        self._dp, self._timeout_s = dp, timeout_s
        self._threads = DaemonThreads(_AHEAD_COUNT + _BEHIND_COUNT, "shardwell-partition")
        self._partitions: dict[tuple[int, int, int], RemotePartition] = {}
        """Keyed by unit index, first byte of the shard, and dp rank."""

    def run(
        self,
        units: Iterable[RemoteUnit],
        dp_rank: int,
        make_context: MakeContext,
        update: Callable[[int, PartitionSegment], None],
        *,
        cache_bytes: float,
    ) -> None:
        """Reads, updates and stages one data rank's partitions.

        Args:
            units: The units to update.
            dp_rank: The data rank.
            make_context: Returns the context of a new request; raises if this trainer must stop.
            update: Updates a segment in place. Called in this thread with the unit's index and the segment.
            cache_bytes: Limit of cached values and state, over all data ranks.

        Raises:
            ShardwellError: See ``ShardClient.read_partition`` and ``stage_partition``. Some segments may be staged.
        """
        todo = iter(self._partitions_of(units, dp_rank))
        reads: deque[tuple[RemotePartition, Future[PartitionSegment]]] = deque()
        stagings: deque[Future[None]] = deque()
        reserved: dict[RemotePartition, int] = {}

        def read_next() -> None:
            if (partition := next(todo, None)) is not None:
                reads.append((partition, self._threads.submit(partition.read, make_context())))

        try:
            for _ in range(_AHEAD_COUNT):
                read_next()
            while reads:
                partition, reading = reads[0]
                part = reading.result()
                reads.popleft()
                read_next()
                update(partition.unit_index, part)
                if len(stagings) == _BEHIND_COUNT:
                    stagings.popleft().result()
                # Segments that are being staged count before they are cached.
                total = sum(max(other.cached_bytes, reserved.get(other, 0)) for other in self._partitions.values())
                size = partition.cacheable_bytes(part)
                reserved[partition] = size if total + size <= cache_bytes else 0
                stagings.append(
                    self._threads.submit(partition.stage, make_context, part, cache=reserved[partition] > 0)
                )
            for staging in stagings:
                staging.result()
        except Exception:
            wait(stagings)
            wait([reading for _, reading in reads])
            raise
        except BaseException:  # Ctrl-C must not wait for servers: their answers are ignored
            self.drop_cache()
            raise

    def drop_cache(self) -> None:
        """Drops the cached values and state of all partitions."""
        self._partitions.clear()

    def close(self) -> None:
        """Stops the threads. Transfers in flight end when the connection to their server is closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self, limit_s: float) -> None:
        """Waits after ``close`` until no transfer is in flight, for at most ``limit_s``."""
        self._threads.join(limit_s)

    def _partitions_of(self, units: Iterable[RemoteUnit], dp_rank: int) -> Sequence[RemotePartition]:
        found = []
        for unit in units:
            for shard in unit.shards:
                start, stop = part_in(unit.layout.size_bytes, self._dp, dp_rank, shard.start_bytes, shard.stop_bytes)
                key = unit.index, shard.start_bytes, dp_rank
                if start < stop and key not in self._partitions:
                    location = PartitionLocation(unit.layout, dp_rank, start, stop)
                    self._partitions[key] = RemotePartition(unit.index, location, shard, self._timeout_s)
                if start < stop:
                    found.append(self._partitions[key])
        return found
