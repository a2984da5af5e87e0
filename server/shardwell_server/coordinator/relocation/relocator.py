"""Gives the shards of lost server processes to other servers, and those of restarted servers back to them.

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

from collections import Counter
from collections.abc import Iterable

from shardwell_server.coordinator.checkpoints.restoring import RunRestorer
from shardwell_server.coordinator.committer import UpdateSender
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainer_leases import ItemLeases
from shardwell_server.coordinator.promotion import Promoter
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.copies import HeldShards, Losses
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import BackupState, ShardRecord
from shardwell_wire import fault_points
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


class Relocator:
    """Replaces lost primaries of every run. See Note: [Relocation].

    Args:
        items: Fences former attempts.
        updates: Repeats the last update on servers of former copies that replace a primary.
        restorer: Takes a run back to a checkpoint if no copy can replace a shard.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        promoter: Promoter,
        items: ItemLeases,
        updates: UpdateSender,
        restorer: RunRestorer,
    ) -> None:
        self._state, self._servers, self._promoter, self._items = state, servers, promoter, items
        self._copies, self._updates, self._restorer = servers.copies, updates, restorer
        self._adopting: set[tuple[str, tuple[str, str]]] = set()
        """Adoptions of primaries that are not durable yet, by run id and server process."""

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
                self._state.tasks.start(run.calls.relocating(self._relocate, run))

    def _must_roll_back(self, run: Run, losses: Losses) -> bool:
        """True if a lost shard is only in a checkpoint, and no server that could bring a copy back is expected."""
        if not losses.shards or not self._restorer.can_roll_back(run):
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
            if self._must_roll_back(run, losses):
                servers = ", ".join(map(repr, sorted({shard.server_id for _, shard in losses.shards})))
                why = f"{len(losses.shards)} shards on {servers} were lost and have no backup"
                await self._restorer.roll_back(run, why)
                return
            if not losses.promotions and not losses.backups:
                return  # nothing can be replaced; the run reports what it lost
            self._apply(run, losses)
            fault_points.reach("coordinator.relocation.before_record", run=run.name)
            await self._state.save_or_retry(run)
            fault_points.reach("coordinator.relocation.after_record", run=run.name)
            self._add_events(run, losses)
            self._promoter.start(run)
            self._items.start_fencing(run)

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

    # Restarted servers

    def replacing(self, server_id: str, held: Iterable[coordinator_pb2.HeldShard]) -> set[str]:
        """Returns the servers that must prove that they live before a new process drops its copies. See ``Copies``."""
        by_run = _by_run(held)
        return {
            name
            for run in self._state.runs.values()
            if run.identity.run_id in by_run
            for name in self._copies.replacing(run, server_id, by_run[run.identity.run_id])
        }

    async def adopt(
        self, server_id: str, incarnation: str, held: Iterable[coordinator_pb2.HeldShard]
    ) -> list[coordinator_pb2.HeldShard]:
        """Gives a restarted process the copies of shards that its predecessor has left and ``Copies`` lets it keep.

        The contributions of the step in flight are lost with the former process, so the step is computed again.

        Changes the runs before the first ``await``, so that no shard that is kept counts as lost meanwhile.

        Returns:
            The copies that the process keeps, with their roles, when this is durable. A retry returns the same.

        Raises:
            UnavailableError: The change could not be stored. The process must register again, also if this call is
                cancelled. The next call ends the adoption.
        """
        by_run = _by_run(held)
        process, kept, adopting = (server_id, incarnation), [], []
        for run in self._state.runs.values():
            if run.identity.run_id in by_run:
                found, former = self._copies.adopt(run, process, by_run[run.identity.run_id])
                kept += found
                if former:
                    self._begin_adoption(run, process, former)
                for shard in found:
                    if shard.role != shard_pb2.SHARD_ROLE_BACKUP:
                        kept_here = {*shard.held_versions, *range(shard.version, run.committed_step)}
                        lost = set(run.kept_versions.before(run.committed_step)) - kept_here
                        why = f"the former process of server {server_id!r} did not leave them"
                        self._state.note_lost_versions(run, lost, why)
                adopting.append(run)
        for run in adopting:
            await self._state.save(run)
            if (run.identity.run_id, process) in self._adopting:
                fault_points.reach("coordinator.adoption.after_record", run=run.name, server=server_id)
                self._end_adoption(run, process)
        return kept

    def _begin_adoption(self, run: Run, process: tuple[str, str], former: set[tuple[str, str]]) -> None:
        self._adopting.add((run.identity.run_id, process))
        run.relocations.unconfirmed.add(process[0])  # PromoteShards names the backups, which the process does not know
        run.relocations.raise_count()
        run.work.restart()
        run.commits.expect_update(process, self._state.clock())
        for each in former:
            self._servers.abandon(each)

    def _end_adoption(self, run: Run, process: tuple[str, str]) -> None:
        self._adopting.discard((run.identity.run_id, process))
        count = sum(shard.process == process for unit in run.units for shard in unit.shards)
        message = (
            f"the restarted server {process[0]!r} took up its {count} shards; step {run.committed_step} is repeated"
        )
        self._state.events.add(EventKind.SHARDS_ADOPTED, message, run=run.name)
        self._promoter.start(run)
        self._updates.repeat(run, process)
        self._items.start_fencing(run)


def _by_run(held: Iterable[coordinator_pb2.HeldShard]) -> dict[str, HeldShards]:
    by_run: dict[str, dict[tuple[int, int, int], coordinator_pb2.HeldShard]] = {}
    for shard in held:
        by_run.setdefault(shard.run_id, {})[shard.unit_index, shard.start_bytes, shard.stop_bytes] = shard
    return dict(by_run)
