"""The coordinator's state that survives a restart.

A change is stored before any trainer or server can observe it. State that is not stored (rpcs in progress, finished
work items, step proposals) is sent again by the trainers when they poll the restarted coordinator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from shardwell_server.coordinator.storage.records import (
    KEPT_COMMITS,
    KEPT_EVENTS,
    AddressRecord,
    BackupRecord,
    Change,
    CheckpointRecord,
    CommitRecord,
    Delete,
    EventRecord,
    InitializerRecord,
    MemberRecord,
    Put,
    RankRecord,
    Row,
    RunRecord,
    ServerRecord,
    ShardRecord,
    StoredRun,
    StoredState,
    TableStore,
    UnitRecord,
)
from shardwell_wire.errors import UnavailableError

_ROWS_OF_RUN: dict[str, type[Row]] = {
    "members": MemberRecord,
    "ranks": RankRecord,
    "addresses": AddressRecord,
    "initializers": InitializerRecord,
}
"""Tables of which ``save_run`` writes only the changed rows. The first field of a record identifies it in its run."""
_RUN_TABLES = (*_ROWS_OF_RUN, "runs", "units", "shards", "backups", "commits", "states", "checkpoints")

Result = TypeVar("Result")
_Row = TypeVar("_Row", bound=Row)


class Storage:
    """The stored state of one coordinator.

    Calls of the store block, so they run in a separate thread, in the order of the calls. The async methods are for the
    event loop. Every ``save`` and ``delete`` method returns when its change is durable.

    Args:
        store: The tables. ``close`` closes them.
    """

    def __init__(self, store: TableStore) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwell-storage")
        self._store = store
        self._facts: dict[str, int] = dict(store.rows("facts"))
        self._stored: dict[str, RunRecord] = {}
        """Last stored record of each run, by run name. ``save_run`` writes the difference."""
        self._events: deque[tuple[object, ...]] = deque(maxlen=KEPT_EVENTS)
        """Events that the next write stores."""
        self._last_event = max((number for number, *_ in store.rows("events")), default=0)
        """Number of the newest stored event."""
        self.lost = asyncio.Event()
        """Set when the outcome of a write is unknown. The coordinator must then stop."""

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._events:
            with suppress(UnavailableError):
                self._write([])
        self._store.close()

    @property
    def term(self) -> int:
        """Term of this coordinator: rises each time the store is opened."""
        return self._store.term

    @property
    def server_epoch(self) -> int:
        """Highest epoch of a server that was forgotten."""
        return self._facts.get("server_epoch", 0)

    @property
    def why_lost(self) -> UnavailableError | None:
        """The error that set ``lost``."""
        return self._store.lost

    def keep_event(self, record: EventRecord) -> None:
        """Stores an event with the next write of anything else, or when this is closed. Never waits.

        A write of its own would delay the commit record that follows. If the process is killed before the next write,
        the event is lost.
        """
        self._events.append(record.to_row())

    async def load(self) -> StoredState:
        """Reads everything that is stored."""
        loop = asyncio.get_running_loop()
        self._store.when_lost = lambda: loop.call_soon_threadsafe(self.lost.set)
        return await self._call(self._load)

    async def save_server(self, record: ServerRecord) -> None:
        """Stores a shard server."""
        await self._call(self._write, [_put("servers", record.to_row())])

    async def delete_server(self, server_id: str, last_epoch: int) -> None:
        """Deletes a server and stores ``last_epoch``, the highest epoch of any server, so that no epoch is reused."""
        changes = [Delete("servers", [(server_id,)]), _put("facts", ("server_epoch", last_epoch))]
        await self._call(self._write, changes)

    async def save_run(self, record: RunRecord, units: Sequence[UnitRecord] = ()) -> None:
        """Stores a run, and units that changed with it. Writes only rows of the run that differ from the last record.

        All changes become durable together.
        """
        await self._call(self._write_run, record, units)

    def _write_run(self, record: RunRecord, units: Sequence[UnitRecord], more: Sequence[Change] = ()) -> None:
        self._write([*self._run_writes(record), *_unit_writes(record.run, units), *more])
        self._stored[record.run] = record  # only now: after a failed write, the next call must write the difference

    def _run_writes(self, record: RunRecord) -> list[Change]:
        run, before = record.run, self._stored.get(record.run)
        writes: list[Change] = [_put("runs", record.to_row())]
        for table in _ROWS_OF_RUN:
            old_rows, new_rows = _rows_by_key(before, table), _rows_by_key(record, table)
            deleted = [(run, each) for each in old_rows.keys() - new_rows.keys()]
            changed = [(run, *values) for each, values in new_rows.items() if old_rows.get(each) != values]
            writes += [Delete(table, deleted), Put(table, changed)]
        return writes

    async def save_units(self, run: str, records: Sequence[UnitRecord]) -> None:
        """Stores units and their shards, replacing the units' previous shards."""
        await self._call(self._write, _unit_writes(run, records))

    async def save_loaded_run(
        self, record: RunRecord, units: Sequence[UnitRecord], commits: Sequence[CommitRecord], state: bytes | None
    ) -> None:
        """Stores a run that was loaded from a checkpoint. Replaces its units, commits and state, all at once."""
        run = record.run
        writes: list[Change] = [
            *(Delete(table, [(run,)]) for table in ("units", "shards", "backups", "commits", "states")),
            *_unit_writes(run, units),
            Put("commits", [(run, *commit.to_row()) for commit in commits]),
        ]
        if state is not None:
            writes.append(_put("states", (run, commits[-1].step if commits else 0, state)))
        await self._call(self._write_run, record, (), writes)

    async def save_state(self, run: str, step: int, state: bytes) -> None:
        """Stores the run's state after the last commit, which was that of ``step``."""
        await self._call(self._write, [_put("states", (run, step, state))])

    async def save_checkpoint(self, run: str, record: CheckpointRecord) -> None:
        """Stores a checkpoint that is about to be written, or is complete."""
        await self._call(self._write, [_put("checkpoints", (run, *record.to_row()))])

    async def delete_checkpoints(self, run: str, checkpoint_ids: Iterable[str]) -> None:
        """Deletes the records of checkpoints."""
        rows = [(run, checkpoint_id) for checkpoint_id in checkpoint_ids]
        await self._call(self._write, [Delete("checkpoints", rows)])

    async def save_commit(
        self,
        run: str,
        record: CommitRecord,
        state: bytes | None,
        changed: tuple[RunRecord, Sequence[UnitRecord]] | None = None,
    ) -> None:
        """Stores a commit record. When this returns, the step is committed.

        Args:
            state: The run's state, if it changed.
            changed: The run and its changed units, if they change with this commit.
        """
        await self._call(self._write_commit, run, record, state, changed)

    def _write_commit(
        self,
        run: str,
        record: CommitRecord,
        state: bytes | None,
        changed: tuple[RunRecord, Sequence[UnitRecord]] | None,
    ) -> None:
        writes: list[Change] = [
            _put("commits", (run, *record.to_row())),
            Delete("commits", [(run, record.step - KEPT_COMMITS)]),
        ]
        if state is not None:
            writes.append(_put("states", (run, record.step, state)))
        if changed is not None:
            run_record, units = changed
            writes += [*self._run_writes(run_record), *_unit_writes(run, units)]
        self._write(writes)
        if changed is not None:
            self._stored[run] = changed[0]

    async def delete_run(self, run: str, run_id: str, last_epoch: int) -> None:
        """Deletes a run. Keeps its id, and its highest epoch: the epochs of later runs start above it."""
        await self._call(self._delete_run, run, run_id, last_epoch)

    def _delete_run(self, run: str, run_id: str, last_epoch: int) -> None:
        highest = max(last_epoch, self._facts.get("deleted_last_epoch", 0))
        keep = [_put("facts", ("deleted_last_epoch", highest)), _put("deleted_runs", (run_id,))]
        self._write([*(Delete(table, [(run,)]) for table in _RUN_TABLES), *keep])
        self._facts["deleted_last_epoch"] = highest
        self._stored.pop(run, None)

    async def _call(self, method: Callable[..., Result], *arguments: object) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(method, *arguments))
        finally:
            if self._store.lost is not None:
                self.lost.set()

    def _write(self, changes: Sequence[Change]) -> None:
        """Makes changes durable, and the events that were kept since the last ones. For the thread of the storage."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        if events:
            numbers = range(self._last_event + 1, self._last_event + 1 + len(events))
            rows = [(number, *event) for number, event in zip(numbers, events, strict=True)]
            changes = [*changes, Put("events", rows), Delete("events", [(number - KEPT_EVENTS,) for number in numbers])]
        try:
            self._store.write(changes)
        except UnavailableError:
            self._events.extendleft(reversed(events))
            raise
        self._last_event += len(events)

    def _load(self) -> StoredState:
        servers = map(ServerRecord.from_row, self._store.rows("servers"))
        runs = [self._load_run(row) for row in self._store.rows("runs")]
        self._stored = {each.record.run: each.record for each in runs}
        return StoredState(
            servers=tuple(servers),
            runs=tuple(runs),
            deleted_last_epoch=self._facts.get("deleted_last_epoch", 0),
            events=tuple(EventRecord.from_row(row) for _, *row in self._store.rows("events")),
            deleted_run_ids=frozenset(run_id for (run_id,) in self._store.rows("deleted_runs")),
        )

    def _load_run(self, row: Sequence[Any]) -> StoredRun:
        run, states = row[0], self._store.rows("states", row[0])
        rows = {table: self._records(kind, table, run) for table, kind in _ROWS_OF_RUN.items()}
        return StoredRun(
            record=RunRecord.from_row(row, **rows),
            units=tuple(self._load_units(run)),
            commits=self._records(CommitRecord, "commits", run),
            state=states[0][2] if states else None,
            checkpoints=tuple(sorted(self._records(CheckpointRecord, "checkpoints", run), key=lambda each: each.time)),
        )

    def _load_units(self, run: str) -> Iterator[UnitRecord]:
        shards, backups = self._copies(ShardRecord, "shards", run), self._copies(BackupRecord, "backups", run)
        for _, index, *row in self._store.rows("units", run):
            copies = {"shards": tuple(shards.get(index, ())), "backups": tuple(backups.get(index, ()))}
            yield UnitRecord.from_row((index, *row), **copies)

    def _copies(self, kind: type[_Row], table: str, run: str) -> dict[int, list[_Row]]:
        """Returns the rows of a table of copies by unit index, in the order of their ranges."""
        found: dict[int, list[_Row]] = {}
        for _, index, *row in self._store.rows(table, run):
            found.setdefault(index, []).append(kind.from_row(row))
        return found

    def _records(self, kind: type[_Row], table: str, run: str) -> tuple[_Row, ...]:
        return tuple(kind.from_row(row) for _, *row in self._store.rows(table, run))


def _put(table: str, *rows: tuple[object, ...]) -> Change:
    return Put(table, rows)


def _unit_writes(run: str, records: Sequence[UnitRecord]) -> list[Change]:
    """Returns the writes that store units and replace their previous shards and backups."""
    replaced = [(run, record.unit_index) for record in records]
    shards = [(run, record.unit_index, *at.to_row()) for record in records for at in record.shards]
    backups = [(run, record.unit_index, *at.to_row()) for record in records for at in record.backups]
    return [
        Put("units", [(run, *record.to_row()) for record in records]),
        Delete("shards", replaced),
        Put("shards", shards),
        Delete("backups", replaced),
        Put("backups", backups),
    ]


def _rows_by_key(record: RunRecord | None, table: str) -> dict[object, tuple[object, ...]]:
    """Returns a record's rows of one table, without the run column, by their first column."""
    if record is None:
        return {}
    return {(values := row.to_row())[0]: values for row in getattr(record, table)}
