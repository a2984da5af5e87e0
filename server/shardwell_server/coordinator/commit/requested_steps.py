"""The step that a request of a trainer concerns: in flight, committed, or not started."""

from __future__ import annotations

from shardwell_server.coordinator.runs.asynchronous_work import AsynchronousWork
from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Step
from shardwell_wire.errors import InvalidRequestError, StepStateError
from shardwell_wire.v1 import coordinator_pb2


def step_in_flight(run: Run, number: int) -> Step | None:
    """Returns the step in flight of a synchronous run, or None if step ``number`` is committed.

    Raises:
        StepStateError: The step has not started.
    """
    require_started(run, number)
    return run.work.steps[0] if number == run.committed_step else None


def step_of(run: Run, member: Member, number: int, dp_rank: int, item_number: int) -> Step | None:
    """Returns the step in flight that has an item, or None if it is committed.

    Args:
        run: The run.
        member: The trainer that computes the item.
        number: Number of the step, which is the version that the item reads.
        dp_rank: Data rank of the item, in an asynchronous run.
        item_number: Number of the item, in an asynchronous run.

    Raises:
        StepStateError: The step has not started.
        StepRestartedError: In an asynchronous run, the item is computed again from another version.
    """
    if not isinstance(run.work, AsynchronousWork):
        return step_in_flight(run, number)
    require_started(run, number)
    return run.work.find_step(member.name, number, dp_rank, item_number)


def named_step(run: Run, member: Member, number: int, item: coordinator_pb2.ItemName | None) -> Step | None:
    """As ``step_of``. Raises InvalidRequestError if an item is required and not named."""
    if item is None and run.asynchronous:
        raise InvalidRequestError(
            f"item is not set: run {run.name!r} has consistency={run.settings.consistency}, in which the request names "
            "the work item"
        )
    return step_of(run, member, number, item.dp_rank if item else 0, item.number if item else 0)


def require_started(run: Run, number: int) -> None:
    """Raises StepStateError if a step has not started."""
    if not run.started:
        raise StepStateError(f"run {run.name!r} has not started: wait until Join returns started=True")
    if number > run.committed_step:
        raise StepStateError(
            f"step {number} of run {run.name!r} has not started: step {run.committed_step} is in flight",
            step=run.committed_step,
        )
