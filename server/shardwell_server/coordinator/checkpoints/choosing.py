"""Chooses the checkpoint from which a run is loaded, and what a run of another grid takes from it.

Note: [Resuming with other data ranks]
    Values, optimizer state, averages, buffers, commit records and tracked objects belong to the run as a whole, and are
    the same with any number of data ranks. The servers cut the state of optimizers that run on trainers into other
    optimizer partitions. What belongs to a data rank cannot be divided over other ranks: residuals of error feedback
    start at zero, and gradients that were kept for another optimizer are dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from shardwell_server.coordinator.checkpoints.manifests import CheckpointFiles, require_same_run
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.run_checkpoints import CheckpointOptions, Restore
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.signals import SharedCall
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.steps.proposals import committed_optimizer
from shardwell_server.coordinator.storage.records import CheckpointRecord, CommitRecord
from shardwell_server.optimizer_checks import algorithm_of
from shardwell_wire.checkpoints.folder import Entry, entry_at
from shardwell_wire.checkpoints.manifest import RESIDUAL_RANKS, Manifest
from shardwell_wire.checkpoints.reading import Checkpoint, read_manifest, require_same_tensor
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import (
    AccessError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.optimizers import KEPT_GROUP, NO_GROUP
from shardwell_wire.model.topology import World
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


logger = logging.getLogger(__name__)

LATEST = "latest"
"""Value of ``JoinRequest.resume`` for the newest checkpoint that can be loaded."""


class CheckpointChooser:
    """Looks for usable checkpoints in the folders of runs, and reports damaged ones.

    Args:
        state: State of the coordinator.
        files: Runs work on checkpoint folders.
    """

    def __init__(self, state: CoordinatorState, files: CheckpointFiles) -> None:
        self._state, self._files = state, files
        self._choosing: dict[str, SharedCall[Restore | None]] = {}
        """Look-ups in checkpoint folders, by run name."""

    async def choose(
        self, run_name: str, settings: RunSettings, options: CheckpointOptions, resume: str, *, own_only: bool = False
    ) -> Restore | None:
        """Returns the checkpoint from which to create a run. None: create it without one.

        Args:
            run_name: Name of the run.
            settings: Settings that the trainer asks for.
            options: Options for checkpoints that the trainer asks for.
            resume: As in ``JoinRequest``.
            own_only: Whether the caller may read checkpoints of runs of this name only.

        Raises:
            AccessError: The checkpoint is of a run of another name, and ``own_only`` is set.
            InvalidRequestError: ``resume`` is "latest", but there is no folder of checkpoints.
            CorruptDataError: The checkpoint is damaged or does not exist. The message offers another one.
            RunMismatchError: The checkpoint belongs to a run with other settings.
        """
        if not resume or run_name in self._state.runs:
            return None
        # Concurrent trainers of a run share one look-up.
        call = self._choosing.setdefault(run_name, SharedCall())
        try:
            found = await call(self._choose, run_name, settings, options, resume, own_only=own_only)
        finally:
            self._choosing.pop(run_name, None)
        return None if run_name in self._state.runs else found

    async def _choose(
        self, run_name: str, settings: RunSettings, options: CheckpointOptions, resume: str, *, own_only: bool
    ) -> Restore | None:
        if resume != LATEST:
            only = run_name if own_only else None
            manifest = await self._files(self._open_named, resume, run_name, options.directory, only)
            require_same_run(manifest, run_name, settings, resume)
            return Restore(url=resume, checkpoint_id=manifest.checkpoint_id, step=manifest.step)
        if not options.directory:
            raise InvalidRequestError(
                'resume is "latest", but checkpoint_dir is not set: set the folder of checkpoints'
            )
        entries = await self._files(lambda: self._files.open_run(options.directory, run_name).entries())
        # A checkpoint whose manifest is damaged has no time: it comes last in the list, and may be the newest.
        usable = next((at for at in entries if at.manifest is not None and at.is_valid), None)
        damaged = [at for at in entries if not at.is_incomplete and not at.is_valid]
        newer = [at for at in damaged if usable is None or at.step >= usable.step]
        for entry in newer:
            self.report_damaged(run_name, entry.url, entry.problem)
        if usable is not None and usable.manifest is not None:
            require_same_run(usable.manifest, run_name, settings, usable.url)
            return Restore(
                url=usable.url,
                checkpoint_id=usable.checkpoint_id,
                step=usable.step,
                may_fall_back=True,
                damaged=tuple(entry.checkpoint_id for entry in damaged),
                passed_over=tuple(f"{entry.url} ({entry.problem})" for entry in newer),
            )
        if damaged:
            raise CorruptDataError(
                f"run {run_name!r} cannot be resumed: all {len(damaged)} checkpoints in {options.directory} are "
                f"damaged, the newest because {damaged[0].problem}. Repair one, or join without resume to start from "
                "step 0"
            )
        logger.info("run %r: there is no checkpoint in %s yet: the run starts at step 0", run_name, options.directory)
        return None

    async def choose_before(self, run: Run, restore: Restore, error: ShardwellError) -> Restore | None:
        """Reports that a checkpoint is damaged, and returns the newest usable one before it.

        Args:
            run: The run that is being loaded.
            restore: The damaged checkpoint.
            error: Why it cannot be loaded.

        Returns:
            None if there is no other checkpoint, or the user named this one. ``restore`` itself if the folder of
            checkpoints cannot be listed now.
        """
        if run.checkpoints.restoring.fatal != str(error):  # else it was reported, and nothing has changed
            self.report_damaged(run.name, restore.url, str(error))
        if not restore.may_fall_back:
            return None
        damaged = (*restore.damaged, restore.checkpoint_id)
        directory, saved = run.checkpoints.options.directory, list(run.checkpoints.saved)
        known = {at.checkpoint_id for at in saved}
        try:
            entries = await self._files(self._candidates, directory, run.name, saved)
        except ShardwellError as problem:
            logger.warning("run %r: the folder of checkpoints cannot be listed: %s", run.name, problem)
            return restore
        lineage = {*run.checkpoints.lineage, run.identity.run_id}
        usable = [
            at
            for at in entries
            if at.manifest is not None
            and at.is_valid
            and at.checkpoint_id not in damaged
            and (not restore.is_rollback or at.checkpoint_id in known or at.manifest.run_id in lineage)
        ]
        if not usable:
            return None
        before = usable[0]
        return replace(
            restore,
            url=before.url,
            checkpoint_id=before.checkpoint_id,
            step=before.step,
            damaged=damaged,
            passed_over=(*restore.passed_over, f"{restore.url} ({error})"),
        )

    def report_damaged(self, run_name: str, url: str, problem: str) -> None:
        logger.error("run %r: checkpoint %s cannot be loaded: %s", run_name, url, problem)
        self._state.events.add(EventKind.CHECKPOINT_DAMAGED, f"{url}: {problem}", run=run_name)

    def _candidates(self, directory: str, run: str, saved: Sequence[CheckpointRecord]) -> list[Entry]:
        """Returns the checkpoints in a run's folder, newest first, and those that the run has elsewhere. Blocks.

        A run may have been resumed from another folder, or have changed its folder.
        """
        found = self._files.open_run(directory, run).entries() if directory else []
        listed = {entry.checkpoint_id for entry in found}
        others = [record for record in reversed(saved) if record.checkpoint_id not in listed]
        elsewhere = [entry_at(self._files.open(record.url)) for record in others]
        return sorted([*found, *elsewhere], key=lambda entry: -entry.manifest.created if entry.manifest else 0.0)

    def _open_named(self, url: str, run: str, directory: str, only: str | None) -> Manifest:
        """Returns the manifest of a checkpoint that the user named, for a run. Blocks.

        Args:
            url: The checkpoint.
            run: Name of the run that is to be created.
            directory: The folder of its checkpoints. Empty: it has none.
            only: The run whose checkpoints the caller may read. None: any.
        """
        storage = self._files.open(url)
        try:
            if only is not None:
                _require_of_run(storage, only)
            return open_manifest(storage)
        except CorruptDataError as error:
            others = []
            if directory:
                entries = self._files.open_run(directory, run).entries()
                others = [at.url for at in entries if at.is_valid and at.url != url]
            offer = f". The newest other checkpoint of the run is {others[0]}: pass it as resume" if others else ""
            raise CorruptDataError(f"{error}{offer}", **error.data) from error


def open_manifest(storage: Storage) -> Manifest:
    """Returns the manifest of a checkpoint, after checks of all headers. Blocks.

    Raises:
        CorruptDataError: The checkpoint is damaged, or a file is missing.
    """
    with _missing_is_damaged():
        return Checkpoint(storage).manifest


def _require_of_run(storage: Storage, run: str) -> None:
    """Raises AccessError unless a checkpoint is of a run, before more than its manifest is read. Blocks."""
    with _missing_is_damaged():
        if read_manifest(storage).run == run:
            return
    raise AccessError(
        f"the token is for run {run!r}, but checkpoint {storage.url} is of another run: an operator can resume from it",
        run=run,
    )


@contextmanager
def _missing_is_damaged() -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise CorruptDataError(str(error), **error.data) from error
