"""Saves checkpoints of runs while they train, with the residuals of error feedback that trainers write to them.

Trainers write their residuals at the start of step v to the checkpoint of version v, see Note: [Residuals in
checkpoints] in the client. A checkpoint waits for all live trainers that have residuals. Missing residuals are zero
in a run that is loaded from the checkpoint, and an event names their ranks.

Note: [Consistent checkpoints]
    A checkpoint starts when every server has acknowledged the update that makes version v. The shards then do not
    change until the update of step v, which follows a whole forward and backward later: enough time to write most of
    them. ``BeginCheckpoint`` is sent to all servers while ``RunCheckpoints.boundary`` is held. The commit record of
    step v waits for this lock, so no server can be asked to update before all of them have begun.

    The record of a checkpoint is stored before any server begins. The manifest is written after every server has
    written its file. A coordinator that is killed in between finds the record of an incomplete checkpoint, and removes
    what was written. A checkpoint that fails is reported; it never stops the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from shardwell_server.coordinator.checkpoints.manifests import CheckpointFiles, manifest_of, with_files
from shardwell_server.coordinator.checkpoints.restoring import UnitFiller
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.ranks.members import Member, tell
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.run_checkpoints import CheckpointInFlight, CheckpointState, ResidualReport
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.signals import SharedCall, poll
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import CheckpointRecord
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.folder import RunFolder, checkpoint_folder
from shardwell_wire.checkpoints.format import FileRecord, residual_state
from shardwell_wire.checkpoints.manifest import MANIFEST_NAME, Manifest
from shardwell_wire.checkpoints.reading import read_index, read_manifest
from shardwell_wire.checkpoints.storage import Storage, check_writable
from shardwell_wire.errors import (
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.model.names import new_run_id
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

_WAIT_S = 300.0
"""Longest time to wait for live trainers after the servers have written their files, in seconds."""


def add_report(run: Run, member: Member, request: coordinator_pb2.AddResidualsRequest) -> None:
    """Adds a trainer's report about its residuals to the checkpoint in flight.

    Raises:
        InvalidRequestError: A field is invalid.
        StepStateError: The checkpoint is not being written, or is complete without this trainer.
    """
    report = ResidualReport.from_proto(request, run.settings.world.dp)
    in_flight = run.checkpoints.in_flight
    if in_flight is None or in_flight.checkpoint_id != request.checkpoint_id:
        raise StepStateError(f"checkpoint {request.checkpoint_id!r} of run {run.name!r} is not being written")
    in_flight.residuals.add(member.name, report)
    run.changed.notify()


def usable_files(
    storage: Storage, manifest: Manifest, reports: Iterable[tuple[str, ResidualReport]], replica_size: int
) -> tuple[list[FileRecord], set[int], list[str]]:
    """Checks the files of trainers, because a checkpoint with an invalid file cannot be loaded. Blocks.

    Args:
        storage: Folder of the checkpoint.
        manifest: Its manifest, without these files.
        replica_size: Number of trainers that have residuals of one data rank.

    Returns:
        The files that are part of the checkpoint, the data ranks whose residuals they have, and why others are not.
    """
    files, reported, names = list[FileRecord](), Counter[int](), set[str]()
    problems = []
    for trainer, report in reports:
        problem = report.error
        if not problem and report.file is not None:
            try:
                index = read_index(storage, manifest, report.file)
            except NotFoundError:
                problem = "its file is not in the folder of the coordinator and the shard servers"
            except ShardwellError as error:
                problem = str(error)
            else:
                own = {placed.piece.name for placed in index.pieces}
                stages = (None, *range(replica_size))
                expected = {residual_state(rank, stage) for rank in report.dp_ranks for stage in stages}
                if index.parts or own & names or not {placed.piece.state for placed in index.pieces} <= expected:
                    problem = "its file has other tensors than the residuals of its ranks"
                else:
                    names |= own
                    files.append(report.file)
        if problem:
            problems.append(f"trainer {trainer!r}: {problem}")
        else:
            reported.update(report.dp_ranks)
    # The residuals of a data rank are complete only if every trainer of its replica has reported them.
    return files, {rank for rank, count in reported.items() if count >= replica_size}, problems


logger = logging.getLogger(__name__)

_BEGIN_LIMIT_S = 5.0
"""Seconds that the servers have to begin. A commit may wait for this."""
_CHECK_LIMIT_S = 10.0
"""Longest time that a joining trainer waits until its folder for checkpoints is checked, in seconds."""
_POLL_S = 2.0
"""Seconds that a server waits in ``DescribeCheckpoint`` for the end of its file."""
_STALLED_S = 300.0
"""Seconds without progress after which a checkpoint is given up."""
_ABORT_RETRY_S = 5.0


class CheckpointSaver:
    """Saves checkpoints. See Note: [Consistent checkpoints].

    Args:
        filler: Knows the commit records of runs that were resumed in another grid.
    """

    def __init__(
        self, state: CoordinatorState, servers: ShardServers, files: CheckpointFiles, filler: UnitFiller
    ) -> None:
        self._state, self._servers, self._files, self._filler = state, servers, files, filler
        self._checking: dict[str, SharedCall[None]] = {}
        """Checks of folders that joining trainers name, by folder."""

    async def check_new_directory(self, name: str, config: coordinator_pb2.RunConfig) -> str:
        """Checks the folder for checkpoints that a trainer names and the run does not have yet.

        Call it before the run is created or changed. A folder that does not answer within ``_CHECK_LIMIT_S`` passes:
        ``check_directory`` then reports it.

        Returns:
            The folder, if it can be written. Empty: it was not checked, or did not answer in time.

        Raises:
            AccessError: The folder is not below one of those that the operator allows, or cannot be written.
            InvalidRequestError: The folder is not supported here, or the storage refuses it.
            CapacityError: The disk is full.
            NotFoundError: The folder, or the bucket, cannot be made.
        """
        run, directory = self._state.runs.get(name), config.checkpoint_dir
        if not directory or (run is not None and run.checkpoints.options.directory == directory):
            return ""
        check = self._checking.setdefault(directory, SharedCall())
        try:
            async with asyncio.timeout(_CHECK_LIMIT_S) as limit:
                await check(self._check_writable, directory)
        except TimeoutError:
            if not limit.expired():
                raise
            return ""
        except ShardwellError as error:
            # A trainer would repeat a request if the coordinator were unavailable.
            kind = InvalidRequestError if isinstance(error, UnavailableError) else type(error)
            raise kind(f"checkpoints of run {name!r} cannot be saved: {error}", **error.data) from error
        finally:
            self._checking.pop(directory, None)
        return directory

    def check_directory(self, run: Run, checked: str = "") -> None:
        """Opens a new folder for checkpoints in the background, and reports if it cannot be written, long before the
        first checkpoint.

        Args:
            checked: What ``check_new_directory`` has returned: this folder is not checked again.
        """
        checkpoints, directory = run.checkpoints, run.checkpoints.options.directory
        if directory not in ("", checkpoints.checked_directory):
            checkpoints.checked_directory = directory
            self._state.tasks.start(self._check_directory(run, directory, is_checked=directory == checked))

    async def _check_directory(self, run: Run, directory: str, *, is_checked: bool) -> None:
        try:
            await self._folder(run)
            if not is_checked:
                await self._check_writable(directory)
        except ShardwellError as error:
            self._report_failed(run, f"checkpoints cannot be saved: {error}. Training goes on", str(error))

    async def _check_writable(self, directory: str) -> None:
        await self._files(lambda: check_writable(self._files.open(directory)))

    def _report_failed(self, run: Run, message: str, cause: str) -> None:
        """Tells operators and the trainers of a run that a checkpoint was not saved, or cannot be saved."""
        logger.warning("run %r: %s", run.name, message)
        self._state.events.add(EventKind.CHECKPOINT_FAILED, message, run=run.name)
        run.checkpoints.problem = cause
        run.notices.add(message, now=self._state.wall_clock(), cause=cause)
        tell(run.members)

    def start_if_due(self, run: Run) -> None:
        """Starts a checkpoint if enough steps were committed. Call it when all servers have updated."""
        if run.checkpoints.is_due(run.committed_step) and not run.units.unpublished and not run.deleted:
            self._start(run)

    def request(self, run: Run) -> CheckpointInFlight:
        """Starts a checkpoint of the newest version, or returns the one in flight if it has not begun.

        Raises:
            StepStateError: The run has no folder for checkpoints, no values yet, is being loaded, or another checkpoint
                is being written.
        """
        checkpoints = run.checkpoints
        if not checkpoints.options.directory:
            raise StepStateError(
                f"run {run.name!r} has no folder for checkpoints: pass checkpoint_dir to shardwell.join in a trainer"
            )
        if checkpoints.restore is not None:
            raise StepStateError(checkpoints.restoring.describe(checkpoints.restore))
        if not len(run.units) or run.units.unpublished:
            raise StepStateError(f"run {run.name!r} has no values yet: a checkpoint needs the values of all units")
        if (in_flight := checkpoints.in_flight) is not None:
            if in_flight.step in (None, run.committed_step):
                return in_flight
            raise UnavailableError(
                f"the checkpoint of step {in_flight.step} of run {run.name!r} is still being written: "
                f"{in_flight.progress.done_bytes} of {in_flight.progress.total_bytes} bytes"
            )
        return self._start(run)

    def resume(self, run: Run) -> None:
        """Opens the folder for checkpoints, and removes what the former coordinator left unfinished, in a task."""
        self._state.tasks.start(self._resume(run))

    def _start(self, run: Run) -> CheckpointInFlight:
        assert run.checkpoints.in_flight is None
        checkpoint = run.checkpoints.in_flight = CheckpointInFlight(new_run_id())
        self._state.tasks.start(self._save(run, checkpoint))
        return checkpoint

    async def _save(self, run: Run, checkpoint: CheckpointInFlight) -> None:
        async with run.checkpoints.writing:
            try:
                await self._write(run, checkpoint)
            except ShardwellError as error:
                await self._fail(run, checkpoint, str(error))
            except Exception as error:
                logger.exception("unexpected error in a checkpoint of run %r", run.name)
                await self._fail(run, checkpoint, f"{type(error).__name__}: {error}")
            else:
                await self._delete_old(run)
                if not run.commits.pending_updates:
                    self.start_if_due(run)  # more commits than wanted may have passed meanwhile

    async def _write(self, run: Run, checkpoint: CheckpointInFlight) -> None:
        started = self._state.clock()
        folder = await self._folder(run)
        manifest, server_ids = await self._begin(run, checkpoint, folder)
        files = await asyncio.gather(*(self._follow(run, checkpoint, server_id) for server_id in server_ids))
        complete = await self._with_files(run, checkpoint, manifest, files)
        # The run may have gone back to another checkpoint while the files were written.
        run.checkpoints.check_not_rolled_back(checkpoint)
        name = checkpoint.url.rstrip("/").rsplit("/", 1)[-1]
        fault_points.reach("coordinator.checkpoint.before_manifest", step=complete.step)
        # Only the manifest makes the folder a checkpoint, so it is written after all files.
        await self._files(folder.publish, name, complete)
        fault_points.reach("coordinator.checkpoint.after_manifest", step=complete.step)
        record = self._record(run, checkpoint, is_complete=True, size_bytes=complete.size_bytes)
        await self._state.save_checkpoint(run, record)
        run.checkpoints.check_not_rolled_back(checkpoint)
        checkpoint.end(CheckpointState.SAVED, self._state.wall_clock())
        run.checkpoints.finish(record)
        run.notices.forget_failures()
        took_s = self._state.clock() - started
        message = f"step {record.step}: {record.size_bytes} bytes in {took_s:.1f} s, {record.url}"
        self._state.events.add(EventKind.CHECKPOINT_SAVED, message, run=run.name)
        run.changed.notify()

    async def _folder(self, run: Run) -> RunFolder:
        """Returns the folder of the run's checkpoints. Does not wait if it was opened before.

        A checkpoint of a version begins before the next commit only if nothing is waited for. The first access to a
        bucket imports libraries for seconds, so it takes place in a thread, and before steps have to wait.
        """
        checkpoints, directory = run.checkpoints, run.checkpoints.options.directory
        if checkpoints.folder is None or checkpoints.folder[0] != directory:
            opened = await self._files(self._files.open_run, directory, run.name)
            checkpoints.folder = directory, opened
            return opened
        return checkpoints.folder[1]

    async def _with_files(
        self, run: Run, checkpoint: CheckpointInFlight, manifest: Manifest, files: Sequence[str]
    ) -> Manifest:
        """Returns the complete manifest, once all live trainers with residuals have written them."""

        async def check() -> bool | None:
            live = [member.name for member in run.members.live.values() if member.has_residuals]
            return run.checkpoints.restore is not None or not any(map(checkpoint.wants_residuals_of, live)) or None

        if checkpoint.step:
            await poll(run.changed, check, _WAIT_S)
        reports = checkpoint.residuals.end()
        url, replica_size = checkpoint.url, run.settings.world.replica_size
        written, ranks, problems = await self._files(
            lambda: usable_files(self._files.open(url), manifest, reports, replica_size)
        )
        self._report_missing(run, manifest.step, ranks, problems)
        return with_files(manifest, [*(FileRecord.from_dict(json.loads(file)) for file in files), *written], ranks)

    def _report_missing(self, run: Run, step: int, ranks: Iterable[int], problems: Sequence[str]) -> None:
        """Adds an event if a checkpoint lacks residuals."""
        missing = sorted(set(range(run.settings.world.dp)) - set(ranks))
        if not step or not missing or not any(member.has_residuals for member in run.members):
            return
        why = f" ({'; '.join(problems)})" if problems else ""
        message = (
            f"step {step}: the checkpoint lacks the residuals of error feedback of data ranks {missing}{why}. They are "
            "zero in a run that is loaded from it"
        )
        self._state.events.add(EventKind.RESIDUALS_MISSING, message, run=run.name)

    async def _begin(self, run: Run, checkpoint: CheckpointInFlight, folder: RunFolder) -> tuple[Manifest, list[str]]:
        """Makes every server begin. Returns the manifest without files, and the servers."""
        try:
            async with asyncio.timeout(_BEGIN_LIMIT_S) as limit, run.checkpoints.boundary:
                await run.wait_until_updated()
                run.checkpoints.check_loaded(run.name)
                commits = await self._filler.commits(run)
                step, server_ids = run.committed_step, list(run.units.servers)
                checkpoint.step, checkpoint.rollback_count = step, run.checkpoints.rollback_count
                checkpoint.url = folder.url_of(checkpoint_folder(step, checkpoint.checkpoint_id))
                run.checkpoints.last_step = step
                # Before the folder exists, so that a restarted coordinator finds and removes what was written.
                await self._state.save_checkpoint(run, self._record(run, checkpoint, is_complete=False))
                await self._files(folder.begin, step, checkpoint.checkpoint_id)
                checkpoint.has_folder = True
                fault_points.reach("coordinator.checkpoint.before_begin", step=step)
                last = run.commits.last
                request = shard_pb2.BeginCheckpointRequest(
                    context=self._servers.context(run, step),
                    checkpoint_id=checkpoint.checkpoint_id,
                    url=checkpoint.url,
                    unit_order=last.unit_order if last is not None else (),
                )
                await self._servers.call_all(server_ids, "BeginCheckpoint", request)
                created = run.checkpoints.time_of_next(self._state.wall_clock())
                manifest = manifest_of(run, checkpoint.checkpoint_id, created, commits)
        except TimeoutError:
            if not limit.expired():
                raise
            run.checkpoints.last_step = run.committed_step  # the next attempt follows after as many commits
            raise DeadlineError(
                f"the coordinator or a shard server did not begin within {_BEGIN_LIMIT_S:g} s: the folder "
                f"{checkpoint.url} or a server does not answer"
            ) from None
        fault_points.reach("coordinator.checkpoint.begun", step=step)
        message = f"step {step} on {len(server_ids)} servers, {checkpoint.url}"
        self._state.events.add(EventKind.CHECKPOINT_STARTED, message, run=run.name)
        tell(run.members)
        run.changed.notify()
        return manifest, server_ids

    async def _follow(self, run: Run, checkpoint: CheckpointInFlight, server_id: str) -> str:
        """Waits until a server has written its file. Returns the file's record as JSON."""
        assert checkpoint.step is not None
        request = shard_pb2.DescribeCheckpointRequest(
            context=self._servers.context(run, checkpoint.step), checkpoint_id=checkpoint.checkpoint_id, wait_s=_POLL_S
        )
        written_bytes, since_s = -1, self._state.clock()
        while True:
            run.check_not_deleted()
            response = await self._servers.call(server_id, "DescribeCheckpoint", request)
            checkpoint.progress[server_id] = (response.written_bytes, response.total_bytes)
            if response.error:
                raise UnavailableError(f"server {server_id!r}: {response.error}", server=server_id)
            if response.HasField("file_json"):
                return str(response.file_json)
            # A slow write is followed as long as it makes progress.
            if response.written_bytes > written_bytes:
                written_bytes, since_s = response.written_bytes, self._state.clock()
            elif self._state.clock() - since_s > _STALLED_S:
                raise DeadlineError(
                    f"server {server_id!r} has written nothing for {_STALLED_S:g} s, after {written_bytes} of "
                    f"{response.total_bytes} bytes",
                    server=server_id,
                )

    def _record(
        self, run: Run, checkpoint: CheckpointInFlight, *, is_complete: bool, size_bytes: int = 0
    ) -> CheckpointRecord:
        assert checkpoint.step is not None
        return CheckpointRecord(
            checkpoint.checkpoint_id,
            checkpoint.step,
            checkpoint.url,
            size_bytes,
            run.checkpoints.time_of_next(self._state.wall_clock()),
            is_complete,
        )

    # Failures

    async def _fail(self, run: Run, checkpoint: CheckpointInFlight, error: str) -> None:
        checkpoint.end(CheckpointState.FAILED, self._state.wall_clock(), error)
        if checkpoint.step is None:
            run.checkpoints.last_step = run.committed_step
        run.checkpoints.fail(checkpoint)
        step = "" if checkpoint.step is None else f"step {checkpoint.step}: "
        every = run.checkpoints.options.every_commits
        following = f"the next follows after {every} commits" if every else "request another when this is fixed"
        message = f"{step}{error}. Training goes on; {following}"
        if not run.deleted:
            cause = error.replace(checkpoint.url, run.checkpoints.options.directory) if checkpoint.url else error
            self._report_failed(run, f"the checkpoint was not saved: {message}", cause)
        run.changed.notify()
        if checkpoint.step is not None:
            await self._remove(run, checkpoint.checkpoint_id, checkpoint.step, checkpoint.url)

    async def _resume(self, run: Run) -> None:
        if run.checkpoints.options.directory:
            with suppress(ShardwellError):  # the next checkpoint reports it
                await self._folder(run)
        for record in run.checkpoints.take_torn():
            rolled_back = run.checkpoints.restore is not None  # the checkpoint was begun before
            if not rolled_back and await self._is_complete(record):
                await self._state.save_checkpoint(run, replace(record, is_complete=True))
                run.checkpoints.saved.append(replace(record, is_complete=True))
                continue
            cause = f"the coordinator restarted while {record.url} was written"
            message = f"the checkpoint was not saved: step {record.step}: {cause}. Training goes on"
            self._report_failed(run, message, cause)
            await self._remove(run, record.checkpoint_id, record.step, record.url)

    async def _is_complete(self, record: CheckpointRecord) -> bool:
        """True if the manifest was written before the former coordinator ended."""
        try:
            await self._files(lambda: read_manifest(self._files.open(record.url)))
        except ShardwellError:
            return False
        return True

    async def _remove(self, run: Run, checkpoint_id: str, step: int, url: str) -> None:
        """Stops the servers and removes an incomplete checkpoint. What cannot be removed now stays recorded."""
        request = shard_pb2.AbortCheckpointRequest(
            context=self._servers.context(run, step), checkpoint_id=checkpoint_id
        )

        async def abort(server_id: str) -> None:
            try:
                await self._servers.call(server_id, "AbortCheckpoint", request, retry_for_s=_ABORT_RETRY_S)
            except ShardwellError as error:
                logger.info("server %r did not stop writing checkpoint %s: %s", server_id, url, error)

        await asyncio.gather(*(abort(server_id) for server_id in run.units.servers))
        try:
            await self._files(lambda: delete_checkpoint(self._files.open(url)))
            await self._state.delete_checkpoints(run, {checkpoint_id})
        except ShardwellError as error:
            logger.warning("the incomplete checkpoint %s was not removed: %s", url, error)

    async def _delete_old(self, run: Run) -> None:
        options = run.checkpoints.options
        if not options.keep or run.deleted:
            return
        lineage = (*run.checkpoints.lineage, run.identity.run_id)

        def delete() -> set[str]:
            folder = self._files.open_run(options.directory, run.name)
            return {name.rsplit("-", 1)[-1] for name in folder.keep_newest(options.keep, lineage=lineage)}

        try:
            if deleted := await self._files(delete):
                await self._state.delete_checkpoints(run, deleted)
        except ShardwellError as error:
            logger.warning("run %r: old checkpoints were not deleted: %s", run.name, error)


def delete_checkpoint(storage: Storage) -> None:
    """Deletes the folder of a checkpoint: the manifest first, so that nobody finds half of it. Blocks."""
    storage.delete(MANIFEST_NAME)
    storage.delete_folder("")
