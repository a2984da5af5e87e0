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
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shardwell_server.coordinator.storage.database import Database, Write
from shardwell_server.coordinator.storage.records import (
    KEPT_COMMITS,
    KEPT_EVENTS,
    AddressRecord,
    BackupRecord,
    CheckpointRecord,
    CommitRecord,
    EventRecord,
    InitializerRecord,
    MemberRecord,
    RankRecord,
    Row,
    RunRecord,
    ServerRecord,
    ShardRecord,
    StoredRun,
    StoredState,
    UnitRecord,
)
from shardwell_wire.errors import UnavailableError

SCHEMA_VERSION = 19

_EVENTS_TABLE = """CREATE TABLE events (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, run TEXT NOT NULL, message TEXT NOT NULL
);"""
_UPGRADES = {
    18: "ALTER TABLE runs ADD COLUMN created_by TEXT NOT NULL DEFAULT ''; "
    "ALTER TABLE runs ADD COLUMN created_on TEXT NOT NULL DEFAULT ''; ALTER TABLE runs ADD COLUMN ended_step INTEGER; "
    f"{_EVENTS_TABLE}",
}
"""Statements that bring a file of an older schema version to the next version."""

FILE_NAME = "coordinator.sqlite"

_SCHEMA = f"""
{_EVENTS_TABLE}
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE deleted_runs (run_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE servers (
    server_id TEXT PRIMARY KEY, address TEXT NOT NULL, incarnation TEXT NOT NULL, epoch INTEGER NOT NULL,
    budget_bytes INTEGER NOT NULL, process TEXT NOT NULL, has_left INTEGER NOT NULL, draining INTEGER NOT NULL,
    restartable INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE runs (
    run TEXT PRIMARY KEY, run_id TEXT NOT NULL, config BLOB NOT NULL, created REAL NOT NULL, started INTEGER NOT NULL,
    last_epoch INTEGER NOT NULL, placement INTEGER NOT NULL, rebalancing INTEGER NOT NULL, checkpoints TEXT NOT NULL,
    parallel_plan BLOB, created_by TEXT NOT NULL, created_on TEXT NOT NULL, ended_step INTEGER
) WITHOUT ROWID;
CREATE TABLE members (
    run TEXT NOT NULL, trainer TEXT NOT NULL, host TEXT NOT NULL, incarnation TEXT NOT NULL, epoch INTEGER NOT NULL,
    requested_rank INTEGER, state TEXT NOT NULL, accepts_reassigned_work INTEGER, process TEXT NOT NULL,
    behind INTEGER NOT NULL, PRIMARY KEY (run, trainer)
) WITHOUT ROWID;
CREATE TABLE ranks (
    run TEXT NOT NULL, global_rank INTEGER NOT NULL, owner TEXT NOT NULL, trainer TEXT NOT NULL, epoch INTEGER NOT NULL,
    step INTEGER NOT NULL, attempt INTEGER NOT NULL, last_attempt INTEGER NOT NULL, vacant INTEGER NOT NULL,
    replica_epoch INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (run, global_rank)
) WITHOUT ROWID;
CREATE TABLE addresses (
    run TEXT NOT NULL, name TEXT NOT NULL, address TEXT NOT NULL, PRIMARY KEY (run, name)
) WITHOUT ROWID;
CREATE TABLE initializers (
    run TEXT NOT NULL, global_rank INTEGER NOT NULL, trainer TEXT NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (run, global_rank)
) WITHOUT ROWID;
CREATE TABLE units (
    run TEXT NOT NULL, unit_index INTEGER NOT NULL, spec BLOB NOT NULL, published INTEGER NOT NULL,
    PRIMARY KEY (run, unit_index)
) WITHOUT ROWID;
CREATE TABLE shards (
    run TEXT NOT NULL, unit_index INTEGER NOT NULL, start_bytes INTEGER NOT NULL, stop_bytes INTEGER NOT NULL,
    server_id TEXT NOT NULL, incarnation TEXT NOT NULL, PRIMARY KEY (run, unit_index, start_bytes)
) WITHOUT ROWID;
CREATE TABLE backups (
    run TEXT NOT NULL, unit_index INTEGER NOT NULL, start_bytes INTEGER NOT NULL, stop_bytes INTEGER NOT NULL,
    server_id TEXT NOT NULL, incarnation TEXT NOT NULL, state TEXT NOT NULL, placement INTEGER NOT NULL,
    PRIMARY KEY (run, unit_index, start_bytes, server_id, incarnation)
) WITHOUT ROWID;
CREATE TABLE commits (
    run TEXT NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL, leader TEXT NOT NULL, optimizer BLOB NOT NULL,
    clip_coefficient REAL NOT NULL, unit_order TEXT NOT NULL, grad_norm REAL NOT NULL,
    other_norms TEXT NOT NULL, skipped INTEGER NOT NULL, trainer TEXT NOT NULL, dp_rank INTEGER NOT NULL,
    item INTEGER NOT NULL, base_version INTEGER NOT NULL, means TEXT NOT NULL,
    PRIMARY KEY (run, step)
) WITHOUT ROWID;
CREATE TABLE states (run TEXT PRIMARY KEY, step INTEGER NOT NULL, state BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE checkpoints (
    run TEXT NOT NULL, checkpoint_id TEXT NOT NULL, step INTEGER NOT NULL, url TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, time REAL NOT NULL, is_complete INTEGER NOT NULL, PRIMARY KEY (run, checkpoint_id)
) WITHOUT ROWID;
"""

