"""Rows in which the coordinator's state is stored, and the stores of their tables.

``durable_state.py`` writes and reads the rows. ``Database`` keeps the tables in a SQLite file, ``EtcdStore`` in etcd.
One contract suite checks both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from shardwell_wire.errors import UnavailableError

KEPT_COMMITS = 8
"""Commit records kept per run. Trainers are rarely more than one step behind."""
KEPT_EVENTS = 256
"""Capacity of the queues of routine events, of other events, and of new events per watcher. Stored events: as many."""


@dataclass(frozen=True, slots=True)
class Row:
    """A record of one table. Its positional fields are the last columns of the table, in order.

    Sequences of numbers are stored as text. Keyword-only fields are rows of other tables.
    """

    def to_row(self) -> tuple[object, ...]:
        """Returns the values of the columns."""
        return tuple(_to_column(getattr(self, column.name)) for column in columns_of(type(self)))

    @classmethod
    def from_row(cls, row: Sequence[Any], **other: tuple[Any, ...]) -> Self:
        """Returns the record that ``to_row`` was called on.

        Args:
            row: The values of the columns. A row of an older schema may lack the last ones, which get their defaults.
            other: Values of the keyword-only fields.
        """
        pairs = zip(columns_of(cls), row, strict=len(row) > len(columns_of(cls)))
        values = (_FROM_COLUMN.get(str(column.type), lambda stored: stored)(value) for column, value in pairs)
        return cls(*values, **other)


def columns_of(kind: type[Row]) -> tuple[Field[Any], ...]:
    """Returns the fields that are columns, in order."""
    return tuple(each for each in fields(kind) if not each.kw_only)


def _to_column(value: object) -> object:
    return " ".join(repr(each) for part in value for each in _flat(part)) if isinstance(value, tuple) else value


def _flat(part: object) -> tuple[object, ...]:
    return part if isinstance(part, tuple) else (part,)


@dataclass(frozen=True, slots=True)
class ServerRecord(Row):
    """A stored shard server."""

    server_id: str
    address: str
    incarnation: str
    epoch: int
    budget_bytes: int
    process: str = ""
    has_left: bool = False
    """True if the server deregistered."""
    draining: bool = False
    """True if the server must hand all its shards to other servers."""
    restartable: bool = False
    """True if another process of this id can take up the shards after this one has ended."""


@dataclass(frozen=True, slots=True)
class MemberRecord(Row):
    """A stored trainer."""

    trainer: str
    host: str
    incarnation: str
    epoch: int
    requested_rank: int | None
    state: str
    """Value of a ``MemberState``."""
    accepts_reassigned_work: bool | None
    process: str = ""
    behind: bool = False
    """See ``Member.behind``."""


@dataclass(frozen=True, slots=True)
class RankRecord(Row):
    """A stored logical rank: its owner, and the lease of its dp rank's work item."""

    global_rank: int
    owner: str
    trainer: str
    """Trainer that computes or computed the rank's part of the work item."""
    epoch: int
    step: int
    """Step that ``attempt`` belongs to: the version that the work item reads."""
    attempt: int
    last_attempt: int = 0
    """Highest attempt of the work item and its twins."""
    vacant: bool = False
    """True if the work item is vacant, or was finished by trainers that were lost. These may be present again."""
    replica_epoch: int = 0
    """Epoch of the replica that owns the dp rank."""
    number: int = 0
    """Number of committed work items of the dp rank."""


