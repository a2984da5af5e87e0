"""Sends the update of a committed step to the shard servers until each of them has acknowledged it."""

from __future__ import annotations

from shardwell_server.coordinator.checkpoints.saving import CheckpointSaver
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.runs.committed_steps import PendingUpdate
from shardwell_server.coordinator.runs.proposals import committed_optimizer
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
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
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers, checkpoints: CheckpointSaver) -> None:
        self._state, self._servers, self._checkpoints = state, servers, checkpoints

    def start_all(self, run: Run) -> None:
        """Sends the update of the last commit to every server, in the background."""
        if run.checkpoints.restore is not None:
            return  # the servers drop these shards
        if run.commits.pending_updates:
            request = self._request(run)
            for server_id, pending in run.commits.pending_updates.items():
                self._state.tasks.start(self._send(run, request, server_id, pending))

    def start(self, run: Run, server_id: str, pending: PendingUpdate) -> None:
        """Sends a pending update to its server, in the background."""
        self._state.tasks.start(self._send(run, self._request(run), server_id, pending))

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

        async def attempt() -> None:
            if run.commits.pending_updates.get(server_id) is not pending:
                return  # the run was loaded from a checkpoint, or the server was replaced
            # A new primary applies the update only after it knows that it is the primary.
            while server_id in run.relocations.unconfirmed and not run.deleted and not cluster.is_gone(process):
                await run.changed.wait(_RECHECK_S)
            if run.deleted:
                return
            if cluster.is_gone(process):
                if cluster.may_return(process) and run.units.needs_updates(process):
                    raise UnavailableError("the server is lost, and no other server has its shards")
                return
            await self._release_retired(run, process)
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

    async def _release_retired(self, run: Run, process: tuple[str, str]) -> None:
        """Makes a server drop the shards that moved to other servers with the commit, before it updates the others.

        Otherwise it would create the next version of them, and accept gradients from trainers that do not know the new
        servers yet.
        """
        if retired := run.units.retired_on(process):
            request = shard_pb2.ReleaseShardsRequest(
                context=self._servers.context(run, run.committed_step),
                placement=run.last_epoch,
                shards=[
                    shard_pb2.ShardReference(
                        unit=unit.layout.unit, start_bytes=backup.start_bytes, stop_bytes=backup.stop_bytes
                    )
                    for unit, backup in retired
                ],
            )
            await self._servers.call(process[0], "ReleaseShards", request, retry_for_s=0.0)

    def _note_stale_backups(self, run: Run, server_id: str, response: shard_pb2.UpdateResponse) -> None:
        """Marks the backups on a server that lacked the step."""
        stale = {
            (status.unit_index, status.start_bytes, server_id): status.error or "the step was missing"
            for status in response.stale_backups
        }
        if run.relocations.fail_backups(stale):
            message = f"{len(stale)} backups on {server_id!r} lacked step {run.committed_step - 1} and are built again"
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)


def _rank_versions(run: Run) -> list[shard_pb2.RankVersion]:
    """Returns the version that each work item of an asynchronous run reads after its last commit."""
    if not run.asynchronous:
        return []
    return [
        shard_pb2.RankVersion(dp_rank=dp_rank, version=step.number) for step in run.work.steps for dp_rank in step.items
    ]
