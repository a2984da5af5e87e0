"""Background transfers of units between this trainer and the shard servers."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from functools import partial

import torch

from shardwell.data_plane.error_feedback import EncodedGradients
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.transfer_queue import DaemonThreads, TransferQueue
from shardwell.memory.device_copies import to_host
from shardwell.transport.base import NearlyDone
from shardwell.transport.server_connection import ServerConnection
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.errors import DeadlineError, ShardwellError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2

_FETCH_THREADS = _PUSH_THREADS = 16
"""The threads mostly wait for the network. A fetch may also wait for a version."""

_POLL_LIMIT_S = 0.1
"""How long to poll shared memory for a version before asking the servers, which may report it gone."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.001


Excuse = Callable[[BaseException], bool]
"""Returns whether the error of a push does not matter, because the push does not count any more."""


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A declared unit and its shards."""

    index: int
    layout: UnitLayout
    shards: tuple[RemoteShard, ...]
    placement: int = 0
    """The run's placement when the shards were connected."""
    vector: SharedVector | None = None
    """The flat vector in shared memory of servers or of the host cache, if all of it can be read in place."""


@dataclass
class TrafficStats:
    """Counts, bytes, and seconds that the training thread waited."""

    gather_count: int = 0
    gathered_bytes: int = 0
    gather_wait_s: float = 0.0
    push_count: int = 0
    pushed_bytes: int = 0
    push_wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


class TimedFuture(Future[int]):
    """The version that a gather fetched. ``result`` adds its waiting time to the statistics."""

    def __init__(self, stats: TrafficStats) -> None:
        super().__init__()
        self._stats = stats

    def result(self, timeout: float | None = None) -> int:
        started = time.perf_counter()
        try:
            return super().result(timeout)
        finally:
            self._stats.gather_wait_s += time.perf_counter() - started


class GatherFuture(TimedFuture):
    """Done when every shard of a unit has arrived or failed."""

    def __init__(self, parts: Sequence[Future[int]], stats: TrafficStats) -> None:
        super().__init__(stats)
        self._parts: Sequence[Future[int]] = parts
        self._missing = len(parts)
        self._count_lock = threading.Lock()
        for part in parts:
            part.add_done_callback(self._part_done)

    def _part_done(self, _: Future[int]) -> None:
        with self._count_lock:
            self._missing -= 1
            if self._missing:
                return
        # All parts are done, so no thread writes to the target any more, even if a part has failed.
        # The parts refer to this future. Without this, the reference cycle would keep the target in memory.
        parts, self._parts = self._parts, ()
        for part in parts:
            if (error := part.exception()) is not None:
                self.set_exception(error)
                return
        self.set_result(parts[0].result())


class VersionInPlace(Future[int]):
    """A version of memory that is read in place. ``result`` polls for the version. No background thread waits.

    Args:
        unit: The unit.
        version: The version to wait for.
        stats: Counts the waiting time.
        fetch: Fetches the shards that are in the host cache. None: there are none.
    """

    def __init__(self, unit: RemoteUnit, version: int, stats: TrafficStats, fetch: Future[int] | None = None) -> None:
        super().__init__()
        self._unit, self._version, self._stats, self._fetch = unit, version, stats, fetch

    def result(self, timeout: float | None = None) -> int:
        if not self.done():
            started = time.perf_counter()
            try:
                self.set_result(self._wait())
            except ShardwellError as error:
                self.set_exception(error)
            self._stats.gather_wait_s += time.perf_counter() - started
        return super().result(timeout)

    def _wait(self) -> int:
        vector, shards = self._unit.vector, self._unit.shards
        assert vector is not None
        if self._fetch is not None:
            Future.result(self._fetch)
        # An update takes milliseconds. An rpc that waits for it would cost almost as much processor time.
        started = time.perf_counter()
        deadline, pause_s = started + _POLL_LIMIT_S, _FIRST_PAUSE_S
        while not vector.shows(self._version):
            if time.perf_counter() > deadline:
                # A segment of a server that is gone shows its last version for ever, until the shard's move is known.
                for shard in shards:
                    shard.await_version(self._version)
                    shard.owner.settle()
                if time.perf_counter() - started > shards[0].wait_limit_s:
                    raise DeadlineError(
                        f"version {self._version} of unit {self._unit.layout.unit!r} did not appear in shared memory, "
                        "although its servers have it",
                        unit=self._unit.layout.unit,
                    )
                deadline, pause_s = time.perf_counter() + _POLL_LIMIT_S, _FIRST_PAUSE_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._version


