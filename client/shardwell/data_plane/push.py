"""Background pushes of gradients to the shard servers: order, limits of bytes in flight, errors, and who waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwell.data_plane.batches import MAX_STREAM_BYTES, PushBatches
from shardwell.data_plane.error_feedback import EncodedGradients
from shardwell.data_plane.shard import RelayedPush, RemoteShard, RemoteUnit, ShardPush, push_together
from shardwell.data_plane.transfers import DaemonThreads, TrafficStats, TransferQueue, closed_error, uninterrupted
from shardwell.memory.device_copies import to_host
from shardwell.transport.base import DIRECT, HIERARCHICAL, NearlyDone, PartHeader, PreparedPush
from shardwell.transport.server_connection import ServerConnection
from shardwell_wire.errors import ShardwellError

logger = logging.getLogger(__name__)

Excuse = Callable[[BaseException], bool]
"""Returns whether the error of a push does not matter, because the push does not count any more."""


@dataclass(slots=True, eq=False)
class Held:
    """Gradients that may count as in flight; see ``PushesInFlight.hold``."""

    held_bytes: int = 0
    is_held: bool = False


class UnitPush(Held):
    """A push of one part of a contribution, until all shards have it.

    Args:
        excuse: See ``Pushes.push``.
        when_pushed: Called when the push has ended.
        route: See ``Pushes.push``.
    """

    __slots__ = ("counted", "excuse", "missing", "route", "size_bytes", "started_s", "when_pushed")

    def __init__(
        self,
        excuse: Excuse,
        size_bytes: int,
        *,
        when_pushed: Callable[[], None] | None = None,
        route: str | None = None,
    ) -> None:
        self.held_bytes, self.is_held = 0, False
        self.excuse, self.size_bytes, self.when_pushed, self.route = excuse, size_bytes, when_pushed, route
        self.missing = 0
        """Shards that do not have their part yet."""
        self.counted: dict[str, list[int]] = {}
        """By the route of a part that the relay has pushed: bytes of the relay's pushes, and bytes that the pushes of
        other trainers contain."""
        self.started_s = time.perf_counter() if route is not None else 0.0


class PushesInFlight:
    """Counts the pushes in flight and keeps the first error. Thread-safe.

    Args:
        stats: Counts the routes of pushes, and the time that the training thread waits.
        push_bytes: Limit of gradient bytes in flight.
        flush: Starts to send the pushes that wait for others.
    """

    def __init__(self, stats: TrafficStats, push_bytes: int, flush: Callable[[], None]) -> None:
        self._stats, self._push_limit, self._flush = stats, push_bytes, flush
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._changed = threading.Condition(self._lock)
        self._bytes_in_flight, self._pushes_in_flight = 0, 0
        self.waiter_count = 0
        """Threads that wait for pushes. Meanwhile no push waits for others."""
        self.error: BaseException | None = None
        """The first error since the last ``raise_error``."""
        self._ordered_count = 0
        """Parts that wait for the part before them."""

    # ---- room and errors ----

    def hold(self, held: Held, size_bytes: int) -> None:
        """Waits until the limit of bytes in flight admits gradients, and adds their bytes until ``release``.

        Call it within ``uninterrupted``.
        """
        while True:
            with self._lock:
                if not self._bytes_in_flight or self._has_room(size_bytes):
                    self._bytes_in_flight += size_bytes
                    self._pushes_in_flight += 1
                    held.held_bytes, held.is_held = size_bytes, True
                    return
            self._wait_for(lambda: self._has_room(size_bytes))

    def _has_room(self, size_bytes: int) -> bool:
        """True if a push may start. A push larger than the limit goes alone."""
        return not self._bytes_in_flight or self._bytes_in_flight + size_bytes <= self._push_limit

    def grow(self, held: Held, size_bytes: int) -> None:
        """Counts more bytes, without a wait. Has no effect after ``release``."""
        with self._lock:
            if held.is_held:
                held.held_bytes += size_bytes
                self._bytes_in_flight += size_bytes

    def release(self, held: Iterable[Held]) -> None:
        """Called in any thread when gradients are pushed or dropped. Harmless to repeat."""
        with self._lock:
            freed_bytes = 0
            for each in held:
                if each.is_held:
                    each.is_held = False
                    freed_bytes += each.held_bytes
                    self._pushes_in_flight -= 1
            self._bytes_in_flight -= freed_bytes
            if self.waiter_count and (freed_bytes or not self._pushes_in_flight):
                self._changed.notify_all()

    def wait(self) -> None:
        """Waits until no push is in flight."""
        self._wait_for(lambda: not self._pushes_in_flight)

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        """Waits for the end of pushes. Meanwhile no push waits for others."""
        started = time.perf_counter()
        with uninterrupted:
            with self._lock:
                self.waiter_count += 1
            try:
                self._flush()
                with self._changed:
                    uninterrupted.wait_for(self._changed, is_true)
            finally:
                with self._lock:
                    self.waiter_count -= 1
                self._stats.push_wait_s += time.perf_counter() - started

    def fail(self, error: BaseException) -> None:
        """Makes the next ``raise_error`` raise an error. Called in any thread."""
        with self._lock:
            self.error = self.error or error

    def raise_error(self) -> None:
        """Raises the first error since the last call."""
        if self.error is None:
            return
        with uninterrupted, self._lock:
            error, self.error = self.error, None
        if error is not None:
            raise error

    def drop_error(self) -> None:
        """Forgets the error."""
        self.error = None

    # ---- the end of pushes ----

    def end(self, parts: Sequence[ShardPush], _: int = 0, failure: BaseException | None = None) -> None:
        """Called in any thread with parts that have ended. Raises nothing: a push that is not counted never ends.

        Args:
            failure: Why all of them failed. None: each part has its own error, or none.
        """
        error, ended = None, list[UnitPush]()
        for part in parts:
            part.error = part.error or failure
            if part.error is not None and not _is_excused(part.of, part.error):
                error = error or part.error
        with self._lock:
            self.error = self.error or error
            for part in parts:
                part.done, part.prepared, part.prepare = True, None, None  # the gradients are not needed any more
                if part.counted is not None:
                    route, pushed_bytes, peer_bytes = part.counted
                    counted = part.of.counted.setdefault(route, [0, 0])
                    counted[0] += pushed_bytes
                    counted[1] += peer_bytes
                part.of.missing -= 1
                if not part.of.missing:
                    ended.append(part.of)
            if self._ordered_count:
                self._changed.notify_all()
        if ended:
            self._complete(ended)

    def count_ended(self, push: UnitPush, part_count: int) -> None:
        """Counts parts of a push that were not started. Completes the push if it has no other parts."""
        with self._lock:
            push.missing -= part_count
            is_over = not push.missing
        if is_over:
            self._complete([push])

    def _complete(self, ended: Sequence[UnitPush]) -> None:
        """Counts pushes for their routes, and releases what they hold."""
        now_s = time.perf_counter()
        for push in ended:
            if push.route == HIERARCHICAL:
                self._count_relayed(push, now_s - push.started_s)
            elif push.route is not None:
                self._stats.routes.add(push.route, pushed_bytes=push.size_bytes, seconds=now_s - push.started_s)
            if (when_pushed := push.when_pushed) is not None:
                push.when_pushed = None
                try:
                    when_pushed()
                except Exception as error:
                    self.fail(error)
        self.release(ended)

    def _count_relayed(self, push: UnitPush, seconds: float) -> None:
        """Counts the parts of a push that has ended for the routes on which the relay has pushed them."""
        relayed_bytes = sum(map(sum, push.counted.values()))
        if push.size_bytes > relayed_bytes:  # parts that the relay did not take
            push.counted.setdefault(DIRECT, [0, 0])[0] += push.size_bytes - relayed_bytes
        for route, (pushed_bytes, peer_bytes) in push.counted.items():
            self._stats.routes.add(route, pushed_bytes=pushed_bytes, peer_bytes=peer_bytes, seconds=seconds)
            self._stats.pushed_bytes += pushed_bytes

    def await_part(self, part: ShardPush) -> None:
        """Waits until a part has ended. Raises its error."""
        with self._changed:
            self._ordered_count += 1
            self._changed.wait_for(lambda: part.done)
            self._ordered_count -= 1
        if part.error is not None:
            raise part.error


def _is_excused(push: UnitPush, error: BaseException) -> bool:
    """Returns whether the error of a push does not matter. It matters if that cannot be decided."""
    try:
        return push.excuse(error)
    except Exception:
        logger.exception("whether the error of a push matters cannot be decided: %s", error)
        return False


_THREADS = 16
"""The threads mostly wait for the network."""

Prepare = Callable[[RemoteShard], ShardPush]
"""Reads one shard's part, or refers to it, so that it can be pushed in any thread."""


