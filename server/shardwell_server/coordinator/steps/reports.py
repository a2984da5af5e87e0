"""Checks what trainers report: finished work items, with checksums of buffers and gradients, and parallel plans.

All tensor-parallel ranks of a replica compute the gradients of parameters that all of them hold. Rank 0 pushes these.
Each rank reports their checksums with its finished work item. Different checksums mean that the ranks have computed
different things, for example with other activations, or that their hardware or numbers of threads differ. The item is
not finished then, unless its trainers allow differences.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product

from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.steps.step import NO_REPORT, FinishedWork, ItemReport, MemberWork, Step, WorkItem
from shardwell_wire.errors import ConflictError, InvalidRequestError, RunMismatchError, StepStateError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import (
    MAX_PLAN_BYTES,
    MAX_PLAN_MODELS,
    MAX_PLAN_ROWS,
    check_data_position,
    check_path,
    check_scalars,
)
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2

_MAX_NAMED = 3
"""Most differences that a message names."""


_STEPS_WITH_EQUAL_GRADIENTS = 3
"""Compared steps in a row with equal gradients after which data ranks are said to read the same data."""


class EqualGradients:
    """Finds data ranks that push equal gradients step after step."""

    def __init__(self) -> None:
        self._ranks: frozenset[int] = frozenset()
        """The data ranks with equal gradients in the last compared steps."""
        self._steps: list[int] = []
        """These steps."""
        self._is_reported = False

    def note(self, step: Step) -> str:
        """Compares the items of a step, which are all finished; returns a warning. Empty: there is none.

        Steps without samples are left out. There is one warning per run and process of the coordinator.
        """
        by_sample: dict[tuple[int, ...], set[int]] = {}
        for dp_rank, item in step.items.items():
            sample = tuple(member.report.gradient_sample for member in item.members.values())
            by_sample.setdefault(sample, set()).add(dp_rank)
        if self._is_reported or all(not any(sample) for sample in by_sample) or step.number in self._steps:
            return ""
        equal = max((ranks for sample, ranks in by_sample.items() if any(sample)), key=len)
        both = self._ranks & equal if self._steps else frozenset(equal)
        self._ranks, self._steps = (both, [*self._steps, step.number]) if len(both) > 1 else (frozenset(), [])
        if len(self._steps) < _STEPS_WITH_EQUAL_GRADIENTS:
            return ""
        self._is_reported = True
        ranks = ", ".join(map(str, sorted(self._ranks)))
        return (
            f"the data ranks {ranks} have pushed equal gradients in the steps {', '.join(map(str, self._steps))}: do "
            "they read the same data? Give each data rank its own batches: step.batches(dataset, batch_size=...) "
            "divides a dataset, and a function (step, dp_rank) or session.dp_rank tells the rank"
        )


def check_reports(
    step: Step, trainer: str, reports: Sequence[coordinator_pb2.FinishedItem], layouts: Sequence[UnitLayout]
) -> list[FinishedWork]:
    """Returns what is newly finished among the reported items.

    Reports of former epochs and attempts are skipped: the item was restarted, or leased to other trainers. Reports
    of twin items that have lost are skipped, too.

    Args:
        layouts: Layouts of the run's units.

    Raises:
        InvalidRequestError: A report is malformed, or names a tensor that is not a buffer.
        StepStateError: A rank was never leased to the trainer, or was finished with other parts.
        ConflictError: The training script of another rank has given a buffer other values before the item started.
    """
    if len({report.global_rank for report in reports}) != len(reports):
        raise InvalidRequestError(f"a rank is reported twice: {[report.global_rank for report in reports]}")
    checked = [_check_report(step, trainer, report, layouts) for report in reports]
    found = [work for work in checked if work is not None]
    _check_written_buffers(step, {work.member.global_rank: work.report.written_buffers for work in found}, layouts)
    return found


def _check_report(
    step: Step, trainer: str, report: coordinator_pb2.FinishedItem, layouts: Sequence[UnitLayout]
) -> FinishedWork | None:
    parts, rank = _parts(report, len(layouts)), report.global_rank
    item = step.item_of(rank)
    member, where = item.members[rank], f"rank {rank} of step {step.number}"
    key, current = (trainer, report.epoch, report.attempt), (member.trainer, item.epoch, item.attempt)
    summed, is_twin = _checked_sums(step, report), item.twin is not None and key == item.twin.key
    if not is_twin:
        if report.copy and key != current:
            return None  # the twin item has lost
        if (report.epoch, report.attempt) < (item.epoch, item.attempt):
            return None
        if key != current:
            raise StepStateError(
                f"trainer {trainer!r} reports {where} as finished under epoch {report.epoch}, attempt "
                f"{report.attempt}, but the item was leased to {member.trainer!r} under epoch {item.epoch}, "
                f"attempt {item.attempt}",
                global_rank=rank,
            )
        if member.finished and member.report.parts != parts:
            raise StepStateError(f"{where} was finished before with parts {member.report.parts}, now with {parts}")
        if member.finished:
            return None
    written, checksums = _written_buffers(report, layouts), _gradient_checksums(report, layouts)
    check_scalars(report.scalars)
    check_data_position(report.data_position)
    summed = frozenset() if is_twin else summed
    return FinishedWork(
        item,
        member,
        ItemReport(
            parts,
            summed,
            written,
            checksums,
            dict(report.scalars),
            data_position=report.data_position,
            gradient_sample=report.gradient_sample,
        ),
    )


def _checked_sums(step: Step, report: coordinator_pb2.FinishedItem) -> frozenset[int]:
    if unknown := [rank for rank in report.summed_dp_ranks if rank not in step.items]:
        raise InvalidRequestError(
            f"rank {report.global_rank} reports sums with the data ranks {unknown[:10]}: the run has "
            f"{len(step.items)} data ranks"
        )
    return frozenset(report.summed_dp_ranks)


def _parts(report: coordinator_pb2.FinishedItem, unit_count: int) -> dict[int, int]:
    indices = [unit.unit_index for unit in report.units]
    if len(set(indices)) != len(indices):
        raise InvalidRequestError(f"rank {report.global_rank} reports a unit index twice: {indices}")
    parts: dict[int, int] = {}
    for unit in report.units:
        if unit.unit_index >= unit_count:
            raise InvalidRequestError(
                f"rank {report.global_rank} reports unit index {unit.unit_index}, but the run has {unit_count} units"
            )
        if unit.part_count:
            parts[unit.unit_index] = unit.part_count
    return parts


def _gradient_checksums(
    report: coordinator_pb2.FinishedItem, layouts: Sequence[UnitLayout]
) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for unit in report.gradient_checksums:
        indices = list(unit.parameter_indices)
        count = len(layouts[unit.unit_index].parameters) if unit.unit_index < len(layouts) else 0
        if len(indices) != len(unit.checksums) or sorted(set(indices)) != indices or (indices or [0])[-1] >= count:
            raise InvalidRequestError(
                f"rank {report.global_rank} reports {len(unit.checksums)} checksums of the gradients {indices[:10]} of "
                f"unit {unit.unit_index}, which has {count} parameters: expected one for each rising index"
            )
        found.update({(unit.unit_index, index): value for index, value in zip(indices, unit.checksums, strict=True)})
    return found


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


def _check_written_buffers(
    step: Step, new: Mapping[int, Mapping[tuple[int, int], int]], layouts: Sequence[UnitLayout]
) -> None:
    """Compares the buffers that the training script changed before the newly finished work started.

    Only ranks with the same cp, tp and pp rank are compared: others may have other buffers.

    Args:
        new: Checksums by unit and layout index, by newly finished rank.
        layouts: Layouts of the run's units.

    Raises:
        ConflictError: Another rank started with other values.
    """
    for peers in zip(*(item.members.values() for item in step.items.values()), strict=True):
        written = {
            at.global_rank: new.get(at.global_rank, at.report.written_buffers)
            for at in peers
            if at.finished or at.global_rank in new
        }
        for rank in (each for each in written if each in new):
            for other in (each for each in written if each != rank):
                _require_same(step.number, (rank, new[rank]), (other, written[other]), layouts)


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
        name = layouts[unit].parameters[index].shown_name
        writers = [f"rank {at}" for at, written in (one, other) if (unit, index) in written]
        raise ConflictError(
            f"buffer {name!r} had different values when rank {rank} and rank {other_rank} started their work of step "
            f"{step}: the training script changed the buffer after the last commit in the process of "
            f"{' and of '.join(writers)}. Write the same values in every process before step.batches, or change the "
            "buffer in the forward, where the values of rank 0 count",
            buffer=name,
            global_rank=rank,
        )


def find_differences(
    finished: Sequence[FinishedWork], step: int, world: World, units: Iterable[Unit]
) -> Iterator[tuple[Unit, WorkItem, str]]:
    """Yields the units of which the trainers of an item computed different gradients, the items, and messages.

    Args:
        finished: What is newly finished. It is not recorded yet.
    """
    if world.tp == 1:
        return
    new = {work.member.global_rank: work.report for work in finished}
    for item in {id(work.item): work.item for work in finished}.values():
        groups: dict[tuple[int, int], list[_Reported]] = {}
        for member in item.members.values():
            if (report := new.get(member.global_rank, member.report)) is not NO_REPORT:
                at = world.coordinates(member.global_rank)
                groups.setdefault((at.cp_rank, at.pp_rank), []).append((member, report.gradient_checksums))
        for unit in units:
            for place in product(range(unit.layout.cp), unit.layout.pp_ranks):
                if lines := _differences(unit, groups.get(place, ())):
                    yield unit, item, _message(item, step, unit, place, lines)
                    break


_Reported = tuple[MemberWork, Mapping[tuple[int, int], int]]
"""A member of an item, and its checksums by unit and parameter index."""


def _differences(unit: Unit, members: Sequence[_Reported]) -> list[str]:
    """Returns a text for each parameter whose gradient differs between the first member and others."""
    lines: list[str] = []
    if not members or all(checksums == members[0][1] for _, checksums in members[1:]):
        return lines
    first, expected = members[0]
    for index, parameter in enumerate(unit.layout.parameters):
        key = unit.index, index
        others = [member for member, checksums in members[1:] if checksums.get(key) != expected.get(key)]
        if others:
            ranks = ", ".join(f"{member.global_rank} (trainer {member.trainer!r})" for member in others)
            lines.append(f"{parameter.name!r}: rank {ranks} and rank {first.global_rank} (trainer {first.trainer!r})")
    return lines


def _message(item: WorkItem, step: int, unit: Unit, place: tuple[int, int], lines: Sequence[str]) -> str:
    """Returns the error for the trainers of a context-parallel rank and pipeline rank."""
    more = f" and {len(lines) - _MAX_NAMED} more parameters" if len(lines) > _MAX_NAMED else ""
    at = f"context-parallel rank {place[0]}, pipeline rank" if unit.layout.cp > 1 else "pipeline rank"
    return (
        f"step {step}: tensor-parallel ranks of dp rank {item.dp_rank}, {at} {place[1]}, computed different "
        f"gradients of parameters of unit {unit.layout.unit!r} that all of them hold: "
        f"{'; '.join(lines[:_MAX_NAMED])}{more}. Check that the ranks get the same batch and random numbers, and "
        "that the plan sums the gradient of a parameter that a rank uses with its own heads or its own part of the "
        "sequence, as plan_tensor_parallel does. If only rounding can differ, because the hardware differs or a kernel "
        "is not deterministic, pass join(allow_gradient_differences=True): the gradient of rank 0 counts then"
    )


_MAX_PARTS, _MAX_BOTTLENECKS, _MAX_ADVICE = 32, 32, 1000
"""Limits of a report of a trainer's steps: entries, and characters of each text."""


