"""Gives the shards of lost server processes to other servers.

Note: [Relocation]
    A relocation is decided from the current state alone, so it is repeated until nothing is left to do, also by a
    restarted coordinator:
    1. In one turn of the event loop, backups that are in sync, or former copies, become the primaries of the lost
       shards, the run's placement rises, and every work item of the step in flight gets a new attempt: contributions
       that only the lost process had are gone. If a commit record is being written, the relocation waits until it is
       durable.
    2. The change is stored in one transaction. Trainers learn the placement only after that.
    3. ``PromoteShards`` tells the new primaries, and is repeated until they acknowledge it. Requests about the step in
       flight wait for that (``Run.wait_until_updated``).
    4. Backups receive every update, so the update of the last commit may still be pending there and goes on. Then the
       former attempts are fenced, and the trainers get the new ones from ``FinishWork``.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

from shardwell_server.coordinator.commit.updates import UpdateSender
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainers import TrainerLeases
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.copies import Copies, Losses
from shardwell_server.coordinator.servers.promoter import Promoter
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupState, ShardRecord
from shardwell_wire import fault_points
from shardwell_wire.errors import ShardwellError

logger = logging.getLogger(__name__)


class Rollback(Protocol):
    """Takes a run back to its last checkpoint."""

    def can_roll_back(self, run: Run) -> bool:
        """True if a checkpoint of the run exists."""
        ...

    async def roll_back(self, run: Run, lost: str) -> bool:
        """Starts the rollback. Returns when this is durable. Repeating it is harmless."""
        ...


class Relocator:
    """Replaces lost primaries of every run. See Note: [Relocation].

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        promoter: Tells servers about their new primaries.
        trainers: Fences former attempts.
        copies: Decides which copies replace lost primaries.
        updates: Repeats the last update on servers of former copies that replace a primary.
        rollback: Takes a run back to a checkpoint if no copy can replace a shard. None: not possible.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        promoter: Promoter,
        trainers: TrainerLeases,
        copies: Copies,
        updates: UpdateSender,
        rollback: Rollback | None = None,
    ) -> None:
        self._state, self._servers, self._promoter = state, servers, promoter
        self._trainers, self._copies, self._updates, self._rollback = trainers, copies, updates, rollback
        promoter.when_refused = self._note_refused

    def start(self) -> None:
        """Continues the relocations of the former term, and watches the servers from now on."""
        self._state.tasks.start(self._watch())

    async def _watch(self) -> None:
        while True:
            change = self._state.cluster.changed.next_change()
            self.check()
            await change.wait()

    def check(self) -> None:
        """Starts relocating the shards of every run that lost a server process."""
        for run in self._state.runs.values():
            self._promoter.start(run)
            losses = self._copies.losses(run)
            replaceable = losses.promotions or losses.backups or self._must_roll_back(run, losses)
            if replaceable and not run.calls.relocating.in_flight:
                self._state.tasks.start(run.calls.relocating(lambda run=run: self._relocate(run)))  # type: ignore[misc]

    def _must_roll_back(self, run: Run, losses: Losses) -> bool:
        """True if a lost shard is only in a checkpoint, and no server that could bring a copy back is expected."""
        if self._rollback is None or not losses.shards or not self._rollback.can_roll_back(run):
            return False
        cluster, wait_s = self._state.cluster, self._state.settings.restart_wait_s

        def is_expected(copy: ShardRecord) -> bool:
            return cluster.awaits_restart(copy.process) and cluster.restart_awaited_s(copy.process) < wait_s

        lost = not all(any(map(is_expected, self._copies.sources(*each))) for each in losses.shards)
        return lost and bool(cluster.staying)  # otherwise no server could load the checkpoint

    async def _relocate(self, run: Run) -> None:
        while True:
            while run.commits.writing:
                await run.changed.wait()
            losses = self._copies.losses(run)
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

    def _apply(self, run: Run, losses: Losses) -> None:
        """Changes the run in memory, without ``await``."""
        promotions = losses.promotions
        gone = {backup.process for _, backup, _ in losses.backups}
        gone |= {promotion.unit.shard_at(promotion.backup.start_bytes).process for promotion in promotions}
        self._copies.apply(run, losses)
        if promotions:
            run.relocations.promote(promotions)
            run.work.restart()
            for process in {each.backup.process for each in promotions if each.backup.state is BackupState.FORMER}:
                self._updates.repeat(run, process)
        for process in gone:
            self._servers.abandon(process)
        run.changed.notify()

    def _add_events(self, run: Run, losses: Losses) -> None:
        if losses.promotions:
            by_server = Counter(promotion.backup.server_id for promotion in losses.promotions)
            targets = ", ".join(f"{count} on {server!r}" for server, count in sorted(by_server.items()))
            step = f"; step {run.committed_step} is computed again" if run.started else ""
            placement = f"placement {run.relocations.count}"
            message = f"copies replace {len(losses.promotions)} lost shards ({targets}), {placement}{step}"
            self._state.events.add(EventKind.SHARDS_PROMOTED, message, run=run.name)
        wanted = [backup for _, backup, _ in losses.backups if backup.is_wanted]
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
