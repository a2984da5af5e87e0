"""What the coordinator's storage needs of a store: tables of rows, and changes that take effect together or not at all.

``Database`` keeps the tables in a SQLite file, ``EtcdStore`` in etcd. One contract suite checks both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwell_wire.errors import UnavailableError

SCHEMA_VERSION = 20
"""Version of the tables and their rows."""

KEYS: dict[str, tuple[str, ...]] = {
    "facts": ("name",),
    "deleted_runs": ("run_id",),
    "servers": ("server_id",),
    "runs": ("run",),
    "members": ("run", "trainer"),
    "ranks": ("run", "global_rank"),
    "addresses": ("run", "name"),
    "initializers": ("run", "global_rank"),
    "units": ("run", "unit_index"),
    "shards": ("run", "unit_index", "start_bytes"),
    "backups": ("run", "unit_index", "start_bytes", "stop_bytes", "server_id", "incarnation"),
    "commits": ("run", "step"),
    "states": ("run",),
    "checkpoints": ("run", "checkpoint_id"),
    "events": ("number",),
}
"""The tables, each with the columns that identify a row. These are its first columns."""

Values = tuple[object, ...]
"""Values of a row, or of its first columns: text, numbers, truth values, bytes and None."""


@dataclass(frozen=True, slots=True)
class Put:
    """Stores rows of a table. A row replaces the one with the same key."""

    table: str
    rows: Sequence[Values]


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes the rows of a table whose first columns have one of several values."""

    table: str
    keys: Sequence[Values]


Change = Put | Delete


class TableStore(ABC):
    """Tables that one coordinator at a time can change. All methods block. Use it from one thread at a time."""

    term: int
    """Term of this coordinator: rises with every process that opens the store."""
    lost: UnavailableError | None = None
    """Set when this coordinator can write no more, because the outcome of a write is unknown or another coordinator has
    taken over. Every later write raises it, and the coordinator must stop."""
    when_lost: Callable[[], object] = staticmethod(lambda: None)
    """Called, in any thread, when ``lost`` is set outside of a write."""

    @abstractmethod
    def rows(self, table: str, *first: object) -> list[Any]:
        """Returns the rows of a table whose first columns have the given values, in the order of their keys."""

    @abstractmethod
    def write(self, changes: Sequence[Change]) -> None:
        """Makes several changes, in order. Returns when they are durable.

        Raises:
            UnavailableError: Nothing was changed; or, if ``lost`` is set, the outcome is unknown.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases the store, so that another coordinator can open it."""
