"""Gives a restarted server process the shards that it took up from its predecessor's shared memory."""

from __future__ import annotations

from collections.abc import Iterable

from shardwell_server.coordinator.commit.updates import UpdateSender
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainers import TrainerLeases
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.promoter import Promoter
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_wire import fault_points
from shardwell_wire.v1 import coordinator_pb2


class Adoption:
    """Decides which shards a restarted server process owns from now on.

    A process may continue a shard if the shard has the committed version, or if the update to it can be repeated. The
    contributions of the step in flight are lost with the former process, so the step is computed again.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        promoter: Tells servers about new primaries.
        trainers: Fences former attempts.
        updates: Repeats interrupted updates.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        promoter: Promoter,
        trainers: TrainerLeases,
        updates: UpdateSender,
    ) -> None:
        self._state, self._servers, self._promoter = state, servers, promoter
        self._trainers, self._updates = trainers, updates

    async def adopt(
        self, server_id: str, incarnation: str, held: Iterable[coordinator_pb2.HeldShard]
    ) -> list[coordinator_pb2.HeldShard]:
        """Returns the shards that a process may keep. Returns when this is durable. A retry returns the same.

        Changes the runs before the first ``await``, so that no shard that is kept counts as lost meanwhile.

        Raises:
            UnavailableError: The change could not be stored. The process must register again.
        """
        by_run: dict[str, dict[tuple[int, int, int], coordinator_pb2.HeldShard]] = {}
        for shard in held:
            by_run.setdefault(shard.run_id, {})[shard.unit_index, shard.start_bytes, shard.stop_bytes] = shard
        runs = {run.identity.run_id: run for run in self._state.runs.values()}
        process, adopted, changed = (server_id, incarnation), [], []
        for run_id, shards in by_run.items():
            run = runs.get(run_id)
            if run is not None and run.checkpoints.restore is None:
                kept, is_new = self._adopt(run, process, shards)
                adopted += kept
                if is_new:
                    changed.append(run)
        for run in changed:
            await self._state.save(run)
            fault_points.reach("coordinator.adoption.after_record", run=run.name, server=server_id)
            self._resume(run, process)
        return adopted

    def _adopt(
        self, run: Run, process: tuple[str, str], held: dict[tuple[int, int, int], coordinator_pb2.HeldShard]
    ) -> tuple[list[coordinator_pb2.HeldShard], bool]:
        """Returns the shards of one run that the process keeps, and True if any was its predecessor's until now."""
        server_id, incarnation = process
        kept, former = [], set()
        for unit in run.units:
            for shard in unit.shards:
                found = held.get((unit.index, shard.start_bytes, shard.stop_bytes))
                if found is None or shard.server_id != server_id or not unit.published:
                    continue
                if shard.incarnation == incarnation:
                    kept.append(found)  # also if the step was committed since the first answer
                elif _can_continue(found, run.committed_step, is_committing=run.commits.writing):
                    kept.append(found)
                    former.add(shard.process)
                    run.units.adopt(unit, shard, incarnation)
        if not former:
            return kept, False
        run.relocations.unconfirmed.add(server_id)  # PromoteShards names the backups, which the process does not know
        run.relocations.raise_count()
        run.work.restart()
        run.commits.expect_update(process, self._state.clock())
        for each in former:
            self._servers.abandon(each)
        return kept, True

    def _resume(self, run: Run, process: tuple[str, str]) -> None:
        server_id, _ = process
        count = sum(shard.process == process for unit in run.units for shard in unit.shards)
        message = (
            f"the restarted server {server_id!r} took up its {count} shards; step {run.committed_step} is repeated"
        )
        self._state.events.add(EventKind.SHARDS_ADOPTED, message, run=run.name)
        self._promoter.start(run)
        if (pending := run.commits.pending_updates.get(server_id)) is not None and pending.incarnation == process[1]:
            self._updates.start(run, server_id, pending)
        self._trainers.items.start_fencing(run)


def _can_continue(held: coordinator_pb2.HeldShard, committed_step: int, *, is_committing: bool) -> bool:
    """True if a shard has the committed version, or can still get it. A step that is being committed is due, too."""
    complete = held.version == committed_step and not held.updating
    if complete and (held.can_update or not is_committing):
        return True
    return held.version == committed_step - 1 and held.can_update and not is_committing