def check_step_report(report: coordinator_pb2.StepReport) -> None:
    """Raises InvalidRequestError if a trainer's report of its steps is too large, or has an impossible value."""
    steps = report.steps
    parts = [*report.part_s.items(), *(part for step in steps for part in step.part_s.items())]
    most = max([len(report.part_s), *(len(step.part_s) for step in steps)])
    if most > _MAX_PARTS or max(len(report.bottlenecks), len(steps)) > _MAX_BOTTLENECKS:
        raise InvalidRequestError(
            f"the report has {most} parts, {len(report.bottlenecks)} bottlenecks and {len(steps)} steps: expected at "
            f"most {_MAX_PARTS}, {_MAX_BOTTLENECKS} and {_MAX_BOTTLENECKS}"
        )
    of_steps = [number for step in steps for number in (step.committed_s, step.step_s)]
    numbers = (report.step_s, report.tokens_per_s, report.samples_per_s, *of_steps, *(number for _, number in parts))
    if not all(0 <= number < math.inf for number in (*numbers, *(each.share for each in report.bottlenecks))):
        raise InvalidRequestError("the report has a number that is negative or not finite")
    texts = [text for each in report.bottlenecks for text in (each.kind, each.severity, each.finding, each.advice)]
    for text in (*(name for name, _ in parts), *texts):
        if len(text) > _MAX_ADVICE or not text.isprintable():
            raise InvalidRequestError(
                f"the report has the text {text[:_MAX_ADVICE]!r}: expected at most {_MAX_ADVICE} printable characters"
            )


