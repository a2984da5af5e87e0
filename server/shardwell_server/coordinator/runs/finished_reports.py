"""Checks the reports of trainers that have finished work items. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.work_items import FinishedWork
from shardwell_wire.errors import InvalidRequestError, StepStateError
from shardwell_wire.v1 import coordinator_pb2


def newly_finished(
    step: Step, trainer: str, reports: Sequence[coordinator_pb2.FinishedItem], unit_count: int
) -> list[FinishedWork]:
    """Returns what is newly finished among the reported items, with its parts. Changes nothing.

    Reports of former epochs and attempts are skipped: the item was restarted, or leased to other trainers. Reports
    of copies that have lost are skipped, too.

    Raises:
        InvalidRequestError: A report is malformed.
        StepStateError: A rank was never leased to the trainer, or was finished with other parts.
    """
    if len({report.global_rank for report in reports}) != len(reports):
        raise InvalidRequestError(f"a rank is reported twice: {[report.global_rank for report in reports]}")
    checked = (_check_report(step, trainer, report, _parts(report, unit_count)) for report in reports)
    return [work for work in checked if work is not None]


def _check_report(
    step: Step, trainer: str, report: coordinator_pb2.FinishedItem, parts: dict[int, int]
) -> FinishedWork | None:
    rank = report.global_rank
    item = step.item_of(rank)
    member, where = item.members[rank], f"rank {rank} of step {step.number}"
    key, current = (trainer, report.epoch, report.attempt), (member.trainer, item.epoch, item.attempt)
    summed = _checked_sums(step, report)
    if item.copy is not None and key == item.copy.key:
        return FinishedWork(item, member, parts)
    if report.copy and key != current:
        return None  # the copy has lost
    if (report.epoch, report.attempt) < (item.epoch, item.attempt):
        return None
    if key != current:
        raise StepStateError(
            f"trainer {trainer!r} reports {where} as finished under epoch {report.epoch}, attempt "
            f"{report.attempt}, but the item was leased to {member.trainer!r} under epoch {item.epoch}, "
            f"attempt {item.attempt}",
            global_rank=rank,
        )
    if member.finished and member.parts != parts:
        raise StepStateError(f"{where} was finished before with parts {member.parts}, now with {parts}")
    return None if member.finished else FinishedWork(item, member, parts, summed)


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
