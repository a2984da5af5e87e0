"""Decides what happens to each copy of a shard: which one serves, which may replace it, and which is dropped.

Note: [Life of a copy]
    A copy is a shard's bytes in one server process, or what an ended process has left of them. Each copy of a run has
    one durable record: a ``ShardRecord`` for the primary, a ``BackupRecord`` for the others. docs/architecture.md has
    the table of states and transitions. Everything that drops, promotes, adopts or waits for a copy asks this file.

    - A copy is dropped only when the primary is *confirmed*: its process has acknowledged, since it registered and
      after the placement was stored, that it has the shard. The decision is stored before the server learns of it.
      Two things drop copies otherwise: the deletion of the run, and a restore, whose checkpoint replaces all copies.
    - A primary that is replaced, and a backup that gets no further step, become *former* copies. A former copy was
      the primary or in sync when the last step was committed: it has the committed version, or can repeat the last
      update. It can therefore become the primary. The next commit ends this, in the transaction of its record.
    - What the process of a copy does is not stored: whether it lives, was lost, or has ended and left its copies to
      the next process of its id. That is the state of the server, see Note: [Lost and ended servers].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwell_server.coordinator.placed_units import Promotion, Unit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, ShardRecord
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

HeldShards = Mapping[tuple[int, int, int], coordinator_pb2.HeldShard]
"""Copies of one run that a process has taken up, by unit index, start and stop."""


@dataclass(slots=True)
class Losses:
    """What a run loses with the server processes that are gone."""

    promotions: list[Promotion] = field(default_factory=list)
    backups: list[tuple[Unit, BackupRecord, BackupState | None]] = field(default_factory=list)
    """Copies on processes that are gone, with their new state. None: their memory is gone, too."""
    shards: list[tuple[Unit, ShardRecord]] = field(default_factory=list)
    """Primaries that no other copy can replace now."""


class Copies:
    """The copies of every run's shards. See Note: [Life of a copy]. Changes records only in memory."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    # Dropping

    def is_confirmed(self, run: Run, shard: ShardRecord) -> bool:
        """True if a primary's process is live, is not suspected to have ended, and has acknowledged that it has the
        shard."""
        return (
            self._is_live(shard)
            and not self._cluster.servers[shard.server_id].suspected
            and shard.server_id not in run.relocations.unconfirmed
        )

    def to_release(self, run: Run, process: tuple[str, str]) -> list[tuple[Unit, BackupRecord]]:
        """Returns the copies that a server process must drop. The caller stores the run before it tells the server.

        None while the run is loaded from a checkpoint: the server may be loading these shards.
        """
        if run.deleted or run.checkpoints.restore is not None:
            return []
        self.settle(run)
        return run.units.retired_on(process)

    def settle(self, run: Run) -> None:
        """Ends the time of former copies on live servers whose primaries are confirmed: they are to be released."""
        for unit, backup in run.units.former:
            if self._is_live(backup) and self.is_confirmed(run, unit.shard_at(backup.start_bytes)):
                run.units.set_backup_state(unit, backup, BackupState.RELEASING)

    def end_former(self, run: Run) -> None:
        """Ends the time of all former copies, because a step is committed that they do not have."""
        for unit, backup in run.units.former:
            self._change(run, unit, backup, BackupState.RELEASING if self._cluster.may_return(backup.process) else None)

    def apply(self, run: Run, losses: Losses) -> None:
        """Changes the records of copies on processes that are gone."""
        for unit, backup, state in losses.backups:
            self._change(run, unit, backup, state)

    def _change(self, run: Run, unit: Unit, backup: BackupRecord, state: BackupState | None) -> None:
        if state is None:
            run.units.remove_backup(unit, backup)
        else:
            run.units.set_backup_state(unit, backup, state)

    # Replacing

    def losses(self, run: Run) -> Losses:
        """Returns what a run loses now, and which copies replace it."""
        found, cluster = Losses(), self._cluster
        gone = {process for process in run.units.holders if cluster.is_gone(process)}
        if not gone or run.deleted or run.checkpoints.restore is not None:
            return found
        for unit in run.units:
            for backup in unit.backups:
                if backup.process in gone and (state := self._state_when_gone(backup)) is not backup.state:
                    found.backups.append((unit, backup, state))
            for shard in unit.shards if unit.published else ():  # others are placed again by the next declaration
                if shard.process not in gone:
                    continue
                if (copy := self.replacement(unit, shard)) is not None:
                    found.promotions.append(Promotion(unit, copy, keep_former=cluster.may_have_copies(shard.process)))
                else:
                    found.shards.append((unit, shard))
        return found

    def _state_when_gone(self, backup: BackupRecord) -> BackupState | None:
        """Returns the state of a copy whose process is gone. None: its memory is gone, or it is of no use."""
        if backup.state in (BackupState.IN_SYNC, BackupState.FORMER):
            return BackupState.FORMER if self._cluster.may_have_copies(backup.process) else None
        return BackupState.RELEASING if self._cluster.may_return(backup.process) else None

    def replacement(self, unit: Unit, shard: ShardRecord) -> BackupRecord | None:
        """Returns the copy that replaces a lost primary: a backup in sync, else a former copy.

        Copies on servers that are being drained come last.
        """
        cluster = self._cluster
        able = [
            copy
            for copy in unit.backups_of(shard)
            if (copy.in_sync or copy.state is BackupState.FORMER) and not cluster.is_gone(copy.process)
        ]
        return min(able, key=lambda at: (not at.in_sync, cluster.servers[at.server_id].draining), default=None)

    def sources(self, unit: Unit, shard: ShardRecord) -> list[ShardRecord]:
        """Returns the copies from which a lost primary may come back: by a server that returns or is started again."""
        copies = [at for at in unit.backups_of(shard) if at.in_sync or at.state is BackupState.FORMER]
        return [copy for copy in (shard, *copies) if self._cluster.may_have_copies(copy.process)]

    # Taking up

    def replacing(self, run: Run, server_id: str, held: HeldShards) -> set[str]:
        """Returns the servers for whose primaries a new process would drop what its predecessor has left."""
        return {
            unit.shard_at(copy.start_bytes).server_id
            for unit in run.units
            for copy in unit.backups
            if copy.server_id == server_id
            and (unit.index, copy.start_bytes, copy.stop_bytes) in held
            and (copy.in_sync or copy.state is BackupState.FORMER)
        }

    def adopt(
        self, run: Run, process: tuple[str, str], held: HeldShards
    ) -> tuple[list[coordinator_pb2.HeldShard], set[tuple[str, str]]]:
        """Gives a new server process the copies of its predecessor that are of use.

        A process becomes the primary of the shards whose primary its predecessor was. It keeps former copies, without
        serving them, while their primary is not confirmed. A process may continue a shard if the shard has the
        committed version, or if the update to it can be repeated.

        Returns:
            The copies that the process keeps, with their roles, and the former processes of adopted primaries. A retry
            returns the same copies.
        """
        server_id, incarnation = process
        kept, former = [], set()
        refused: list[str] = []
        for unit in run.units if run.checkpoints.restore is None else ():
            for copy in (*unit.shards, *unit.backups) if unit.published else ():
                found = held.get((unit.index, copy.start_bytes, copy.stop_bytes))
                if found is None or copy.server_id != server_id:
                    continue
                is_primary = not isinstance(copy, BackupRecord)
                if copy.incarnation != incarnation:
                    problem = _problem(found, run.committed_step, is_committing=run.commits.writing)
                    if problem:
                        if is_primary:
                            refused.append(f"{unit.layout.unit!r} from byte {copy.start_bytes} {problem}")
                        continue
                    if not isinstance(copy, BackupRecord):
                        former.add(copy.process)
                    elif copy.state not in (BackupState.IN_SYNC, BackupState.FORMER) or self.is_confirmed(
                        run, unit.shard_at(copy.start_bytes)
                    ):
                        continue
                    run.units.adopt(unit, copy, incarnation)
                elif isinstance(copy, BackupRecord) and copy.state is not BackupState.FORMER:
                    continue
                # Also if the step was committed since the first answer. PromoteShards makes a former backup a primary.
                kept.append(_with_role(found, is_primary=is_primary))
        if refused:
            why = f"it does not continue {len(refused)} shards, such as {refused[0]}"
            self._cluster.servers[server_id].not_kept[run.identity.run_id] = why
            logger.warning("server %r was restarted, run %r: %s", server_id, run.name, why)
        return kept, former

    def _is_live(self, shard: ShardRecord) -> bool:
        server = self._cluster.servers.get(shard.server_id)
        return server is not None and server.live and server.incarnation == shard.incarnation


def _problem(held: coordinator_pb2.HeldShard, committed_step: int, *, is_committing: bool) -> str:
    """Returns why a copy cannot be continued. Empty if it has the committed version, or can still get it.

    A step that is being committed is due, too.
    """
    complete = held.version == committed_step and not held.updating
    if complete and (held.can_update or not is_committing):
        return ""
    if held.version == committed_step - 1 and held.can_update and not is_committing:
        return ""
    state = "whose update was interrupted" if held.updating else "complete"
    able = "can" if held.can_update else "cannot"
    due = f", and step {committed_step} is being committed" if is_committing else ""
    return (
        f"at version {held.version}, {state}, which {able} be updated; the committed version is {committed_step}{due}"
    )


def _with_role(held: coordinator_pb2.HeldShard, *, is_primary: bool) -> coordinator_pb2.HeldShard:
    """Returns a copy with its role from now on."""
    if is_primary or held.role == shard_pb2.SHARD_ROLE_BACKUP:
        return held
    kept = coordinator_pb2.HeldShard()
    kept.CopyFrom(held)
    kept.role = shard_pb2.SHARD_ROLE_BACKUP
    return kept
