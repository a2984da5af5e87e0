"""The tables of the coordinator in a SQLite file, with exclusive access and atomic, durable writes.

Note: [Failed COMMIT]
    SQLite appends a transaction to its write-ahead log and then syncs the log. If the sync fails, COMMIT raises, but
    the log may contain the whole transaction: the next process that opens the file would find it committed. Reporting
    a failed write would then be wrong. After a failed COMMIT, ``Database`` therefore reopens the file, which replays
    the log as the next process would. It reads whether the change was made, and makes that outcome final with one
    more write. If this fails too, the outcome is unknown and the database refuses all further writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwell_server.coordinator.storage.records import (
    KEYS,
    RECORDS,
    SCHEMA_VERSION,
    Change,
    Put,
    TableStore,
    Values,
    columns_of,
)
from shardwell_wire.errors import ConflictError, UnavailableError

FILE_NAME = "coordinator.sqlite"

_TYPES = {"int": "INTEGER", "bool": "INTEGER", "float": "REAL", "bytes": "BLOB"}
"""Types of columns by the types of fields. Others are text."""


def _create(table: str, columns: Mapping[str, str] | None = None) -> str:
    """Returns the statement that creates a table: the columns of its key, and those of its records.

    Args:
        columns: The columns and their types. None: those of the records.
    """
    if columns is None:
        own = {each.name: str(each.type) for each in columns_of(RECORDS[table])}
        columns = {name: "str" if name == "run" else "int" for name in KEYS[table] if name not in own} | own
    described = []
    for name, kind in columns.items():
        stored, optional, _ = kind.partition(" | None")
        described.append(f"{name} {_TYPES.get(stored, 'TEXT')}{'' if optional else ' NOT NULL'}")
    return f"CREATE TABLE {table} ({', '.join(described)}, PRIMARY KEY ({', '.join(KEYS[table])})) WITHOUT ROWID;"


_SCHEMA = " ".join(
    [
        _create("facts", {"name": "str", "value": "int"}),
        _create("deleted_runs", {"run_id": "str"}),
        _create("states", {"run": "str", "step": "int", "state": "bytes"}),
        *map(_create, RECORDS),
    ]
)

_UPGRADES = {
    18: "ALTER TABLE runs ADD COLUMN created_by TEXT NOT NULL DEFAULT ''; "
    "ALTER TABLE runs ADD COLUMN created_on TEXT NOT NULL DEFAULT ''; ALTER TABLE runs ADD COLUMN ended_step INTEGER; "
    f"{_create('events')}",
    19: "ALTER TABLE runs ADD COLUMN published TEXT NOT NULL DEFAULT '';",
}
"""Statements that bring a file of an older schema version to the next version."""

_COUNTER_SCHEMA = "CREATE TABLE writes (count INTEGER NOT NULL); INSERT INTO writes VALUES (0);"
_INCREMENT_COUNTER = "UPDATE writes SET count = count + 1"

_LOG_PAGES = 100
"""Pages of the write-ahead log after which SQLite copies it to the file and overwrites it from its start. While the log
grows, each sync also has to store its new size, which takes longer than the data."""


class Database(TableStore):
    """The tables in one SQLite file.

    Args:
        directory: Directory of the file. Both are created if they do not exist.

    Raises:
        ConflictError: Another process uses the file, or the file has a schema version without an upgrade.
        UnavailableError: The file cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._connection = self._open()
        self._made = self._count()
        """Number of transactions that are stored."""
        self.term = dict(self.rows("facts")).get("term", 0) + 1
        self.write([Put("facts", [("term", self.term)])])

    def close(self) -> None:
        self._connection.close()

    def rows(self, table: str, *first: object) -> list[Any]:
        where = f" WHERE {_equal(table, len(first))}" if first else ""
        return self._read(f"SELECT * FROM {table}{where} ORDER BY {', '.join(KEYS[table])}", first)

    def _read(self, statement: str, arguments: Sequence[object] = ()) -> list[Any]:
        try:
            return self._connection.execute(statement, arguments).fetchall()
        except sqlite3.Error as error:
            raise self._unchanged_error(error) from error

    def write(self, changes: Sequence[Change]) -> None:
        if self.lost is not None:
            raise self.lost
        try:
            self._begin(changes)
        except sqlite3.Error as error:
            raise self._unchanged_error(error) from error
        try:
            self._connection.execute("COMMIT")
            self._made += 1
        except sqlite3.Error as error:
            if not self._settle():
                raise self._unchanged_error(error) from error

    def _begin(self, changes: Sequence[Change]) -> None:
        """Executes everything except COMMIT."""
        database = self._connection
        database.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in map(_statement, changes):
                if values:
                    database.executemany(statement, values)
            database.execute(_INCREMENT_COUNTER)
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _settle(self) -> bool:
        """Returns True if the transaction whose COMMIT failed took effect. See Note: [Failed COMMIT]."""
        try:
            self._connection.close()
            self._connection = self._open()
            is_made = self._count() > self._made
            ((busy, *_),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if busy:
                raise sqlite3.OperationalError("the log is in use")
            self._connection.execute(_INCREMENT_COUNTER)  # outside a transaction: commits at once
            self._made = self._count()
        except (sqlite3.Error, UnavailableError, ConflictError) as error:
            self.lost = UnavailableError(
                f"{self.path}: a write failed and its outcome cannot be determined: {error}: this coordinator stops; "
                "fix the disk and start the coordinator again, which then continues from the contents of the file",
                path=self.path,
            )
            raise self.lost from error
        return is_made

    def _count(self) -> int:
        return int(self._read("SELECT count FROM writes")[0][0])

    def _unchanged_error(self, error: sqlite3.Error) -> UnavailableError:
        return UnavailableError(
            f"the coordinator cannot write its state to {self.path}: {error}: this request changed nothing; "
            "free disk space or fix the disk, then retry",
            path=self.path,
        )

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=2.0)
        except (OSError, sqlite3.Error) as error:
            raise UnavailableError(f"cannot open {self.path}: {error}", path=self.path) from error
        try:
            # The first access locks the file until the connection is closed, so a second coordinator fails here.
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            found = database.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                create = f"{_SCHEMA} {_COUNTER_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};"
                database.executescript(f"BEGIN IMMEDIATE; {create} COMMIT;")
            while found in _UPGRADES:
                upgrade = f"{_UPGRADES[found]} PRAGMA user_version = {found + 1};"
                database.executescript(f"BEGIN IMMEDIATE; {upgrade} COMMIT;")
                found += 1
        except sqlite3.Error as error:
            database.close()
            if "locked" in str(error):
                raise ConflictError(f"{self.path} is in use by another coordinator", path=self.path) from error
            raise self._unchanged_error(error) from error
        if found not in (0, SCHEMA_VERSION):
            database.close()
            raise ConflictError(
                f"{self.path} has schema version {found}, expected {SCHEMA_VERSION}: "
                "use the version of Shardwell that wrote the file, or another --state-dir",
                path=self.path,
            )
        return database


def _statement(change: Change) -> tuple[str, Sequence[Values]]:
    """Returns the statement of a change, and the values that it is executed with."""
    table = change.table
    if isinstance(change, Put):
        columns = len(change.rows[0]) if change.rows else 1
        return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * columns)})", change.rows
    return f"DELETE FROM {table} WHERE {_equal(table, len(change.keys[0]) if change.keys else 1)}", change.keys


def _equal(table: str, count: int) -> str:
    """Returns the condition that the first columns of a table have given values."""
    return " AND ".join(f"{column} = ?" for column in KEYS[table][:count])
