"""Everything one coordinator knows, and the rule that it is durable before anybody is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shardwell_server.coordinator.inspection.events import EventLog
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.run_records import from_stored, to_record
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_server.coordinator.settings import RunSettings, Settings
from shardwell_server.coordinator.storage.storage import Storage
from shardwell_server.coordinator.waiting import TaskGroup
from shardwell_wire.errors import NotFoundError, RunDeletedError, ShardwellError
from shardwell_wire.run_identity import RunIdentity, new_run_id

logger = logging.getLogger(__name__)


@dataclass
class CoordinatorState:
    """The runs, the servers, and where both are stored.

    Args:
        settings: How the coordinator behaves.
        storage: Where state survives.
        cluster: The shard servers.
        events: What happens.
        clock: Monotonic seconds.
        wall_clock: Seconds since 1970.
    """

    settings: Settings
    storage: Storage
    cluster: Cluster
    events: EventLog
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    runs: dict[str, Run] = field(default_factory=dict)
    tasks: TaskGroup = field(default_factory=TaskGroup)
    _deleted_last_epoch: int = 0
    """The highest epoch of a deleted run."""

    @classmethod
    async def load(
        cls, settings: Settings, storage: Storage, *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> CoordinatorState:
        """Takes up what an earlier term left behind."""
        stored = await storage.load()
        cluster = Cluster(clock, settings.lease_s, stored.servers, storage.server_epoch)
        state = cls(settings, storage, cluster, EventLog(wall_clock), clock, wall_clock)
        state.runs = {each.record.run: from_stored(each, clock) for each in stored.runs}
        state._deleted_last_epoch = stored.deleted_last_epoch
        return state

    @property
    def term(self) -> int:
        """Fences what earlier coordinators tell servers."""
        return self.storage.term

    def require_run(self, name: str, run_id: str = "") -> Run:
        """A run by its name; if an id is given, that very run.

        Raises:
            NotFoundError: There is no run of this name.
            RunDeletedError: The run with this id was deleted.
        """
        run = self.runs.get(name)
        if run is not None and run_id in ("", run.identity.run_id):
            return run
        if run_id:
            another = f", and another run of this name, with id {run.identity.run_id}, exists" if run else ""
            raise RunDeletedError(
                f"run {name!r} was deleted (its id was {run_id}){another}: end this process, or join again",
                run=name,
                run_id=run_id,
            )
        known = ", ".join(sorted(self.runs)[:10]) or "none"
        raise NotFoundError(f"there is no run {name!r}; known runs: {known}", run=name)

    def create_run(self, name: str, settings: RunSettings) -> Run:
        """A new run of a name that no other run has. Its id and its epochs tell it from deleted runs of the name."""
        identity = RunIdentity(name, new_run_id())
        run = self.runs[name] = Run(identity, settings, self.clock, self.wall_clock(), self._deleted_last_epoch)
        run.touch()
        return run

    async def delete_run(self, run: Run) -> None:
        """Returns once it is durable that the run is gone."""
        run.deleted = True
        try:
            await self.storage.delete_run(run.name, run.last_epoch)
        except ShardwellError:
            run.deleted = False
            raise
        self._deleted_last_epoch = max(self._deleted_last_epoch, run.last_epoch)
        self.runs.pop(run.name, None)
        run.changed.notify()

    async def save(self, run: Run) -> None:
        """Returns once every change of the run so far is durable.

        Raises:
            RunDeletedError: The run was deleted.
            UnavailableError: The disk does not take it. The change stands and is written by the next
                save; until then nobody is told of it.
        """
        wanted = run.changes
        while run.saved_changes < wanted:
            await run.saving(lambda: self._save(run))

    async def _save(self, run: Run) -> None:
        run.check_not_deleted()  # written after the deletion, the run would come back with the next term
        changes = run.changes
        await self.storage.save_run(to_record(run))
        run.saved_changes = changes

    async def store(self, run: Run, write: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Calls a ``save`` method of the storage for a run, unless the run was deleted."""
        run.check_not_deleted()
        await write(run.name, *arguments)

    async def save_or_retry(self, run: Run) -> None:
        """As ``save``, for work in the background: tries again until the disk takes it, or the run is deleted."""
        while True:
            try:
                return await self.save(run)
            except RunDeletedError:
                return None
            except ShardwellError as error:
                logger.error("%s", error)
            await asyncio.sleep(1.0)