@dataclass(frozen=True, slots=True)
class AddressRecord(Row):
    """A stored address that trainers exchange."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class InitializerRecord(Row):
    """A stored trainer that sends initial values."""

    global_rank: int
    """Rank of dp rank 0 that holds the units."""
    trainer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RunRecord(Row):
    """The stored state of a run that can change between commits."""

    run: str
    run_id: str
    config: bytes
    created: float
    started: bool
    last_epoch: int
    placement: int = 0
    """Number of relocations of the run's shards."""
    rebalancing: bool = False
    """True while shards are moved to spread them evenly over the servers."""
    checkpoints: str = ""
    """Options for checkpoints, and the restore in progress. JSON."""
    parallel_plan: bytes | None = None
    """How the run's models are divided over tensor and pipeline ranks. None: not reported yet."""
    created_by: str = ""
    """The trainer that joined first. Empty: not known."""
    created_on: str = ""
    """Host of that trainer. Empty: not known."""
    ended_step: int | None = None
    """Number of committed steps at which a trainer's loop has ended. None: not known."""
    published: str = ""
    """Published versions by name. JSON. Empty: none."""
    members: tuple[MemberRecord, ...] = field(default=(), kw_only=True)
    ranks: tuple[RankRecord, ...] = field(default=(), kw_only=True)
    addresses: tuple[AddressRecord, ...] = field(default=(), kw_only=True)
    initializers: tuple[InitializerRecord, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class ShardRecord(Row):
    """A stored shard and the server process that owns it."""

    start_bytes: int
    stop_bytes: int
    server_id: str
    incarnation: str

    @property
    def process(self) -> tuple[str, str]:
        """The server process, as (server id, incarnation)."""
        return (self.server_id, self.incarnation)

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


class BackupState(StrEnum):
    """State of a backup."""

    BUILDING = "building"
    """The server does not have the committed version, or missed a step. The backup is built again."""
    IN_SYNC = "in sync"
    """The server has the committed version and receives every prepared step. It can replace the primary."""
    FORMER = "former"
    """The copy was the primary or in sync when the last step was committed, and gets no further step. It can replace
    the primary until the primary is confirmed, or the next step is committed."""
    RELEASING = "releasing"
    """The server must release its copy."""


@dataclass(frozen=True, slots=True)
class BackupRecord(ShardRecord):
    """A stored copy of a shard on a server process other than its primary."""

    state: BackupState = BackupState.BUILDING
    placement: int = 0
    """Number of the backup's reservation on its server. 0: not built yet."""

    @property
    def is_wanted(self) -> bool:
        """True if the backup is in sync or to be built."""
        return self.state in (BackupState.BUILDING, BackupState.IN_SYNC)

    @property
    def in_sync(self) -> bool:
        """True if the backup can replace the primary without a loss."""
        return self.state is BackupState.IN_SYNC


@dataclass(frozen=True, slots=True)
class UnitRecord(Row):
    """A stored unit."""

    unit_index: int
    spec: bytes
    published: bool
    shards: tuple[ShardRecord, ...] = field(default=(), kw_only=True)
    """The primaries, in the order of their ranges."""
    backups: tuple[BackupRecord, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class CommitRecord(Row):
    """The durable record that makes a step final."""

    step: int
    time: float
    leader: str
    """Trainer whose proposal was committed, and its ranks."""
    optimizer: bytes
    clip_coefficient: float
    unit_order: tuple[int, ...]
    grad_norm: float
    other_norms: tuple[tuple[float, float, float], ...] = ()
    """Type, bound and value of the norms that were requested besides the Euclidean norm. Bound 0: not clamped."""
    skipped: bool = False
    """True if a gradient was not finite and the step changed no parameter."""
    trainer: str = ""
    """In an asynchronous run: the trainer that computed the item."""
    dp_rank: int = 0
    """In an asynchronous run: the data rank of the item."""
    item: int = 0
    """In an asynchronous run: the number of the item in its data rank."""
    base_version: int = 0
    """In an asynchronous run: the version that the item read."""
    means: str = ""
    """Means over the data ranks of the numbers that training scripts have logged: JSON, by name. Empty: none."""

    @property
    def staleness(self) -> int | None:
        """Number of commits between the version that the item read and its own commit. None: in a synchronous run."""
        return self.step - self.base_version if self.trainer else None


@dataclass(frozen=True, slots=True)
class CheckpointRecord(Row):
    """A stored checkpoint, complete or not."""

    checkpoint_id: str
    step: int
    """Version of the units in it."""
    url: str
    size_bytes: int
    """0 until the checkpoint is complete."""
    time: float
    """Seconds since 1970 at which it began or was complete."""
    is_complete: bool


@dataclass(frozen=True, slots=True)
class EventRecord(Row):
    """A stored event, see ``EventLog``."""

    time: float
    """Seconds since 1970."""
    kind: str
    run: str
    message: str


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Everything that is stored of one run."""

    record: RunRecord
    units: tuple[UnitRecord, ...]
    commits: tuple[CommitRecord, ...]
    """The most recent commit records, oldest first."""
    state: bytes | None
    checkpoints: tuple[CheckpointRecord, ...]
    """In the order in which they began."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """Everything that is stored."""

    servers: tuple[ServerRecord, ...]
    runs: tuple[StoredRun, ...]
    deleted_last_epoch: int
    """Highest epoch of a deleted run. 0: no run was deleted."""
    deleted_run_ids: frozenset[str]
    """Ids of all deleted runs. No run gets one of them again."""
    events: tuple[EventRecord, ...] = ()
    """The most recent events that are not routine, oldest first."""


def _norms(text: str) -> tuple[tuple[float, ...], ...]:
    values = list(map(float, text.split()))
    return tuple(zip(values[::3], values[1::3], values[2::3], strict=True))


_FROM_COLUMN: Mapping[str, Callable[[Any], Any]] = {
    "bool": bool,
    "bool | None": lambda value: None if value is None else bool(value),
    "BackupState": BackupState,
    "tuple[int, ...]": lambda text: tuple(map(int, text.split())),
    "tuple[tuple[float, float, float], ...]": _norms,
}
"""How the value of a field is read from its column, by the field's type. Other values are stored as they are."""


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

RECORDS: dict[str, type[Row]] = {
    "servers": ServerRecord,
    "runs": RunRecord,
    "members": MemberRecord,
    "ranks": RankRecord,
    "addresses": AddressRecord,
    "initializers": InitializerRecord,
    "units": UnitRecord,
    "shards": ShardRecord,
    "backups": BackupRecord,
    "commits": CommitRecord,
    "checkpoints": CheckpointRecord,
    "events": EventRecord,
}
"""The tables of records. Columns of a key that are no fields of the record come first."""

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
