"""Tells shard servers that they are the primaries of shards (``PromoteShards``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_server.coordinator.servers.releases import Releases
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.storage.records import ShardRecord
from shardwell_server.coordinator.waiting import BackgroundTasks
from shardwell_wire import fault_points
from shardwell_wire.errors import NotFoundError, ShardwellError, StepStateError
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

_RETRY_S = 0.1


class Promoter:
    """Confirms relocations on the shard servers. The step of a run goes on when all its servers have confirmed.

    Args:
        servers: The shard servers.
        cluster: Their registry.
        tasks: Runs the requests in the background.
        releases: Releases the shards on their former primaries.
    """

    def __init__(self, servers: ShardServers, cluster: Cluster, tasks: BackgroundTasks, releases: Releases) -> None:
        self._servers, self._cluster, self._tasks, self._releases = servers, cluster, tasks, releases
        self.when_refused: Callable[[Run, str, ShardwellError], None] | None = None
        """Called if a server cannot be the primary of a shard, because it lacks the version. Called repeatedly."""
        self._problems: dict[tuple[str, str], str] = {}
        """Why servers have not confirmed, by run id and server. Each reason is logged once."""

    def start(self, run: Run) -> None:
        """Confirms a relocation in the background, until every server has acknowledged it and has released the shards
        that moved away from it."""
        if not run.relocations.settled:
            self._tasks.start(run.calls.promoting(lambda: self._confirm(run)))

    async def _confirm(self, run: Run) -> None:
        while not (run.relocations.settled or run.deleted):
            outcomes = await asyncio.gather(
                *(self._promote(run, server_id) for server_id in sorted(run.relocations.unconfirmed)),
                *(self._release(run, process) for process in sorted(run.relocations.releasing)),
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
            shards=[_reference(unit, shard) for unit, shard in owned],
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
                    shard=_reference(unit, backup),
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
            if placement == run.relocations.count and self.when_refused is not None:
                self.when_refused(run, server_id, error)
            return False
        except ShardwellError as error:
            self._log(run, server_id, error)
            return False
        self._problems.pop((run.identity.run_id, server_id), None)
        fault_points.reach("coordinator.promotion.after", server=server_id)
        run.relocations.note_confirmed(server_id, placement)
        return True

    async def _release(self, run: Run, process: tuple[str, str]) -> bool:
        """Releases the former shards of one server process. Returns False if this must be repeated."""
        if self._cluster.is_gone(process):
            run.relocations.releasing.discard(process)  # it drops them before it serves anyone again
            run.changed.notify()
            return True
        if self._releases.are_open(run, process):
            return False
        try:
            await self._releases.release(run, process)
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


def _reference(unit: Unit, shard: ShardRecord) -> shard_pb2.ShardReference:
    return shard_pb2.ShardReference(unit=unit.layout.unit, start_bytes=shard.start_bytes, stop_bytes=shard.stop_bytes)
