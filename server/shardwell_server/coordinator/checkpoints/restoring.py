"""Loads runs from checkpoints: new runs that continue from one, and runs that lost shards and go back to one.

Note: [Resuming in another grid]
    A run with another cp, tp or pp than its checkpoint has other units, which are known only when
    trainers declare them. So has a run whose model is wrapped differently, which its first trainer announces with
    ``JoinRequest.rewrap``. Loading such a run therefore loads commit records and tracked state, but no unit. It stores
    the checkpoint as ``RunCheckpoints.source``. When a trainer declares a unit, the unit is placed as in a new run, but
    no trainer sends initial values: the servers read values and state from the checkpoint's files (``LoadShards``),
    by the names of parameters and the places of elements, and publish the checkpoint's version.

    The first step after the checkpoint is committed only if all values of the checkpoint are in units, so that no
    parameter is lost without notice.

    A rollback to a checkpoint with other units loads all units of the run at once, like any other rollback.

Note: [Loading a run]
    Both are the same work. ``RunCheckpoints.restore`` is stored first. Until it is cleared, ``Join`` answers that the
    run is not started, so no trainer observes a run that is partly loaded. The coordinator then

    1. makes every live server drop what it holds of the run, and reject the epochs of former trainers
       (``BeginRestore``),
    2. places all units of the checkpoint on these servers, and has each fill and publish its shards (``LoadShards``),
    3. stores units, commit records, the run's state and the end of the restore in one transaction.

    No server is told to release a copy meanwhile, because it may be loading the same shard. A server that is silent now
    releases its copies when it returns after the end.

    After an error, and after a coordinator restart, everything starts again with a higher number. If a file is
    damaged, the checkpoint before it is used, unless the user named the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from shardwell_server.coordinator.checkpoints.manifests import (
    CheckpointFiles,
    commits_in,
    describe_other_data_ranks,
    first_items_in,
    for_units,
    has_units_of,
    require_all_declared,
    require_in_checkpoint,
    require_same_optimizer,
    require_same_run,
    run_state_in,
    without_buffers,
    without_items,
    without_units,
)
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainer_leases import TrainerLeases
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.placement import UnitPlacer
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.run_checkpoints import ByteProgress, CheckpointOptions, CheckpointSource, Restore
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.signals import SharedCall, poll
from shardwell_server.coordinator.state import CoordinatorState, raise_if_deleted
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, CheckpointRecord, CommitRecord
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.folder import Entry, entry_at
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.reading import Checkpoint, read_manifest
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.connection.channel import backoff, retry_async
from shardwell_wire.errors import (
    AccessError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import UnitLayout, with_model_names
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Seconds that a server waits in ``LoadShards`` for the end."""
_SERVERS_WAIT_S = 2.0
"""Seconds that a rollback waits for the configured number of servers: all may be about to start again."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0

LATEST = "latest"
"""Value of ``JoinRequest.resume`` for the newest checkpoint that can be loaded."""


class RunRestorer:
    """Loads runs from checkpoints. See Note: [Loading a run].

    Args:
        trainers: Ends memberships, and fences former trainers.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        placer: UnitPlacer,
        trainers: TrainerLeases,
        files: CheckpointFiles,
    ) -> None:
        self._state, self._servers, self._placer = state, servers, placer
        self._trainers, self._files = trainers, files
        self._chooser = CheckpointChooser(state, files)

    # New runs

    async def find_or_create_run(
        self, request: coordinator_pb2.JoinRequest, settings: RunSettings, run_id: str = ""
    ) -> Run:
        """Returns the run that a trainer joins, with the trainer's options for checkpoints.

        If the run does not exist and the trainer wants to resume, the run is loaded in the background.

        Args:
            run_id: Id of the run for which the trainer's token is. Empty: the trainer may join any run.

        Raises:
            ShardwellError: As ``TrainerLeases.find_or_create_run`` and ``CheckpointChooser.choose``.
        """
        options = CheckpointOptions().changed_by(request.config)
        restore = await self._chooser.choose(request.run, settings, options, request.resume, own_only=bool(run_id))
        is_new = request.run not in self._state.runs
        run = self._trainers.find_or_create_run(request.run, settings, run_id)
        if is_new and restore is not None:
            restore = replace(restore, rewrap=request.rewrap)
            run.checkpoints.begin_restore(restore, run.clock())
            message = f"checkpoint {restore.url}, step {restore.step}"
            self._state.events.add(EventKind.RUN_LOADING, message, run=run.name)
            self._notify_passed_over(run, restore)
            self.start(run)
        if run.checkpoints.set_options(run.checkpoints.options.changed_by(request.config)):
            run.changes.touch()
        return run

    def start(self, run: Run) -> None:
        """Loads a run in the background if ``RunCheckpoints.restore`` is set. Continues after a coordinator restart."""
        if run.checkpoints.restore is not None:
            self._state.tasks.start(self._restore(run))

    # Rollback

    def can_roll_back(self, run: Run) -> bool:
        """True if the run has a checkpoint to go back to."""
        return bool(run.checkpoints.saved)

    async def roll_back(self, run: Run, lost: str) -> bool:
        """Rolls a run back to its newest checkpoint, because shards are lost. Returns when this is durable.

        All memberships end, and trainers join again. The run is loaded in the background.

        Args:
            lost: What was lost, for messages, such as ``server 'b' has ended``.

        Returns:
            False if the run has no checkpoint. True also if it is being loaded already.
        """
        if run.checkpoints.restore is not None:
            return True
        if not run.checkpoints.saved or run.deleted:
            return False
        newest = max(run.checkpoints.saved, key=lambda record: (record.time, record.step))
        source = run.checkpoints.source
        restore = Restore(
            url=newest.url,
            checkpoint_id=newest.checkpoint_id,
            step=newest.step,
            reason=lost,
            may_fall_back=True,
            rewrap=source is not None and source.url == newest.url,
        )
        async with run.checkpoints.boundary:  # a commit record that is being written must be final first
            if run.checkpoints.restore is not None:
                return True
            run.checkpoints.begin_restore(restore, run.clock())
        self._end_memberships(run, restore)
        run.changes.touch()
        await self._state.save_or_retry(run)
        message = f"{lost}: going back from step {run.committed_step} to checkpoint {restore.url}"
        self._state.events.add(EventKind.RUN_LOADING, message, run=run.name)
        self.start(run)
        return True

    def _end_memberships(self, run: Run, restore: Restore) -> None:
        run.members.returning.update(run.members.live)
        for member in [*run.members.live.values(), *run.members.expired]:
            member.revoked_because = f"the run was rolled back to step {restore.step}: {restore.reason}"
            run.revoke_lease(member)

    # Loading

    async def _restore(self, run: Run) -> None:
        pauses = backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while (restore := run.checkpoints.restore) is not None and not run.deleted:
            progress = run.checkpoints.restoring
            try:
                await self._load(run, restore)
            except (CorruptDataError, UnitMismatchError) as error:
                if isinstance(error, UnitMismatchError) or not await self._fall_back(run, restore, error):
                    # Trainers get an error. The user may still bring the files back, so the run is not given up.
                    progress.fatal = str(error)
                    run.changed.notify()
                    await asyncio.sleep(_LONGEST_RETRY_S)
            except ShardwellError as error:
                if progress.problem != str(error):
                    logger.warning("run %r is not loaded yet: %s", run.name, error)
                progress.problem = str(error)
                run.changed.notify()
                await asyncio.sleep(next(pauses))
            except Exception as error:
                logger.exception("unexpected error while run %r was loaded", run.name)
                progress.problem = f"{type(error).__name__}: {error}"
                await asyncio.sleep(_LONGEST_RETRY_S)

    async def _load(self, run: Run, restore: Restore) -> None:
        """Loads a run. See Note: [Loading a run].

        Raises:
            CorruptDataError: The checkpoint is damaged, or a file is missing.
            ShardwellError: Another error. The caller tries again.
        """
        manifest = await self._files(lambda: open_manifest(self._files.open(restore.url)))
        if (manifest.checkpoint_id, manifest.step) != (restore.checkpoint_id, restore.step):
            raise CorruptDataError(
                f"{restore.url} contains checkpoint {manifest.checkpoint_id} of step {manifest.step}, expected "
                f"{restore.checkpoint_id} of step {restore.step}"
            )
        commits = commits_in(manifest, restore.url)
        fault_points.reach("coordinator.restore.begun", step=restore.step)
        await self._wait_for_servers(restore)
        number = run.changes.next_epoch()
        await self._state.save(run)  # no other restore may get this number, even after a restart
        context = self._servers.context(run, restore.step)
        begin = shard_pb2.BeginRestoreRequest(context=context, restore=number, min_epoch=number)
        emptied = {server.server_id: server.incarnation for server in self._state.cluster.live}
        answers = await self._servers.call_all(emptied, "BeginRestore", begin)
        for server_id, answer in answers.items():
            self._state.cluster.note_free(server_id, answer.free_bytes)
        # Otherwise the run has the units that its trainers have declared so far. See Note: [Resuming in another grid].
        same_units = not restore.rewrap and has_units_of(manifest, run.settings.world, run.units.layouts)
        units = [
            Unit(index, layout, await self._placer.reserve(run, index, layout, number, emptied), published=True)
            for index, layout in enumerate(manifest.units if same_units else run.units.layouts)
        ]
        self._keep_former(run, units, emptied)
        await self._load_shards(run, restore, number, units)
        await self._finish(run, restore, manifest, commits, units, same_units=same_units)

    def _keep_former(self, run: Run, units: Sequence[Unit], emptied: Mapping[str, str]) -> None:
        """Notes the shards of servers that may be alive and did not drop them. They must release these shards when
        they return, before they serve anyone."""
        for unit, former in zip(units, run.units, strict=False):
            if unit.layout.unit != former.layout.unit:
                continue
            unit.backups = tuple(
                BackupRecord(at.start_bytes, at.stop_bytes, at.server_id, at.incarnation, BackupState.RELEASING)
                for at in (*former.shards, *former.backups)
                if emptied.get(at.server_id) != at.incarnation and not self._placer.has_ended(at)
            )

    async def _wait_for_servers(self, restore: Restore) -> None:
        """Waits for ``min_servers`` servers. A rollback continues with fewer after ``_SERVERS_WAIT_S``."""
        cluster, wanted = self._state.cluster, self._state.settings.min_servers

        async def check() -> bool | None:
            return cluster.can_place(wanted) or None

        found = await poll(cluster.changed, check, _SERVERS_WAIT_S if restore.is_rollback else _LONGEST_RETRY_S)
        if not found and not (restore.is_rollback and cluster.staying):
            raise UnavailableError(f"the restore {cluster.describe_waiting(wanted)}")

    async def _load_shards(self, run: Run, restore: Restore, number: int, units: Sequence[Unit]) -> None:
        request = shard_pb2.LoadShardsRequest(
            context=self._servers.context(run, restore.step), restore=number, url=restore.url, wait_s=_POLL_S
        )
        progress = run.checkpoints.restoring.progress = ByteProgress()
        owners = {shard.server_id for unit in units for shard in unit.shards}
        await asyncio.gather(*(_load_shards(self._servers, run, owner, request, progress) for owner in owners))

    async def _finish(
        self,
        run: Run,
        restore: Restore,
        manifest: Manifest,
        commits: Sequence[CommitRecord],
        units: Sequence[Unit],
        *,
        same_units: bool,
    ) -> None:
        """Makes the loaded version the run's newest one."""
        run.check_not_deleted()
        if any(self._placer.has_ended(shard) for unit in units for shard in unit.shards):
            raise UnavailableError("a shard server ended while the run was loaded")
        # No ``await`` before the state is complete. Trainers still wait, because ``restore`` is set.
        if not restore.is_rollback:
            run.checkpoints.lineage = (*manifest.lineage, manifest.run_id)
        lost, state = run.committed_step, run_state_in(manifest)
        if same_units:
            run.checkpoints.source = None
        else:
            run.checkpoints.source = CheckpointSource(url=restore.url, step=restore.step)
            commits, state = without_units(commits), without_buffers(state)
        if manifest.world.dp != run.settings.world.dp:
            commits = without_items(commits)
        run.checkpoints.first_items = first_items_in(manifest, run.settings)
        lost_versions = run.load(units, commits, state)
        fault_points.reach("coordinator.restore.before_record", step=restore.step)
        await retry_async(lambda: self._state.save_loaded(run), errors=ShardwellError, check=raise_if_deleted)
        fault_points.reach("coordinator.restore.after_record", step=restore.step)
        run.checkpoints.end_restore()
        await self._add_loaded_checkpoint(run, restore, manifest)
        steps = f"rolled back to step {restore.step}" if restore.is_rollback else f"continues at step {restore.step}"
        why = f": {restore.reason}; {lost - restore.step} steps are repeated" if restore.is_rollback else ""
        kind = EventKind.ROLLED_BACK if restore.is_rollback else EventKind.RUN_RESUMED
        self._state.events.add(kind, f"{steps} from {restore.url}{why}", run=run.name)
        if lost_versions:
            self._state.events.add(EventKind.VERSIONS_LOST, lost_versions, run=run.name)
        if differences := describe_other_data_ranks(manifest, run.settings.world, commits_in(manifest, restore.url)):
            logger.warning("run %r: %s", run.name, differences)
            self._state.events.add(EventKind.DATA_RANKS_CHANGED, differences, run=run.name)
        run.changed.notify()
        self._trainers.items.start_fencing(run)
        self._state.tasks.start(self._trainers.wait_for_return(run))

    async def _add_loaded_checkpoint(self, run: Run, restore: Restore, manifest: Manifest) -> None:
        """Remembers the checkpoint of a new run, so that it can be rolled back to."""
        if run.checkpoints.find(restore.checkpoint_id) is not None:
            return
        record = CheckpointRecord(
            restore.checkpoint_id, restore.step, restore.url, manifest.size_bytes, manifest.created, True
        )
        run.checkpoints.saved.append(record)
        try:
            await self._state.save_checkpoint(run, record)
        except ShardwellError as error:
            logger.warning("run %r: checkpoint %s is not remembered: %s", run.name, record.url, error)

    async def _fall_back(self, run: Run, restore: Restore, error: ShardwellError) -> bool:
        """Goes on with the checkpoint before a damaged one. Returns False if there is none."""
        before = await self._chooser.choose_before(run, restore, error)
        if before is None:
            return False
        if before is restore:
            return True  # try again
        run.checkpoints.begin_restore(before, run.clock())
        run.changes.touch()
        await self._state.save_or_retry(run)
        message = f"the checkpoint before it is used: step {before.step}, {before.url}"
        self._state.events.add(EventKind.RUN_LOADING, message, run=run.name)
        self._notify_passed_over(run, before)
        return True

    def _notify_passed_over(self, run: Run, restore: Restore) -> None:
        """Tells the trainers that newer checkpoints than this one are damaged, and cannot be loaded."""
        if restore.passed_over:
            message = (
                f"the run continues from the checkpoint of step {restore.step}, {restore.url}, because newer ones are "
                f"damaged: {'; '.join(restore.passed_over)}"
            )
            run.notices.add(message, now=self._state.wall_clock())


