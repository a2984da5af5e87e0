"""Leases of work items: former trainers of an item are fenced on the shard servers, then the item is leased anew."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.ranks.members import Member
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.steps.step import WorkItem
from shardwell_server.coordinator.steps.work import SynchronousWork
from shardwell_wire import fault_points
from shardwell_wire.errors import NotFoundError, ShardwellError
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

_FENCE_RETRY_S = 0.5


class ItemLeases:
    """Leases of the work items of every run.

    Args:
        state: State of the coordinator.
        servers: The shard servers, which fence former trainers.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    def start_fencing(self, run: Run) -> None:
        """Fences former trainers of work items in the background, then leases the vacant items."""
        if run.work.unfenced:
            self._state.tasks.start(run.calls.fencing(self._fence_all, run))

    async def _fence_all(self, run: Run) -> None:
        # The epochs of former trainers of a run that is loaded from a checkpoint are rejected by ``BeginRestore``.
        while not (run.deleted or run.checkpoints.restore) and (items := run.work.unfenced):
            # Store the new epochs before any server sees them: a restarted coordinator must not issue them again.
            await self._state.save_or_retry(run)
            fault_points.reach("coordinator.fence.before")
            try:
                await self.fence(run, items)
            except ShardwellError as error:
                run.fence_error = str(error)
                logger.warning("run %r: %s", run.name, error)
                await run.changed.wait(_FENCE_RETRY_S)
                continue
            run.fence_error = ""
            fault_points.reach("coordinator.fence.after")
            self.lease_vacant_items(run)
            run.changed.notify()

    async def fence(self, run: Run, items: list[WorkItem]) -> None:
        """Makes every server reject pushes under older epochs and attempts of the items' dp ranks."""
        # In an asynchronous run, no commit may take place between the choice of the version and the fence.
        async with run.calls.turn if run.asynchronous else nullcontext():
            await self._fence(run, items)

    async def _fence(self, run: Run, items: list[WorkItem]) -> None:
        # A server applies a fence to the step it is at. A server that has not updated yet would apply the fence of the
        # step in flight to the step before.
        await run.wait_until_updated()
        # Attempts start again in every step, and the step may have been committed while the items were stored.
        found = [(step, item) for item in items if (step := run.work.step_of(item)) is not None]
        if not found:
            return
        fences = [(item, item.epoch, item.attempt) for _, item in found]
        request = shard_pb2.FenceRequest(
            context=self._servers.context(run, run.committed_step),
            ranks=[_rank_fence(item, step.number if run.asynchronous else None) for step, item in found],
        )
        processes = [at for at in run.units.updated_processes if not self._is_replaced(run, at)]
        await asyncio.gather(*(self._fence_server(server_id, request) for server_id in dict(processes)))
        for step, _ in found:
            step.mark_fenced(fences)

    def _is_replaced(self, run: Run, process: tuple[str, str]) -> bool:
        """True if a server process is gone, and what it holds of a run does not count even if it returns."""
        cluster = self._state.cluster
        return cluster.is_gone(process) and not (cluster.may_return(process) and run.units.needs_updates(process))

    async def _fence_server(self, server_id: str, request: shard_pb2.FenceRequest) -> None:
        try:
            await self._servers.call(server_id, "Fence", request)
        except NotFoundError:
            return  # the server has no data of the run, so no push can succeed

    def start_twin(self, run: Run, member: Member) -> None:
        """Lets a waiting trainer compute the twin of a late item. Wakes the run's waiters when an item will be late.

        See Note: [Twin items] in ``work.py``.
        """
        work = run.work
        if not isinstance(work, SynchronousWork) or (found := work.next_late_item(excluding=member.name)) is None:
            return
        item, late_s = found
        remaining_s = late_s - self._state.clock()
        if remaining_s > 0:
            self._wake_later(run, remaining_s)
            return
        work.start_twin(item, member.name)
        message = (
            f"{item} of step {run.committed_step} is late at trainer {item.first_trainer!r}: trainer "
            f"{member.name!r} computes its twin item"
        )
        self._state.events.add(EventKind.WORK_COPIED, message, run=run.name)

    def _wake_later(self, run: Run, seconds: float) -> None:
        if not run.calls.waking.in_flight:
            self._state.tasks.start(run.calls.waking(run.changed.notify_after, seconds))

    def lease_vacant_items(self, run: Run) -> None:
        """Leases vacant items to trainers that wait for work. In an asynchronous run, they ask for items."""
        if not isinstance(run.work, SynchronousWork):
            return
        for item in run.work.lease_vacant_items():
            trainers = ", ".join(f"trainer {name!r}" for name in item.trainers)
            message = f"{item} of step {run.committed_step} is leased to {trainers}"
            self._state.events.add(EventKind.WORK_LEASED, message, run=run.name)


def _rank_fence(item: WorkItem, version: int | None) -> shard_pb2.RankFence:
    """Returns the fence of an item. The contributions of a finished item count: the step may be prepared already.

    Args:
        item: The item.
        version: The version that it reads. None: the version of the step.
    """
    attempt = 0 if item.state.is_finished else item.attempt
    return shard_pb2.RankFence(dp_rank=item.dp_rank, epoch=item.epoch, attempt=attempt, version=version)
