"""Background gathers: all shards of a unit are fetched at once, from all servers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

from shardwell.data_plane.batches import MAX_STREAM_BYTES, Batches
from shardwell.data_plane.in_place import wait_in_place
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.data_plane.shard_fetch import ShardFetch, fetch_together
from shardwell.data_plane.traffic_stats import TrafficStats
from shardwell.data_plane.transfer_queue import DaemonThreads, TransferQueue
from shardwell.transport.base import NearlyDone, ignore
from shardwell.transport.server_connection import ServerConnection
from shardwell_wire.layout import UnitLayout

_THREADS = 16
"""The threads mostly wait for the network. A fetch may also wait for a version."""


_MAX_BATCHES = 2
"""Messages with small fetches in flight to one server. With one, a slow network would be idle between two messages."""

FetchBatches = Batches[ShardFetch, int]
"""The small fetches from one server."""


class Gather(Future[int]):
    """The version that a gather fetched. ``result`` adds its waiting time to the statistics."""

    def __init__(self, stats: TrafficStats) -> None:
        super().__init__()
        self._stats = stats

    def result(self, timeout: float | None = None) -> int:
        with self._stats.waiting_for_gather():
            return super().result(timeout)

    def finish_as(self, other: Future[int]) -> None:
        """Takes the outcome of another gather that is done."""
        if (error := other.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(Future.result(other))  # the training thread does not wait here


class _UnitGather(Gather):
    """Done when every shard of a unit has arrived or failed. Then no thread writes to the target any more.

    It does not refer to the fetches of the shards, which refer to it: a cycle would keep the target in memory until
    Python collects it.
    """

    def __init__(self, shards: Sequence[Future[int]], stats: TrafficStats) -> None:
        super().__init__(stats)
        self._missing = len(shards)
        self._failed: Future[int] | None = None
        self._count_lock = threading.Lock()
        for shard in shards:
            shard.add_done_callback(self._shard_done)

    def _shard_done(self, shard: Future[int]) -> None:
        with self._count_lock:
            self._missing -= 1
            if self._failed is None and shard.exception() is not None:
                self._failed = shard
            if self._missing:
                return
            failed, self._failed = self._failed, None
        self.finish_as(failed or shard)


class Fetches:
    """Gathers units in background threads. Called by the training thread.

    Args:
        stats: Counts gathers, bytes and waiting times.
        max_batched_bytes: Largest shard that is fetched in one message with others. None: no shard is batched.
    """

    def __init__(self, stats: TrafficStats, *, max_batched_bytes: int | None = MAX_STREAM_BYTES) -> None:
        self.stats, self._max_batched_bytes = stats, max_batched_bytes
        self._threads = DaemonThreads(_THREADS, "shardwell-fetch")
        self._queues = defaultdict[ServerConnection, TransferQueue[int]](lambda: TransferQueue(self._threads))
        self._batches: dict[ServerConnection, FetchBatches] = {}
        self._collects = False
        """Whether small fetches are held back until ``together`` ends."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sends the small fetches that start in the block in one message per server, or in several full ones."""
        self._collects = True
        try:
            yield
        finally:
            self._collects = False
            for batches in list(self._batches.values()):  # another thread may add one
                batches.flush()

    def gather(
        self,
        unit: RemoteUnit,
        version: int,
        target: memoryview,
        layout: UnitLayout | None = None,
        *,
        exact: bool = False,
    ) -> Future[int]:
        """Starts to fetch all shards of a unit.

        Args:
            unit: The unit.
            version: The version to fetch.
            target: Receives the flat vector; must stay in place until the future is done. [layout.size_bytes]
            layout: The same parameters in the dtypes to deliver. None: the stored dtypes.
            exact: Whether to read the values as stored, without rounding.
        """
        self.stats.gather_count += 1
        if layout is None or layout == unit.layout:
            self.stats.gathered_bytes += unit.layout.size_bytes
            return self._fetch_shards(
                unit,
                lambda shard: shard.prepare_fetch(version, target[shard.start_bytes : shard.stop_bytes], exact=exact),
            )
        assert not exact
        self.stats.gathered_bytes += layout.size_bytes
        return self._fetch_shards(unit, lambda shard: shard.prepare_fetch_cast(version, layout, target))

    def run(self, action: Callable[[], int]) -> Future[int]:
        """Runs an action in a fetch thread."""
        return self._threads.submit(action)

    def is_present(self, unit: RemoteUnit, version: int) -> bool:
        """Returns whether a unit that is read in place has a version. If so, counts a gather."""
        assert unit.vector is not None
        if not unit.vector.shows(version):
            return False
        self.stats.gather_count += 1
        self.stats.in_place_bytes += unit.layout.size_bytes
        for shard in unit.shards:
            if shard.cached is not None:
                shard.cached.count_hit()
        return True

    def await_version(self, unit: RemoteUnit, version: int) -> Callable[[], int]:
        """Starts to wait until a unit that is read in place has a version.

        Returns:
            A function that waits in the calling thread. No background thread waits, except for shards that another
            trainer of this host may have to fetch.
        """
        if self.is_present(unit, version):
            return lambda: version
        self.stats.gather_count += 1
        self.stats.in_place_bytes += unit.layout.size_bytes
        in_place = partial(wait_in_place, unit, version, self.stats)
        if all(shard.cached is None for shard in unit.shards):
            return in_place
        cached = self._fetch_shards(unit, lambda shard: partial(_await_version, shard, version))

        def both() -> int:
            cached.result()
            return in_place()

        return both

    def close(self) -> None:
        """Fails all waiting fetches. Fetches in flight end when the connection to their server is closed."""
        for queue in self._queues.values():
            queue.close()
        for batches in self._batches.values():
            batches.close()
        self._threads.shutdown(wait=False)

    def join(self, limit_s: float) -> None:
        """Waits after ``close`` until no fetch writes to memory of units, at most ``limit_s``."""
        self._threads.join(limit_s)

    def _fetch_shards(
        self, unit: RemoteUnit, work_of: Callable[[RemoteShard], Callable[[NearlyDone], int]]
    ) -> Future[int]:
        parts: list[Future[int]] = []
        with uninterrupted:
            try:
                for shard in unit.shards:
                    parts.append(self._submit(shard, work_of(shard)))
            except BaseException:  # without a future, the caller may reuse the target at once
                wait(parts)
                raise
            return _UnitGather(parts, self.stats)

    def _submit(self, shard: RemoteShard, fetch: Callable[[NearlyDone], int]) -> Future[int]:
        size_bytes, limit_bytes = shard.stop_bytes - shard.start_bytes, self._max_batched_bytes
        is_small = limit_bytes is not None and 0 < size_bytes <= limit_bytes
        if not is_small or not isinstance(fetch, ShardFetch) or fetch.small is None:
            return self._queues[shard.server].submit(size_bytes, fetch)
        batches = self._batches.get(fetch.server)
        if batches is None:
            batches = self._batches[fetch.server] = FetchBatches(
                self._threads, fetch_together, lambda each: each(ignore), max_in_flight=_MAX_BATCHES, holds=True
            )
        future = batches.submit(fetch, size_bytes)
        if not self._collects:
            batches.flush()
        return future


def _await_version(shard: RemoteShard, version: int, _: NearlyDone) -> int:
    return shard.await_version(version)