class CheckpointChooser:
    """Looks for usable checkpoints in the folders of runs, and reports damaged ones."""

    def __init__(self, state: CoordinatorState, files: CheckpointFiles) -> None:
        self._state, self._files = state, files
        self._choosing: dict[str, SharedCall[Restore | None]] = {}
        """Look-ups in checkpoint folders, by run name."""

    async def choose(
        self, run_name: str, settings: RunSettings, options: CheckpointOptions, resume: str, *, own_only: bool = False
    ) -> Restore | None:
        """Returns the checkpoint from which to create a run. None: create it without one.

        Args:
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
            _report_damaged(self._state, run_name, entry.url, entry.problem)
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
            error: Why it cannot be loaded.

        Returns:
            None if there is no other checkpoint, or the user named this one. ``restore`` itself if the folder of
            checkpoints cannot be listed now.
        """
        if run.checkpoints.restoring.fatal != str(error):  # else it was reported, and nothing has changed
            _report_damaged(self._state, run.name, restore.url, str(error))
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


class UnitFiller:
    """Fills declared units from checkpoints. See Note: [Resuming in another grid]."""

    def __init__(self, state: CoordinatorState, servers: ShardServers, files: CheckpointFiles) -> None:
        self._state, self._servers, self._files = state, servers, files
        self._manifests: dict[CheckpointSource, Manifest] = {}
        """Manifests of the checkpoints from which units are filled."""

    async def check(self, run: Run, layout: UnitLayout) -> None:
        """Checks a unit before it is placed, if it is to be filled.

        Raises:
            UnitMismatchError: The checkpoint lacks a parameter, or has another tensor of its name.
        """
        if (source := run.filled_from) is not None and run.units.find(layout.unit) is None:
            require_in_checkpoint(await self._manifest(source), layout, source.url)

    async def fill(self, run: Run, unit: Unit, wait_s: float) -> None:
        """Fills and publishes a unit that is to be filled. Returns when it is published, or after ``wait_s``.

        Returns early, too, if a server is unavailable or was restarted: the caller must place the unit again.

        Raises:
            CorruptDataError: A file is missing or damaged; the message names it.
            ShardwellError: Another error of a server.
        """
        source = run.filled_from
        if source is None:
            return

        async def check() -> bool | None:
            if not unit.published:
                await unit.publishing(self._fill, run, unit, source)
            return True

        try:
            await poll(run.changed, check, wait_s)
        except (UnavailableError, NotFoundError) as error:  # not found: a new process of a server that has ended
            logger.info("unit %r is not filled yet: %s", unit.layout.unit, error)
        except CorruptDataError as error:
            _report_damaged(self._state, run.name, source.url, str(error))
            raise

    async def check_step(self, run: Run, optimizer: common_pb2.OptimizerStep) -> None:
        """Checks a step proposal before the first commit after the checkpoint.

        Raises:
            UnitMismatchError: The run's units lack a parameter of the checkpoint.
            ConflictError: A parameter has state of another optimizer.
        """
        if (source := run.filled_from) is not None:
            manifest, layouts = await self._manifest(source), run.units.layouts
            require_all_declared(manifest, layouts, source.url)
            require_same_optimizer(manifest, commits_in(manifest, source.url), layouts, optimizer)

    async def commits(self, run: Run) -> Sequence[CommitRecord]:
        """Returns the run's most recent commit records, oldest first, for a checkpoint.

        Those of a checkpoint of another grid get the units of this run.

        Raises:
            UnitMismatchError: Not all values of the checkpoint are in units of this run yet.
        """
        if (source := run.filled_from) is None:
            return run.commits.records
        manifest, layouts = await self._manifest(source), run.units.layouts
        require_all_declared(manifest, layouts, source.url)
        return for_units(commits_in(manifest, source.url), manifest.units, layouts)

    async def _manifest(self, source: CheckpointSource) -> Manifest:
        if source not in self._manifests:
            manifest = await self._files(lambda: open_manifest(self._files.open(source.url)))
            wanted = {at.filled_from for at in self._state.runs.values()}
            self._manifests = {each: self._manifests[each] for each in self._manifests if each in wanted}
            self._manifests[source] = replace(manifest, units=with_model_names(manifest.units))
        return self._manifests[source]

    async def _fill(self, run: Run, unit: Unit, source: CheckpointSource) -> None:
        shards, progress = unit.shards, ByteProgress()
        request = shard_pb2.LoadShardsRequest(
            context=self._servers.context(run, source.step), url=source.url, wait_s=_POLL_S, unit=unit.layout.unit
        )
        run.checkpoints.filling[unit.layout.unit] = progress
        outcomes = await asyncio.gather(
            *(_load_shards(self._servers, run, owner, request, progress) for owner in sorted(unit.owners)),
            return_exceptions=True,
        )
        run.checkpoints.filling.pop(unit.layout.unit, None)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:  # all servers have ended their work, so the unit may be placed again
            raise min(errors, key=lambda error: isinstance(error, UnavailableError))
        async with run.units.placement_lock:
            if unit.shards is not shards or run.checkpoints.restore is not None:
                return  # the unit was placed again, or the run is loaded from a checkpoint
            await self._state.save_unit(run, unit, published=True)
            unit.published = True
        message = f"unit {unit.layout.unit!r} is version {source.step} of checkpoint {source.url}"
        self._state.events.add(EventKind.UNIT_PUBLISHED, message, run=run.name)
        run.changed.notify()


async def _load_shards(
    servers: ShardServers, run: Run, server_id: str, request: shard_pb2.LoadShardsRequest, progress: ByteProgress
) -> None:
    """Makes a server read shards of a checkpoint. Returns when it has read them, or the run is deleted."""
    while not run.deleted:
        answer = await servers.call(server_id, "LoadShards", request)
        progress[server_id] = (answer.loaded_bytes, answer.total_bytes)
        if answer.loaded:
            return


def _report_damaged(state: CoordinatorState, run: str, url: str, problem: str) -> None:
    logger.error("run %r: checkpoint %s cannot be loaded: %s", run, url, problem)
    state.events.add(EventKind.CHECKPOINT_DAMAGED, f"{url}: {problem}", run=run)


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
