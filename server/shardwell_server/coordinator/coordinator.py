"""The coordinator: its parts, and the background work while it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from prometheus_client.core import Metric

from shardwell_server.coordinator.checkpoints.manifests import CheckpointFiles
from shardwell_server.coordinator.checkpoints.restoring import RunRestorer, UnitFiller
from shardwell_server.coordinator.checkpoints.saving import CheckpointSaver
from shardwell_server.coordinator.committer import Committer, StepPreparer, UpdateSender
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.inspection.run_metrics import coordinator_metrics
from shardwell_server.coordinator.leases.server_leases import ServerLeases
from shardwell_server.coordinator.leases.trainer_leases import TrainerLeases
from shardwell_server.coordinator.placement import UnitPlacer
from shardwell_server.coordinator.promotion import Promoter
from shardwell_server.coordinator.relocation.keeper import BackupKeeper
from shardwell_server.coordinator.relocation.relocator import Relocator
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.settings import Settings
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_wire.errors import ConflictError, ShardwellError
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

_DROP_RETRY_S = 2.0


class Coordinator:
    """Assigns ranks and shards, and commits steps. All methods run on one event loop."""

    def __init__(self, state: CoordinatorState, calls: ShardCalls) -> None:
        self.state = state
        self.servers = ShardServers(state.cluster, calls, term=state.term, lease_s=state.settings.lease_s)
        self.server_leases = ServerLeases(state, calls)
        self.trainers = TrainerLeases(state, self.servers)
        self.placer = UnitPlacer(state, self.servers)
        self.checkpoint_files = CheckpointFiles(state.settings.checkpoint_roots)
        self.filler = UnitFiller(state, self.servers, self.checkpoint_files)
        self.checkpoints = CheckpointSaver(state, self.servers, self.checkpoint_files, self.filler)
        self.restorer = RunRestorer(state, self.servers, self.placer, self.trainers, self.checkpoint_files)
        self.promoter = Promoter(state, self.servers, self.restorer)
        self.preparer = StepPreparer(state, self.servers)
        self.updates = UpdateSender(state, self.servers, self.checkpoints, self.promoter)
        items = self.trainers.items
        self.committer = Committer(state, self.servers, items, self.promoter, self.preparer, self.updates)
        self.relocator = Relocator(state, self.servers, self.promoter, items, self.updates, self.restorer)
        self.backups = BackupKeeper(state, self.servers, self.promoter, items, self.updates)

    @classmethod
    async def load(
        cls,
        settings: Settings,
        storage: Storage,
        calls: ShardCalls,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> Coordinator:
        """Creates a coordinator with the state that former coordinators stored."""
        return cls(await CoordinatorState.load(settings, storage, clock=clock, wall_clock=wall_clock), calls)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watches leases while entered. First continues the updates and fences of the former term."""
        state = self.state
        message = f"term {state.term}, {len(state.runs)} runs, {len(state.cluster.servers)} servers"
        state.events.add(EventKind.COORDINATOR_STARTED, message)
        self.trainers.renew_all()
        for run in state.runs.values():
            self.checkpoints.resume(run)
            self.restorer.start(run)
            self.placer.resume(run)
            self.updates.start_all(run)
            self.trainers.items.start_fencing(run)
        self.server_leases.start()
        self.relocator.start()
        self.backups.start()
        state.tasks.start(self._watch_leases())
        try:
            yield
        finally:
            await state.tasks.close()
            for run in state.runs.values():
                run.calls.fencing.cancel()  # repeated until all servers have answered, which some may never do
                run.calls.promoting.cancel()
            self.checkpoint_files.close()

    async def _watch_leases(self) -> None:
        interval = self.state.settings.lease_s / 10
        while True:
            slept_from = self.state.clock()
            await asyncio.sleep(interval)
            slept_s = self.state.clock() - slept_from
            if slept_s > interval + self.state.settings.lease_s / 3:
                # This process was suspended. Heartbeats that arrived meanwhile are still in the socket buffers.
                logger.warning("the coordinator was suspended for %.1f s", slept_s)
                self.trainers.renew_all()
                self.state.cluster.renew_all()
            self.expire()

    def expire(self) -> None:
        """Handles all leases that have expired."""
        self.trainers.expire()
        self.server_leases.expire()
        self.relocator.check()

    async def delete_run(self, run: Run, *, force: bool) -> int:
        """Deletes a run and frees its memory on the servers. Returns the number of bytes freed.

        Raises:
            ConflictError: The run has live trainers and ``force`` is False.
        """
        name = run.name
        if run.members.live and not force:
            names = ", ".join(map(repr, sorted(run.members.live)))
            raise ConflictError(f"run {name!r} has live trainers ({names}): stop them, or force the deletion", run=name)
        await self.state.delete_run(run)
        freed = await asyncio.gather(*(self._drop(run, server_id) for server_id in dict(run.units.holders)))
        self.state.events.add(EventKind.RUN_DELETED, f"{sum(freed)} bytes were freed", run=name)
        return sum(freed)

    def metrics(self) -> Iterable[Metric]:
        """Returns what Prometheus reads."""
        state = self.state
        return coordinator_metrics(state.runs, state.cluster, state.events, state.term, state.clock())

    def deleted_run_ids(self, run_ids: Iterable[str]) -> list[str]:
        """Returns the ids that belong to no existing run."""
        existing = {run.identity.run_id for run in self.state.runs.values()}
        return [run_id for run_id in run_ids if run_id not in existing]

    async def _drop(self, run: Run, server_id: str) -> int:
        request = shard_pb2.DropRunRequest(context=self.servers.context(run, run.committed_step))
        try:
            response = await self.servers.call(server_id, "DropRun", request, retry_for_s=_DROP_RETRY_S)
        except ShardwellError as error:
            logger.warning(
                "deleted run %r stays in the memory of server %r until its next heartbeat: %s",
                run.name,
                server_id,
                error,
            )
            return 0
        return int(response.freed_bytes)
