"""A SQLite file with exclusive access and atomic, durable writes.

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

from shardwell_wire.errors import ConflictError, UnavailableError

Write = tuple[str, Sequence[tuple[object, ...]]]
"""A statement and the rows that it is executed for."""

_COUNTER_SCHEMA = "CREATE TABLE writes (count INTEGER NOT NULL); INSERT INTO writes VALUES (0);"
_INCREMENT_COUNTER = "UPDATE writes SET count = count + 1"

_LOG_PAGES = 100
"""Pages of the write-ahead log after which SQLite copies it to the file and overwrites it from its start. While the log
grows, each sync also has to store its new size, which takes longer than the data."""


class Database:
    """One SQLite file. All methods block. Not thread-safe: use it from one thread at a time.

    Args:
        path: The file. It is created if it does not exist.
        schema: Statements that create the tables of a new file.
        version: Version of the schema.
        upgrades: Statements that bring a file from a schema version to the next one, by the older version.

    Raises:
        ConflictError: Another process uses the file, or the file has a schema version without an upgrade.
        UnavailableError: The file cannot be read or written.
    """

    def __init__(self, path: Path, schema: str, version: int, upgrades: Mapping[int, str] | None = None) -> None:
        self.path, self._schema, self._version, self._upgrades = path, schema, version, upgrades or {}
        self.lost: UnavailableError | None = None
        """Set when the outcome of a write is unknown. Every later write raises it."""
        self._connection = self._open()
        self._made = self._count()
        """Number of transactions that are stored."""

    def close(self) -> None:
        self._connection.close()

    def read(self, statement: str, arguments: Sequence[object] = ()) -> list[Any]:
        """Returns the rows of a query."""
        try:
            return self._connection.execute(statement, arguments).fetchall()
        except sqlite3.Error as error:
            raise self._unchanged_error(error) from error

    def write(self, writes: Sequence[Write]) -> None:
        """Executes several statements in one transaction. Returns when the transaction is durable.

        Args:
            writes: The statements and their rows.

        Raises:
            UnavailableError: Nothing was changed; or, if ``lost`` is set, the outcome is unknown.
        """
        if self.lost is not None:
            raise self.lost
        try:
            self._begin(writes)
        except sqlite3.Error as error:
            raise self._unchanged_error(error) from error
        try:
            self._connection.execute("COMMIT")
            self._made += 1
        except sqlite3.Error as error:
            if not self._settle():
                raise self._unchanged_error(error) from error

    def _begin(self, writes: Sequence[Write]) -> None:
        """Executes everything except COMMIT."""
        database = self._connection
        database.execute("BEGIN IMMEDIATE")
        try:
            for statement, rows in writes:
                if rows:
                    database.executemany(statement, rows)
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
        return int(self.read("SELECT count FROM writes")[0][0])

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
                create = f"{self._schema} {_COUNTER_SCHEMA} PRAGMA user_version = {self._version};"
                database.executescript(f"BEGIN IMMEDIATE; {create} COMMIT;")
            while found in self._upgrades:
                upgrade = f"{self._upgrades[found]} PRAGMA user_version = {found + 1};"
                database.executescript(f"BEGIN IMMEDIATE; {upgrade} COMMIT;")
                found += 1
        except sqlite3.Error as error:
            database.close()
            if "locked" in str(error):
                raise ConflictError(f"{self.path} is in use by another coordinator", path=self.path) from error
            raise self._unchanged_error(error) from error
        if found not in (0, self._version):
            database.close()
            raise ConflictError(
                f"{self.path} has schema version {found}, expected {self._version}: "
                "use the version of Shardwell that wrote the file, or another --state-dir",
                path=self.path,
            )
        return database
