"""Everything one coordinator knows, and the rule that it is durable before anybody is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shardwell_server.coordinator.cluster import Cluster
from shardwell_server.coordinator.events import EventLog
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.run_records import from_stored, to_record
from shardwell_server.coordinator.settings import Settings
from shardwell_server.coordinator.storage import Storage
from shardwell_server.coordinator.waiting import TaskGroup
from shardwell_wire.errors import NotFoundError, ShardwellError

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

    @classmethod
    async def load(
        cls, settings: Settings, storage: Storage, *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> CoordinatorState:
        """Takes up what an earlier term left behind."""
        servers, runs = await storage.load()
        cluster = Cluster(clock, settings.lease_s, servers, storage.server_epoch)
        state = cls(settings, storage, cluster, EventLog(wall_clock), clock, wall_clock)
        state.runs = {stored.record.run: from_stored(stored, clock) for stored in runs}
        return state

    @property
    def term(self) -> int:
        """Fences what earlier coordinators tell servers."""
        return self.storage.term

    def require_run(self, name: str) -> Run:
        """Raises NotFoundError if there is no such run."""
        if name not in self.runs:
            known = ", ".join(sorted(self.runs)[:10]) or "none"
            raise NotFoundError(f"there is no run {name!r}; known runs: {known}", run=name)
        return self.runs[name]

    async def save(self, run: Run) -> None:
        """Returns once every change of the run so far is durable.

        Raises:
            UnavailableError: The disk does not take it. The change stands and is written by the next
                save; until then nobody is told of it.
        """
        wanted = run.changes
        while run.saved_changes < wanted and not run.deleted:
            await run.saving(lambda: self._save(run))

    async def _save(self, run: Run) -> None:
        changes = run.changes
        await self.storage.save_run(to_record(run))
        run.saved_changes = changes

    async def store(self, run: Run, write: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Calls a ``save`` method of the storage for a run, unless the run was deleted."""
        if run.deleted:
            raise NotFoundError(f"run {run.name!r} was deleted", run=run.name)
        await write(run.name, *arguments)

    async def save_or_retry(self, run: Run) -> None:
        """As ``save``, for work in the background: tries again until the disk takes it."""
        while True:
            try:
                return await self.save(run)
            except ShardwellError as error:
                logger.error("%s", error)
            await asyncio.sleep(1.0)
