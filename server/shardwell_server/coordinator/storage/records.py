"""Rows in which the coordinator's state is stored. ``storage.py`` writes and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Self

KEPT_COMMITS = 8
"""Commit records kept per run. Trainers are rarely more than one step behind."""


@dataclass(frozen=True, slots=True)
class Row:
    """A record of one table. Its fields are the last columns of the table, in order."""

    def to_row(self) -> tuple[object, ...]:
        """Returns the values of the columns."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        """Returns the record that ``to_row`` was called on."""
        return cls(*row)


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

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        record = cls(*row)
        return replace(
            record,
            has_left=bool(record.has_left),
            draining=bool(record.draining),
            restartable=bool(record.restartable),
        )


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

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        record = cls(*row)
        accepts = record.accepts_reassigned_work
        return replace(
            record, accepts_reassigned_work=None if accepts is None else bool(accepts), behind=bool(record.behind)
        )


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

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        record = cls(*row)
        return replace(record, vacant=bool(record.vacant))


@dataclass(frozen=True, slots=True)
class InitializerRecord(Row):
    """A stored trainer that sends initial values."""

    global_rank: int
    """Rank of dp rank 0 that holds the units."""
    trainer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The stored state of a run that can change between commits."""

    run: str
    run_id: str
    config: bytes
    created: float
    started: bool
    last_epoch: int
    members: tuple[MemberRecord, ...]
    ranks: tuple[RankRecord, ...]
    addresses: tuple[tuple[str, str], ...]
    initializers: tuple[InitializerRecord, ...] = ()
    placement: int = 0
    """Number of relocations of the run's shards."""
    rebalancing: bool = False
    """True while shards are moved to spread them evenly over the servers."""
    checkpoints: str = ""
    """Options for checkpoints, and the restore in progress. JSON."""
    parallel_plan: bytes | None = None
    """How the run's models are divided over tensor and pipeline ranks. None: not reported yet."""


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

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        record = cls(*row)
        return replace(record, state=BackupState(record.state))

    @property
    def is_wanted(self) -> bool:
        """True if the backup is in sync or to be built."""
        return self.state in (BackupState.BUILDING, BackupState.IN_SYNC)

    @property
    def in_sync(self) -> bool:
        """True if the backup can replace the primary without a loss."""
        return self.state is BackupState.IN_SYNC


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """A stored unit."""

    unit_index: int
    spec: bytes
    published: bool
    shards: tuple[ShardRecord, ...]
    """The primaries, in the order of their ranges."""
    backups: tuple[BackupRecord, ...] = ()


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

    @property
    def staleness(self) -> int | None:
        """Number of commits between the version that the item read and its own commit. None: in a synchronous run."""
        return self.step - self.base_version if self.trainer else None

    def to_row(self) -> tuple[object, ...]:
        """Returns the values of the columns. Sequences are stored as text."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        columns["unit_order"] = " ".join(map(str, self.unit_order))
        columns["other_norms"] = " ".join(repr(value) for norm in self.other_norms for value in norm)
        return tuple(columns.values())

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        columns = dict(zip((field.name for field in fields(cls)), row, strict=True))
        columns["unit_order"] = tuple(map(int, columns["unit_order"].split()))
        norms = [float(value) for value in columns["other_norms"].split()]
        columns["other_norms"] = tuple(zip(norms[::3], norms[1::3], norms[2::3], strict=True))
        columns["skipped"] = bool(columns["skipped"])
        return cls(**columns)


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

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        record = cls(*row)
        return replace(record, is_complete=bool(record.is_complete))


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