def mean_scalars(items: Mapping[int, WorkItem], world: World) -> dict[str, float]:
    """Returns the means over the data ranks of the numbers that training scripts have logged, by name.

    With context parallelism, they are the means over the data ranks and context-parallel ranks. They are added in the
    order of these ranks. Of the trainers of one of them, that of the lowest rank that has logged a name counts. A rank
    that has not logged it does not count.

    Args:
        items: The finished work items of a step, by data rank.
        world: The grid of the run.
    """
    values: dict[str, list[float]] = {}
    for _, item in sorted(items.items()):
        of_item: dict[tuple[int, str], float] = {}
        for rank, member in sorted(item.members.items()):
            cp_rank = world.coordinates(rank).cp_rank if world.cp > 1 else 0
            for name, value in member.report.scalars.items():
                of_item.setdefault((cp_rank, name), value)
        for (_, name), value in sorted(of_item.items()):
            values.setdefault(name, []).append(value)
    # Not `sum`, whose result depends on the version of Python.
    return {name: reduce(operator.add, found) / len(found) for name, found in sorted(values.items())}


def check_plan(plan: coordinator_pb2.ParallelPlan) -> None:
    """Raises InvalidRequestError if a plan is too large, or has a text that is too long or not printable."""
    stages = [stage for model in plan.models for stage in model.stages]
    layers = [layer for stage in stages for layer in stage.layers]
    collectives = [collective for layer in layers for collective in layer.collectives]
    for what, size, limit in (
        ("bytes", plan.ByteSize(), MAX_PLAN_BYTES),
        ("models", len(plan.models), MAX_PLAN_MODELS),
        ("rows", len(stages) + len(layers) + len(collectives), MAX_PLAN_ROWS),
        ("sizes of a micro-batch", max((len(model.micro_batch_shape) for model in plan.models), default=0), 2),
    ):
        if size > limit:
            raise InvalidRequestError(f"a parallel plan with {size} {what}: expected at most {limit}")
    texts = {
        "model": {text for model in plan.models for text in (model.model, model.schedule)},
        "layer": {text for stage in stages for text in (stage.first_layer, stage.last_layer)}
        | {text for layer in layers for text in (layer.name, layer.kind, layer.class_name, layer.style, layer.part)},
        "collective": {text for at in collectives for text in (at.operation, at.phase)},
    }
    for what, found in texts.items():
        for text in filter(None, found):
            check_path(what, text)


