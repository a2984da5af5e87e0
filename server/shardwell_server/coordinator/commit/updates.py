"""Sends the update of a committed step to the shard servers until each of them has acknowledged it."""

from __future__ import annotations

from shardwell_server.coordinator.checkpoints.saving import CheckpointSaver
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.runs.committed_steps import PendingUpdate
from shardwell_server.coordinator.runs.proposals import committed_optimizer
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.releases import Releases
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupState
from shardwell_wire import fault_points
from shardwell_wire.errors import NotFoundError, ShardwellError, UnavailableError
from shardwell_wire.retry import retry_async
from shardwell_wire.v1 import shard_pb2

_RECHECK_S = 0.5
"""How often a waiting update checks whether its server is gone, in seconds."""

_DELAY_EVENT_AFTER_S = 1.0
"""Seconds after which an unacknowledged update is reported as an event."""


class UpdateSender:
    """Sends the updates of committed steps, in the background.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        checkpoints: Saves checkpoints between two steps.
        releases: Releases the copies of shards that have moved to other servers.
    """

    def __init__(
        self, state: CoordinatorState, servers: ShardServers, checkpoints: CheckpointSaver, releases: Releases
    ) -> None:
        self._state, self._servers, self._checkpoints, self._releases = state, servers, checkpoints, releases

    def start_all(self, run: Run) -> None:
        """Sends the update of the last commit to every server, in the background."""
        if run.checkpoints.restore is not None:
            return  # the servers drop these shards
        if run.commits.pending_updates:
            request = self._request(run)
            for server_id, pending in run.commits.pending_updates.items():
                self._state.tasks.start(self._send(run, request, server_id, pending))

    def repeat(self, run: Run, process: tuple[str, str]) -> None:
        """Sends the update of the last commit to one server process, in the background. It may have missed it."""
        run.commits.expect_update(process, self._state.clock())
        if (pending := run.commits.pending_updates.get(process[0])) is not None:
            self._state.tasks.start(self._send(run, self._request(run), process[0], pending))

    def _request(self, run: Run) -> shard_pb2.UpdateRequest:
        """Returns the update of the last commit."""
        record = run.commits.records[-1]
        return shard_pb2.UpdateRequest(
            context=self._servers.context(run, record.step),
            optimizer=committed_optimizer(record.optimizer),
            clip_coefficient=record.clip_coefficient,
            unit_order=record.unit_order,
            rank_versions=_rank_versions(run),
        )

    async def _send(self, run: Run, request: shard_pb2.UpdateRequest, server_id: str, pending: PendingUpdate) -> None:
        """Repeats ``Update`` until the server acknowledges it, the run is deleted, or the server process is gone.

        A server that is only lost may return with its shards. It then needs the update, unless they have moved.
        """
        process, cluster, reported = (server_id, pending.incarnation), self._state.cluster, False
        step = request.context.step

        def is_pending() -> bool:
            return run.commits.pending_updates.get(server_id) is pending and not run.deleted

        async def attempt() -> None:
            # A new primary applies the update only after it knows that it is the primary. A server with a former copy
            # first learns whether it must drop it: otherwise it would create the next version of it, and accept
            # gradients from trainers that do not know the new primary yet.
            while (
                is_pending()
                and not cluster.is_gone(process)
                and (server_id in run.relocations.unconfirmed or self._releases.are_open(run, process))
            ):
                await run.changed.wait(_RECHECK_S)
            if not is_pending():
                return  # the run was loaded from a checkpoint or deleted, or the server was replaced
            if cluster.is_gone(process):
                if cluster.may_return(process) and run.units.needs_updates(process):
                    raise UnavailableError("the server is lost, and no other server has its shards")
                return
            await self._releases.release(run, process)
            try:
                response = await self._servers.call(server_id, "Update", request, retry_for_s=0.0)
            except NotFoundError:
                if run.units.needs_updates(process):
                    raise
                return  # a backup was to be built there, and its memory is not reserved yet
            self._note_stale_backups(run, server_id, response)

        def note_failure(error: Exception) -> None:
            nonlocal reported
            pending.note_failed(str(error))
            if not reported and self._state.clock() - pending.since_s > _DELAY_EVENT_AFTER_S:
                reported = True
                message = f"step {step} is not updated yet: {error}"
                self._state.events.add(EventKind.UPDATE_DELAYED, message, run=run.name)

        await retry_async(attempt, errors=ShardwellError, check=note_failure)
        fault_points.reach("coordinator.update.acknowledged", step=step, server=server_id)
        if run.commits.pending_updates.get(server_id) is pending:
            run.commits.finish_update(server_id, pending, self._state.clock())
            run.changed.notify()
            if not run.commits.pending_updates:
                self._checkpoints.start_if_due(run)

    def _note_stale_backups(self, run: Run, server_id: str, response: shard_pb2.UpdateResponse) -> None:
        """Marks the backups on a server that lacked the step."""
        stale = {
            (status.unit_index, status.start_bytes, server_id): status.error or "the step was missing"
            for status in response.stale_backups
        }
        if run.relocations.fail_backups(stale, BackupState.BUILDING):
            message = f"{len(stale)} backups on {server_id!r} lacked step {run.committed_step - 1} and are built again"
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)


def _rank_versions(run: Run) -> list[shard_pb2.RankVersion]:
    """Returns the version that each work item of an asynchronous run reads after its last commit."""
    if not run.asynchronous:
        return []
    return [
        shard_pb2.RankVersion(dp_rank=dp_rank, version=step.number) for step in run.work.steps for dp_rank in step.items
    ]
