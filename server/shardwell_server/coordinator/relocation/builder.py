"""Builds single backups on the shard servers."""

from __future__ import annotations

from shardwell_server.coordinator.commit.updates import UpdateSender
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.copies import Copies
from shardwell_server.coordinator.servers.releases import reference
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, ShardRecord
from shardwell_wire import fault_points
from shardwell_wire.errors import StepStateError
from shardwell_wire.v1 import shard_pb2


class BackupBuilder:
    """Builds backups.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        updates: Sends the last update to a backup that was copied before it.
        copies: Says whether the primary can be copied.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers, updates: UpdateSender, copies: Copies) -> None:
        self._state, self._servers, self._updates, self._copies = state, servers, updates, copies

    async def build(self, run: Run, unit: Unit, backup: BackupRecord) -> bool:
        """Copies a shard from its primary to a backup, which is in sync afterwards. Replaces an outdated copy.

        Returns:
            False if the primary is not confirmed, or the backup missed a step meanwhile, or the shard has another
            primary. It must be built again.

        Raises:
            CapacityError: The server has no memory for the backup.
            ShardwellError: A server is unavailable, or refused.
        """
        primary, relocations = unit.shard_at(backup.start_bytes), run.relocations.count
        if not self._copies.is_confirmed(run, primary):
            return False
        # First drop what an earlier attempt has left. A reservation with a higher number is then a new one.
        await self._release_copy(run, unit, backup)
        placement = _next_number(run)
        await self._state.save(run)  # no other reservation may get this number, even after a restart
        reserved = await self._servers.call(
            backup.server_id,
            "ReserveUnit",
            shard_pb2.ReserveUnitRequest(
                context=self._servers.context(run, 0),
                unit=unit.layout.to_proto(),
                unit_index=unit.index,
                start_bytes=backup.start_bytes,
                stop_bytes=backup.stop_bytes,
                dp=run.settings.world.dp,
                reduction_groups=run.settings.reduction_groups,
                placement=placement,
                role=shard_pb2.SHARD_ROLE_BACKUP,
                asynchronous=run.asynchronous,
            ),
        )
        target = self._state.cluster.require(backup.server_id)
        target.note_free(reserved.free_bytes)
        await run.wait_until_updated()  # copies while trainers compute, not while servers update
        if not self._is_current(run, unit, primary, backup):
            return False
        copied = await self._servers.call(
            primary.server_id,
            "CopyShard",
            shard_pb2.CopyShardRequest(
                context=self._servers.context(run, run.committed_step),
                shard=reference(unit, backup),
                placement=placement,
                target_server_id=backup.server_id,
                target_address=target.address,
            ),
        )
        fault_points.reach("coordinator.backup.copied", unit=unit.layout.unit, server=backup.server_id)
        # A relocation meanwhile may have told the primary which backups it has, without this one.
        if not self._is_current(run, unit, primary, backup) or run.relocations.count != relocations:
            return False
        if copied.version < run.committed_step:
            # The commit of this step came before the copy, so the backup's server may have acknowledged the update
            # without it.
            self._updates.repeat(run, backup.process)
        run.units.set_backup_state(unit, backup, BackupState.IN_SYNC, placement=placement)
        run.touch()
        await self._state.save(run)
        run.changed.notify()
        return True

    def _is_current(self, run: Run, unit: Unit, primary: ShardRecord, backup: BackupRecord) -> bool:
        """True if the primary and the backup are as they were when the build started."""
        unchanged = any(each is backup for each in unit.backups) and any(each is primary for each in unit.shards)
        return unchanged and not run.deleted

    async def _release_copy(self, run: Run, unit: Unit, backup: BackupRecord) -> None:
        request = shard_pb2.ReleaseShardsRequest(
            context=self._servers.context(run, run.committed_step),
            placement=_next_number(run),
            shards=[reference(unit, backup)],
        )
        await self._state.save(run)
        response = await self._servers.call(backup.server_id, "ReleaseShards", request, retry_for_s=0.0)
        if (server := self._state.cluster.servers.get(backup.server_id)) is not None and response.free_bytes:
            server.note_free(response.free_bytes)


def _next_number(run: Run) -> int:
    """Returns the number of a reservation or release. All of them are lower than that of a later restore, whose shards
    they must not affect.

    Raises:
        StepStateError: The run is being loaded from a checkpoint, which drops all copies.
    """
    if run.checkpoints.restore is not None:
        raise StepStateError(f"run {run.name!r} is being loaded from a checkpoint", run=run.name)
    return run.next_epoch()
