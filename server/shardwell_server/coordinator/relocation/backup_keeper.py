"""Builds single backups on the shard servers, and compares the backups of a run with their primaries by hash."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shardwell_server.coordinator.commit.committer import UpdateSender
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers, reference
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, ShardRecord
from shardwell_wire import fault_points
from shardwell_wire.errors import StepStateError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


class BackupBuilder:
    """Builds backups.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        updates: Sends the last update to a backup that was copied before it.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers, updates: UpdateSender) -> None:
        self._state, self._servers, self._updates, self._copies = state, servers, updates, servers.copies

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
        run.changes.touch()
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
    return run.changes.next_epoch()


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
