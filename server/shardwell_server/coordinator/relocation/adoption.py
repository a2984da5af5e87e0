"""Gives a restarted server process the copies of shards that its predecessor has left."""

from __future__ import annotations

from collections.abc import Iterable

from shardwell_server.coordinator.commit.updates import UpdateSender
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainers import TrainerLeases
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.copies import Copies
from shardwell_server.coordinator.servers.promoter import Promoter
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_wire import fault_points
from shardwell_wire.v1 import coordinator_pb2


class Adoption:
    """Gives a restarted server process the copies that ``Copies`` lets it keep.

    The contributions of the step in flight are lost with the former process, so the step is computed again.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        promoter: Tells servers about new primaries.
        trainers: Fences former attempts.
        updates: Repeats interrupted updates.
        copies: Decides which copies the process keeps.
    """

    def __init__(
        self,
        state: CoordinatorState,
        servers: ShardServers,
        promoter: Promoter,
        trainers: TrainerLeases,
        updates: UpdateSender,
        copies: Copies,
    ) -> None:
        self._state, self._servers, self._promoter = state, servers, promoter
        self._trainers, self._updates, self._copies = trainers, updates, copies

    async def adopt(
        self, server_id: str, incarnation: str, held: Iterable[coordinator_pb2.HeldShard]
    ) -> list[coordinator_pb2.HeldShard]:
        """Returns the copies that a process keeps, with their roles. Returns when this is durable. A retry returns the
        same.

        Changes the runs before the first ``await``, so that no shard that is kept counts as lost meanwhile.

        Raises:
            UnavailableError: The change could not be stored. The process must register again.
        """
        by_run: dict[str, dict[tuple[int, int, int], coordinator_pb2.HeldShard]] = {}
        for shard in held:
            by_run.setdefault(shard.run_id, {})[shard.unit_index, shard.start_bytes, shard.stop_bytes] = shard
        process, kept, adopting = (server_id, incarnation), [], []
        for run in self._state.runs.values():
            if run.identity.run_id in by_run:
                found, former = self._copies.adopt(run, process, by_run[run.identity.run_id])
                kept += found
                if former:
                    self._begin(run, process, former)
                adopting.append((run, bool(former)))
        for run, is_primary in adopting:
            await self._state.save(run)
            if is_primary:
                fault_points.reach("coordinator.adoption.after_record", run=run.name, server=server_id)
                self._resume(run, process)
        return kept

    def _begin(self, run: Run, process: tuple[str, str], former: set[tuple[str, str]]) -> None:
        run.relocations.unconfirmed.add(process[0])  # PromoteShards names the backups, which the process does not know
        run.relocations.raise_count()
        run.work.restart()
        run.commits.expect_update(process, self._state.clock())
        for each in former:
            self._servers.abandon(each)

    def _resume(self, run: Run, process: tuple[str, str]) -> None:
        count = sum(shard.process == process for unit in run.units for shard in unit.shards)
        message = (
            f"the restarted server {process[0]!r} took up its {count} shards; step {run.committed_step} is repeated"
        )
        self._state.events.add(EventKind.SHARDS_ADOPTED, message, run=run.name)
        self._promoter.start(run)
        self._updates.repeat(run, process)
        self._trainers.items.start_fencing(run)
