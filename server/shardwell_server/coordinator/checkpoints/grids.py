"""Checkpoints of another grid: what a run of another world takes from them. No I/O.

Note: [Resuming with other data ranks]
    Values, optimizer state, averages, buffers, commit records and tracked objects belong to the run as a whole, and are
    the same with any number of data ranks. The servers cut the state of optimizers that run on trainers into other
    optimizer partitions. What belongs to a data rank cannot be divided over other ranks: residuals of error feedback
    start at zero, and gradients that were kept for another optimizer are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwell_server.coordinator.runs.proposals import committed_optimizer
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.optimizer_checks import algorithm_of
from shardwell_wire.checkpoints.elements import require_same_tensor
from shardwell_wire.checkpoints.manifest import RESIDUAL_RANKS, Manifest
from shardwell_wire.errors import ConflictError, UnitMismatchError
from shardwell_wire.layout import Parameter, UnitLayout
from shardwell_wire.optimizers import KEPT_GROUP, NO_GROUP
from shardwell_wire.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2


def has_units_of(manifest: Manifest, world: World, layouts: Iterable[UnitLayout]) -> bool:
    """True if a run has the checkpoint's units: tp and pp are equal, and no unit of the run has its tensors otherwise.

    Args:
        manifest: The checkpoint.
        world: The run's world.
        layouts: The units that the run has already.
    """
    if (manifest.world.tp, manifest.world.pp) != (world.tp, world.pp):
        return False
    stored = {unit.unit: unit for unit in manifest.units}
    names = {name for unit in manifest.units for name in unit.index_by_name}
    return all(stored.get(unit.unit) == unit or names.isdisjoint(unit.index_by_name) for unit in layouts)


def describe_other_data_ranks(manifest: Manifest, world: World, commits: Sequence[CommitRecord]) -> str:
    """Returns what a run does not take from a checkpoint of other data ranks. Empty: the data ranks are the same.

    See Note: [Resuming with other data ranks].

    Args:
        manifest: The checkpoint.
        world: The run's world.
        commits: The checkpoint's most recent commit records.
    """
    former = manifest.world.dp
    if former == world.dp:
        return ""
    lost = []
    if ranks := manifest.extra.get(RESIDUAL_RANKS):
        lost.append(f"the residuals of error feedback of data ranks {ranks}, which start at zero")
    if commits and any(KEPT_GROUP in unit.group_indices for unit in committed_optimizer(commits[-1].optimizer).units):
        lost.append("the gradients that were kept for another optimizer")
    items = f"; all data ranks continue at work item {min(numbers)}" if (numbers := manifest.item_numbers) else ""
    return (
        f"the checkpoint has dp={former}, and this run dp={world.dp}: from step {manifest.step} on, gradients are "
        f"those of {world.dp} data ranks and their batches{items}; not taken over: " + (" and ".join(lost) or "nothing")
    )


def without_units(commits: Iterable[CommitRecord]) -> list[CommitRecord]:
    """Returns commit records without indices of units, which mean other units in another grid."""
    found = []
    for record in commits:
        optimizer = common_pb2.OptimizerStep.FromString(record.optimizer)
        optimizer.ClearField("units")
        found.append(replace(record, optimizer=optimizer.SerializeToString(deterministic=True), unit_order=()))
    return found


def without_items(commits: Iterable[CommitRecord]) -> list[CommitRecord]:
    """Returns commit records without work items, whose numbers mean other batches with other data ranks."""
    return [replace(record, trainer="", dp_rank=0, item=0, base_version=0) for record in commits]


def for_units(
    commits: Iterable[CommitRecord], former: Sequence[UnitLayout], layouts: Sequence[UnitLayout]
) -> list[CommitRecord]:
    """Returns commit records with the parameter groups and the order of other units of the same parameters.

    Args:
        commits: Commit records of a checkpoint.
        former: Units of the checkpoint.
        layouts: Units of the run.
    """
    unit_of = {name: index for index, layout in enumerate(former) for name in layout.index_by_name}
    found = []
    for record in commits:
        optimizer = common_pb2.OptimizerStep.FromString(record.optimizer)
        groups = _groups(optimizer, former)
        optimizer.ClearField("units")
        place = {unit: number for number, unit in enumerate(record.unit_order)}
        places = {}
        for index, layout in enumerate(layouts):
            names = [parameter.name for parameter in layout.parameters]
            if groups and not layout.holds_buffers:
                group_indices = [groups.get(name, NO_GROUP) for name in names]
                optimizer.units.append(common_pb2.UnitGroups(unit_index=index, group_indices=group_indices))
            if known := [place[unit_of[name]] for name in names if unit_of.get(name) in place]:
                places[index] = min(known)
        order = tuple(sorted(places, key=lambda index: (places[index], index)))
        found.append(replace(record, optimizer=optimizer.SerializeToString(deterministic=True), unit_order=order))
    return found


def without_buffers(state: coordinator_pb2.RunState | None) -> coordinator_pb2.RunState | None:
    """Returns a run's state without the versions of buffers, by unit: trainers then read all buffers."""
    if state is not None:
        state.ClearField("buffer_versions")
    return state


