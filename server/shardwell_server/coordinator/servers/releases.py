"""Makes shard servers drop the copies that ``Copies`` has given up, once this is durable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_server.coordinator.servers.copies import Copies
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.storage.records import BackupRecord, ShardRecord
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


class Releases:
    """Releases copies on shard servers: with their heartbeats, before their updates, or by themselves.

    Args:
        servers: The shard servers.
        cluster: Their registry.
        copies: Decides which copies are released.
        save: Stores a run; see ``CoordinatorState.save``.
    """

    def __init__(
        self, servers: ShardServers, cluster: Cluster, copies: Copies, save: Callable[[Run], Awaitable[None]]
    ) -> None:
        self._servers, self._cluster, self._copies, self._save = servers, cluster, copies, save

    def are_open(self, run: Run, process: tuple[str, str]) -> bool:
        """True while it is not decided whether a server process must drop a former copy."""
        self._copies.settle(run)
        return any(copy.process == process for _, copy in run.units.former)

    async def _durable(self, run: Run, process: tuple[str, str]) -> list[tuple[Unit, BackupRecord]]:
        """Returns the copies that a server process must drop, once this is stored."""
        if not (found := self._copies.to_release(run, process)):
            return []
        await self._save(run)
        still = self._copies.to_release(run, process)  # empty if a restore has begun
        return [each for each in found if each in still]

    async def named(self, runs: Iterable[Run], server_id: str, incarnation: str) -> list[coordinator_pb2.RetiredShard]:
        """Returns the copies of runs that a server process must drop before it serves anyone."""
        process = (server_id, incarnation)
        for run in (listed := list(runs)):
            if self.are_open(run, process):  # the process has returned before this was decided
                run.relocations.releasing.add(process)
        return [
            coordinator_pb2.RetiredShard(
                run_id=run.identity.run_id,
                unit=unit.layout.unit,
                start_bytes=backup.start_bytes,
                stop_bytes=backup.stop_bytes,
                placement=run.last_epoch,
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
            placement=run.last_epoch,
            shards=[reference(unit, backup) for unit, backup in found],
        )
        response = await self._servers.call(process[0], "ReleaseShards", request, retry_for_s=0.0)
        if (server := self._cluster.servers.get(process[0])) is not None and response.free_bytes:
            server.note_free(response.free_bytes)
        for unit, backup in found:
            if any(each is backup for each in unit.backups):
                run.units.remove_backup(unit, backup)
                run.touch()
        run.relocations.note_released(process)


def reference(unit: Unit, shard: ShardRecord) -> shard_pb2.ShardReference:
    """Returns the name of a shard in requests to its servers."""
    return shard_pb2.ShardReference(unit=unit.layout.unit, start_bytes=shard.start_bytes, stop_bytes=shard.stop_bytes)