class Traffic:
    """Background gathers and pushes of one trainer. Called by the training thread.

    Args:
        push_bytes: Limit of gradient bytes in flight. ``push`` waits while they exceed it.
    """

    def __init__(self, *, push_bytes: int) -> None:
        self.stats = TrafficStats()
        self._push_limit = push_bytes
        self._fetch_threads = DaemonThreads(_FETCH_THREADS, "shardwell-fetch")
        self._push_threads = DaemonThreads(_PUSH_THREADS, "shardwell-push")
        self._fetch_queues = defaultdict[ServerConnection, TransferQueue[int]](
            lambda: TransferQueue(self._fetch_threads)
        )
        self._push_queues = defaultdict[ServerConnection, TransferQueue[None]](
            lambda: TransferQueue(self._push_threads)
        )
        self._changed = threading.Condition()
        """Protects the next three fields, which the push threads change too."""
        self._bytes_in_flight, self._pushes_in_flight = 0, 0
        self._push_error: BaseException | None = None
        self._last_part: dict[tuple[int, int], Future[None]] = {}
        """The last push to each shard, keyed by unit index and shard number."""

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
                lambda shard: partial(shard.fetch, version, target[shard.start_bytes : shard.stop_bytes], exact=exact),
            )
        assert not exact
        self.stats.gathered_bytes += layout.size_bytes
        return self._fetch_shards(unit, lambda shard: partial(shard.fetch_cast, version, layout, target))

    def run(self, action: Callable[[], int]) -> Future[int]:
        """Runs an action in a fetch thread."""
        return self._fetch_threads.submit(action)

    def await_version(self, unit: RemoteUnit, version: int) -> Future[int]:
        """Starts to wait until a unit that is read in place has a version."""
        assert unit.vector is not None
        self.stats.gather_count += 1
        if unit.vector.shows(version):
            for shard in unit.shards:
                shard.count_hit()
            found: Future[int] = Future()
            found.set_result(version)
            return found
        if all(shard.cached is None for shard in unit.shards):
            return VersionInPlace(unit, version, self.stats)
        fetch = self._fetch_shards(unit, lambda shard: partial(_await_version, shard, version))
        return VersionInPlace(unit, version, self.stats, fetch)

    def push(
        self,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        excuse: Excuse = lambda _: False,
    ) -> None:
        """Starts to push one part of a contribution to every owner of the unit.

        Waits while more than ``push_bytes`` are in flight. Raises the error of an earlier push that failed.

        Args:
            unit: The unit.
            header: See ``RemoteShard.prepare_push``.
            gradients: ``(parameter index, gradient)`` by rising index. The caller must not change them afterwards.
            excuse: Returns whether an error of this push does not matter. Called in any thread.
        """
        self._raise_push_error()
        copies, copied = to_host([gradient for _, gradient in gradients])
        flats = {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}
        size = sum(flat.nbytes for flat in flats.values())
        # Gradients on the CPU that go through shared memory are copied before this method returns.
        on_cpu = all(gradient.device.type == "cpu" for _, gradient in gradients)
        if on_cpu:
            held_bytes = size if _are_streamed(unit) else 0
            self._push(unit, lambda shard: shard.prepare_push(header, flats), size, held_bytes, excuse)
        else:
            self._push(unit, lambda shard: partial(_push_after_copy, copied, shard, header, flats), size, size, excuse)

    def push_encoded(
        self,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        gradients: EncodedGradients,
        excuse: Excuse = lambda _: False,
    ) -> None:
        """Starts to push encoded gradients; see ``push``. Releases them when all shards have their part."""
        self._raise_push_error()
        self._push(
            unit,
            lambda shard: shard.prepare_push_encoded(header, gradients),
            gradients.stored_bytes,
            len(gradients.stream) if _are_streamed(unit) else 0,
            excuse,
            gradients.release,
        )

    def _push(
        self,
        unit: RemoteUnit,
        prepare: Callable[[RemoteShard], Callable[[NearlyDone], None]],
        size_bytes: int,
        held_bytes: int,
        excuse: Excuse,
        when_pushed: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the pushes to all shards of a unit.

        Args:
            unit: The unit.
            prepare: Returns a function that pushes one shard's part.
            size_bytes: Size of the gradients.
            held_bytes: Memory that is in use until all parts are pushed.
            excuse: See ``push``.
            when_pushed: Called when all parts are pushed.
        """
        with uninterrupted:
            self._reserve(held_bytes)
            self.stats.push_count += 1
            self.stats.pushed_bytes += size_bytes
            futures: list[Future[None]] = []
            try:
                for number, shard in enumerate(unit.shards):
                    previous = self._last_part.get((unit.index, number))
                    streamed_bytes = 0 if shard.server.copies_gradients else shard.stop_bytes - shard.start_bytes
                    send = partial(_send, _prepared(prepare, shard), previous)
                    future = self._push_queues[shard.server].submit(streamed_bytes, send)
                    self._last_part[unit.index, number] = future
                    futures.append(future)
            finally:  # wait only for the parts that were started
                self._release_when_done(futures, held_bytes, excuse, when_pushed)

    def drain(self) -> None:
        """Waits until every push is acknowledged; raises the first error."""
        self._await_pushes()
        self._raise_push_error()

    def discard(self) -> None:
        """Waits until no push is in flight and drops their errors. Called when their work item is restarted."""
        self._await_pushes()
        self._push_error = None

    def _await_pushes(self) -> None:
        started = time.perf_counter()
        with uninterrupted, self._changed:
            uninterrupted.wait_for(self._changed, lambda: not self._pushes_in_flight)
        self.stats.push_wait_s += time.perf_counter() - started
        self._last_part.clear()

    def _fetch_shards(
        self, unit: RemoteUnit, work_of: Callable[[RemoteShard], Callable[[NearlyDone], int]]
    ) -> Future[int]:
        parts: list[Future[int]] = []
        with uninterrupted:
            try:
                for shard in unit.shards:
                    queue = self._fetch_queues[shard.server]
                    parts.append(queue.submit(shard.stop_bytes - shard.start_bytes, work_of(shard)))
            except BaseException:  # without a future, the caller may reuse the target at once
                wait(parts)
                raise
            return GatherFuture(parts, self.stats)

    def close(self) -> None:
        """Fails all waiting transfers. Transfers in flight end when the connection to their server is closed."""
        for fetches in self._fetch_queues.values():
            fetches.close()
        for pushes in self._push_queues.values():
            pushes.close()
        self._fetch_threads.shutdown(wait=False)
        self._push_threads.shutdown(wait=False)

    def join(self, limit_s: float) -> None:
        """Waits after ``close`` until no transfer uses memory of units, at most ``limit_s`` for each direction."""
        self._fetch_threads.join(limit_s)
        self._push_threads.join(limit_s)

    def _reserve(self, size_bytes: int) -> None:
        started = time.perf_counter()
        with uninterrupted, self._changed:
            # A push larger than the limit goes alone.
            uninterrupted.wait_for(
                self._changed,
                lambda: not self._bytes_in_flight or self._bytes_in_flight + size_bytes <= self._push_limit,
            )
            self._bytes_in_flight += size_bytes
            self._pushes_in_flight += 1
        self.stats.push_wait_s += time.perf_counter() - started

    def _release_when_done(
        self, futures: Sequence[Future[None]], size_bytes: int, excuse: Excuse, when_done: Callable[[], None]
    ) -> None:
        missing = len(futures)

        def release() -> None:
            when_done()
            with self._changed:
                self._bytes_in_flight -= size_bytes
                self._pushes_in_flight -= 1
                self._changed.notify_all()

        def done(future: Future[None]) -> None:
            nonlocal missing
            error = future.exception()
            if error is not None and excuse(error):
                error = None
            with self._changed:
                if error is not None and self._push_error is None:
                    self._push_error = error
                missing -= 1
                is_last = not missing
            if is_last:
                release()

        for future in futures:
            future.add_done_callback(done)
        if not futures:
            release()

    def _raise_push_error(self) -> None:
        with uninterrupted, self._changed:
            error, self._push_error = self._push_error, None
        if error is not None:
            raise error


def _are_streamed(unit: RemoteUnit) -> bool:
    """Whether some gradients of a unit stay in memory until they are sent."""
    return any(not shard.server.copies_gradients for shard in unit.shards)


def _await_version(shard: RemoteShard, version: int, _: NearlyDone) -> int:
    return shard.await_version(version)


def _prepared(
    prepare: Callable[[RemoteShard], Callable[[NearlyDone], None]], shard: RemoteShard
) -> Callable[[NearlyDone], None]:
    """Returns a function that pushes a shard's part, or one that raises the error of preparing the push."""
    try:
        return prepare(shard)
    except ShardwellError as error:
        # In this frame nothing refers to the error: a cycle would keep the gradients until a garbage collection.
        return partial(_fail, error)


def _push_after_copy(
    copied: Callable[[], None],
    shard: RemoteShard,
    header: shard_pb2.ReduceScatterHeader,
    flats: Mapping[int, torch.Tensor],
    nearly_done: NearlyDone,
) -> None:
    """Pushes a shard's part when the copy from the GPU is done."""
    copied()
    shard.prepare_push(header, flats)(nearly_done)


def _fail(error: ShardwellError, _: NearlyDone) -> None:
    raise error


def _send(push: Callable[[NearlyDone], None], previous: Future[None] | None, nearly_done: NearlyDone) -> None:
    """Pushes a part after the previous part to the same shard. See Note: [Order of pushes] in ``transfer_queue.py``."""
    if previous is not None:
        previous.result()
    push(nearly_done)
