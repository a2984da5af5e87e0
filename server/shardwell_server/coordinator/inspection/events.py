"""The event log: recent events of the cluster, and watchers that receive new ones."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum

from google.protobuf.timestamp_pb2 import Timestamp

from shardwell_server.coordinator.storage.records import KEPT_EVENTS, EventRecord
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)


class EventKind(StrEnum):
    """All kinds of events. The values are those of ``WatchEventsResponse.kind``."""

    COORDINATOR_STARTED = "coordinator_started"
    """A coordinator process started its term."""
    SERVER_REGISTERED = "server_registered"
    """A shard server registered under a new id."""
    SERVER_RESTARTED = "server_restarted"
    """A new process registered under the id of a former shard server. Its memory is empty."""
    SERVER_LOST = "server_lost"
    """A shard server's lease expired and the server is unreachable. It may be alive."""
    SERVER_ENDED = "server_ended"
    """A shard server's process has ended for certain. Its memory is gone."""
    SERVER_LEFT = "server_left"
    """A shard server was stopped and deregistered. Its memory is gone."""
    SERVER_RETURNED = "server_returned"
    """A lost shard server is reachable again, with its memory."""
    RUN_CREATED = "run_created"
    RUN_STARTED = "run_started"
    """Enough trainers joined and the logical ranks were assigned."""
    RUN_DELETED = "run_deleted"
    TRAINER_JOINED = "trainer_joined"
    TRAINER_LEFT = "trainer_left"
    TRAINER_ENDED = "trainer_ended"
    """A trainer's process has ended without leaving the run. Its work is reassigned."""
    TRAINER_RETURNED = "trainer_returned"
    """A trainer sent a request after its lease expired and before its work was reassigned."""
    TRAINER_CUT_OFF = "trainer_cut_off"
    """A trainer could not reach a live shard server, and its work was reassigned."""
    TRANSFERS_CORRUPT = "transfers_corrupt"
    """Transfers between a trainer and a shard server arrived with a wrong checksum, and were repeated."""
    LEASE_EXPIRED = "lease_expired"
    """A trainer was silent for longer than its lease. Its work may be reassigned."""
    WORK_LEASED = "work_leased"
    """A lost trainer's work item was leased to another trainer."""
    WORK_COPIED = "work_copied"
    """A trainer's work item is late, and an idle trainer computes its twin item. The first that is finished counts."""
    WORK_RESET = "work_reset"
    """A trainer started a new attempt of a work item."""
    UNIT_PLACED = "unit_placed"
    UNIT_PUBLISHED = "unit_published"
    STEP_COMMITTED = "step_committed"
    """The commit record of a step is durable."""
    GRADIENTS_DIFFER = "gradients_differ"
    """Tensor-parallel ranks computed different gradients of a parameter that all of them hold. Once per unit."""
    GRADIENTS_EQUAL = "gradients_equal"
    """Data ranks pushed equal gradients for several steps, so they probably read the same data. Once per run."""
    STEP_FAILED = "step_failed"
    """A step could not be prepared or committed. The message contains the error."""
    SHARDS_PROMOTED = "shards_promoted"
    """Backups replaced the primaries of a lost server."""
    SHARDS_ADOPTED = "shards_adopted"
    """A restarted server process took up the shards of its predecessor."""
    SHARDS_MOVED = "shards_moved"
    """Shards changed their servers as planned, with a commit."""
    BACKUPS_LOST = "backups_lost"
    """Backups were on a lost server, or missed a step. They are built again."""
    BACKUPS_IN_SYNC = "backups_in_sync"
    """Every shard of a run has the wanted number of backups."""
    BACKUPS_DELAYED = "backups_delayed"
    """A backup cannot be built. The message says why; it is tried again."""
    SERVER_DRAINING = "server_draining"
    """A server hands its shards to other servers."""
    SERVER_DRAINED = "server_drained"
    """A server has no shards any more and may be stopped."""
    RUN_REBALANCED = "run_rebalanced"
    """The shards of a run are spread evenly over the servers."""
    VERSIONS_LOST = "versions_lost"
    """Versions that a run kept for readers are gone. The message names them and says why."""
    READER_SILENT = "reader_silent"
    """A run waited for a reader (``max_reader_lag``) that did not read in time, and goes on."""
    UPDATE_DELAYED = "update_delayed"
    """A server has not acknowledged the update of a committed step. The update is repeated."""
    CHECKPOINT_STARTED = "checkpoint_started"
    """The shard servers write a checkpoint."""
    CHECKPOINT_SAVED = "checkpoint_saved"
    """A checkpoint is complete."""
    CHECKPOINT_FAILED = "checkpoint_failed"
    """A checkpoint could not be saved, and was removed. Training goes on."""
    RESIDUALS_MISSING = "residuals_missing"
    """A checkpoint lacks residuals of error feedback. They are zero in a run that is loaded from it."""
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    """A checkpoint cannot be loaded. The message names the damaged file."""
    RUN_LOADING = "run_loading"
    """A run is being loaded from a checkpoint: it is created from it, or rolled back to it."""
    RUN_RESUMED = "run_resumed"
    """A run was created from a checkpoint."""
    DATA_RANKS_CHANGED = "data_ranks_changed"
    """A run continues from a checkpoint of another number of data ranks. The message says what is not taken over."""
    ROLLED_BACK = "rolled_back"
    """A run that lost shards was rolled back to a checkpoint. Trainers continue there."""