class Pushes:
    """Pushes gradients in background threads. Called by the training thread, where nothing else is said.

    Args:
        stats: Counts pushes, bytes and waiting times.
        push_bytes: Limit of gradient bytes in flight. ``push`` waits while they exceed it.
        max_batched_bytes: Largest part that is streamed in one message with others. None: no part is batched.
    """

    def __init__(
        self, stats: TrafficStats, *, push_bytes: int, max_batched_bytes: int | None = MAX_STREAM_BYTES
    ) -> None:
        self.stats = stats
        self._max_batched_bytes = max_batched_bytes
        self._threads = DaemonThreads(_THREADS, "shardwell-push")
        self._queues: dict[ServerConnection, TransferQueue] = {}
        self._batches: dict[ServerConnection, PushBatches] = {}
        self._starting = threading.Lock()
        """Held while a push is queued, by the training thread or by the thread that adds gradients."""
        self._in_flight = PushesInFlight(stats, push_bytes, self._flush)
        self._opening = threading.Lock()
        """Protects ``_closed``, and additions to ``_queues`` and ``_batches``."""
        self._closed = False
        self._last_part: dict[tuple[int, int], ShardPush] = {}
        """The last push to each shard, by unit index and shard number."""

    def push(
        self,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        excuse: Excuse = lambda _: False,
        *,
        route: str | None = None,
        via: RelayedPush | None = None,
    ) -> None:
        """Starts to push one part of a contribution to every owner of the unit.

        Waits while more than ``push_bytes`` are in flight. Raises the error of an earlier push that failed.

        Args:
            header: See ``RemoteShard.prepare_push``.
            gradients: ``(parameter index, gradient)`` by rising index. The caller must not change them afterwards.
            excuse: Returns whether an error of this push does not matter. Called in any thread.
            route: The route for which the push is counted. None: none.
            via: How the gradients go through the relay, on the route ``hierarchical``.
        """
        if self._in_flight.error is not None:
            self._in_flight.raise_error()
        flats, size, copied = dict[int, torch.Tensor](), 0, None
        for index, gradient in gradients:
            if not gradient.is_cpu:
                flats, copied = self.start_copies(gradients)
                size = _size_of(flats)
                break
            flats[index] = flat = gradient
            if gradient.requires_grad or not gradient.is_contiguous():
                flats[index] = flat = gradient.detach().contiguous()
            size += flat.nbytes
        if copied is None:  # the parts that go through shared memory are copied before this method returns
            prepare: Prepare = partial(RemoteShard.prepare_push, header=header, flats=flats, via=via)
        else:
            prepare = partial(_read_later, copied, header, flats, via)
        self._push(unit, prepare, UnitPush(excuse, size, route=route), copies=copied is None)

    def push_encoded(
        self,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: EncodedGradients,
        excuse: Excuse = lambda _: False,
        *,
        route: str | None = None,
    ) -> None:
        """Starts to push encoded gradients; see ``push``. Releases them when all shards have their part."""
        self._in_flight.raise_error()
        push = UnitPush(excuse, gradients.stored_bytes, when_pushed=gradients.release, route=route)
        self._push(unit, lambda shard: shard.prepare_push_encoded(header, gradients), push, len(gradients.stream))

    def _push(
        self, unit: RemoteUnit, prepare: Prepare, push: UnitPush, held_bytes: int | None = None, *, copies: bool = True
    ) -> None:
        """Starts a push when there is room for it.

        Args:
            prepare: Prepares one shard's part.
            held_bytes: Memory of the gradients. None: their size.
            copies: Whether gradients that go through shared memory are copied at once.
        """
        size = push.size_bytes if held_bytes is None else held_bytes
        copies = copies and _copies_all(unit)
        with uninterrupted:
            self._in_flight.hold(push, 0 if copies else size)
            self._start(unit, prepare, push)
            if copies and not _copies_all(unit):  # a server had no memory for a copy
                self._in_flight.grow(push, size)

    def start_copies(
        self, gradients: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[dict[int, torch.Tensor], Callable[[], None]]:
        """Starts to copy gradients to the host. Raises the error of an earlier push that failed.

        Returns:
            Flat gradients by parameter index, and a function that waits until they are complete.
        """
        self._in_flight.raise_error()
        copies, copied = to_host([gradient for _, gradient in gradients])
        return {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}, copied

    def hold(self, size_bytes: int) -> Callable[[], None]:
        """Counts gradients as in flight, once there is room within ``push_bytes``.

        Returns:
            A function to call in any thread when the gradients are pushed or dropped. Harmless to repeat.
        """
        with uninterrupted:
            self._in_flight.hold(held := Held(), size_bytes)
        return lambda: self._in_flight.release([held])

    def push_held(
        self,
        unit: RemoteUnit,
        header: PartHeader,
        flats: Mapping[int, torch.Tensor],
        excuse: Excuse,
        release: Callable[[], None],
    ) -> None:
        """Starts to push gradients on the CPU that are counted as in flight. Called in any thread.

        Args:
            unit: See ``push``.
            header: See ``push``.
            excuse: See ``push``.
            release: The result of ``hold``.
        """
        push = UnitPush(excuse, _size_of(flats), when_pushed=release)
        with uninterrupted:
            self._start(unit, lambda shard: shard.prepare_push(header, flats), push)

    def push_sums(
        self,
        unit: RemoteUnit,
        header: PartHeader,
        indices: Sequence[int],
        sums: Mapping[int, torch.Tensor],
        excuse: Excuse,
        when_pushed: Callable[[], None],
    ) -> None:
        """Starts to push sums of several ranks' gradients to some shards of a unit. Called in any thread.

        Args:
            header: See ``push``. Names the ranks.
            indices: Parameters that have a gradient, by rising index.
            sums: By shard number. Each laid out like its shard. uint8. [stop_bytes - start_bytes]
            excuse: See ``push``.
        """
        by_start = {unit.shards[number].start_bytes: buffer for number, buffer in sums.items()}
        size = sum(buffer.numel() for buffer in sums.values())
        with uninterrupted:
            self._start(
                unit,
                lambda shard: shard.prepare_push_sum(header, indices, by_start[shard.start_bytes]),
                UnitPush(excuse, size, when_pushed=when_pushed),
                numbers=sums.keys(),
            )

    def fail(self, error: BaseException) -> None:
        """Makes the next ``push`` or ``drain`` raise an error. Called in any thread."""
        self._in_flight.fail(error)

    def _start(
        self, unit: RemoteUnit, prepare: Prepare, push: UnitPush, numbers: Collection[int] | None = None
    ) -> None:
        """Starts the pushes to shards of a unit. Call it within ``uninterrupted``.

        Args:
            prepare: Prepares one shard's part.
            numbers: Numbers of the shards. None: all.
        """
        with self._starting:
            self.stats.push_count += 1
            if push.route != HIERARCHICAL:  # otherwise the relay says what it has pushed
                self.stats.pushed_bytes += push.size_bytes
            push.missing, started_count = len(unit.shards) if numbers is None else len(numbers), 0
            count = push.missing
            try:
                for number, shard in enumerate(unit.shards):
                    if numbers is None or number in numbers:
                        part = _prepared(prepare, shard)
                        part.of, part.key = push, (unit.index, number)
                        self._submit(part)
                        started_count += 1
            finally:
                if started_count < count or not count:  # wait only for the parts that were started
                    self._in_flight.count_ended(push, count - started_count)
            if self._in_flight.waiter_count:
                self._flush()

    def _submit(self, part: ShardPush) -> None:
        """Queues the push of a shard's part: with those of other units if it is small, or else by itself."""
        server, key, limit_bytes = part.server, part.key, self._max_batched_bytes
        previous = self._last_part.get(key)
        if part.prepared is not None and limit_bytes is not None and part.stream_bytes <= limit_bytes and not part.via:
            batches = self._batches.get(server) or self._open_batches(server)
            # The pushes of one queue are sent in order.
            if previous is None or previous.done or previous.batches is batches:
                part.batches = batches
                batches.add(part)
                self._last_part[key] = part
                return
        if self._batches:
            self._flush()  # the push may wait for one of them
        streamed_bytes = 0 if server.copies_gradients else part.size_bytes
        queue = self._queues.get(server) or self._open_queue(server)
        work = part if previous is None or previous.done else partial(self._send, part, previous)
        queue.submit(streamed_bytes, work, partial(self._in_flight.end, [part]))
        self._last_part[key] = part

    def _open_batches(self, server: ServerConnection) -> PushBatches:
        """Returns the batches of small pushes to a server."""
        with self._opening:
            self._check_open()
            batches = self._batches[server] = PushBatches(self._threads, push_together, self._in_flight.end)
        return batches

    def _open_queue(self, server: ServerConnection) -> TransferQueue:
        """Returns the queue of pushes to a server that are sent by themselves."""
        with self._opening:
            self._check_open()
            queue = self._queues[server] = TransferQueue(self._threads)
        return queue

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()

    def _send(self, part: ShardPush, previous: ShardPush, nearly_done: NearlyDone) -> None:
        """Pushes a part after the previous part to the same shard. See Note: [Order of pushes] in
        ``transfers.py``."""
        self._in_flight.await_part(previous)
        part(nearly_done)

    def _flush(self) -> None:
        """Starts to send the pushes that wait for others, because somebody waits for them."""
        for batches in list(self._batches.values()):
            batches.flush()

    def drain(self) -> None:
        """Waits until every push is acknowledged; raises the first error."""
        self._in_flight.wait()
        self._last_part.clear()
        self._in_flight.raise_error()

    def discard(self) -> None:
        """Waits until no push is in flight and drops their errors. Called when their work item is restarted."""
        self._in_flight.wait()
        self._last_part.clear()
        self._in_flight.drop_error()

    def close(self) -> None:
        """Fails all waiting pushes. Pushes in flight end when the connection to their server is closed."""
        with self._opening:  # the thread that adds gradients may start a push
            self._closed = True
            queues, batches = list(self._queues.values()), list(self._batches.values())
        for queue in queues:
            queue.close()
        for each in batches:
            each.close()
        self._threads.shutdown(wait=False)

    def join(self, limit_s: float) -> None:
        """Waits after ``close`` until no push reads memory of units, at most ``limit_s``."""
        self._threads.join(limit_s)


def _size_of(flats: Mapping[int, torch.Tensor]) -> int:
    return sum([flat.nbytes for flat in flats.values()])


def _copies_all(unit: RemoteUnit) -> bool:
    """Whether no gradient of a unit stays in memory until it is sent."""
    for shard in unit.shards:  # noqa: SIM110 - a generator takes twice as long, and every push comes here
        if not shard.owner.server.copies_gradients:
            return False
    return True


def _prepared(prepare: Prepare, shard: RemoteShard) -> ShardPush:
    """Returns the push of a shard's part, or one that raises the error of preparing it."""
    try:
        return prepare(shard)
    except ShardwellError as error:
        # In this frame nothing refers to the error: a cycle would keep the gradients until a garbage collection.
        return _failed(error, shard)


def _failed(error: ShardwellError, shard: RemoteShard) -> ShardPush:

    def fail() -> PreparedPush:
        raise error

    return ShardPush(shard, shard.size_bytes, shard.owner.server, prepare=fail)


def _read_later(
    copied: Callable[[], None],
    header: PartHeader,
    flats: Mapping[int, torch.Tensor],
    via: RelayedPush | None,
    shard: RemoteShard,
) -> ShardPush:
    """Prepares a push of a shard's part that is read when the copy from the GPU is done."""

    def read() -> Mapping[int, torch.Tensor]:
        copied()
        return flats

    return shard.prepare_push_later(header, read, via)
