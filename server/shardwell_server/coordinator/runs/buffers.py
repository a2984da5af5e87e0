"""Buffers of a run: which values count, when they changed last, and whether ranks began with the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Item, Step, WorkState
from shardwell_wire.errors import ConflictError, InvalidRequestError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


def changed(
    responses: Iterable[shard_pb2.PrepareStepResponse], layouts: Sequence[UnitLayout]
) -> dict[int, Sequence[int]]:
    """By unit index: the buffers of which any server has new values, as rising layout indices."""
    found: dict[int, set[int]] = {}
    for response in responses:
        for unit in response.buffers:
            found.setdefault(unit.unit_index, set()).update(unit.buffer_indices)
    return {index: sorted(buffers) for index, buffers in sorted(found.items()) if index < len(layouts)}


def next_state(
    run: Run, handed_in: coordinator_pb2.RunState | None, changed: Mapping[int, Sequence[int]]
) -> coordinator_pb2.RunState | None:
    """The run's state once the step in flight is committed; what did not change in the step is taken over.

    Args:
        run: With the state after the step before.
        handed_in: Tracked objects, from the trainer whose hyper-parameters count; None: as they were.
        changed: As returned by ``changed``.
    """
    before, step = run.state, run.step
    assert step is not None
    if handed_in is None and not changed:
        return before
    state = coordinator_pb2.RunState()
    if before is not None:
        state.CopyFrom(before)
    state.step = step.number
    if handed_in is not None:
        state.ClearField("tracked_json")
        state.tracked_json.update(handed_in.tracked_json)
    known = {unit.unit_index: unit for unit in state.buffer_versions}
    for index, buffers in changed.items():
        if (unit := known.get(index)) is None:
            unit = state.buffer_versions.add(unit_index=index)
            unit.versions.extend([0] * len(run.units.layouts[index].parameters))
        for buffer in buffers:
            unit.versions[buffer] = step.number + 1
    if changed:
        state.buffer_source.CopyFrom(step.items[0].to_proto())
    return state


def note_written(
    step: Step,
    items: Sequence[Item],
    reports: Iterable[coordinator_pb2.FinishedItem],
    layouts: Sequence[UnitLayout],
) -> None:
    """Takes down which buffers the training script had changed when items began that are now finished.

    Args:
        step: The step in flight.
        items: Those that are newly finished.
        reports: How they were reported, and others.
        layouts: Of the run's units.

    Raises:
        InvalidRequestError: A report names what is no buffer.
        ConflictError: Another rank's item began with other values. Nothing is taken down.
    """
    by_rank = {report.global_rank: report for report in reports}
    news = {item.global_rank: _written(by_rank[item.global_rank], layouts) for item in items}
    finished = {
        rank: item.written for rank, item in step.items.items() if item.state is WorkState.FINISHED and rank not in news
    }
    for rank, written in news.items():
        for other, theirs in finished.items():
            _require_same(step.number, (rank, written), (other, theirs), layouts)
        finished[rank] = written
    for item in items:
        item.written = news[item.global_rank]


def _written(report: coordinator_pb2.FinishedItem, layouts: Sequence[UnitLayout]) -> dict[tuple[int, int], int]:
    written: dict[tuple[int, int], int] = {}
    for buffer in report.written_buffers:
        layout = layouts[buffer.unit_index] if buffer.unit_index < len(layouts) else None
        if layout is None or not layout.holds_buffers or buffer.buffer_index >= len(layout.parameters):
            raise InvalidRequestError(
                f"rank {report.global_rank} names buffer {buffer.buffer_index} of unit {buffer.unit_index}: the run "
                "has no such buffer"
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
        wrote = [f"rank {at}" for at, written in (one, other) if (unit, index) in written]
        raise ConflictError(
            f"buffer {name!r} had other values when rank {rank} began its work of step {step} than when rank "
            f"{other_rank} did: the training script changed it after the last commit in the process of "
            f"{' and of '.join(wrote)}. Write the same values in every process before step.batches, or change it in "
            "the forward, where rank 0's values count",
            buffer=name,
            global_rank=rank,
        )
