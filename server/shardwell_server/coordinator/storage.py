"""What survives a coordinator's restart: one SQLite file. Blocking; ``Storage.call`` keeps it off the event loop.

Everything that was told to a trainer or a server is here first. What is not here (polls in
progress, hyper-parameters handed in) comes again with the next polls.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shardwell_server.coordinator.records import (
    CommitRecord,
    FinishedRecord,
    MemberRecord,
    RankRecord,
    RunRecord,
    ServerRecord,
    ShardRecord,
    StoredRun,
    StoredState,
    UnitRecord,
)
from shardwell_wire.errors import ConflictError, UnavailableError

SCHEMA_VERSION = 6

FILE_NAME = "coordinator.sqlite"

KEPT_COMMITS = 8
"""Commit records per run; trainers are rarely more than one step behind."""

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE servers (
    server_id TEXT PRIMARY KEY, address TEXT NOT NULL, incarnation TEXT NOT NULL, epoch INTEGER NOT NULL,
    budget_bytes INTEGER NOT NULL, process TEXT NOT NULL, departed INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE runs (
    run TEXT PRIMARY KEY, run_id TEXT NOT NULL, config BLOB NOT NULL, created REAL NOT NULL, started INTEGER NOT NULL,
    last_epoch INTEGER NOT NULL, initializer TEXT, initializer_epoch INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE members (
    run TEXT NOT NULL, trainer TEXT NOT NULL, host TEXT NOT NULL, incarnation TEXT NOT NULL, epoch INTEGER NOT NULL,
    requested_rank INTEGER, live INTEGER NOT NULL, lapsed INTEGER NOT NULL, accepts_work INTEGER,
    PRIMARY KEY (run, trainer)
) WITHOUT ROWID;
CREATE TABLE ranks (
    run TEXT NOT NULL, global_rank INTEGER NOT NULL, owner TEXT NOT NULL, holder TEXT NOT NULL, epoch INTEGER NOT NULL,
    step INTEGER NOT NULL, attempt INTEGER NOT NULL, PRIMARY KEY (run, global_rank)
) WITHOUT ROWID;
CREATE TABLE addresses (
    run TEXT NOT NULL, name TEXT NOT NULL, address TEXT NOT NULL, PRIMARY KEY (run, name)
) WITHOUT ROWID;
CREATE TABLE units (
    run TEXT NOT NULL, unit_index INTEGER NOT NULL, spec BLOB NOT NULL, published INTEGER NOT NULL,
    PRIMARY KEY (run, unit_index)
) WITHOUT ROWID;
CREATE TABLE shards (
    run TEXT NOT NULL, unit_index INTEGER NOT NULL, start_bytes INTEGER NOT NULL, stop_bytes INTEGER NOT NULL,
    server_id TEXT NOT NULL, incarnation TEXT NOT NULL, PRIMARY KEY (run, unit_index, server_id)
) WITHOUT ROWID;
CREATE TABLE finished (
    run TEXT NOT NULL, step INTEGER NOT NULL, global_rank INTEGER NOT NULL, attempt INTEGER NOT NULL,
    parts BLOB NOT NULL, PRIMARY KEY (run, global_rank)
) WITHOUT ROWID;
CREATE TABLE commits (
    run TEXT NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL, decider TEXT NOT NULL, optimizer BLOB NOT NULL,
    clip_coefficient REAL NOT NULL, unit_order TEXT NOT NULL, grad_norm REAL NOT NULL, norm_type REAL,
    other_norm REAL, skipped INTEGER NOT NULL,
    PRIMARY KEY (run, step)
) WITHOUT ROWID;
CREATE TABLE states (run TEXT PRIMARY KEY, step INTEGER NOT NULL, state BLOB NOT NULL) WITHOUT ROWID;
"""

_CHANGING = ("members", "ranks", "addresses")
_RUN_TABLES = (*_CHANGING, "runs", "units", "shards", "finished", "commits", "states")

Result = TypeVar("Result")


