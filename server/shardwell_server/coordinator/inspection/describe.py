"""The coordinator's state as messages, for people and for trainers."""

from __future__ import annotations

from collections.abc import Iterable

from shardwell_server.coordinator.inspection.events import timestamp
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Item, WorkState
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.topology import AXES, AXIS_NUMBERS, Coordinates, World
from shardwell_wire.v1 import common_pb2, coordinator_pb2

MAX_LISTED_ENTRIES = 1 << 20
"""Group members in one answer; a larger world is refused rather than cut short."""


class RankAssignmentView:
    """Describes logical ranks of one world; a group that many ranks share is worked out once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}

    def rank_assignment(self, global_rank: int) -> coordinator_pb2.RankAssignment:
        """A logical rank with its coordinates, groups and neighbours."""
        at = self._world.coordinates(global_rank)
        previous_stage, next_stage = self._world.stage_neighbours(global_rank)
        return coordinator_pb2.RankAssignment(
            coordinates=common_pb2.Coordinates(
                global_rank=at.global_rank, dp_rank=at.dp_rank, tp_rank=at.tp_rank, pp_rank=at.pp_rank
            ),
            groups=[
                coordinator_pb2.RankGroup(axis=AXIS_NUMBERS[axis], global_ranks=self._group(at, axis)) for axis in AXES
            ],
            previous_stage=previous_stage,
            next_stage=next_stage,
        )

    def _group(self, at: Coordinates, axis: str) -> tuple[int, ...]:
        place = {f"{name}_rank": 0 if name == axis else at.along(name) for name in AXES}
        key = (axis, self._world.global_rank(**place))
        if key not in self._groups:
            self._groups[key] = self._world.group(at.global_rank, axis)
        return self._groups[key]


def world(of: World, run: Run | None) -> coordinator_pb2.DescribeWorldResponse:
    """Every rank of a world and, in a run, who plays it.

    Raises:
        InvalidRequestError: The world is too large to be listed.
    """
    if of.size * (of.dp + of.tp + of.pp) > MAX_LISTED_ENTRIES:
        raise InvalidRequestError(f"{of} is too large to be listed: {of.size} ranks with their groups")
    view, rank_assignments = RankAssignmentView(of), []
    for rank in range(of.size):
        member = run.members.members.get(run.rank_assignments.get(rank, "")) if run is not None else None
        live = member if member is not None and member.live else None
        rank_assignments.append(
            coordinator_pb2.RankAssignmentSummary(
                rank_assignment=view.rank_assignment(rank),
                trainer=live.name if live else "",
                host=live.host if live else "",
            )
        )
    return coordinator_pb2.DescribeWorldResponse(
        world=of.to_proto(), world_size=of.size, rank_assignments=rank_assignments
    )


def summary(run: Run) -> coordinator_pb2.RunSummary:
    """A run in a few numbers."""
    last = run.commits[-1] if run.commits else None
    return coordinator_pb2.RunSummary(
        run=run.name,
        config=run.settings.to_proto(),
        committed_step=run.committed_step,
        live_trainer_count=len(run.members.live),
        unit_count=len(run.units),
        parameter_bytes=sum(
            parameter.size_bytes
            for unit in run.units
            if not unit.layout.holds_buffers
            for parameter in unit.layout.parameters
        ),
        created=timestamp(run.created),
        last_commit=timestamp(last.time) if last is not None else None,
        run_id=run.identity.run_id,
    )


def run_details(run: Run, cluster: Cluster, now: float) -> coordinator_pb2.DescribeRunResponse:
    """A run with its trainers, how they reach shard servers, and the step in flight."""
    last = run.commits[-1] if run.commits else None
    ids = {server.address: server.server_id for server in cluster.servers.values()}
    return coordinator_pb2.DescribeRunResponse(
        summary=summary(run),
        trainers=[
            coordinator_pb2.TrainerSummary(
                trainer=member.name,
                host=member.host,
                epoch=member.epoch,
                global_ranks=run.ranks_of(member.name),
                silent_s=round(member.silent_s(now), 3),
                live=member.live,
                transports=[at.to_proto(ids.get(at.address, "")) for at in member.transports if member.live],
            )
            for member in run.members
        ],
        work=_work(run.step.items.values() if run.step is not None else ()),
        grad_norm=last.grad_norm if last is not None else 0.0,
        optimizer=common_pb2.OptimizerStep.FromString(last.optimizer) if last is not None else None,
    )


def _work(items: Iterable[Item]) -> list[coordinator_pb2.WorkSummary]:
    return [
        coordinator_pb2.WorkSummary(
            item=item.to_proto(),
            state=item.state.value,
            trainer="" if item.state is WorkState.VACANT else item.holder,
        )
        for item in items
    ]


def units(run: Run, cluster: Cluster) -> coordinator_pb2.ListUnitsResponse:
    """The units of a run and where they live."""
    return coordinator_pb2.ListUnitsResponse(
        units=[
            coordinator_pb2.UnitSummary(
                unit_index=unit.index,
                unit=unit.layout.unit,
                parameter_count=len(unit.layout.parameters),
                element_count=sum(parameter.numel for parameter in unit.layout.parameters),
                size_bytes=unit.layout.size_bytes,
                shards=shards(unit, cluster),
                published=unit.published,
            )
            for unit in run.units
        ],
        version=run.committed_step,
    )


def shards(unit: Unit, cluster: Cluster) -> list[common_pb2.ShardRange]:
    """Where a unit's shards live, in the order of the flat vector."""
    return [
        common_pb2.ShardRange(
            server_id=shard.server_id,
            address=cluster.require(shard.server_id).address,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
        )
        for shard in unit.shards
    ]


def servers(cluster: Cluster, now: float) -> coordinator_pb2.ListServersResponse:
    """Every shard server, live or lost."""
    return coordinator_pb2.ListServersResponse(
        servers=[
            coordinator_pb2.ServerSummary(
                server_id=server.server_id,
                address=server.address,
                epoch=server.epoch,
                live=server.live,
                silent_s=round(max(0.0, now - server.heard_s), 3),
                budget_bytes=server.budget_bytes,
                reserved_bytes=server.reserved_bytes,
                used_bytes=server.used_bytes,
                state=server.state.value,
            )
            for _, server in sorted(cluster.servers.items())
        ]
    )
