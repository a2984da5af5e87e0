"""Checkpoints of a run: its options, the checkpoint in flight, the complete ones, and loading the run from one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from shardwell_server.coordinator.storage.records import CheckpointRecord
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import FileRecord
from shardwell_wire.errors import ConflictError, InvalidRequestError, ShardwellError, StepStateError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2

_FILE_PREFIX = "residuals-"
_MAX_ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class ResidualReport:
    """One trainer's residuals in a checkpoint."""

    dp_ranks: frozenset[int]
    """Data ranks whose residuals the trainer had."""
    file: FileRecord | None
    """None: all of them are zero."""
    error: str
    """Why the file was not written. Empty: no error."""

    @classmethod
    def from_proto(cls, request: coordinator_pb2.AddResidualsRequest, dp: int) -> ResidualReport:
        """Decodes and checks a report.

        Raises:
            InvalidRequestError: A field is invalid.
        """
        ranks = frozenset(request.dp_ranks)
        if any(rank >= dp for rank in ranks):
            raise InvalidRequestError(f"dp_ranks are {sorted(ranks)}: expected ranks below {dp}")
        file = None
        if request.file_json:
            try:
                file = FileRecord.from_dict(json.loads(request.file_json))
            except (ValueError, TypeError, ShardwellError) as error:
                raise InvalidRequestError(f"file_json is not the entry of a file: {error}") from error
            if not file.name.startswith(_FILE_PREFIX):
                raise InvalidRequestError(f"file_json names {file.name!r}: expected a name with {_FILE_PREFIX!r}")
        return cls(ranks, file, request.error[:_MAX_ERROR_LENGTH])


@dataclass(slots=True)
class ResidualReports:
    """The reports of all trainers about one checkpoint."""

    by_trainer: dict[str, ResidualReport] = field(default_factory=dict)
    complete: bool = False
    """True once the coordinator waits for no more reports."""

    def are_missing_of(self, trainer: str) -> bool:
        """True if the coordinator waits for the report of a trainer."""
        return not self.complete and trainer not in self.by_trainer

    def add(self, trainer: str, report: ResidualReport) -> None:
        """Adds a report. A report that was added before, or that has no file although a former one had, is ignored.

        Raises:
            StepStateError: It is too late.
        """
        former = self.by_trainer.get(trainer)
        if former is not None and (former == report or (former.file is not None and report.file is None)):
            return
        if self.complete:
            raise StepStateError("the checkpoint is being completed without these residuals")
        self.by_trainer[trainer] = report

    def end(self) -> Sequence[tuple[str, ResidualReport]]:
        """Returns all reports with their trainers. Later ones are refused."""
        self.complete = True
        return list(self.by_trainer.items())


_REMEMBERED_FAILURES = 16
"""Failed checkpoints whose errors are remembered for callers that ask for them."""