class Storage:
    """The state of one coordinator, in one file that no other process may open.

    Methods run one after another in a thread of their own, in the order in which they were called.

    Args:
        directory: Where the file is, or shall be made.

    Raises:
        ConflictError: Another coordinator uses the file, or it is of another schema.
        UnavailableError: The file cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwell-storage")
        self._database = self._open(directory)
        self.term = self._begin_term()
        """Rises with every process that opens the file."""
        self.server_epoch = self._fact("server_epoch")
        """The highest epoch of the servers that were forgotten."""

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._database.close()

    async def load(self) -> StoredState:
        """Everything."""
        return await self._call(self._load)

    async def save_server(self, record: ServerRecord) -> None:
        """Returns once it is durable, as all ``save`` methods."""
        await self._call(self._write, [(_upsert("servers", 7), [_values(record)])])

    async def delete_server(self, server_id: str, last_epoch: int) -> None:
        """Forgets a server. Its epoch stays used up.

        Args:
            server_id: Name of the server.
            last_epoch: The highest epoch of any server.
        """
        delete = ("DELETE FROM servers WHERE server_id = ?", [(server_id,)])
        await self._call(self._write, [delete, (_upsert("facts", 2), [("server_epoch", last_epoch)])])

    async def save_run(self, record: RunRecord) -> None:
        run = record.run
        row = (
            run,
            record.run_id,
            record.config,
            record.created,
            record.started,
            record.last_epoch,
            record.initializer,
            record.initializer_epoch,
        )
        await self._call(
            self._write,
            [
                (_upsert("runs", 8), [row]),
                *(_clear(table, run) for table in _CHANGING),
                (_upsert("members", 9), [(run, *_values(member)) for member in record.members]),
                (_upsert("ranks", 7), [(run, *_values(rank)) for rank in record.ranks]),
                (_upsert("addresses", 3), [(run, *address) for address in record.addresses]),
            ],
        )

    async def save_units(self, run: str, records: Sequence[UnitRecord]) -> None:
        units = [(run, record.unit_index, record.spec, record.published) for record in records]
        shards = [
            (run, record.unit_index, at.start_bytes, at.stop_bytes, at.server_id, at.incarnation)
            for record in records
            for at in record.shards
        ]
        await self._call(self._write, [(_upsert("units", 4), units), (_upsert("shards", 6), shards)])

    async def save_finished(self, run: str, step: int, records: Sequence[FinishedRecord]) -> None:
        """Survives the death of this process at once, of the machine only from the next commit on."""
        rows = [(run, step, *_values(record)) for record in records]
        await self._call(self._write, [_clear("finished", run), (_upsert("finished", 5), rows)], full=False)

    async def save_commit(self, run: str, record: CommitRecord, state: bytes | None) -> None:
        """The commit record: once it is durable, the step is committed."""
        order = " ".join(map(str, record.unit_order))
        row = (
            run,
            record.step,
            record.time,
            record.decider,
            record.optimizer,
            record.clip_coefficient,
            order,
            record.grad_norm,
            record.norm_type,
            record.other_norm,
            int(record.skipped),
        )
        writes: list[_Write] = [
            (_upsert("commits", 11), [row]),
            ("DELETE FROM commits WHERE run = ? AND step <= ?", [(run, record.step - KEPT_COMMITS)]),
            _clear("finished", run),
        ]
        if state is not None:
            writes.append((_upsert("states", 3), [(run, record.step, state)]))
        await self._call(self._write, writes)

    async def delete_run(self, run: str, last_epoch: int) -> None:
        """Deletes all of a run; keeps its highest epoch, which later runs start from."""
        keep = (
            "INSERT INTO facts VALUES ('deleted_last_epoch', ?) "
            "ON CONFLICT DO UPDATE SET value = max(value, excluded.value)"
        )
        await self._call(self._write, [*(_clear(table, run) for table in _RUN_TABLES), (keep, [(last_epoch,)])])

    async def _call(self, method: Callable[..., Result], *arguments: object, **options: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, partial(self._guarded, method, *arguments, **options)
        )

    def _guarded(self, method: Callable[..., Result], *arguments: object, **options: object) -> Result:
        try:
            return method(*arguments, **options)
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: sqlite3.Error) -> UnavailableError:
        return UnavailableError(
            f"the coordinator cannot keep its state in {self.path}: {error}: nothing was changed by this request; "
            "make room or mend the disk, and ask again",
            path=self.path,
        )

    def _open(self, directory: Path) -> sqlite3.Connection:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=2.0)
        except (OSError, sqlite3.Error) as error:
            raise UnavailableError(f"cannot open {self.path}: {error}", path=self.path) from error
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        except sqlite3.Error as error:
            database.close()
            if "locked" in str(error):
                raise ConflictError(f"{self.path} is in use by another coordinator", path=self.path) from error
            raise self._unavailable(error) from error
        if version not in (0, SCHEMA_VERSION):
            database.close()
            raise ConflictError(
                f"{self.path} has schema version {version}, expected {SCHEMA_VERSION}: "
                "use the version of Shardwell that wrote it, or another --state-dir",
                path=self.path,
            )
        return database

    def _begin_term(self) -> int:
        advance = "INSERT INTO facts VALUES ('term', 1) ON CONFLICT DO UPDATE SET value = value + 1"
        self._guarded(self._write, [(advance, [()])])
        return self._fact("term")

    def _fact(self, name: str) -> int:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row is not None else 0

    def _write(self, writes: Sequence[_Write], *, full: bool = True) -> None:
        database = self._database
        database.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
        database.execute("BEGIN IMMEDIATE")
        try:
            for statement, rows in writes:
                database.executemany(statement, rows)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _load(self) -> StoredState:
        servers = (
            ServerRecord(server_id, address, incarnation, epoch, budget_bytes, process, bool(departed))
            for server_id, address, incarnation, epoch, budget_bytes, process, departed in self._database.execute(
                "SELECT * FROM servers"
            )
        )
        names = [name for (name,) in self._database.execute("SELECT run FROM runs")]
        return StoredState(
            servers=tuple(servers),
            runs=tuple(self._load_run(name) for name in names),
            deleted_last_epoch=self._fact("deleted_last_epoch"),
        )

    def _load_run(self, run: str) -> StoredRun:
        (_, run_id, config, created, started, last_epoch, initializer, initializer_epoch), *_ = self._rows("runs", run)
        members = [
            MemberRecord(
                trainer,
                host,
                incarnation,
                epoch,
                rank,
                bool(live),
                bool(lapsed),
                None if accepts is None else bool(accepts),
            )
            for _, trainer, host, incarnation, epoch, rank, live, lapsed, accepts in self._rows("members", run)
        ]
        commits = [
            CommitRecord(
                step,
                time,
                decider,
                optimizer,
                clip,
                tuple(map(int, order.split())),
                grad_norm,
                norm_type,
                other_norm,
                bool(skipped),
            )
            for _, step, time, decider, optimizer, clip, order, grad_norm, norm_type, other_norm, skipped in self._rows(
                "commits", run
            )
        ]
        step = commits[-1].step + 1 if commits else 0
        states = self._rows("states", run)
        return StoredRun(
            record=RunRecord(
                run=run,
                run_id=run_id,
                config=config,
                created=created,
                started=bool(started),
                last_epoch=last_epoch,
                initializer=initializer,
                initializer_epoch=initializer_epoch,
                members=tuple(members),
                ranks=tuple(RankRecord(*row[1:]) for row in self._rows("ranks", run)),
                addresses=tuple((name, address) for _, name, address in self._rows("addresses", run)),
            ),
            units=tuple(self._load_units(run)),
            commits=tuple(commits),
            state=states[0][2] if states else None,
            finished=tuple(FinishedRecord(*row[2:]) for row in self._rows("finished", run) if row[1] == step),
        )

    def _load_units(self, run: str) -> list[UnitRecord]:
        shards: dict[int, list[ShardRecord]] = {}
        for _, unit_index, *shard in sorted(self._rows("shards", run)):
            shards.setdefault(unit_index, []).append(ShardRecord(*shard))
        return [
            UnitRecord(unit_index, spec, bool(published), tuple(shards.get(unit_index, ())))
            for _, unit_index, spec, published in self._rows("units", run)
        ]

    def _rows(self, table: str, run: str) -> list[Any]:
        """Rows of one run by their second column: the rank, name, index or step."""
        return self._database.execute(f"SELECT * FROM {table} WHERE run = ? ORDER BY 2", (run,)).fetchall()


_Write = tuple[str, Sequence[tuple[object, ...]]]


def _upsert(table: str, column_count: int) -> str:
    return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * column_count)})"


def _clear(table: str, run: str) -> _Write:
    return f"DELETE FROM {table} WHERE run = ?", [(run,)]


def _values(record: Any) -> tuple[object, ...]:
    """A record's fields in order: the columns of its table."""
    return tuple(getattr(record, field.name) for field in fields(record))
