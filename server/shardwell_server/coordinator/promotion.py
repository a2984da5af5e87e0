"""Tells shard servers which copies of shards are primaries, and which they must drop.

``Copies`` decides both. A promotion (``PromoteShards``) and a release are repeated until the servers have acknowledged
them. No server learns of either before it is durable.
"""

from __future__ import annotations

import asyncio
import logging

from shardwell_server.coordinator.checkpoints.restoring import RunRestorer
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers, reference
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupRecord
from shardwell_wire import fault_points
from shardwell_wire.errors import NotFoundError, ShardwellError, StepStateError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_RETRY_S = 0.1


class Promoter:
    """Confirms relocations on the shard servers, and releases copies: with the servers' heartbeats, before their
    updates, or by themselves.

    The step of a run goes on when all its servers have confirmed.

    Args:
        restorer: Takes a run back to a checkpoint if a server cannot be the primary, because it lacks the version.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers, restorer: RunRestorer) -> None:
        self._state, self._servers, self._restorer = state, servers, restorer
        self._cluster, self._copies = state.cluster, servers.copies
        self._problems: dict[tuple[str, str], str] = {}
        """Why servers have not confirmed, by run id and server. Each reason is logged once."""

    def start(self, run: Run) -> None:
        """Confirms a relocation in the background, until every server has acknowledged it and has released the shards
        that moved away from it."""
        if not run.relocations.settled:
            self._state.tasks.start(run.calls.promoting(self._confirm, run))

    async def _confirm(self, run: Run) -> None:
        while not (run.relocations.settled or run.deleted):
            outcomes = await asyncio.gather(
                *(self._promote(run, server_id) for server_id in sorted(run.relocations.unconfirmed)),
                *(self._release_former(run, process) for process in sorted(run.relocations.releasing)),
            )
            if not all(outcomes):
                await asyncio.sleep(_RETRY_S)

    async def _promote(self, run: Run, server_id: str) -> bool:
        """Sends one request. Returns False if it must be repeated."""
        placement = run.relocations.count
        published = [
            (unit, shard)
            for unit in run.units
            for shard in unit.shards
            if unit.published and shard.server_id == server_id
        ]
        if not published:
            run.relocations.note_confirmed(server_id, placement)  # it owns no shards any more
            return True
        owned = [each for each in published if not self._cluster.is_gone(each[1].process)]
        if run.relocations.announced < placement or not owned:
            # Not stored yet. Or the server may come back, and must learn of its shards then; or it is replaced.
            return False
        request = shard_pb2.PromoteShardsRequest(
            context=self._servers.context(run, run.committed_step),
            placement=placement,
            shards=[reference(unit, shard) for unit, shard in owned],
            fences=[
                shard_pb2.RankFence(
                    dp_rank=item.dp_rank,
                    epoch=item.epoch,
                    attempt=item.attempt,
                    version=step.number if run.asynchronous else None,
                )
                for step in run.work.steps
                for item in step.items.values()
            ],
            backups=[
                shard_pb2.PromotedBackup(
                    shard=reference(unit, backup),
                    server_id=backup.server_id,
                    address=self._cluster.servers[backup.server_id].address,
                    placement=backup.placement,
                )
                for unit, shard in owned
                for backup in unit.backups_of(shard)
                if backup.in_sync and not self._cluster.is_gone(backup.process)
            ],
        )
        try:
            await self._servers.call(server_id, "PromoteShards", request)
        except (StepStateError, NotFoundError) as error:
            self._log(run, server_id, error)
            if placement == run.relocations.count and self._restorer.can_roll_back(run):
                # The copy lacks the version, and was the last one that could replace the lost shard.
                lost = f"server {server_id!r} cannot replace a lost shard: {error}"
                self._state.tasks.start(self._restorer.roll_back(run, lost))
            return False
        except ShardwellError as error:
            self._log(run, server_id, error)
            return False
        self._problems.pop((run.identity.run_id, server_id), None)
        fault_points.reach("coordinator.promotion.after", server=server_id)
        run.relocations.note_confirmed(server_id, placement)
        return True

    async def _release_former(self, run: Run, process: tuple[str, str]) -> bool:
        """Releases the former shards of one server process. Returns False if this must be repeated."""
        if self._cluster.is_gone(process):
            run.relocations.releasing.discard(process)  # it drops them before it serves anyone again
            run.changed.notify()
            return True
        if self.are_open(run, process):
            return False
        try:
            await self.release(run, process)
        except ShardwellError as error:
            self._log(run, process[0], error)
            return False
        return True

    def _log(self, run: Run, server_id: str, error: ShardwellError) -> None:
        """Logs why a server has not confirmed, once per reason: requests are repeated many times."""
        key, problem = (run.identity.run_id, server_id), str(error)
        if self._problems.get(key) != problem:
            self._problems[key] = problem
            logger.warning("run %r: %s", run.name, problem)

    # Copies that are dropped

    def are_open(self, run: Run, process: tuple[str, str]) -> bool:
        """True while it is not decided whether a server process must drop a former copy."""
        self._copies.settle(run)
        return any(copy.process == process for _, copy in run.units.former)

    async def _durable(self, run: Run, process: tuple[str, str]) -> list[tuple[Unit, BackupRecord]]:
        """Returns the copies that a server process must drop, once this is stored."""
        if not (found := self._copies.to_release(run, process)):
            return []
        await self._state.save(run)
        still = self._copies.to_release(run, process)  # empty if a restore has begun
        return [each for each in found if each in still]

    async def named(self, server_id: str, incarnation: str) -> list[coordinator_pb2.RetiredShard]:
        """Returns the copies of runs that a server process must drop before it serves anyone."""
        process = (server_id, incarnation)
        for run in (listed := list(self._state.runs.values())):
            if self.are_open(run, process):  # the process has returned before this was decided
                run.relocations.releasing.add(process)
        return [
            coordinator_pb2.RetiredShard(
                run_id=run.identity.run_id,
                unit=unit.layout.unit,
                start_bytes=backup.start_bytes,
                stop_bytes=backup.stop_bytes,
                placement=run.changes.last_epoch,
            )
            for run in listed
            for unit, backup in await self._durable(run, process)
        ]

    async def release(self, run: Run, process: tuple[str, str]) -> None:
        """Makes a server process drop its copies, and removes their records.

        Raises:
            ShardwellError: The server is unavailable, or the decision could not be stored.
        """
        if not (found := await self._durable(run, process)):
            run.relocations.note_released(process)
            return
        request = shard_pb2.ReleaseShardsRequest(
            context=self._servers.context(run, run.committed_step),
            placement=run.changes.last_epoch,
            shards=[reference(unit, backup) for unit, backup in found],
        )
        response = await self._servers.call(process[0], "ReleaseShards", request, retry_for_s=0.0)
        if response.free_bytes:
            self._cluster.note_free(process[0], response.free_bytes)
        for unit, backup in found:
            if any(each is backup for each in unit.backups):
                run.units.remove_backup(unit, backup)
        run.relocations.note_released(process)
