"""Converts a run to the manifest of a checkpoint, and back, also if the run has another grid or other units.

Folders of checkpoints are read and written in threads.

Note: [Resuming with other data ranks]
    Values, optimizer state, averages, buffers, commit records and tracked objects belong to the run as a whole, and are
    the same with any number of data ranks. The servers cut the state of optimizers that run on trainers into other
    optimizer partitions. What belongs to a data rank cannot be divided over other ranks: residuals of error feedback
    start at zero, and gradients that were kept for another optimizer are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from google.protobuf import json_format

from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.steps.proposals import committed_optimizer
from shardwell_server.coordinator.steps.work import AsynchronousWork
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.optimizer_checks import algorithm_of
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import FileRecord
from shardwell_wire.checkpoints.manifest import (
    CONSISTENCY,
    ITEM_NUMBERS,
    REDUCTION_GROUPS,
    RESIDUAL_RANKS,
    Manifest,
    message_from_dict,
    message_to_dict,
)
from shardwell_wire.checkpoints.reading import require_same_tensor
from shardwell_wire.checkpoints.storage import CheckpointRoots, Storage
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    InternalError,
    RunMismatchError,
    ShardwellError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.optimizers import KEPT_GROUP, NO_GROUP
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class CheckpointFiles:
    """Opens folders of checkpoints, and runs blocking work on them in threads.

    The threads are their own, because a bucket that does not answer must not block anything else.

    Args:
        roots: The folders that may be opened.
    """

    def __init__(self, roots: CheckpointRoots) -> None:
        self._roots = roots
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="shardwell-checkpoints")
        self._closed = False

    async def __call__(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """Returns the result of a call in a thread. Unexpected errors of storage libraries become InternalError."""
        if self._closed:
            raise UnavailableError("the coordinator is stopping")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **options))
        except (ShardwellError, asyncio.CancelledError):
            raise
        except Exception as error:
            logger.exception("unexpected error in the storage of checkpoints")
            raise InternalError(f"the storage of checkpoints failed: {type(error).__name__}: {error}") from error

    def open(self, url: str) -> Storage:
        """Returns the storage at a path or URL. Blocks.

        Raises:
            ShardwellError: See ``CheckpointRoots.open``.
        """
        return self._roots.open(url)

    def open_run(self, url: str, run: str) -> RunFolder:
        """Returns the folder of a run in a folder of checkpoints. Blocks. Raises as ``open``."""
        return RunFolder(self._roots.open(url), run)

    def close(self) -> None:
        """Lets running work end, and starts no more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def manifest_of(run: Run, checkpoint_id: str, created: float, commits: Iterable[CommitRecord]) -> Manifest:
    """Returns the manifest of a checkpoint of a run's current version, without files.

    Args:
        checkpoint_id: Random id of the checkpoint.
        created: Seconds since 1970.
        commits: The most recent commit records, oldest first.
    """
    return Manifest(
        run=run.name,
        run_id=run.identity.run_id,
        checkpoint_id=checkpoint_id,
        step=run.committed_step,
        created=created,
        world=run.settings.world,
        seed=run.settings.seed,
        units=tuple(run.units.layouts),
        files=(),
        commits=tuple(map(_commit_to_dict, commits)),
        run_state=run.commits.state,
        lineage=run.checkpoints.lineage,
        extra={
            "num_layers": run.settings.num_layers,
            "min_trainers": run.settings.min_trainers,
            REDUCTION_GROUPS: list(run.settings.reduction_groups),
            **_asynchronous_facts(run),
        },
    )


def _asynchronous_facts(run: Run) -> dict[str, Any]:
    """Returns what the manifest of an asynchronous run has in addition."""
    if not isinstance(run.work, AsynchronousWork):
        return {}
    return {CONSISTENCY: str(run.settings.consistency), ITEM_NUMBERS: run.work.numbers}


def with_files(manifest: Manifest, files: Sequence[FileRecord], residual_ranks: Collection[int]) -> Manifest:
    """Returns a manifest with the files of all servers and trainers.

    Args:
        manifest: The manifest without files.
        residual_ranks: Data ranks whose residuals of error feedback the files have.
    """
    extra = {**manifest.extra, RESIDUAL_RANKS: sorted(residual_ranks)} if residual_ranks else manifest.extra
    return replace(manifest, files=tuple(files), extra=extra)


def commits_in(manifest: Manifest, where: str) -> list[CommitRecord]:
    """Returns the most recent commit records, oldest first.

    Raises:
        CorruptDataError: A record is invalid, or they do not end with the manifest's step.
    """
    try:
        commits = [_commit_from_dict(commit) for commit in manifest.commits]
    except (KeyError, TypeError, ValueError, json_format.ParseError) as error:
        raise CorruptDataError(f"the manifest of {where} has an invalid commit record: {error}") from error
    steps = [commit.step for commit in commits]
    if steps != list(range(manifest.step - len(steps), manifest.step)) or (manifest.step and not steps):
        raise CorruptDataError(f"the manifest of {where} has commit records {steps}, but step {manifest.step}")
    return commits