_ROUTINE = frozenset(
    (
        EventKind.STEP_COMMITTED,
        EventKind.WORK_LEASED,
        EventKind.WORK_COPIED,
        EventKind.WORK_RESET,
        EventKind.UNIT_PLACED,
        EventKind.UNIT_PUBLISHED,
        EventKind.UPDATE_DELAYED,
        EventKind.CHECKPOINT_STARTED,
    )
)
"""Frequent events. A separate queue stores them, because they would evict the rare events within a minute."""


_OF_CLUSTER = frozenset(
    kind for kind in EventKind if kind.startswith(("coordinator_", "server_")) or kind is EventKind.RUN_DELETED
)
"""Kinds of events that belong to no run."""


class EventLog:
    """Recent events and their watchers. For one event loop.

    Args:
        wall_clock: Returns seconds since 1970.
        stored: Events of former coordinators, oldest first.
        store: Called with each new event that is not routine. Must not wait.
    """

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.time,
        stored: Sequence[EventRecord] = (),
        store: Callable[[EventRecord], None] | None = None,
    ) -> None:
        self._wall_clock, self._store = wall_clock, store
        self._routine: deque[tuple[int, coordinator_pb2.WatchEventsResponse]] = deque(maxlen=KEPT_EVENTS)
        self._rare: deque[tuple[int, coordinator_pb2.WatchEventsResponse]] = deque(maxlen=KEPT_EVENTS)
        self._rare.extend((number, _to_proto(record)) for number, record in enumerate(stored))
        self._count = len(stored)
        self._counts: dict[str, Counter[str]] = {}
        """Events since the start by run and kind. Without those of deleted runs."""
        self._watchers: set[_Watcher] = set()

    def add(self, kind: EventKind, message: str, *, run: str = "") -> None:
        """Adds and logs an event of a run, or of the cluster if ``run`` is empty."""
        record = EventRecord(self._wall_clock(), kind, run, message)
        event = _to_proto(record)
        fields = {"run": run, "event": str(kind)} if run else {"event": str(kind)}
        logger.info("%s%s: %s", f"run {run!r}: " if run else "", kind, message, extra={"fields": fields})
        if kind is EventKind.RUN_DELETED:
            self._counts.pop(run, None)
        counted = "" if kind is EventKind.RUN_DELETED else run
        self._counts.setdefault(counted, Counter())[kind] += 1
        (self._routine if kind in _ROUTINE else self._rare).append((self._count, event))
        if self._store is not None and kind not in _ROUTINE:
            self._store(record)
        self._count += 1
        for watcher in self._watchers:
            watcher.add(event)

    def kept(self) -> list[coordinator_pb2.WatchEventsResponse]:
        """Returns the kept events in the order in which they happened."""
        return [event for _, event in heapq.merge(self._rare, self._routine, key=lambda numbered: numbered[0])]

    def counts(self, runs: Collection[str]) -> Iterator[tuple[str, str, int]]:
        """Yields the run, the kind and the number of events since the start, also of kinds without an event.

        Args:
            runs: Names of the runs. The events of the cluster have the run "".
        """
        for run in ("", *runs):
            counts = self._counts.get(run, Counter[str]())
            kinds = (kind for kind in EventKind if (kind in _OF_CLUSTER) == (run == ""))
            for kind in dict.fromkeys((*kinds, *counts)):
                yield run, str(kind), counts[kind]

    async def watch(self, run: str, duration_s: float | None) -> AsyncIterator[coordinator_pb2.WatchEventsResponse]:
        """Yields the kept events in order, then new events as they happen.

        Args:
            run: Yield only events of this run and of the cluster. Empty: all events.
            duration_s: Stop after this many seconds. None: never.
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
    """Queue of events for one watcher. Drops the oldest new events if the watcher is too slow."""

    def __init__(self, past: Iterable[coordinator_pb2.WatchEventsResponse]) -> None:
        self._past = deque(past)
        self._pending: deque[coordinator_pb2.WatchEventsResponse] = deque(maxlen=KEPT_EVENTS)
        self._available = asyncio.Event()

    def add(self, event: coordinator_pb2.WatchEventsResponse) -> None:
        self._pending.append(event)
        self._available.set()

    async def next(self, timeout_s: float | None) -> coordinator_pb2.WatchEventsResponse | None:
        """Returns the next event, or None after ``timeout_s``."""
        if self._past:
            return self._past.popleft()
        while not self._pending:
            self._available.clear()
            try:
                await asyncio.wait_for(self._available.wait(), timeout_s)
            except TimeoutError:
                return None
        return self._pending.popleft()


def _to_proto(record: EventRecord) -> coordinator_pb2.WatchEventsResponse:
    return coordinator_pb2.WatchEventsResponse(
        time=timestamp(record.time), kind=record.kind, run=record.run, message=record.message
    )


def timestamp(seconds: float) -> Timestamp:
    """Converts seconds since 1970 to a message."""
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
