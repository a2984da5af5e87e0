"""Chooses the checkpoint from which a run is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from shardwell_server.coordinator.checkpoints.files import CheckpointFiles
from shardwell_server.coordinator.checkpoints.manifests import require_same_run
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.runs.checkpoints import CheckpointOptions, Restore
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import CheckpointRecord
from shardwell_server.coordinator.waiting import SharedCall
from shardwell_wire.checkpoints.folder import Entry, entry_at
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.reading import Checkpoint, read_manifest
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import AccessError, CorruptDataError, InvalidRequestError, NotFoundError, ShardwellError

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
            found = await call(lambda: self._choose(run_name, settings, options, resume, own_only=own_only))
        finally:
            self._choosing.pop(run_name, None)
        return None if run_name in self._state.runs else found

    async def _choose(
        self, run_name: str, settings: RunSettings, options: CheckpointOptions, resume: str, *, own_only: bool
    ) -> Restore | None:
        if resume != LATEST:
            only = run_name if own_only else None
            manifest = await self._files(lambda: self._open_named(resume, run_name, options.directory, only))
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
            entries = await self._files(lambda: self._candidates(directory, run.name, saved))
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
