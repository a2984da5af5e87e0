"""Rows in which the coordinator's state is stored. ``storage.py`` writes and reads them."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_COMMITS = 8
"""Commit records kept per run. Trainers are rarely more than one step behind."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A stored shard server."""

    server_id: str
    address: str
    incarnation: str
    epoch: int
    budget_bytes: int
    process: str = ""
    left: bool = False
    """True if the server deregistered."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A stored trainer."""

    trainer: str
    host: str
    incarnation: str
    epoch: int
    requested_rank: int | None
    state: str
    """Value of a ``MemberState``."""
    accepts_reassigned_work: bool | None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A stored logical rank: its owner and the lease of its work item."""

    global_rank: int
    owner: str
    trainer: str
    """Trainer that the work item is or was leased to."""
    epoch: int
    step: int
    """Step that ``attempt`` belongs to."""
    attempt: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The stored state of a run that can change between commits."""

    run: str
    run_id: str
    config: bytes
    created: float
    started: bool
    last_epoch: int
    initializer: str | None
    initializer_epoch: int
    members: tuple[MemberRecord, ...]
    ranks: tuple[RankRecord, ...]
    addresses: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A stored shard and the server process that owns it."""

    start_bytes: int
    stop_bytes: int
    server_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """A stored unit."""

    unit_index: int
    spec: bytes
    published: bool
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, slots=True)
class FinishedRecord:
    """A stored finished work item."""

    global_rank: int
    attempt: int
    parts: bytes


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The durable record that makes a step final."""

    step: int
    time: float
    leader: str
    """Trainer whose proposal was committed, and its ranks."""
    optimizer: bytes
    clip_coefficient: float
    unit_order: tuple[int, ...]
    grad_norm: float
    norm_type: float | None = None
    """Type of ``other_norm``. None: no other norm was requested."""
    other_norm: float | None = None
    skipped: bool = False
    """True if a gradient was not finite and the step changed no parameter."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Everything that is stored of one run."""

    record: RunRecord
    units: tuple[UnitRecord, ...]
    commits: tuple[CommitRecord, ...]
    """The most recent commit records, oldest first."""
    state: bytes | None
    finished: tuple[FinishedRecord, ...]
    """Finished items of the step in flight: either all or none."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """Everything that is stored."""

    servers: tuple[ServerRecord, ...]
    runs: tuple[StoredRun, ...]
    deleted_last_epoch: int
    """Highest epoch of a deleted run. 0: no run was deleted."""
