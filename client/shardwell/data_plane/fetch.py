"""Gathers: all shards of a unit are fetched at once, from all servers, in background threads.

A unit that is read in place is waited for in the calling thread. A work item that does not count any more reads the
newest version in place of the item's: its batch is computed to the end without effect, and no exception reaches the
training script.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

from shardwell.data_plane.batches import MAX_STREAM_BYTES, FetchBatches
from shardwell.data_plane.fetch_targets import CopyToDevice
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, ShardFetch, fetch_together
from shardwell.data_plane.transfers import DaemonThreads, TrafficStats, TransferQueue, uninterrupted
from shardwell.transport.base import NearlyDone
from shardwell.transport.server_connection import ServerConnection
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.connection.channel import backoff
from shardwell_wire.errors import DeadlineError, NotFoundError, StaleEpochError, UnavailableError, VersionGoneError
from shardwell_wire.model.layout import UnitLayout

_THREADS = 16
"""The threads mostly wait for the network. A fetch may also wait for a version."""


_MAX_BATCHES = 2
"""Messages with small fetches in flight to one server. With one, a slow network would be idle between two messages."""

Alternative = Callable[[BaseException], Future[int] | None]
"""Called when a gather has failed; returns another one in its place, or None. May raise."""


class Gather(Future[int]):
    """The version that a gather fetched. ``result`` adds its waiting time to the statistics.

    Done when every shard of the unit has arrived or failed. Then no thread writes to the target any more. A gather does
    not refer to the fetches of the shards, which refer to it: a cycle would keep the target in memory until Python
    collects it.

    Args:
        stats: Counts the waiting time.
        alternative: See ``Alternative``. None: a failure is final.
        shard_count: Calls of ``end_shard`` after which the gather is done.
    """

    def __init__(self, stats: TrafficStats, alternative: Alternative | None = None, shard_count: int = 0) -> None:
        super().__init__()
        self._stats, self._alternative, self._missing = stats, alternative, shard_count
        self._failure: BaseException | None = None
        self._count_lock = threading.Lock()

    def result(self, timeout: float | None = None) -> int:
        if self.done():
            return super().result()
        started = time.perf_counter()
        try:
            return super().result(timeout)
        finally:
            self._stats.add_gather_wait(started)

    def end_shard(self, version: int, error: BaseException | None = None) -> None:
        """Called in any thread when a shard has arrived or failed."""
        with self._count_lock:
            self._missing -= 1
            if self._failure is None:
                self._failure = error
            if self._missing:
                return
            failure, self._failure = self._failure, None
        if failure is None:
            self.set_result(version)
        else:
            self.fail(failure)

    def finish_as(self, other: Future[int]) -> None:
        """Takes the outcome of another gather that is done."""
        if (error := other.exception()) is not None:
            self.fail(error)
        else:
            self.set_result(Future.result(other))  # the training thread does not wait here

    def fail(self, error: BaseException) -> None:
        """Ends the gather, which has failed: with the outcome of its alternative, if there is one."""
        alternative, self._alternative = self._alternative, None
        try:
            other = None if alternative is None else alternative(error)
        except Exception as reason:  # the training thread waits for the gather
            self.set_exception(reason)
            return
        if other is None:
            self.set_exception(error)
        else:
            other.add_done_callback(self.finish_as)


class Fetches:
    """Gathers units in background threads. Called by the training thread.

    Args:
        stats: Counts gathers, bytes and waiting times.
        max_batched_bytes: Largest shard that is fetched in one message with others. None: no shard is batched.
    """

    def __init__(self, stats: TrafficStats, *, max_batched_bytes: int | None = MAX_STREAM_BYTES) -> None:
        self.stats, self._max_batched_bytes = stats, max_batched_bytes
        self._threads = DaemonThreads(_THREADS, "shardwell-fetch")
        self._queues = defaultdict[ServerConnection, TransferQueue](lambda: TransferQueue(self._threads))
        self._batches: dict[ServerConnection, FetchBatches] = {}
        self._collects = False
        """Whether small fetches are held back until ``together`` ends."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sends the small fetches that start in the block in one message per server, or in several full ones."""
        with uninterrupted:
            self._collects = True
            try:
                yield
            finally:
                self._collects = False
                if self._batches:
                    self._flush()

    def _flush(self) -> None:
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
        alternative: Alternative | None = None,
    ) -> Future[int]:
        """Starts to fetch all shards of a unit.

        Args:
            target: Receives the flat vector; must stay in place until the future is done. [layout.size_bytes]
            layout: The same parameters in the dtypes to deliver. None: the stored dtypes.
            exact: Whether to read the values as stored, without rounding.
            alternative: See ``Alternative``.
        """
        self.stats.gather_count += 1
        if layout is None or layout == unit.layout:
            self.stats.gathered_bytes += unit.layout.size_bytes
            fetches = list[Callable[[NearlyDone], int]]()
            for shard in unit.shards:
                part = target[shard.start_bytes : shard.stop_bytes]
                fetches.append(shard.prepare_fetch(version, part, exact=exact))
        else:
            assert not exact
            self.stats.gathered_bytes += layout.size_bytes
            fetches = [shard.prepare_fetch_cast(version, layout, target) for shard in unit.shards]
        return self._fetch_shards(unit, fetches, alternative)

    def gather_to_device(
        self, unit: RemoteUnit, version: int, copy: CopyToDevice, alternative: Alternative | None = None
    ) -> Future[int]:
        """Starts to copy all shards of a unit from registered memory to a GPU.

        Args:
            unit: The unit. ``is_registered`` is true for all its shards.
            copy: Copies the part of one shard.
            alternative: See ``Alternative``.

        Returns:
            A future that is done when the GPU has the version.
        """
        self.stats.gather_count += 1
        self.stats.gathered_bytes += unit.layout.size_bytes
        fetches = [shard.prepare_fetch_to_device(version, copy) for shard in unit.shards]
        return self._fetch_shards(unit, fetches, alternative)

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

        def in_place() -> int:
            wait_in_place(lambda: unit, version, self.stats)
            return version

        if all(shard.cached is None for shard in unit.shards):
            return in_place
        cached = self._fetch_shards(unit, [partial(_await_version, shard, version) for shard in unit.shards])

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
        self, unit: RemoteUnit, fetches: Sequence[Callable[[NearlyDone], int]], alternative: Alternative | None = None
    ) -> Future[int]:
        """Starts to fetch all shards of a unit, each by one of the fetches."""
        with uninterrupted:
            whole, started_count = Gather(self.stats, alternative, len(fetches)), 0
            try:
                for shard, fetch in zip(unit.shards, fetches, strict=True):
                    size_bytes, limit_bytes = shard.size_bytes, self._max_batched_bytes
                    is_small = limit_bytes is not None and 0 < size_bytes <= limit_bytes
                    if is_small and isinstance(fetch, ShardFetch) and fetch.may_be_batched:
                        fetch.end = whole.end_shard
                        self._batches_of(shard.owner.server).add(fetch)
                    else:
                        self._queues[shard.owner.server].submit(size_bytes, fetch, whole.end_shard)
                    started_count += 1
            except BaseException as error:
                self._flush()
                for _ in fetches[started_count:]:
                    whole.end_shard(0, error)
                wait([whole])  # without a future, the caller may reuse the target at once
                raise
            if self._batches and not self._collects:
                self._flush()
            return whole

    def _batches_of(self, server: ServerConnection) -> FetchBatches:
        batches = self._batches.get(server)
        if batches is None:
            batches = self._batches[server] = FetchBatches(
                self._threads, partial(fetch_together, server), max_in_flight=_MAX_BATCHES
            )
        return batches


