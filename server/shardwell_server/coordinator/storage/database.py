"""One SQLite file that this process alone has open, and in which a change is durable, undone, or ends the process.

Note: a COMMIT that fails
    SQLite writes a transaction to its log and then has the log reach the disk. If the second fails, COMMIT raises,
    though the log may hold all of the transaction: the next process to open the file would find it committed. Whoever
    was told that it failed would be wrong. After a COMMIT that failed, the file is therefore opened again, which reads
    the log as the next process would, and written once more, so that what was read is what stays. If that fails too,
    nobody can tell what became of the transaction, and the database takes nothing any more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwell_wire.errors import ConflictError, UnavailableError

Write = tuple[str, Sequence[tuple[object, ...]]]
"""A statement, and the rows that it is executed for."""

_COUNT_SCHEMA = "CREATE TABLE writes (count INTEGER NOT NULL); INSERT INTO writes VALUES (0);"
_COUNT = "UPDATE writes SET count = count + 1"


class Database:
    """Blocking; for one thread at a time.

    Args:
        path: The file; made if it is not there.
        schema: Statements that make the tables of a new file.
        version: Of the schema.

    Raises:
        ConflictError: Another process uses the file, or it is of another schema.
        UnavailableError: The file cannot be read or written.
    """

    def __init__(self, path: Path, schema: str, version: int) -> None:
        self.path, self._schema, self._version = path, schema, version
        self.lost: UnavailableError | None = None
        """Why it is not known what the file holds; None: it is known."""
        self._connection = self._open()

    def close(self) -> None:
        self._connection.close()

    def read(self, statement: str, arguments: Sequence[object] = ()) -> list[Any]:
        """The rows of a query."""
        try:
            return self._connection.execute(statement, arguments).fetchall()
        except sqlite3.Error as error:
            raise self._unchanged(error) from error

    def write(self, writes: Sequence[Write], *, full: bool = True) -> None:
        """Makes one change of several statements. Returns once it is durable.

        Args:
            writes: The statements.
            full: Whether it survives the end of the machine at once, not only that of this process.

        Raises:
            UnavailableError: Nothing was changed; or ``lost`` is set, and nobody knows.
        """
        if self.lost is not None:
            raise self.lost
        try:
            number = self._begin(writes, full=full)
        except sqlite3.Error as error:
            raise self._unchanged(error) from error
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if not self._settle(number):
                raise self._unchanged(error) from error

    def _begin(self, writes: Sequence[Write], *, full: bool) -> int:
        """Executes everything but the COMMIT; returns the number of this change."""
        database = self._connection
        database.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
        database.execute("BEGIN IMMEDIATE")
        try:
            for statement, rows in writes:
                database.executemany(statement, rows)
            database.execute(_COUNT)
            return self._count()
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _settle(self, number: int) -> bool:
        """Whether the change whose COMMIT failed was made after all; see the note above."""
        try:
            self._connection.close()
            self._connection = self._open()
            made = self._count() >= number
            ((busy, *_),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if busy:
                raise sqlite3.OperationalError("the log is in use")
            self._connection.execute(_COUNT)  # commits by itself
        except (sqlite3.Error, UnavailableError, ConflictError) as error:
            self.lost = UnavailableError(
                f"{self.path}: a change could not be completed, and it cannot be found out what became of it: {error}: "
                "this coordinator ends; mend the disk and start it again, then it goes on with what the file holds",
                path=self.path,
            )
            raise self.lost from error
        return made

    def _count(self) -> int:
        return int(self._connection.execute("SELECT count FROM writes").fetchone()[0])

    def _unchanged(self, error: sqlite3.Error) -> UnavailableError:
        return UnavailableError(
            f"the coordinator cannot keep its state in {self.path}: {error}: nothing was changed by this request; "
            "make room or mend the disk, and ask again",
            path=self.path,
        )

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=2.0)
        except (OSError, sqlite3.Error) as error:
            raise UnavailableError(f"cannot open {self.path}: {error}", path=self.path) from error
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            found = database.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                made = f"{self._schema} {_COUNT_SCHEMA} PRAGMA user_version = {self._version};"
                database.executescript(f"BEGIN IMMEDIATE; {made} COMMIT;")
        except sqlite3.Error as error:
            database.close()
            if "locked" in str(error):
                raise ConflictError(f"{self.path} is in use by another coordinator", path=self.path) from error
            raise self._unchanged(error) from error
        if found not in (0, self._version):
            database.close()
            raise ConflictError(
                f"{self.path} has schema version {found}, expected {self._version}: "
                "use the version of Shardwell that wrote it, or another --state-dir",
                path=self.path,
            )
        return database
