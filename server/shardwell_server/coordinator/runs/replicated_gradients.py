"""Compares the gradients that the tensor-parallel ranks of a replica compute of the parameters that all of them hold.

Tensor-parallel rank 0 pushes these gradients. Each rank reports their checksums with its finished work item. Different
checksums mean that the ranks have computed different things, for example with other activations, or that their
hardware or numbers of threads differ. The step goes on with the gradient of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.runs.work_items import FinishedWork, MemberWork, WorkItem
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2

_NAMED_COUNT = 3
"""Number of parameters that a message names."""


def note_gradients(
    newly_finished: Iterable[FinishedWork],
    reports: Iterable[coordinator_pb2.FinishedItem],
    layouts: Sequence[UnitLayout],
) -> None:
    """Records the checksums that a trainer reported for newly finished work.

    Raises:
        InvalidRequestError: A report is malformed. Nothing is recorded.
    """
    by_rank = {report.global_rank: report for report in reports}
    found = [(work.member, _decode(by_rank[work.member.global_rank], layouts)) for work in newly_finished]
    for member, checksums in found:
        member.note_gradients(checksums)


def _decode(report: coordinator_pb2.FinishedItem, layouts: Sequence[UnitLayout]) -> dict[tuple[int, int], int]:
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


def find_differences(item: WorkItem, step: int, world: World, units: Iterable[Unit]) -> Iterator[tuple[Unit, str]]:
    """Yields the units of which the trainers of a finished item computed different gradients, and messages about them.

    Leaves out units for which an earlier step found a difference.
    """
    if world.tp == 1:
        return
    groups: dict[int, list[MemberWork]] = {}
    for member in item.members.values():
        groups.setdefault(world.coordinates(member.global_rank).pp_rank, []).append(member)
    for unit in units:
        if not unit.gradients_differed:
            for pp_rank in unit.layout.pp_ranks:
                if lines := _differences(unit, groups[pp_rank]):
                    yield unit, _message(item, step, unit, pp_rank, lines)
                    break


def _differences(unit: Unit, members: Sequence[MemberWork]) -> list[str]:
    """Returns a text for each parameter whose gradient differs between the first member and others."""
    lines: list[str] = []
    first = members[0]
    if all(member.gradient_checksums == first.gradient_checksums for member in members[1:]):
        return lines
    for index, parameter in enumerate(unit.layout.parameters):
        key = unit.index, index
        expected = first.gradient_checksums.get(key)
        others = [member for member in members[1:] if member.gradient_checksums.get(key) != expected]
        if others:
            ranks = ", ".join(f"{member.global_rank} (trainer {member.trainer!r})" for member in others)
            lines.append(f"{parameter.name!r}: rank {ranks} and rank {first.global_rank} (trainer {first.trainer!r})")
    return lines


def _message(item: WorkItem, step: int, unit: Unit, pp_rank: int, lines: Sequence[str]) -> str:
    more = f" and {len(lines) - _NAMED_COUNT} more parameters" if len(lines) > _NAMED_COUNT else ""
    return (
        f"step {step}: tensor-parallel ranks of dp rank {item.dp_rank}, pipeline rank {pp_rank}, computed different "
        f"gradients of parameters of unit {unit.layout.unit!r} that all of them hold: "
        f"{'; '.join(lines[:_NAMED_COUNT])}{more}. The gradient of tensor-parallel rank 0 counts. If the trainers have "
        "the same hardware and number of threads, the ranks compute with different values: check that all of them get "
        "the same batch and the same random numbers. Later differences of this unit are not reported"
    )