def _await_version(shard: RemoteShard, version: int, _: NearlyDone) -> int:
    return shard.await_version(version)


_POLL_LIMIT_S = 0.1
"""How long to poll shared memory for a version before asking the servers, which may report it gone."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.001
_RECHECK_S = 1.0
"""How often a wait for any version compares the shards with their owners."""
_FIRST_NEWEST_PAUSE_S, _LONGEST_NEWEST_PAUSE_S = 0.0005, 0.05


def wait_in_place(find: Callable[[], RemoteUnit], version: int, stats: TrafficStats) -> SharedVector | None:
    """Waits until the memory of a unit shows a version.

    Args:
        find: Returns the unit as its shards lie now, which may have another vector after they have moved.
        stats: Counts the waiting time.

    Returns:
        The vector that shows the version. None: the unit is not in shared memory of this host.

    Raises:
        VersionGoneError: A later version has replaced it.
        DeadlineError: The servers have the version, but the memory does not show it.
    """
    started = time.perf_counter()
    try:
        return _poll(find, version)
    finally:
        stats.add_gather_wait(started)


def _poll(find: Callable[[], RemoteUnit], version: int) -> SharedVector | None:
    vector = find().vector
    # An update takes milliseconds. An rpc that waits for it would cost almost as much processor time.
    started = time.perf_counter()
    deadline, pause_s = started + _POLL_LIMIT_S, _FIRST_PAUSE_S
    while vector is not None and not vector.shows(version):
        if time.perf_counter() > deadline:
            # A segment of a server that is gone shows its last version for ever, until the shard's move is known.
            unit = find()
            for shard in unit.shards:
                shard.await_version(version)
                shard.owner.policy.settle()
            vector = find().vector
            if vector is None or vector.shows(version):
                return vector
            if (shown := vector.version) is not None and shown > version:  # the servers may keep the older one
                raise VersionGoneError(
                    f"version {version} of unit {unit.layout.unit!r} was replaced by version {shown}: the step was "
                    "committed without this trainer",
                    unit=unit.layout.unit,
                    version=version,
                )
            if time.perf_counter() - started > unit.shards[0].wait_limit_s:
                raise DeadlineError(
                    f"version {version} of unit {unit.layout.unit!r} did not appear in shared memory, although its "
                    "servers have it",
                    unit=unit.layout.unit,
                )
            deadline, pause_s = time.perf_counter() + _POLL_LIMIT_S, _FIRST_PAUSE_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return vector


def wait_for_any(vector: SharedVector, check: Callable[[], None], recheck: Callable[[], None], limit_s: float) -> int:
    """Waits until all segments of a unit show the same version; returns it. For a work item that does not count.

    Args:
        vector: The memory.
        check: Raises if this trainer cannot continue.
        recheck: Starts to compare the shards with their owners. A trainer whose membership is over is not told of
            moves, and the segment of a former owner shows its last version for ever.

    Raises:
        DeadlineError: No version was complete in time.
    """
    started = time.monotonic()
    recheck_s = started + _RECHECK_S
    pauses = backoff(_FIRST_NEWEST_PAUSE_S, _LONGEST_NEWEST_PAUSE_S)
    while (version := vector.version) is None:
        check()
        if (now := time.monotonic()) > recheck_s:
            recheck()
            recheck_s = now + _RECHECK_S
        if now > started + limit_s:
            raise DeadlineError(f"no version of the unit was complete in shared memory for {limit_s:.0f} s")
        time.sleep(next(pauses))
    return version


_FIRST_PIN_PAUSE_S, _LONGEST_PIN_PAUSE_S = 0.0005, 0.05

_PASSING = (VersionGoneError, StaleEpochError, NotFoundError, DeadlineError, UnavailableError)
"""Errors of a read while steps are committed, shards move, or the run is loaded from a checkpoint. Then a shard has no
version yet, or its server has another range of the unit. Any other version, from any other server, will do."""

Read = Callable[[RemoteShard, int | None], int]
"""Reads one version of a shard, or the newest; returns the version."""


def read_newest(find: Callable[[], RemoteUnit], read: Read, check: Callable[[], None], limit_s: float) -> int:
    """Reads the newest version that all shards of a unit have; returns the version.

    Args:
        find: Returns the unit as it is cut now.
        check: Raises if this trainer cannot continue. Called before a read is repeated.
        limit_s: How long to retry while versions are replaced, shards move, or the run is loaded.
    """
    deadline = time.monotonic() + limit_s
    pauses = backoff(_FIRST_PIN_PAUSE_S, _LONGEST_PIN_PAUSE_S)
    while True:
        try:
            version = None
            for shard in find().shards:
                version = read(shard, version)
            return version or 0
        except _PASSING:
            check()
            if time.monotonic() > deadline:
                raise
            time.sleep(next(pauses))
