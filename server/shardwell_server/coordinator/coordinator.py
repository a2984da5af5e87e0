"""One coordinator: its parts put together, and what runs while it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from shardwell_server.coordinator.commit.committer import Committer
from shardwell_server.coordinator.commit.step_requests import Steps
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.servers import ServerLeases
from shardwell_server.coordinator.leases.trainers import Trainers
from shardwell_server.coordinator.placement.placer import Units
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.settings import Settings
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.storage import Storage
from shardwell_wire.errors import ConflictError, ShardwellError
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

_DROP_RETRY_S = 2.0


class Coordinator:
    """Assigns ranks and shards and commits steps.

    Args:
        state: What it knows.
        calls: How it reaches shard servers.
    """

    def __init__(self, state: CoordinatorState, calls: ShardCalls) -> None:
        self.state = state
        self.servers = ShardServers(state, calls)
        self.server_leases = ServerLeases(state, calls)
        self.trainers = Trainers(state, self.servers)
        self.units = Units(state, self.servers)
        self.committer = Committer(state, self.servers, self.trainers)
        self.steps = Steps(state, self.servers, self.trainers, self.committer)

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
        """Takes up what an earlier term left behind."""
        return cls(await CoordinatorState.load(settings, storage, clock=clock, wall_clock=wall_clock), calls)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Finishes what an earlier term began and watches leases while entered."""
        state = self.state
        message = f"term {state.term}, {len(state.runs)} runs, {len(state.cluster.servers)} servers"
        state.events.add(EventKind.COORDINATOR_STARTED, message)
        self.trainers.renew_all()
        for run in state.runs.values():
            self.committer.start_updates(run)
            self.trainers.start_fencing(run)
        self.server_leases.start()
        state.tasks.start(self._watch_leases())
        try:
            yield
        finally:
            await state.tasks.close()

    async def _watch_leases(self) -> None:
        interval = self.state.settings.lease_s / 10
        while True:
            slept_from = self.state.clock()
            await asyncio.sleep(interval)
            if self.state.clock() - slept_from > interval + self.state.settings.lease_s / 3:
                # This process was not running for a while; renewals wait in its sockets.
                logger.warning("the coordinator was suspended for %.1f s", self.state.clock() - slept_from)
                self.trainers.renew_all()
                self.state.cluster.renew_all()
            self.expire()

    def expire(self) -> None:
        """Looks for leases that have run out."""
        self.trainers.expire()
        self.server_leases.expire()

    async def delete_run(self, run: Run, *, force: bool) -> int:
        """Ends a run and frees its memory; returns the bytes freed.

        Raises:
            ConflictError: Trainers are live and ``force`` is not set.
        """
        name = run.name
        if run.members.live and not force:
            names = ", ".join(map(repr, sorted(run.members.live)))
            raise ConflictError(f"run {name!r} has live trainers ({names}): end them, or force the deletion", run=name)
        await self.state.delete_run(run)
        outcomes = await asyncio.gather(*(self._drop(run, server_id) for server_id in run.units.servers))
        self.state.events.add(EventKind.RUN_DELETED, f"{sum(outcomes)} bytes were freed", run=name)
        return sum(outcomes)

    def deleted_among(self, run_ids: Iterable[str]) -> list[str]:
        """The ids, of runs that a shard server holds, that belong to no run any more."""
        known = {run.identity.run_id for run in self.state.runs.values()}
        return [run_id for run_id in run_ids if run_id not in known]

    async def _drop(self, run: Run, server_id: str) -> int:
        request = shard_pb2.DropRunRequest(context=self.servers.context(run, run.committed_step))
        try:
            response = await self.servers.call(server_id, "DropRun", request, retry_for_s=_DROP_RETRY_S)
        except ShardwellError as error:
            logger.warning(
                "deleted run %r stays on server %r until that is heard of again: %s", run.name, server_id, error
            )
            return 0
        return int(response.freed_bytes)
