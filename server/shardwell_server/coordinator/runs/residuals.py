"""What trainers have written of one checkpoint: residuals of error feedback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwell_wire.checkpoints.manifest import FileRecord
from shardwell_wire.errors import InvalidRequestError, ShardwellError, StepStateError
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