_TIME_STEP_S = 1e-3
"""Least difference of the times of two checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """When and where checkpoints of a run are saved."""

    directory: str = ""
    """Folder of all runs: a path or URL. Empty: the run saves no checkpoints."""
    every_commits: int = 0
    """Commits between two checkpoints. 0: only on request."""
    keep: int = 0
    """Number of checkpoints to keep. 0: all."""

    def changed_by(self, request: coordinator_pb2.RunConfig) -> CheckpointOptions:
        """Returns the options with those that a trainer has set.

        Raises:
            InvalidRequestError: There are to be checkpoints, but no folder.
        """
        changed = replace(
            self,
            directory=request.checkpoint_dir if request.HasField("checkpoint_dir") else self.directory,
            every_commits=request.checkpoint_every if request.HasField("checkpoint_every") else self.every_commits,
            keep=request.checkpoint_keep if request.HasField("checkpoint_keep") else self.keep,
        )
        if request.HasField("checkpoint_every") and changed.every_commits and not changed.directory:
            raise InvalidRequestError(
                f"checkpoint_every is {changed.every_commits}, but the run has no folder for checkpoints: set "
                "checkpoint_dir"
            )
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """A run that is being loaded from a checkpoint. Durable until the run is loaded."""

    url: str
    """Folder of the checkpoint."""
    checkpoint_id: str
    step: int
    """Version of the checkpoint, which is also the number of its committed steps."""
    reason: str = ""
    """Why the run is rolled back. Empty: the run is created from the checkpoint."""
    may_fall_back: bool = False
    """True if an older checkpoint may be used when this one is damaged."""
    damaged: tuple[str, ...] = ()
    """Ids of the checkpoints that turned out to be damaged."""
    passed_over: tuple[str, ...] = ()
    """Folders of newer checkpoints that are damaged, with the reason."""
    rewrap: bool = False
    """True if the run's units may differ from those of the checkpoint, also with the same cp, tp and pp."""

    @property
    def is_rollback(self) -> bool:
        """True if the run had live trainers, which must go back."""
        return bool(self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """The checkpoint with other units from which the units of a run are filled when trainers declare them."""

    url: str
    """Folder of the checkpoint."""
    step: int
    """Version of the checkpoint."""


class ByteProgress(dict[str, tuple[int, int]]):
    """Bytes that each server has read or written, and its total bytes, by server id."""

    @property
    def done_bytes(self) -> int:
        return sum(done for done, _ in self.values())

    @property
    def total_bytes(self) -> int:
        return sum(total for _, total in self.values())


@dataclass(slots=True)
class RestoreProgress:
    """How far a restore is. Not durable."""

    begun_s: float = 0.0
    """Clock time at which it began, or at which the coordinator restarted."""
    problem: str = ""
    """Why the last attempt failed. The next one follows."""
    fatal: str = ""
    """Why no checkpoint of the run can be loaded."""
    progress: ByteProgress = field(default_factory=ByteProgress)
    """What the servers have read."""

    def describe(self, restore: Restore) -> str:
        """Returns one line for people."""
        line = f"the run is being loaded from checkpoint {restore.url} (step {restore.step})"
        if total := self.progress.total_bytes:
            done = self.progress.done_bytes
            line += f": {done} of {total} bytes, {100 * done // total}%"
        return f"{line}; {self.problem}" if self.problem else line


class CheckpointState(Enum):
    """State of a checkpoint."""

    WRITING = coordinator_pb2.CHECKPOINT_STATE_WRITING
    SAVED = coordinator_pb2.CHECKPOINT_STATE_SAVED
    FAILED = coordinator_pb2.CHECKPOINT_STATE_FAILED


@dataclass(slots=True)
class CheckpointInFlight:
    """A checkpoint from its start until its end."""

    checkpoint_id: str
    step: int | None = None
    """Version to save. None: not determined yet, because no server was asked."""
    url: str = ""
    has_folder: bool = False
    """True once the folder exists. Nobody can write a file before."""
    state: CheckpointState = CheckpointState.WRITING
    progress: ByteProgress = field(default_factory=ByteProgress)
    """What the servers have written."""
    rollback_count: int = 0
    """How often the run had been rolled back when the checkpoint began."""
    residuals: ResidualReports = field(default_factory=ResidualReports)
    """What the trainers have written."""
    error: str = ""
    ended: float = 0.0
    """Seconds since 1970. 0: not ended."""

    def wants_residuals_of(self, trainer: str) -> bool:
        """True if a trainer with residuals of error feedback can write them now, and has not."""
        return bool(self.step) and self.has_folder and self.residuals.are_missing_of(trainer)

    def end(self, state: CheckpointState, now: float, error: str = "") -> None:
        """Records the outcome."""
        self.state, self.ended, self.error = state, now, error


class RunCheckpoints:
    """Everything about the checkpoints of one run. Used on the event loop."""

    def __init__(self) -> None:
        self.options = CheckpointOptions()
        self.checked_directory = ""
        """The folder whose writability this coordinator has checked."""
        self.folder: tuple[str, RunFolder] | None = None
        """The folder of all runs, and the opened folder of this run in it. None: not opened yet."""
        self.in_flight: CheckpointInFlight | None = None
        self.saved: list[CheckpointRecord] = []
        """Complete checkpoints that the run can be rolled back to, oldest first."""
        self.lineage: tuple[str, ...] = ()
        """Ids of the runs that this run was resumed from, oldest first."""
        self._torn: list[CheckpointRecord] = []
        """Incomplete checkpoints of a former coordinator."""
        self.problem = ""
        """Why no checkpoint could be saved when this was tried last. Empty: it was not tried, or the last was saved."""
        self.failed: dict[str, CheckpointInFlight] = {}
        """Recent failures by checkpoint id, oldest first."""
        self.last_step = 0
        """Step of the newest checkpoint that was begun or loaded."""
        self.rollback_count = 0
        self.restore: Restore | None = None
        """Set while the run is loaded from a checkpoint."""
        self.restoring = RestoreProgress()
        self.first_items: tuple[int, ...] = ()
        """In an asynchronous run that was loaded: the number of each data rank's first work item. Empty: 0 for all."""
        self.source: CheckpointSource | None = None
        """The checkpoint that the run was loaded from last, if it has other units, or may have."""
        self.filling: dict[str, ByteProgress] = {}
        """What the servers have read of the units that are being filled from ``source``, by name."""
        self.writing = asyncio.Lock()
        """Held from the start of a checkpoint until it is complete, or the servers have stopped writing a failed one:
        they write one at a time."""
        self.boundary = asyncio.Lock()
        """Held while servers are told to begin a checkpoint, and from before a commit record until its step is over.
        No server is therefore asked to update while a checkpoint begins."""

    # ---- durable facts ----

    def to_json(self) -> str:
        """Returns the durable facts as text."""
        return self._to_json(self.rollback_count, self.restore)

    def after_restore_json(self) -> str:
        """Returns the durable facts as they will be after ``end_restore``."""
        assert self.restore is not None
        return self._to_json(self.rollback_count + self.restore.is_rollback, None)

    def _to_json(self, rollback_count: int, restore: Restore | None) -> str:
        facts = {
            "options": asdict(self.options),
            "lineage": self.lineage,
            "rollback_count": rollback_count,
            "restore": None if restore is None else asdict(restore),
            "source": None if self.source is None else asdict(self.source),
            "first_items": self.first_items,
        }
        return json.dumps(facts)

    def restore_facts(self, text: str, records: Sequence[CheckpointRecord], now: float) -> None:
        """Restores what ``to_json`` returned, and the recorded checkpoints, after a coordinator restart."""
        facts: Mapping[str, Any] = json.loads(text)
        self.options = CheckpointOptions(**facts["options"])
        self.lineage = tuple(facts["lineage"])
        self.rollback_count = facts["rollback_count"]
        if (restore := facts["restore"]) is not None:
            lists = {name: tuple(restore.get(name, ())) for name in ("damaged", "passed_over")}
            self.begin_restore(Restore(**{**restore, **lists}), now)
        self.first_items = tuple(facts.get("first_items", ()))
        if (source := facts.get("source")) is not None:
            self.source = CheckpointSource(**source)
        self.saved = [record for record in records if record.is_complete]
        self._torn = [record for record in records if not record.is_complete]
        self.last_step = max((record.step for record in records), default=0)

    def set_options(self, options: CheckpointOptions) -> bool:
        """Replaces the options. Returns True if they changed."""
        before, self.options = self.options, options
        if before.directory != options.directory:
            self.problem = ""
        return before != options

    # ---- saving ----

    def is_due(self, committed_step: int) -> bool:
        """True if enough steps were committed since the last checkpoint began, and none is being written."""
        return self.in_flight is None and self.is_next_due(committed_step)

    def is_next_due(self, committed_step: int) -> bool:
        """True if enough steps were committed since the last checkpoint began. It may still be written."""
        every = self.options.every_commits
        ready = self.restore is None and bool(self.options.directory)
        return ready and every > 0 and committed_step - self.last_step >= every

    def time_of_next(self, now: float) -> float:
        """Returns the time of a checkpoint that is saved at the wall-clock time ``now``.

        It is later than those of all earlier ones, even if the clock was set back: the time decides which checkpoint is
        the newest.
        """
        return max([now, *(record.time + _TIME_STEP_S for record in self.saved)])

    def finish(self, record: CheckpointRecord) -> None:
        """Records that the checkpoint in flight is complete."""
        self.in_flight, self.problem = None, ""
        self.saved.append(record)

    def take_torn(self) -> list[CheckpointRecord]:
        """Returns the incomplete checkpoints of a former coordinator. The caller removes them."""
        torn, self._torn = self._torn, []
        return torn

    def fail(self, checkpoint: CheckpointInFlight) -> None:
        """Records that the checkpoint in flight failed."""
        self.in_flight = None
        self.failed[checkpoint.checkpoint_id] = checkpoint
        while len(self.failed) > _REMEMBERED_FAILURES:
            del self.failed[next(iter(self.failed))]

    def forget(self, checkpoint_ids: Collection[str]) -> None:
        """Removes checkpoints that were deleted or are damaged."""
        self.saved = [record for record in self.saved if record.checkpoint_id not in checkpoint_ids]

    def check_not_rolled_back(self, checkpoint: CheckpointInFlight) -> None:
        """Raises StepStateError if the run was rolled back after a checkpoint began: its version has no future."""
        if self.restore is not None or self.rollback_count != checkpoint.rollback_count:
            raise StepStateError(f"the run was rolled back while step {checkpoint.step} was being saved")

    def saved_at(self, step: int) -> CheckpointRecord | None:
        """Returns the newest complete checkpoint of a version."""
        return max((record for record in self.saved if record.step == step), key=lambda at: at.time, default=None)

    def find(self, checkpoint_id: str) -> CheckpointInFlight | CheckpointRecord | None:
        """Returns a checkpoint by id. None: it is not known."""
        if self.in_flight is not None and self.in_flight.checkpoint_id == checkpoint_id:
            return self.in_flight
        saved = next((record for record in self.saved if record.checkpoint_id == checkpoint_id), None)
        return saved or self.failed.get(checkpoint_id)

    # ---- loading ----

    def begin_restore(self, restore: Restore, now: float) -> None:
        """Records that the run is loaded from a checkpoint from the clock time ``now`` on."""
        self.restore, self.restoring = restore, RestoreProgress(now)

    def check_loaded(self, run: str) -> None:
        """Raises UnavailableError while the run is loaded from a checkpoint: its shards have no servers now."""
        if self.restore is not None:
            raise UnavailableError(self.restoring.describe(self.restore), run=run)

    def check_loadable(self, run: str) -> None:
        """Raises ConflictError if the run waits for a checkpoint and none can be loaded."""
        if self.restore is not None and self.restoring.fatal:
            raise ConflictError(
                f"run {run!r} cannot be loaded: {self.restoring.fatal}. No other checkpoint of the run can be loaded: "
                f"remove the cause, such as a missing file, or delete the run (shardwell delete-run {run}) and start "
                "it again",
                run=run,
            )

    def describe_filling(self, unit: str) -> str:
        """Returns one line about a unit that is being filled."""
        assert self.source is not None
        at = self.filling.get(unit, ByteProgress())
        return f"unit {unit!r} is read from checkpoint {self.source.url}: {at.done_bytes} of {at.total_bytes} bytes"

    def end_restore(self) -> None:
        """Records that the run is loaded."""
        assert self.restore is not None
        self.rollback_count += self.restore.is_rollback
        self.last_step = self.restore.step
        self.restore = None
