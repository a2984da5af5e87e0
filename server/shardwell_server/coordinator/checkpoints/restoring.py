"""Loads runs from checkpoints: new runs that continue from one, and runs that lost shards and go back to one.

Note: [Resuming in another grid]
    A run with other tensor or pipeline parallelism than its checkpoint has other units, which are known only when
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
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwell_server.coordinator.checkpoints.choosing import (
    CheckpointChooser,
    describe_other_data_ranks,
    for_units,
    has_units_of,
    open_manifest,
    require_all_declared,
    require_in_checkpoint,
    require_same_optimizer,
    without_buffers,
    without_items,
    without_units,
)
from shardwell_server.coordinator.checkpoints.manifests import CheckpointFiles, commits_in, first_items_in, run_state_in
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainer_leases import TrainerLeases
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.placement import UnitPlacer
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.run_checkpoints import CheckpointOptions, CheckpointSource, Restore
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.signals import poll
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, CheckpointRecord, CommitRecord
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.connection.channel import backoff, retry_async
from shardwell_wire.errors import (
    CorruptDataError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Seconds that a server waits in ``LoadShards`` for the end."""


class UnitFiller:
    """Fills declared units from checkpoints. See Note: [Resuming in another grid].

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        files: Runs work on checkpoint folders.
    """

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
            self._report_damaged(run, source, error)
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
            self._manifests[source] = manifest
        return self._manifests[source]

    async def _fill(self, run: Run, unit: Unit, source: CheckpointSource) -> None:
        shards, progress = unit.shards, dict[str, tuple[int, int]]()
        request = shard_pb2.LoadShardsRequest(
            context=self._servers.context(run, source.step), url=source.url, wait_s=_POLL_S, unit=unit.layout.unit
        )

        async def load(server_id: str) -> None:
            while not run.deleted:
                answer = await self._servers.call(server_id, "LoadShards", request)
                progress[server_id] = (answer.loaded_bytes, answer.total_bytes)
                run.checkpoints.note_filling(unit.layout.unit, progress.values())
                if answer.loaded:
                    return

        outcomes = await asyncio.gather(*map(load, sorted(unit.owners)), return_exceptions=True)
        run.checkpoints.note_filled(unit.layout.unit)
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

    def _report_damaged(self, run: Run, source: CheckpointSource, error: ShardwellError) -> None:
        logger.error("run %r: checkpoint %s cannot be loaded: %s", run.name, source.url, error)
        self._state.events.add(EventKind.CHECKPOINT_DAMAGED, f"{source.url}: {error}", run=run.name)


_SERVERS_WAIT_S = 2.0
"""Seconds that a rollback waits for the configured number of servers: all may be about to start again."""
"""Seconds that a server waits in ``LoadShards`` for the end."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0


class RunRestorer:
    """Loads runs from checkpoints. See Note: [Loading a run].

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        placer: Places units.
        trainers: Ends memberships, and fences former trainers.
        files: Runs work on checkpoint folders.
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
            request: The trainer's request.
            settings: The settings in the request.
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
            run: The run.
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
        run.members.expect_back(run.members.live.values())
        for member in [*run.members.live.values(), *run.members.expired]:
            member.revoked_because = restore.why_members_ended
            run.revoke_lease(member)

    # Loading

    async def _restore(self, run: Run) -> None:
        pauses = backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while (restore := run.checkpoints.restore) is not None and not run.deleted:
            progress = run.checkpoints.restoring
            try:
                await self._load(run, restore)
            except CorruptDataError as error:
                if not await self._fall_back(run, restore, error):
                    # Trainers get an error. The user may still bring the files back, so the run is not given up.
                    progress.fatal = str(error)
                    run.changed.notify()
                    await asyncio.sleep(_LONGEST_RETRY_S)
            except UnitMismatchError as error:  # as after a damaged file, the run is not given up
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
            return len(cluster.staying) >= wanted or None

        found = await poll(cluster.changed, check, _SERVERS_WAIT_S if restore.is_rollback else _LONGEST_RETRY_S)
        if not found and not (restore.is_rollback and cluster.staying):
            raise UnavailableError(f"{len(cluster.staying)} of {wanted} shard servers are live: start more")

    async def _load_shards(self, run: Run, restore: Restore, number: int, units: Sequence[Unit]) -> None:
        request = shard_pb2.LoadShardsRequest(
            context=self._servers.context(run, restore.step), restore=number, url=restore.url, wait_s=_POLL_S
        )
        done: dict[str, tuple[int, int]] = {}

        async def load(server_id: str) -> None:
            while not run.deleted:
                answer = await self._servers.call(server_id, "LoadShards", request)
                done[server_id] = (answer.loaded_bytes, answer.total_bytes)
                run.checkpoints.restoring.note(sum(at for at, _ in done.values()), sum(at for _, at in done.values()))
                if answer.loaded:
                    return

        await asyncio.gather(*map(load, {shard.server_id for unit in units for shard in unit.shards}))

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
        run.load(units, commits, state)
        fault_points.reach("coordinator.restore.before_record", step=restore.step)
        await retry_async(lambda: self._state.save_loaded(run), errors=ShardwellError, check=_raise_if_deleted)
        fault_points.reach("coordinator.restore.after_record", step=restore.step)
        run.checkpoints.end_restore()
        await self._add_loaded_checkpoint(run, restore, manifest)
        steps = f"rolled back to step {restore.step}" if restore.is_rollback else f"continues at step {restore.step}"
        why = f": {restore.reason}; {lost - restore.step} steps are repeated" if restore.is_rollback else ""
        kind = EventKind.ROLLED_BACK if restore.is_rollback else EventKind.RUN_RESUMED
        self._state.events.add(kind, f"{steps} from {restore.url}{why}", run=run.name)
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


def _raise_if_deleted(error: Exception) -> None:
    if isinstance(error, NotFoundError):
        raise error
    logger.error("%s", error)
