"""Gives the shards of lost server processes to other servers.

Note: [Relocation]
    A relocation is decided from the current state alone, so it is repeated until nothing is left to do, also by a
    restarted coordinator:
    1. In one turn of the event loop, backups that are in sync become the primaries of the lost shards, the run's
       placement rises, and every work item of the step in flight gets a new attempt: contributions that only the lost
       process had are gone. If a commit record is being written, the relocation waits until it is durable.
    2. The change is stored in one transaction. Trainers learn the placement only after that.
    3. ``PromoteShards`` tells the new primaries, and is repeated until they acknowledge it. Requests about the step in
       flight wait for that (``Run.wait_until_updated``).
    4. Backups receive every update, so the update of the last commit may still be pending there and goes on. Then the
       former attempts are fenced, and the trainers get the new ones from ``FinishWork``.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainers import TrainerLeases
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Promotion, Unit
from shardwell_server.coordinator.servers.promoter import Promoter
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, ShardRecord
from shardwell_wire import fault_points
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)


class Rollback(Protocol):
    """Takes a run back to its last checkpoint."""

    def can_roll_back(self, run: Run) -> bool:
        """True if a checkpoint of the run exists."""
        ...

    async def roll_back(self, run: Run, lost: str) -> bool:
        """Starts the rollback. Returns when this is durable. Repeating it is harmless."""
        ...


@dataclass(slots=True)
class _Losses:
    """What a run loses with the server processes that are gone."""

    promotions: list[Promotion] = field(default_factory=list)
    backups: list[tuple[Unit, BackupRecord]] = field(default_factory=list)
    """Backups on processes that are gone."""
    shards: list[tuple[Unit, ShardRecord]] = field(default_factory=list)
    """Primaries that no backup can replace."""


class Relocator:
    """Replaces lost primaries of every run. See Note: [Relocation].

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        promoter: Tells servers about their new primaries.
        trainers: Fences former attempts.
        rollback: Takes a run back to a checkpoint if no backup can replace a shard. None: not possible.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        promoter: Promoter,
        trainers: TrainerLeases,
        rollback: Rollback | None = None,
    ) -> None:
        self._state, self._servers, self._promoter = state, servers, promoter
        self._trainers, self._rollback = trainers, rollback
        promoter.when_refused = self._note_refused

    def start(self) -> None:
        """Continues the relocations of the former term, and watches the servers from now on."""
        for run in self._state.runs.values():
            self._promoter.start(run)
        self._state.tasks.start(self._watch())

    async def _watch(self) -> None:
        while True:
            change = self._state.cluster.changed.next_change()
            self.check()
            await change.wait()

    def check(self) -> None:
        """Starts relocating the shards of every run that lost a server process."""
        for run in self._state.runs.values():
            losses = self._losses(run)
            replaceable = losses.promotions or losses.backups or self._must_roll_back(run, losses)
            if replaceable and not run.calls.relocating.in_flight:
                self._state.tasks.start(run.calls.relocating(lambda run=run: self._relocate(run)))  # type: ignore[misc]

    async def retired_shards(self, server_id: str, incarnation: str) -> list[coordinator_pb2.RetiredShard]:
        """Returns the shards that a server process no longer owns, once this is durable."""
        retired = []
        for run in list(self._state.runs.values()):
            if run.units.retired_on((server_id, incarnation)) and not run.deleted:
                await self._state.save(run)
                retired += [
                    coordinator_pb2.RetiredShard(
                        run_id=run.identity.run_id,
                        unit=unit.layout.unit,
                        start_bytes=backup.start_bytes,
                        stop_bytes=backup.stop_bytes,
                        placement=run.last_epoch,
                    )
                    for unit, backup in run.units.retired_on((server_id, incarnation))
                ]
        return retired

    def _losses(self, run: Run) -> _Losses:
        """Returns what a run loses now, and which backups replace it."""
        found, is_gone = _Losses(), self._state.cluster.is_gone
        gone = {process for process in run.units.holders if is_gone(process)}
        if not gone or run.deleted or run.checkpoints.restore is not None:
            return found
        for unit in run.units:
            found.backups += [
                (unit, backup)
                for backup in unit.backups
                if backup.process in gone and not (backup.state is BackupState.RELEASING and self._may_be_alive(backup))
            ]
            for shard in unit.shards:
                if shard.process not in gone or not unit.published:
                    continue  # a unit without values is placed again by the next declaration
                if (backup := self._replacement(unit, shard)) is not None:
                    found.promotions.append(Promotion(unit, backup, keep_former=self._may_be_alive(shard)))
                else:
                    found.shards.append((unit, shard))
        return found

    def _replacement(self, unit: Unit, shard: ShardRecord) -> BackupRecord | None:
        """Returns the backup that replaces a lost primary. Servers that are being drained come last."""
        cluster = self._state.cluster
        able = [backup for backup in unit.backups_of(shard) if backup.in_sync and not cluster.is_gone(backup.process)]
        return min(able, key=lambda backup: cluster.servers[backup.server_id].draining, default=None)

    def _must_roll_back(self, run: Run, losses: _Losses) -> bool:
        """True if lost shards are only in a checkpoint, and no process that could take them up is expected."""
        awaited = any(self._state.cluster.awaits_restart(shard.process) for _, shard in losses.shards)
        possible = self._rollback is not None and self._rollback.can_roll_back(run)
        return bool(losses.shards) and not awaited and possible

    def _may_be_alive(self, shard: ShardRecord) -> bool:
        return self._state.cluster.may_return(shard.process)

    async def _relocate(self, run: Run) -> None:
        while True:
            while run.commits.writing:
                await run.changed.wait()
            losses = self._losses(run)
            if self._rollback is not None and self._must_roll_back(run, losses):
                await self._rollback.roll_back(run, _describe_loss(losses.shards))
                return
            if not losses.promotions and not losses.backups:
                return  # nothing can be replaced; the run reports what it lost
            self._apply(run, losses)
            fault_points.reach("coordinator.relocation.before_record", run=run.name)
            await self._state.save_or_retry(run)
            fault_points.reach("coordinator.relocation.after_record", run=run.name)
            self._add_events(run, losses)
            self._promoter.start(run)
            self._trainers.items.start_fencing(run)

    def _apply(self, run: Run, losses: _Losses) -> None:
        """Changes the run in memory, without ``await``."""
        gone = {backup.process for _, backup in losses.backups}
        for unit, backup in losses.backups:
            if self._may_be_alive(backup):
                run.units.set_backup_state(unit, backup, BackupState.RELEASING)
            else:
                run.units.remove_backup(unit, backup)
        if losses.promotions:
            gone |= {promotion.unit.shard_at(promotion.backup.start_bytes).process for promotion in losses.promotions}
            run.relocations.promote(losses.promotions)
            run.work.restart()
        else:
            run.touch()
        for process in gone:
            self._servers.abandon(process)
        run.changed.notify()

    def _add_events(self, run: Run, losses: _Losses) -> None:
        if losses.promotions:
            by_server = Counter(promotion.backup.server_id for promotion in losses.promotions)
            targets = ", ".join(f"{count} on {server!r}" for server, count in sorted(by_server.items()))
            step = f"; step {run.committed_step} is computed again" if run.started else ""
            placement = f"placement {run.relocations.count}"
            message = f"backups replace {len(losses.promotions)} lost shards ({targets}), {placement}{step}"
            self._state.events.add(EventKind.SHARDS_PROMOTED, message, run=run.name)
        wanted = [backup for _, backup in losses.backups if backup.state is not BackupState.RELEASING]
        if wanted:
            servers = ", ".join(map(repr, sorted({backup.server_id for backup in wanted})))
            message = f"{len(wanted)} backups on {servers} are lost and are built again"
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)

    def _note_refused(self, run: Run, server_id: str, error: ShardwellError) -> None:
        """Rolls back because a server cannot be the primary of a shard: its copy lacks the version."""
        if self._rollback is not None and self._rollback.can_roll_back(run):
            lost = f"server {server_id!r} cannot replace a lost shard: {error}"
            self._state.tasks.start(self._rollback.roll_back(run, lost))


def _describe_loss(shards: list[tuple[Unit, ShardRecord]]) -> str:
    servers = ", ".join(map(repr, sorted({shard.server_id for _, shard in shards})))
    return f"{len(shards)} shards on {servers} were lost and have no backup"