def require_in_checkpoint(manifest: Manifest, layout: UnitLayout, where: str) -> None:
    """Raises UnitMismatchError if a checkpoint lacks a tensor of a unit, or has another tensor of its name."""
    stored = _by_name(unit for unit in manifest.units if unit.holds_buffers == layout.holds_buffers)
    for parameter in layout.parameters:
        names = (parameter.name, *parameter.aliases)
        found = next((stored[name] for name in names if name in stored), None)
        require_same_tensor(parameter, found, where)


def require_all_declared(manifest: Manifest, layouts: Sequence[UnitLayout], where: str) -> None:
    """Raises UnitMismatchError if units of a run lack values that a checkpoint has, and names one parameter."""
    declared = Counter[str]()
    for parameter in (each for layout in layouts for each in layout.parameters):
        for name in (parameter.name, *parameter.aliases):
            declared[name] += parameter.numel
    stored = {each.name: each for unit in manifest.units for each in unit.parameters}
    missing = [
        each
        for each in stored.values()
        if max(declared.get(name, -1) for name in (each.name, *each.aliases)) < each.box.whole_numel
    ]
    if missing:
        first, more = missing[0], f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnitMismatchError(
            f"the units of this run have {declared[first.name]} of the {first.box.whole_numel} elements of "
            f"{first.name!r}{more} in checkpoint {where}: resume with the model that the checkpoint was saved with, "
            "and wrap all of it in every trainer",
            parameter=first.name,
        )


def require_same_optimizer(
    manifest: Manifest,
    commits: Iterable[CommitRecord],
    layouts: Sequence[UnitLayout],
    optimizer: common_pb2.OptimizerStep,
) -> None:
    """Raises ConflictError if a step would update a parameter whose state in a checkpoint is another algorithm's."""
    expected: dict[str, str] = {}
    for record in commits:
        expected |= _algorithms(committed_optimizer(record.optimizer), manifest.units)
    for name, algorithm in _algorithms(optimizer, layouts).items():
        if expected.get(name, algorithm) != algorithm:
            raise ConflictError(
                f"parameter {name!r} has {expected[name]!r} state in the checkpoint that the run continues from: to "
                f"train it with {algorithm!r}, start a new run",
                parameter=name,
                expected=expected[name],
                actual=algorithm,
            )


def _algorithms(optimizer: common_pb2.OptimizerStep, layouts: Sequence[UnitLayout]) -> dict[str, str]:
    """Returns the optimizer of each parameter that a step updates, by name and alias."""
    groups = _groups(optimizer, layouts)
    return {name: algorithm_of(optimizer, group) for name, group in groups.items() if group >= 0}


def _groups(optimizer: common_pb2.OptimizerStep, layouts: Sequence[UnitLayout]) -> dict[str, int]:
    """Returns the index of each parameter's group, by name and alias."""
    found: dict[str, int] = {}
    for unit in optimizer.units:
        for parameter, group in zip(layouts[unit.unit_index].parameters, unit.group_indices, strict=True):
            found |= dict.fromkeys((parameter.name, *parameter.aliases), group)
    return found


def _by_name(units: Iterable[UnitLayout]) -> Mapping[str, Parameter]:
    return {name: each for unit in units for each in unit.parameters for name in (each.name, *each.aliases)}
