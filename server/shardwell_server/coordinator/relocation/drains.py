"""Starts, reports and ends planned moves: draining of servers, and rebalancing of runs.

Compares the backups of a run with their primaries, by hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.relocation.keeper import BackupKeeper
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Server
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupRecord, ShardRecord
from shardwell_server.coordinator.units import Unit
from shardwell_wire.errors import InvalidRequestError, StaleEpochError, StepStateError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


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
            server.leaving = True
        if server.draining == cancel:
            server.draining = not cancel
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


_Hashes = Mapping[tuple[str, str, int], shard_pb2.ShardHash]
"""Hashes by server, unit and first byte."""

_WAIT_S = 20.0
"""Longest wait for the servers to reach the committed version, and for shards that move, in seconds."""
_AGAIN_S = 0.05


class RunVerifier:
    """Verifies the copies of a run's shards.

    Args:
        state: State of the coordinator.
        servers: The shard servers, which hash their shards.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    async def verify(self, run: Run) -> coordinator_pb2.VerifyRunResponse:
        """Compares all backups that are in sync with their primaries, at one version. No step is committed meanwhile.

        Compares again if shards move during the comparison.

        Raises:
            UnavailableError: The servers did not reach the committed version, or shards kept moving.
        """
        give_up_s = self._state.clock() + _WAIT_S
        while (response := await self._compare(run)) is None:
            if self._state.clock() >= give_up_s:
                raise UnavailableError(
                    f"run {run.name!r}: its shards moved during every comparison for {_WAIT_S:g} s: try again later",
                    run=run.name,
                )
            await run.changed.wait(_AGAIN_S)
        return response

    async def _compare(self, run: Run) -> coordinator_pb2.VerifyRunResponse | None:
        """Compares once. Returns None if shards moved meanwhile."""
        async with run.checkpoints.boundary:  # no commit record is written while this is held
            try:
                async with asyncio.timeout(_WAIT_S):
                    await run.wait_until_updated()
            except TimeoutError:
                raise UnavailableError(
                    f"run {run.name!r}: its servers did not reach version {run.committed_step} within {_WAIT_S:g} s: "
                    "see shardwell stall, and try again",
                    run=run.name,
                ) from None
            version, placement = run.committed_step, run.relocations.count
            request = shard_pb2.HashShardsRequest(context=self._servers.context(run, version), version=version)
            pairs = [
                (unit, unit.shard_at(backup.start_bytes), backup)
                for unit in run.units
                for backup in unit.backups
                if backup.in_sync and unit.published
            ]
            servers = {shard.server_id for _, primary, backup in pairs for shard in (primary, backup)}
            try:
                answers = await self._servers.call_all(sorted(servers), "HashShards", request)
            except StepStateError:
                if run.relocations.count == placement:
                    raise
        if run.relocations.count != placement:
            return None
        hashes = {
            (server_id, each.unit, each.start_bytes): each
            for server_id, answer in answers.items()
            for each in answer.shards
        }
        differences = [line for pair in pairs for line in _differences(hashes, version, *pair)]
        protected = {(unit.index, backup.start_bytes) for unit, _, backup in pairs}
        return coordinator_pb2.VerifyRunResponse(
            version=version,
            compared_shards=len(pairs),
            compared_bytes=sum(primary.size_bytes for _, primary, _ in pairs),
            differences=differences,
            unprotected_shards=sum(len(unit.shards) for unit in run.units) - len(protected),
        )


def _differences(hashes: _Hashes, version: int, unit: Unit, primary: ShardRecord, backup: BackupRecord) -> list[str]:
    """Returns one line per difference between a backup and its primary."""
    where = (
        f"unit {unit.layout.unit!r}, bytes {backup.start_bytes} to {backup.stop_bytes}: the backup on server "
        f"{backup.server_id!r}"
    )
    found = [hashes.get((at.server_id, unit.layout.unit, at.start_bytes)) for at in (primary, backup)]
    ours, theirs = found
    if ours is None or theirs is None:
        missing = primary if ours is None else backup
        return [f"{where} cannot be compared: server {missing.server_id!r} does not have the shard"]
    if (ours.version, theirs.version) != (version, version):
        return [f"{where} has version {theirs.version}, the primary {ours.version}: expected {version}"]
    left, right = ({(tensor.parameter, tensor.name): tensor.xxh3 for tensor in each.tensors} for each in (ours, theirs))
    different = [
        f"{parameter} {name}"
        for parameter, name in left | right
        if left.get((parameter, name)) != right.get((parameter, name))
    ]
    if not different:
        return []
    return [f"{where} differs from the primary on {primary.server_id!r} in {', '.join(different[:8])}"]
