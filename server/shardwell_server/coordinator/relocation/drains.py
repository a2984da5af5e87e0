"""Starts, reports and ends planned moves: draining of servers, and rebalancing of runs."""

from __future__ import annotations

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.relocation.keeper import BackupKeeper
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.cluster import Server
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import ShardRecord
from shardwell_wire.errors import InvalidRequestError, StaleEpochError
from shardwell_wire.v1 import coordinator_pb2


class Drains:
    """Planned moves of shards. ``BackupKeeper`` makes them.

    Args:
        state: State of the coordinator.
        keeper: Plans and makes the moves.
    """

    def __init__(self, state: CoordinatorState, keeper: BackupKeeper) -> None:
        self._state, self._keeper = state, keeper

    async def drain(
        self, server_id: str, *, epoch: int = 0, cancel: bool = False
    ) -> coordinator_pb2.DrainServerResponse:
        """Starts draining a server, or stops it, and reports the progress.

        Args:
            server_id: Id of the server.
            epoch: Epoch of the process that asks for its own draining. 0: someone else asks.
            cancel: True to stop draining.

        Raises:
            NotFoundError: The server is not registered.
            StaleEpochError: Another process has the id.
        """
        server = self._state.cluster.require(server_id)
        if epoch and epoch != server.epoch:
            raise StaleEpochError(
                f"server {server_id!r}: the process with epoch {epoch} was replaced by one with epoch {server.epoch}",
                server=server_id,
                epoch=server.epoch,
            )
        if epoch:
            server.mark_leaving()
        if server.draining == cancel:
            server.set_draining(not cancel)
            await self._state.storage.save_server(server.to_record())
            if not cancel:
                message = f"server {server_id!r} at {server.address} hands its shards to other servers"
                self._state.events.add(EventKind.SERVER_DRAINING, message)
            self._state.cluster.changed.notify()
        return self._report(server)

    def _report(self, server: Server) -> coordinator_pb2.DrainServerResponse:
        process = (server.server_id, server.incarnation)
        held: list[ShardRecord] = []
        waiting_for = []
        for run in self._state.runs.values():
            # A unit without values loses nothing: the next declaration places it on other servers.
            published = [unit for unit in run.units if unit.published or unit.publishing.in_flight]
            own = [at for unit in published for at in (*unit.shards, *unit.backups) if at.process == process]
            held += own
            if own and server.draining:
                waiting_for += self._keeper.explain_drain(run, server)
        return coordinator_pb2.DrainServerResponse(
            shard_count=len(held), size_bytes=sum(shard.size_bytes for shard in held), waiting_for=waiting_for
        )

    async def rebalance(self, run: Run, *, report_only: bool) -> coordinator_pb2.RebalanceRunResponse:
        """Starts moving shards of a run until they are spread evenly, and reports the progress.

        Raises:
            InvalidRequestError: The run is asynchronous.
        """
        if run.asynchronous:
            raise InvalidRequestError(
                f"run {run.name!r} has consistency={run.settings.consistency}, in which shards cannot move"
            )
        if not report_only and not run.relocations.rebalancing:
            run.relocations.set_rebalancing(True)
            await self._state.save(run)
            self._state.cluster.changed.notify()
        moving = self._keeper.planned_moves(run) if run.relocations.rebalancing else []
        return coordinator_pb2.RebalanceRunResponse(
            rebalancing=run.relocations.rebalancing,
            shard_count=len(moving),
            size_bytes=sum(shard.size_bytes for shard in moving),
        )
