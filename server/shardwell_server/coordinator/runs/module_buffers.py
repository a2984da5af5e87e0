"""Buffers of a run: their current versions, and checks that all ranks start a step with the same values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwell_server.coordinator.runs.optimizer_generations import note_step, starts_anew
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.work_items import FinishedWork
from shardwell_wire.errors import ConflictError, InvalidRequestError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


def changed_buffers(
    responses: Iterable[shard_pb2.PrepareStepResponse], layouts: Sequence[UnitLayout]
) -> dict[int, Sequence[int]]:
    """Returns the sorted layout indices of buffers for which a server has new values, by unit index."""
    found: dict[int, set[int]] = {}
    for response in responses:
        for unit in response.buffers:
            found.setdefault(unit.unit_index, set()).update(unit.buffer_indices)
    return {index: sorted(buffers) for index, buffers in sorted(found.items()) if index < len(layouts)}


def next_run_state(
    before: coordinator_pb2.RunState | None,
    step: Step,
    proposed: coordinator_pb2.RunState | None,
    changed: Mapping[int, Sequence[int]],
    layouts: Sequence[UnitLayout],
    generation: int = 0,
) -> coordinator_pb2.RunState | None:
    """Returns the run's state after the step in flight is committed.

    Args:
        before: State after the previous step.
        step: The step in flight.
        proposed: Tracked objects in the leader's proposal. None: unchanged.
        changed: Result of ``changed_buffers``.
        layouts: Layouts of the run's units.
        generation: ``OptimizerStep.generation`` of the step.
    """
    is_new = starts_anew(before, generation)
    if proposed is None and not changed and not is_new:
        return before
    state = coordinator_pb2.RunState()
    if before is not None:
        state.CopyFrom(before)
    state.step = step.number
    if proposed is not None:
        state.ClearField("tracked_json")
        state.tracked_json.update(proposed.tracked_json)
    known = {unit.unit_index: unit for unit in state.buffer_versions}
    for index, buffers in changed.items():
        if (unit := known.get(index)) is None:
            unit = state.buffer_versions.add(unit_index=index)
            unit.versions.extend([0] * len(layouts[index].parameters))
        for buffer in buffers:
            unit.versions[buffer] = step.number + 1
    if changed:
        state.buffer_source.CopyFrom(step.items[0].to_proto())
    if is_new:
        note_step(state, generation)
    return state


def check_written_buffers(
    step: Step,
    newly_finished: Sequence[FinishedWork],
    reports: Iterable[coordinator_pb2.FinishedItem],
    layouts: Sequence[UnitLayout],
) -> dict[int, dict[tuple[int, int], int]]:
    """Compares the buffers that the training script changed before the newly finished work started.

    Only ranks with the same tp rank and pp rank are compared: others have other buffers.

    Args:
        step: The step in flight.
        newly_finished: What is newly finished.
        reports: Reports of this work, and possibly of other work.
        layouts: Layouts of the run's units.

    Returns:
        Checksums by unit and layout index, by newly finished rank.

    Raises:
        InvalidRequestError: A report names a tensor that is not a buffer.
        ConflictError: Another rank started with other values.
    """
    by_rank = {report.global_rank: report for report in reports}
    ranks = [work.member.global_rank for work in newly_finished]
    new = {rank: _written_buffers(by_rank[rank], layouts) for rank in ranks}
    for peers in zip(*(item.members.values() for item in step.items.values()), strict=True):
        written = {
            at.global_rank: new.get(at.global_rank, at.written_buffers)
            for at in peers
            if at.finished or at.global_rank in new
        }
        for rank in (each for each in written if each in new):
            for other in (each for each in written if each != rank):
                _require_same(step.number, (rank, new[rank]), (other, written[other]), layouts)
    return new


def _written_buffers(report: coordinator_pb2.FinishedItem, layouts: Sequence[UnitLayout]) -> dict[tuple[int, int], int]:
    written: dict[tuple[int, int], int] = {}
    for buffer in report.written_buffers:
        layout = layouts[buffer.unit_index] if buffer.unit_index < len(layouts) else None
        if layout is None or not layout.holds_buffers or buffer.buffer_index >= len(layout.parameters):
            raise InvalidRequestError(
                f"rank {report.global_rank} reports buffer {buffer.buffer_index} of unit {buffer.unit_index}, but the "
                "run has no such buffer"
            )
        written[buffer.unit_index, buffer.buffer_index] = buffer.checksum
    return written


def _require_same(
    step: int,
    one: tuple[int, Mapping[tuple[int, int], int]],
    other: tuple[int, Mapping[tuple[int, int], int]],
    layouts: Sequence[UnitLayout],
) -> None:
    (rank, ours), (other_rank, theirs) = one, other
    for unit, index in sorted({*ours, *theirs}):
        if ours.get((unit, index)) == theirs.get((unit, index)):
            continue
        name = layouts[unit].parameters[index].name
        writers = [f"rank {at}" for at, written in (one, other) if (unit, index) in written]
        raise ConflictError(
            f"buffer {name!r} had different values when rank {rank} and rank {other_rank} started their work of step "
            f"{step}: the training script changed the buffer after the last commit in the process of "
            f"{' and of '.join(writers)}. Write the same values in every process before step.batches, or change the "
            "buffer in the forward, where the values of rank 0 count",
            buffer=name,
            global_rank=rank,
        )
