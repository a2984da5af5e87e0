"""Collects residuals of error feedback, which the trainers write to checkpoints.

Trainers write their residuals at the start of step v to the checkpoint of version v, see Note: [Residuals in
checkpoints] in the client. A checkpoint waits for all live trainers that have residuals. What is missing then is zero
in a run that is loaded from the checkpoint, and an event names the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.runs.checkpoints import CheckpointInFlight
from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.residuals import ResidualReport
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.checkpoints.format import residual_state
from shardwell_wire.checkpoints.manifest import FileRecord, Manifest
from shardwell_wire.checkpoints.reading import read_index
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import NotFoundError, ShardwellError, StepStateError
from shardwell_wire.v1 import coordinator_pb2

_WAIT_S = 300.0
"""Longest time to wait for live trainers after the servers have written their files, in seconds."""


def add_report(run: Run, member: Member, request: coordinator_pb2.AddResidualsRequest) -> None:
    """Adds a trainer's report about its residuals to the checkpoint in flight.

    Raises:
        InvalidRequestError: A field is invalid.
        StepStateError: The checkpoint is not being written, or is complete without this trainer.
    """
    report = ResidualReport.from_proto(request, run.settings.world.dp)
    in_flight = run.checkpoints.in_flight
    if in_flight is None or in_flight.checkpoint_id != request.checkpoint_id:
        raise StepStateError(f"checkpoint {request.checkpoint_id!r} of run {run.name!r} is not being written")
    in_flight.residuals.add(member.name, report)
    run.changed.notify()


async def wait_for_reports(run: Run, checkpoint: CheckpointInFlight) -> Sequence[tuple[str, ResidualReport]]:
    """Waits until all live trainers with residuals have written them. Returns the reports with their trainers."""

    async def check() -> bool | None:
        live = [member.name for member in run.members.live.values() if member.has_residuals]
        return run.checkpoints.restore is not None or not any(map(checkpoint.wants_residuals_of, live)) or None

    if checkpoint.step:
        await poll(run.changed, check, _WAIT_S)
    return checkpoint.residuals.end()


def usable_files(
    storage: Storage, manifest: Manifest, reports: Iterable[tuple[str, ResidualReport]], replica_size: int
) -> tuple[list[FileRecord], set[int], list[str]]:
    """Checks the files of trainers, because a checkpoint with an invalid file cannot be loaded. Blocks.

    Args:
        storage: Folder of the checkpoint.
        manifest: Its manifest, without these files.
        reports: The reports with their trainers.
        replica_size: Number of trainers that have residuals of one data rank.

    Returns:
        The files that are part of the checkpoint, the data ranks whose residuals they have, and why others are not.
    """
    files, reported, names = list[FileRecord](), Counter[int](), set[str]()
    problems = []
    for trainer, report in reports:
        problem = report.error
        if not problem and report.file is not None:
            try:
                index = read_index(storage, manifest, report.file)
            except NotFoundError:
                problem = "its file is not in the folder of the coordinator and the shard servers"
            except ShardwellError as error:
                problem = str(error)
            else:
                own = {placed.piece.name for placed in index.pieces}
                stages = (None, *range(replica_size))
                expected = {residual_state(rank, stage) for rank in report.dp_ranks for stage in stages}
                if index.parts or own & names or not {placed.piece.state for placed in index.pieces} <= expected:
                    problem = "its file has other tensors than the residuals of its ranks"
                else:
                    names |= own
                    files.append(report.file)
        if problem:
            problems.append(f"trainer {trainer!r}: {problem}")
        else:
            reported.update(report.dp_ranks)
    return files, {rank for rank, count in reported.items() if count >= replica_size}, problems


def report_missing(state: CoordinatorState, run: Run, step: int, ranks: Iterable[int], problems: Sequence[str]) -> None:
    """Adds an event if a checkpoint lacks residuals."""
    missing = sorted(set(range(run.settings.world.dp)) - set(ranks))
    if not step or not missing or not any(member.has_residuals for member in run.members):
        return
    why = f" ({'; '.join(problems)})" if problems else ""
    message = (
        f"step {step}: the checkpoint lacks the residuals of error feedback of data ranks {missing}{why}. They are "
        "zero in a run that is loaded from it"
    )
    state.events.add(EventKind.RESIDUALS_MISSING, message, run=run.name)
