"""The coordinator's state: runs, shard servers, events, and the storage that makes changes durable."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shardwell_server.coordinator.inspection.events import EventLog
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.run_records import restore_run, run_record
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_server.coordinator.settings import RunSettings, Settings
from shardwell_server.coordinator.storage.storage import Storage
from shardwell_server.coordinator.waiting import BackgroundTasks
from shardwell_wire.errors import NotFoundError, RunDeletedError, ShardwellError
from shardwell_wire.retry import retry_async
from shardwell_wire.run_identity import RunIdentity, new_run_id

logger = logging.getLogger(__name__)


@dataclass
class CoordinatorState:
    """Runs, shard servers and their storage. All of it belongs to one event loop and needs no locks.

    Args:
        settings: Settings of the coordinator.
        storage: Stores the state.
        cluster: The shard servers.
        events: The event log.
        clock: Returns monotonic seconds.
        wall_clock: Returns seconds since 1970.
    """

    settings: Settings
    storage: Storage
    cluster: Cluster
    events: EventLog
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    runs: dict[str, Run] = field(default_factory=dict)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    _deleted_last_epoch: int = 0
    """Highest epoch of a deleted run."""

    @classmethod
    async def load(
        cls, settings: Settings, storage: Storage, *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> CoordinatorState:
        """Restores the state that former coordinators stored."""
        stored = await storage.load()
        cluster = Cluster(clock, settings.lease_s, stored.servers, storage.server_epoch)
        state = cls(settings, storage, cluster, EventLog(wall_clock), clock, wall_clock)
        state.runs = {each.record.run: restore_run(each, clock) for each in stored.runs}
        state._deleted_last_epoch = stored.deleted_last_epoch
        return state

    @property
    def term(self) -> int:
        """Term of this coordinator. Shard servers reject requests of earlier terms."""
        return self.storage.term

    def require_run(self, name: str, run_id: str = "") -> Run:
        """Returns a run by name and, if given, id.

        Raises:
            NotFoundError: No run has this name.
            RunDeletedError: The run with this id was deleted.
        """
        run = self.runs.get(name)
        if run is not None and run_id in ("", run.identity.run_id):
            return run
        if run_id:
            another = f", and another run of this name, with id {run.identity.run_id}, exists" if run else ""
            raise RunDeletedError(
                f"run {name!r} was deleted (its id was {run_id}){another}: stop this process, or join again",
                run=name,
                run_id=run_id,
            )
        known = ", ".join(sorted(self.runs)[:10]) or "none"
        raise NotFoundError(f"run {name!r} does not exist; existing runs: {known}", run=name)

    def create_run(self, name: str, settings: RunSettings) -> Run:
        """Creates a run with a new id. Its epochs start above those of all deleted runs."""
        identity = RunIdentity(name, new_run_id())
        run = self.runs[name] = Run(identity, settings, self.clock, self.wall_clock(), self._deleted_last_epoch)
        run.touch()
        return run

    async def delete_run(self, run: Run) -> None:
        """Deletes a run. Returns when the deletion is durable."""
        run.set_deleted(True)
        try:
            await self.storage.delete_run(run.name, run.last_epoch)
        except ShardwellError:
            run.set_deleted(False)
            raise
        self._deleted_last_epoch = max(self._deleted_last_epoch, run.last_epoch)
        self.runs.pop(run.name, None)
        run.changed.notify()

    async def save(self, run: Run) -> None:
        """Stores a run. Returns when all its changes so far are durable.

        Raises:
            RunDeletedError: The run was deleted.
            UnavailableError: The run could not be stored. The changes stay in memory and the next ``save`` stores them;
                until then no response may reveal them.
        """
        wanted = run.unsaved.made
        while run.unsaved.saved < wanted:
            await run.unsaved.saving(lambda: self._save(run))

    async def _save(self, run: Run) -> None:
        run.check_not_deleted()  # stored after its deletion, the run would exist again after a restart
        made = run.unsaved.made
        await self.storage.save_run(run_record(run))
        run.unsaved.note_saved(made)

    async def store(self, run: Run, write: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Calls a ``save`` method of the storage for a run, unless the run was deleted."""
        run.check_not_deleted()
        await write(run.name, *arguments)

    async def save_or_retry(self, run: Run) -> None:
        """Calls ``save`` until it succeeds or the run is deleted. For background work."""

        def check(error: Exception) -> None:
            if isinstance(error, RunDeletedError):
                raise error
            logger.error("%s", error)

        try:
            await retry_async(lambda: self.save(run), errors=ShardwellError, check=check)
        except RunDeletedError:
            return