def first_items_in(manifest: Manifest, settings: RunSettings) -> tuple[int, ...]:
    """Returns the number of each data rank's first work item in a run that is loaded from a checkpoint.

    With another number of data ranks, all continue at the lowest number of the checkpoint: no number is left out.

    Returns:
        One number for each data rank of the run. Empty: the run is synchronous.
    """
    if not settings.consistency.asynchronous:
        return ()
    numbers, dp = manifest.item_numbers, settings.world.dp
    return numbers if len(numbers) == dp else (min(numbers),) * dp


def run_state_in(manifest: Manifest) -> coordinator_pb2.RunState | None:
    """Returns the state of a run that is loaded from a checkpoint.

    The trainer that pushed the newest buffers cannot recognise them by lease and attempt any more, so all trainers
    fetch them.
    """
    if manifest.run_state is None:
        return None
    state = coordinator_pb2.RunState()
    state.CopyFrom(manifest.run_state)
    state.ClearField("buffer_source")
    return state


def require_same_run(manifest: Manifest, run: str, settings: RunSettings, where: str) -> None:
    """Raises RunMismatchError unless a run with these settings can continue from a checkpoint.

    The world may differ, see Note: [Resuming in another grid] and Note: [Resuming with other data ranks]. Reduction
    groups belong to a number of data ranks. The batches of a synchronous run depend on the step, and those of an
    asynchronous run on the numbers of the data ranks' work items. Therefore, neither can continue from the other.
    """
    if settings.consistency.asynchronous != manifest.consistency.asynchronous:
        raise RunMismatchError(
            f"run {run!r} cannot continue from checkpoint {where}: the checkpoint has "
            f"consistency={manifest.consistency}, but this trainer asks for consistency={settings.consistency}, whose "
            f"batches are numbered otherwise. Pass consistency={manifest.consistency} to join, or start a new run with "
            "the weights of the checkpoint (shardwell convert-checkpoint)",
            run=run,
            name="consistency",
            expected=manifest.consistency,
            actual=settings.consistency,
        )
    facts: list[tuple[str, object, object]] = [("seed", settings.seed, manifest.seed)]
    if settings.world.dp == manifest.world.dp:
        facts.append(("reduction_groups", settings.reduction_groups, manifest.reduction_groups))
    for name, ours, theirs in facts:
        if ours != theirs:
            raise RunMismatchError(
                f"run {run!r} cannot continue from checkpoint {where}: the checkpoint has {name}={theirs}, but this "
                f"trainer asks for {name}={ours}. Pass the checkpoint's value to join; the world and the numbers of "
                "trainers and servers may differ",
                run=run,
                name=name,
                expected=theirs,
                actual=ours,
            )


def has_units_of(manifest: Manifest, world: World, layouts: Iterable[UnitLayout]) -> bool:
    """True if a run has the checkpoint's units: cp, tp, pp are equal, and no unit of the run has its tensors otherwise.

    Args:
        layouts: The units that the run has already.
    """
    if (manifest.world.cp, manifest.world.tp, manifest.world.pp) != (world.cp, world.tp, world.pp):
        return False
    stored = {unit.unit: unit for unit in manifest.units}
    names = {name for unit in manifest.units for name in unit.index_by_name}
    return all(stored.get(unit.unit) == unit or names.isdisjoint(unit.index_by_name) for unit in layouts)


def describe_other_data_ranks(manifest: Manifest, world: World, commits: Sequence[CommitRecord]) -> str:
    """Returns what a run does not take from a checkpoint of other data ranks. Empty: the data ranks are the same.

    See Note: [Resuming with other data ranks].

    Args:
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
            f"{first.shown_name!r}{more} in checkpoint {where}: resume with the model that the checkpoint was saved "
            "with, and wrap all of it in every trainer",
            parameter=first.shown_name,
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


def _commit_to_dict(record: CommitRecord) -> dict[str, Any]:
    optimizer = common_pb2.OptimizerStep.FromString(record.optimizer)
    return {**asdict(record), "unit_order": list(record.unit_order), "optimizer": message_to_dict(optimizer)}


def _commit_from_dict(content: Mapping[str, Any]) -> CommitRecord:
    fields = dict(content)
    optimizer = message_from_dict(fields.pop("optimizer"), common_pb2.OptimizerStep())
    return CommitRecord(
        step=int(fields["step"]),
        time=float(fields["time"]),
        leader=str(fields["leader"]),
        optimizer=optimizer.SerializeToString(deterministic=True),
        clip_coefficient=float(fields["clip_coefficient"]),
        unit_order=tuple(map(int, fields["unit_order"])),
        grad_norm=float(fields["grad_norm"]),
        other_norms=tuple(
            (float(of), float(bound), float(value)) for of, bound, value in fields.get("other_norms", ())
        ),
        skipped=bool(fields["skipped"]),
        trainer=str(fields.get("trainer", "")),
        dp_rank=int(fields.get("dp_rank", 0)),
        item=int(fields.get("item", 0)),
        base_version=int(fields.get("base_version", 0)),
        means=str(fields.get("means", "")),
    )
