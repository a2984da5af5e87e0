"""What survives a coordinator's restart: one SQLite file. Blocking; ``Storage.call`` keeps it off the event loop.

Everything that was told to a trainer or a server is here first. What is not here (polls in
progress, hyper-parameters handed in) comes again with the next polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shardwell_server.coordinator.storage.database import Database, Write
from shardwell_server.coordinator.storage.records import (
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
from shardwell_wire.errors import UnavailableError

SCHEMA_VERSION = 7

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

_CHANGING = {"members": "trainer", "ranks": "global_rank", "addresses": "name"}
"""Tables of which a save writes only the rows that changed, and the columns that name a row of a run."""
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwell-storage")
        self._database = Database(directory / FILE_NAME, _SCHEMA, SCHEMA_VERSION)
        self.term = self._begin_term()
        """Rises with every process that opens the file."""
        self.server_epoch = self._fact("server_epoch")
        """The highest epoch of the servers that were forgotten."""
        self._stored: dict[str, RunRecord] = {}
        """What the file holds of each run, by name: only what differs is written."""
        self.lost = asyncio.Event()
        """Set when nobody can tell any more what the file holds: this coordinator must end."""

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._database.close()

    @property
    def why_lost(self) -> UnavailableError | None:
        """Why nobody can tell what the file holds."""
        return self._database.lost

    async def load(self) -> StoredState:
        """Everything."""
        return await self._call(self._load)

    async def save_server(self, record: ServerRecord) -> None:
        """Returns once it is durable, as all ``save`` methods."""
        await self._call(self._database.write, [(_upsert("servers", 7), [_values(record)])])

    async def delete_server(self, server_id: str, last_epoch: int) -> None:
        """Forgets a server. Its epoch stays used up.

        Args:
            server_id: Name of the server.
            last_epoch: The highest epoch of any server.
        """
        delete = ("DELETE FROM servers WHERE server_id = ?", [(server_id,)])
        await self._call(self._database.write, [delete, (_upsert("facts", 2), [("server_epoch", last_epoch)])])

    async def save_run(self, record: RunRecord) -> None:
        """Writes what differs from the record that was saved before."""
        await self._call(self._write_run, record)

    def _write_run(self, record: RunRecord) -> None:
        run, former = record.run, self._stored.get(record.run)
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
        writes: list[Write] = [(_upsert("runs", 8), [row])]
        for table, key in _CHANGING.items():
            before = _rows_by_key(former, table)
            now = _rows_by_key(record, table)
            gone = [(run, each) for each in before.keys() - now.keys()]
            changed = [(run, *values) for each, values in now.items() if before.get(each) != values]
            if gone:
                writes.append((f"DELETE FROM {table} WHERE run = ? AND {key} = ?", gone))
            if changed:
                writes.append((_upsert(table, 1 + len(changed[0][1:])), changed))
        self._database.write(writes)
        self._stored[run] = record

    async def save_units(self, run: str, records: Sequence[UnitRecord]) -> None:
        units = [(run, record.unit_index, record.spec, record.published) for record in records]
        shards = [
            (run, record.unit_index, at.start_bytes, at.stop_bytes, at.server_id, at.incarnation)
            for record in records
            for at in record.shards
        ]
        former = [(run, record.unit_index) for record in records]
        writes = [
            (_upsert("units", 4), units),
            ("DELETE FROM shards WHERE run = ? AND unit_index = ?", former),
            (_upsert("shards", 6), shards),
        ]
        await self._call(self._database.write, writes)

    async def save_finished(self, run: str, step: int, records: Sequence[FinishedRecord]) -> None:
        """Survives the death of this process at once, of the machine only from the next commit on."""
        rows = [(run, step, *_values(record)) for record in records]
        await self._call(self._database.write, [_clear("finished", run), (_upsert("finished", 5), rows)], full=False)

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
        writes: list[Write] = [
            (_upsert("commits", 11), [row]),
            ("DELETE FROM commits WHERE run = ? AND step <= ?", [(run, record.step - KEPT_COMMITS)]),
            _clear("finished", run),
        ]
        if state is not None:
            writes.append((_upsert("states", 3), [(run, record.step, state)]))
        await self._call(self._database.write, writes)

    async def delete_run(self, run: str, last_epoch: int) -> None:
        """Deletes all of a run; keeps its highest epoch, which later runs start from."""
        keep = (
            "INSERT INTO facts VALUES ('deleted_last_epoch', ?) "
            "ON CONFLICT DO UPDATE SET value = max(value, excluded.value)"
        )
        await self._call(self._delete_run, run, (keep, [(last_epoch,)]))

    def _delete_run(self, run: str, keep: Write) -> None:
        self._database.write([*(_clear(table, run) for table in _RUN_TABLES), keep])
        self._stored.pop(run, None)

    async def _call(self, method: Callable[..., Result], *arguments: object, **options: object) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, partial(method, *arguments, **options)
            )
        finally:
            if self._database.lost is not None:
                self.lost.set()

    def _begin_term(self) -> int:
        advance = "INSERT INTO facts VALUES ('term', 1) ON CONFLICT DO UPDATE SET value = value + 1"
        self._database.write([(advance, [()])])
        return self._fact("term")

    def _fact(self, name: str) -> int:
        rows = self._database.read("SELECT value FROM facts WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else 0

    def _load(self) -> StoredState:
        servers = (
            ServerRecord(server_id, address, incarnation, epoch, budget_bytes, process, bool(departed))
            for server_id, address, incarnation, epoch, budget_bytes, process, departed in self._database.read(
                "SELECT * FROM servers"
            )
        )
        names = [name for (name,) in self._database.read("SELECT run FROM runs")]
        runs = [self._load_run(name) for name in names]
        self._stored = {each.record.run: each.record for each in runs}
        return StoredState(
            servers=tuple(servers),
            runs=tuple(runs),
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
        return self._database.read(f"SELECT * FROM {table} WHERE run = ? ORDER BY 2", (run,))


def _upsert(table: str, column_count: int) -> str:
    return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * column_count)})"


def _clear(table: str, run: str) -> Write:
    return f"DELETE FROM {table} WHERE run = ?", [(run,)]


def _rows_by_key(record: RunRecord | None, table: str) -> dict[object, tuple[object, ...]]:
    """A record's rows of one table, without the run, by their first column."""
    if record is None:
        return {}
    if table == "addresses":
        return {address[0]: address for address in record.addresses}
    rows = record.members if table == "members" else record.ranks
    return {(values := _values(row))[0]: values for row in rows}


def _values(record: Any) -> tuple[object, ...]:
    """A record's fields in order: the columns of its table."""
    return tuple(getattr(record, field.name) for field in fields(record))
