"""What happens in the cluster, kept for a while and told to who watches."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from enum import StrEnum

from google.protobuf.timestamp_pb2 import Timestamp

from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

KEPT_EVENTS = 256
"""A new watcher gets at most this many routine past events and as many others; it falls behind by at most as many."""


class EventKind(StrEnum):
    """Every kind of event, as ``WatchEventsResponse.kind`` spells it."""

    COORDINATOR_STARTED = "coordinator_started"
    """A coordinator process began its term."""
    SERVER_REGISTERED = "server_registered"
    """A shard server came for the first time."""
    SERVER_RESTARTED = "server_restarted"
    """A shard server came back as a new process: its memory is empty."""
    SERVER_LOST = "server_lost"
    """A shard server's lease ran out and it cannot be reached; it may be alive."""
    SERVER_ENDED = "server_ended"
    """A shard server is known to run no more: its memory is gone."""
    SERVER_LEFT = "server_left"
    """A shard server was told to stop and said so: its memory is gone."""
    SERVER_RETURNED = "server_returned"
    """A shard server that was lost is heard of again; its memory is what it was."""
    RUN_CREATED = "run_created"
    RUN_STARTED = "run_started"
    """Enough trainers were there; logical ranks were assigned."""
    RUN_DELETED = "run_deleted"
    TRAINER_JOINED = "trainer_joined"
    TRAINER_LEFT = "trainer_left"
    TRAINER_RETURNED = "trainer_returned"
    """A trainer whose lease had expired is heard of again, and nobody had taken its work."""
    TRAINER_CUT_OFF = "trainer_cut_off"
    """A trainer cannot reach a live shard server, and another trainer took its work."""
    LEASE_EXPIRED = "lease_expired"
    """A trainer was silent for longer than its lease. Another trainer may take its work."""
    WORK_LEASED = "work_leased"
    """A lost trainer's work item went to another trainer."""
    WORK_RESET = "work_reset"
    """A trainer began a work item anew."""
    UNIT_PLACED = "unit_placed"
    UNIT_PUBLISHED = "unit_published"
    STEP_COMMITTED = "step_committed"
    """The commit record of a step is durable."""
    STEP_FAILED = "step_failed"
    """A step could not be prepared or committed; the message says why."""
    UPDATE_DELAYED = "update_delayed"
    """A server does not acknowledge the update of a committed step; it is repeated."""


_ROUTINE = frozenset(
    (
        EventKind.STEP_COMMITTED,
        EventKind.WORK_LEASED,
        EventKind.WORK_RESET,
        EventKind.UNIT_PLACED,
        EventKind.UNIT_PUBLISHED,
        EventKind.UPDATE_DELAYED,
    )
)
"""Events that come with every step or unit. They are kept apart: they would push out the rare ones within a minute."""


class EventLog:
    """The last events and their live watchers.

    Args:
        wall_clock: Seconds since 1970.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._routine: deque[tuple[int, coordinator_pb2.WatchEventsResponse]] = deque(maxlen=KEPT_EVENTS)
        self._rare: deque[tuple[int, coordinator_pb2.WatchEventsResponse]] = deque(maxlen=KEPT_EVENTS)
        self._count = 0
        self._watchers: set[_Watcher] = set()

    def add(self, kind: EventKind, message: str, *, run: str = "") -> None:
        """Notes an event of a run, or of the cluster."""
        event = coordinator_pb2.WatchEventsResponse(
            time=timestamp(self._wall_clock()), kind=kind, run=run, message=message
        )
        logger.info("%s%s: %s", f"run {run!r}: " if run else "", kind, message)
        (self._routine if kind in _ROUTINE else self._rare).append((self._count, event))
        self._count += 1
        for watcher in self._watchers:
            watcher.offer(event)

    def kept(self) -> list[coordinator_pb2.WatchEventsResponse]:
        """The events that are kept, in the order in which they happened."""
        return [event for _, event in heapq.merge(self._rare, self._routine, key=lambda numbered: numbered[0])]

    async def watch(self, run: str, duration_s: float | None) -> AsyncIterator[coordinator_pb2.WatchEventsResponse]:
        """The kept events in the order in which they happened, then new ones as they come.

        Args:
            run: Only this run's events and the cluster's. Empty: all.
            duration_s: Stop after this long. None: never.
        """
        watcher = _Watcher(self.kept())
        self._watchers.add(watcher)
        loop = asyncio.get_running_loop()
        stop = None if duration_s is None else loop.time() + duration_s
        try:
            while True:
                event = await watcher.next(None if stop is None else stop - loop.time())
                if event is None:
                    return
                if not run or event.run in ("", run):
                    yield event
        finally:
            self._watchers.discard(watcher)


class _Watcher:
    """Events on their way to one watcher; the oldest are dropped when it does not keep up."""

    def __init__(self, past: Iterable[coordinator_pb2.WatchEventsResponse]) -> None:
        self._past = deque(past)
        self._pending: deque[coordinator_pb2.WatchEventsResponse] = deque(maxlen=KEPT_EVENTS)
        self._there = asyncio.Event()

    def offer(self, event: coordinator_pb2.WatchEventsResponse) -> None:
        self._pending.append(event)
        self._there.set()

    async def next(self, timeout_s: float | None) -> coordinator_pb2.WatchEventsResponse | None:
        """The next event, or None after ``timeout_s``."""
        if self._past:
            return self._past.popleft()
        while not self._pending:
            self._there.clear()
            try:
                await asyncio.wait_for(self._there.wait(), timeout_s)
            except TimeoutError:
                return None
        return self._pending.popleft()


def timestamp(seconds: float) -> Timestamp:
    """Seconds since 1970 as a message."""
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
