"""The pushes that are in flight: how many bytes they hold, how they end, and who waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.push_batches import PushBatches
from shardwell.data_plane.traffic_stats import TrafficStats
from shardwell.transport.base import NearlyDone, ignore

logger = logging.getLogger(__name__)

Send = Callable[[NearlyDone], None]
"""Pushes one shard's part."""

Excuse = Callable[[BaseException], bool]
"""Returns whether the error of a push does not matter, because the push does not count any more."""


class Held:
    """Gradients that count as in flight."""

    __slots__ = ("_pushes", "active", "size_bytes")

    def __init__(self, pushes: PushesInFlight, size_bytes: int) -> None:
        self._pushes, self.size_bytes, self.active = pushes, size_bytes, True

    def grow(self, size_bytes: int) -> None:
        """Counts more bytes, without a wait. Has no effect after ``release``."""
        self._pushes.grow(self, size_bytes)

    def release(self) -> None:
        """Called in any thread when the gradients are pushed or dropped. Harmless to repeat."""
        self._pushes.release([self])


class UnitPush:
    """A push of one part of a contribution, until all shards have it.

    Args:
        excuse: See ``Pushes.push``.
        held: Released when the push has ended, if it is given.
        when_pushed: Called when the push has ended.
        route: See ``Pushes.push``.
        size_bytes: Size of the gradients.
    """

    __slots__ = ("excuse", "held", "missing", "route", "size_bytes", "started_s", "when_pushed")

    def __init__(
        self,
        excuse: Excuse,
        size_bytes: int,
        *,
        held: Held | None = None,
        when_pushed: Callable[[], None] | None = None,
        route: str | None = None,
    ) -> None:
        self.excuse, self.size_bytes, self.held = excuse, size_bytes, held
        self.when_pushed, self.route = when_pushed, route
        self.missing = 0
        """Shards that do not have their part yet."""
        self.started_s = time.perf_counter() if route is not None else 0.0


class QueuedPush:
    """One shard's part of a push. A ``BatchedPush``.

    Args:
        of: The push.
        key: Unit index and number of the shard.
        send: Pushes the part by itself.
        size_bytes: Size of the shard.
    """

    __slots__ = ("batches", "done", "error", "key", "of", "send", "size_bytes")

    def __init__(self, of: UnitPush, key: tuple[int, int], send: Send | None, size_bytes: int) -> None:
        self.of, self.key, self.send, self.size_bytes = of, key, send, size_bytes
        self.batches: PushBatches[QueuedPush] | None = None
        """The batches that contain the part. None: it is sent by itself."""
        self.done = False
        """Whether the part has ended. It then refers to no gradients."""
        self.error: BaseException | None = None

    def push_alone(self) -> None:
        """See ``BatchedPush``."""
        assert self.send is not None
        self.send(ignore)


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
        self._bytes_in_flight, self._pushes_in_flight, self._waiter_count = 0, 0, 0
        self._error: BaseException | None = None
        self._ordered_count = 0
        """Parts that wait for the part before them."""

    @property
    def are_awaited(self) -> bool:
        """True while a thread waits for pushes: then no push waits for others."""
        return bool(self._waiter_count)

    # ---- room and errors ----

    def hold(self, size_bytes: int) -> Held:
        """Waits until the limit of bytes in flight admits the gradients, and adds their bytes.

        Call it within ``uninterrupted``.
        """
        while True:
            with self._lock:
                if self._has_room(size_bytes):
                    self._bytes_in_flight += size_bytes
                    self._pushes_in_flight += 1
                    return Held(self, size_bytes)
            self._wait_for(lambda: self._has_room(size_bytes))

    def _has_room(self, size_bytes: int) -> bool:
        """True if a push may start. A push larger than the limit goes alone."""
        return not self._bytes_in_flight or self._bytes_in_flight + size_bytes <= self._push_limit

    def grow(self, held: Held, size_bytes: int) -> None:
        """See ``Held.grow``."""
        with self._lock:
            if held.active:
                held.size_bytes += size_bytes
                self._bytes_in_flight += size_bytes

    def release(self, held: Iterable[Held]) -> None:
        """See ``Held.release``."""
        with self._lock:
            freed_bytes = 0
            for each in held:
                if each.active:
                    each.active = False
                    freed_bytes += each.size_bytes
                    self._pushes_in_flight -= 1
            self._bytes_in_flight -= freed_bytes
            if self._waiter_count and (freed_bytes or not self._pushes_in_flight):
                self._changed.notify_all()

    def wait(self) -> None:
        """Waits until no push is in flight."""
        self._wait_for(lambda: not self._pushes_in_flight)

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        """Waits for the end of pushes. Meanwhile no push waits for others."""
        with self._stats.waiting_for_push(), uninterrupted:
            with self._lock:
                self._waiter_count += 1
            try:
                self._flush()
                with self._changed:
                    uninterrupted.wait_for(self._changed, is_true)
            finally:
                with self._lock:
                    self._waiter_count -= 1

    def fail(self, error: BaseException) -> None:
        """Makes the next ``raise_error`` raise an error. Called in any thread."""
        with self._lock:
            self._error = self._error or error

    def raise_error(self) -> None:
        """Raises the first error since the last call."""
        if self._error is None:
            return
        with uninterrupted, self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def drop_error(self) -> None:
        """Forgets the error."""
        self._error = None

    # ---- the end of pushes ----

    def end(self, parts: Sequence[QueuedPush]) -> None:
        """Called in any thread with parts that have ended. Raises nothing: a push that is not counted never ends."""
        errors = [part.error for part in parts if part.error is not None and not _is_excused(part.of, part.error)]
        with self._lock:
            if errors and self._error is None:
                self._error = errors[0]
            for part in parts:
                part.done, part.send = True, None
            if self._ordered_count:
                self._changed.notify_all()
        self.count_ended([part.of for part in parts])

    def count_ended(self, pushes: Iterable[UnitPush], part_count: int = 1) -> None:
        """Counts parts of pushes that have ended, or were not started. Completes the pushes without other parts."""
        ended = list[UnitPush]()
        with self._lock:
            for push in pushes:
                push.missing -= part_count
                if not push.missing:
                    ended.append(push)
        if not ended:
            return
        self._count_routes(ended)
        for push in ended:
            if (when_pushed := push.when_pushed) is not None:
                push.when_pushed = None
                try:
                    when_pushed()
                except Exception as error:
                    self.fail(error)
        if held := [push.held for push in ended if push.held is not None]:
            self.release(held)

    def _count_routes(self, ended: Sequence[UnitPush]) -> None:
        """Counts pushes for their routes."""
        ended_s = time.perf_counter()
        for route in {push.route for push in ended if push.route is not None}:
            own = [push for push in ended if push.route == route]
            self._stats.routes.add(
                route,
                count=len(own),
                pushed_bytes=sum(push.size_bytes for push in own),
                seconds=sum(ended_s - push.started_s for push in own),
            )

    def await_part(self, part: QueuedPush) -> None:
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
