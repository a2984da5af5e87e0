"""The rows in which a coordinator's state is stored; ``storage`` writes and reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A shard server, as stored."""

    server_id: str
    address: str
    incarnation: str
    epoch: int
    budget_bytes: int
    process: str = ""
    left: bool = False
    """Whether it said that it leaves the cluster."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A trainer, as stored."""

    trainer: str
    host: str
    incarnation: str
    epoch: int
    requested_rank: int | None
    live: bool
    lapsed: bool
    accepts_work: bool | None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A logical rank's rank assignment and lease, as stored."""

    global_rank: int
    owner: str
    holder: str
    epoch: int
    step: int
    """``attempt`` belongs to this step."""
    attempt: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything of a run that changes between commits, as stored."""

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
    """A shard and the server process that holds it, as stored."""

    start_bytes: int
    stop_bytes: int
    server_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """A unit, as stored."""

    unit_index: int
    spec: bytes
    published: bool
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, slots=True)
class FinishedRecord:
    """A finished work item, as stored."""

    global_rank: int
    attempt: int
    parts: bytes


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A committed step, as stored."""

    step: int
    time: float
    decider: str
    optimizer: bytes
    clip_coefficient: float
    unit_order: tuple[int, ...]
    grad_norm: float
    norm_type: float | None = None
    """Of the other norm that was asked for; None: none was."""
    other_norm: float | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class StoredRun:
    """All of a run, as loaded."""

    record: RunRecord
    units: tuple[UnitRecord, ...]
    commits: tuple[CommitRecord, ...]
    """The last few, oldest first."""
    state: bytes | None
    finished: tuple[FinishedRecord, ...]
    """Items of the step in flight; either all or none."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """Everything, as loaded."""

    servers: tuple[ServerRecord, ...]
    runs: tuple[StoredRun, ...]
    deleted_last_epoch: int
    """The highest epoch of a deleted run; 0 if none was."""