_ROWS_OF_RUN: dict[str, type[Row]] = {
    "members": MemberRecord,
    "ranks": RankRecord,
    "addresses": AddressRecord,
    "initializers": InitializerRecord,
}
"""Tables of which ``save_run`` writes only the changed rows. The first field of a record identifies it in its run."""
_RUN_TABLES = (*_ROWS_OF_RUN, "runs", "units", "shards", "backups", "commits", "states", "checkpoints")

_FORGET_EVENTS = f"DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - {KEPT_EVENTS}"
_READ_EVENTS = "SELECT * FROM events ORDER BY number"

Result = TypeVar("Result")
_Row = TypeVar("_Row", bound=Row)


class Storage:
    """The stored state of one coordinator.

    SQLite calls block, so they run in a separate thread, in the order of the calls. The async methods are for the event
    loop. Every ``save`` and ``delete`` method returns when its change is durable.

    Args:
        directory: Directory of the SQLite file. It is created if it does not exist.

    Raises:
        ConflictError: Another coordinator uses the file, or the file has another schema version.
        UnavailableError: The file cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwell-storage")
        self._database = Database(directory / FILE_NAME, _SCHEMA, SCHEMA_VERSION, _UPGRADES)
        self.term = self._begin_term()
        """Term of this coordinator: rises by one each time the file is opened."""
        self.server_epoch = self._fact("server_epoch")
        """Highest epoch of a server that was forgotten."""
        self._stored: dict[str, RunRecord] = {}
        """Last stored record of each run, by run name. ``save_run`` writes the difference."""
        self.lost = asyncio.Event()
        """Set when the outcome of a write is unknown. The coordinator must then stop."""
        self._events: deque[tuple[object, ...]] = deque(maxlen=KEPT_EVENTS)
        """Events that the next write stores."""

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._events:
            with suppress(UnavailableError):
                self._write([])
        self._database.close()

    @property
    def why_lost(self) -> UnavailableError | None:
        """The error that set ``lost``."""
        return self._database.lost

    def keep_event(self, record: EventRecord) -> None:
        """Stores an event with the next write of anything else, or when this is closed. Never waits.

        A write of its own would delay the commit record that follows. If the process is killed before the next write,
        the event is lost.
        """
        self._events.append(record.to_row())

    async def load(self) -> StoredState:
        """Reads everything that is stored."""
        return await self._call(self._load)

    async def save_server(self, record: ServerRecord) -> None:
        """Stores a shard server."""
        await self._call(self._write, [_upsert("servers", record.to_row())])

    async def delete_server(self, server_id: str, last_epoch: int) -> None:
        """Deletes a server and stores ``last_epoch``, the highest epoch of any server, so that no epoch is reused."""
        delete = ("DELETE FROM servers WHERE server_id = ?", [(server_id,)])
        await self._call(self._write, [delete, _upsert("facts", ("server_epoch", last_epoch))])

    async def save_run(self, record: RunRecord, units: Sequence[UnitRecord] = ()) -> None:
        """Stores a run, and units that changed with it. Writes only rows of the run that differ from the last record.

        All changes become durable together.
        """
        await self._call(self._write_run, record, units)

    def _write_run(self, record: RunRecord, units: Sequence[UnitRecord], more: Sequence[Write] = ()) -> None:
        self._write([*self._run_writes(record), *_unit_writes(record.run, units), *more])
        self._stored[record.run] = record  # only now: after a failed write, the next call must write the difference

    def _run_writes(self, record: RunRecord) -> list[Write]:
        run, before = record.run, self._stored.get(record.run)
        writes = [_upsert("runs", record.to_row())]
        for table, kind in _ROWS_OF_RUN.items():
            old_rows, new_rows = _rows_by_key(before, table), _rows_by_key(record, table)
            deleted = [(run, each) for each in old_rows.keys() - new_rows.keys()]
            changed = [(run, *values) for each, values in new_rows.items() if old_rows.get(each) != values]
            writes.append((f"DELETE FROM {table} WHERE run = ? AND {fields(kind)[0].name} = ?", deleted))
            writes.append(_upsert(table, *changed))
        return writes

    async def save_units(self, run: str, records: Sequence[UnitRecord]) -> None:
        """Stores units and their shards, replacing the units' previous shards."""
        await self._call(self._write, _unit_writes(run, records))

    async def save_loaded_run(
        self, record: RunRecord, units: Sequence[UnitRecord], commits: Sequence[CommitRecord], state: bytes | None
    ) -> None:
        """Stores a run that was loaded from a checkpoint. Replaces its units, commits and state, all at once."""
        run = record.run
        writes = [
            *(_clear(table, run) for table in ("units", "shards", "backups", "commits", "states")),
            *_unit_writes(run, units),
            _upsert("commits", *((run, *commit.to_row()) for commit in commits)),
        ]
        if state is not None:
            writes.append(_upsert("states", (run, commits[-1].step if commits else 0, state)))
        await self._call(self._write_run, record, (), writes)

    async def save_checkpoint(self, run: str, record: CheckpointRecord) -> None:
        """Stores a checkpoint that is about to be written, or is complete."""
        await self._call(self._write, [_upsert("checkpoints", (run, *record.to_row()))])

    async def delete_checkpoints(self, run: str, checkpoint_ids: Iterable[str]) -> None:
        """Deletes the records of checkpoints."""
        rows = [(run, checkpoint_id) for checkpoint_id in checkpoint_ids]
        await self._call(self._write, [("DELETE FROM checkpoints WHERE run = ? AND checkpoint_id = ?", rows)])

    async def save_commit(
        self,
        run: str,
        record: CommitRecord,
        state: bytes | None,
        changed: tuple[RunRecord, Sequence[UnitRecord]] | None = None,
    ) -> None:
        """Stores a commit record. When this returns, the step is committed.

        Args:
            run: Name of the run.
            record: The commit record.
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
        writes: list[Write] = [
            _upsert("commits", (run, *record.to_row())),
            ("DELETE FROM commits WHERE run = ? AND step <= ?", [(run, record.step - KEPT_COMMITS)]),
        ]
        if state is not None:
            writes.append(_upsert("states", (run, record.step, state)))
        if changed is not None:
            run_record, units = changed
            writes += [*self._run_writes(run_record), *_unit_writes(run, units)]
        self._write(writes)
        if changed is not None:
            self._stored[run] = changed[0]

    async def delete_run(self, run: str, run_id: str, last_epoch: int) -> None:
        """Deletes a run. Keeps its id, and its highest epoch: the epochs of later runs start above it."""
        keep = (
            "INSERT INTO facts VALUES ('deleted_last_epoch', ?) "
            "ON CONFLICT DO UPDATE SET value = max(value, excluded.value)"
        )
        await self._call(self._delete_run, run, [(keep, [(last_epoch,)]), _upsert("deleted_runs", (run_id,))])

    def _delete_run(self, run: str, keep: Sequence[Write]) -> None:
        self._write([*(_clear(table, run) for table in _RUN_TABLES), *keep])
        self._stored.pop(run, None)

    async def _call(self, method: Callable[..., Result], *arguments: object) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(method, *arguments))
        finally:
            if self._database.lost is not None:
                self.lost.set()

    def _write(self, writes: Sequence[Write]) -> None:
        """Makes a change durable, and the events that were kept since the last one. For the thread of the storage."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        if events:
            writes = [*writes, ("INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", events), (_FORGET_EVENTS, [()])]
        try:
            self._database.write(writes)
        except UnavailableError:
            self._events.extendleft(reversed(events))
            raise

    def _begin_term(self) -> int:
        advance = "INSERT INTO facts VALUES ('term', 1) ON CONFLICT DO UPDATE SET value = value + 1"
        self._database.write([(advance, [()])])
        return self._fact("term")

    def _fact(self, name: str) -> int:
        rows = self._database.read("SELECT value FROM facts WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else 0

    def _load(self) -> StoredState:
        servers = map(ServerRecord.from_row, self._database.read("SELECT * FROM servers"))
        runs = [self._load_run(row) for row in self._database.read("SELECT * FROM runs")]
        self._stored = {each.record.run: each.record for each in runs}
        return StoredState(
            servers=tuple(servers),
            runs=tuple(runs),
            deleted_last_epoch=self._fact("deleted_last_epoch"),
            deleted_run_ids=frozenset(run_id for (run_id,) in self._database.read("SELECT run_id FROM deleted_runs")),
            events=tuple(EventRecord.from_row(row[1:]) for row in self._database.read(_READ_EVENTS)),
        )

    def _load_run(self, row: Sequence[Any]) -> StoredRun:
        run, states = row[0], self._rows("states", row[0])
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
        for _, index, *row in self._rows("units", run):
            copies = {"shards": tuple(shards.get(index, ())), "backups": tuple(backups.get(index, ()))}
            yield UnitRecord.from_row((index, *row), **copies)

    def _copies(self, kind: type[_Row], table: str, run: str) -> dict[int, list[_Row]]:
        """Returns the rows of a table of copies by unit index, in the order of their ranges."""
        found: dict[int, list[_Row]] = {}
        for _, index, *row in sorted(self._rows(table, run)):
            found.setdefault(index, []).append(kind.from_row(row))
        return found

    def _records(self, kind: type[_Row], table: str, run: str) -> tuple[_Row, ...]:
        return tuple(kind.from_row(row) for _, *row in self._rows(table, run))

    def _rows(self, table: str, run: str) -> list[Any]:
        """Returns the rows of one run, sorted by their second column: the rank, name, index or step."""
        return self._database.read(f"SELECT * FROM {table} WHERE run = ? ORDER BY 2", (run,))


def _upsert(table: str, *rows: tuple[object, ...]) -> Write:
    columns = len(rows[0]) if rows else 1
    return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * columns)})", rows


def _clear(table: str, run: str) -> Write:
    return f"DELETE FROM {table} WHERE run = ?", [(run,)]


def _unit_writes(run: str, records: Sequence[UnitRecord]) -> list[Write]:
    """Returns the writes that store units and replace their previous shards and backups."""
    replaced = [(run, record.unit_index) for record in records]
    shards = [(run, record.unit_index, *at.to_row()) for record in records for at in record.shards]
    backups = [(run, record.unit_index, *at.to_row()) for record in records for at in record.backups]
    return [
        _upsert("units", *((run, *record.to_row()) for record in records)),
        ("DELETE FROM shards WHERE run = ? AND unit_index = ?", replaced),
        _upsert("shards", *shards),
        ("DELETE FROM backups WHERE run = ? AND unit_index = ?", replaced),
        _upsert("backups", *backups),
    ]


def _rows_by_key(record: RunRecord | None, table: str) -> dict[object, tuple[object, ...]]:
    """Returns a record's rows of one table, without the run column, by their first column."""
    if record is None:
        return {}
    return {(values := row.to_row())[0]: values for row in getattr(record, table)}