def require_same_plan(
    run: str, expected: coordinator_pb2.ParallelPlan, trainer: str, found: coordinator_pb2.ParallelPlan
) -> None:
    """Raises RunMismatchError, naming the first differences, if a trainer's plan is not that of the run."""
    ours, theirs = dict(_facts(expected)), dict(_facts(found))
    differences = [
        (name, ours.get(name, "none"), theirs.get(name, "none"))
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    if not differences:
        return
    named = "; ".join(f"{name}: expected {before}, found {now}" for name, before, now in differences[:_MAX_NAMED])
    more = len(differences) - _MAX_NAMED
    raise RunMismatchError(
        f"trainer {trainer!r} divides its model differently than run {run!r}: {named}"
        f"{f'; and {more} more differences' if more > 0 else ''}. All trainers of a run need the same parallel plan: "
        "use the run's, or start a run with another name (resume= takes the weights from a checkpoint)",
        run=run,
        name=differences[0][0],
        expected=differences[0][1],
        actual=differences[0][2],
    )


def _facts(plan: coordinator_pb2.ParallelPlan) -> Iterator[tuple[str, str]]:
    """Yields everything that a plan says as (what, value), the most important first."""
    yield "models", ", ".join(model.model for model in plan.models) or "none"
    for number, model in enumerate(plan.models):
        of = f" of {model.model}" if len(plan.models) > 1 else ""
        of += f" ({number})" if sum(other.model == model.model for other in plan.models) > 1 else ""
        yield f"schedule{of}", model.schedule or "none"
        yield f"num_micro_batches{of}", str(model.num_micro_batches)
        yield f"size of a micro-batch{of}", " x ".join(map(str, model.micro_batch_shape)) or "unknown"
        yield f"number of stages{of}", str(len(model.stages))
        for index, stage in enumerate(model.stages):
            yield f"first layer of stage {index}{of}", repr(stage.first_layer)
            yield f"last layer of stage {index}{of}", repr(stage.last_layer)
            yield f"pipeline rank of stage {index}{of}", str(stage.pp_rank)
        yield f"sequence_parallel{of}", str(model.sequence_parallel)
        yield f"loss_parallel{of}", str(model.loss_parallel)
        for index, stage in enumerate(model.stages):
            yield from _layer_facts(f"of stage {index}{of}", stage)
        yield f"rows left out{of}", str(model.omitted_row_count)


def _layer_facts(of: str, stage: coordinator_pb2.PlannedStage) -> Iterator[tuple[str, str]]:
    counts = Counter(layer.name for layer in stage.layers)
    for position, layer in enumerate(stage.layers):
        name = f"layer {layer.name!r}{f' ({position})' if counts[layer.name] > 1 else ''} {of}"
        yield f"style of {name}", f"{layer.style or 'whole'} {layer.part}".strip()
        yield name, f"{layer.count} {layer.kind} of class {layer.class_name or 'none'}, {layer.element_count} elements"
        yield f"bytes of {name}", str(layer.size_bytes)
        causes = [f"{at.phase} {at.operation} of {at.bytes_per_step} bytes" for at in layer.collectives]
        yield f"collectives of {name}", ", ".join(causes) or "none"
    yield f"parameters {of}", f"{stage.element_count} elements, {stage.size_bytes} bytes"
