"""What is to be known of one version of a run's weights before they are read."""

from __future__ import annotations

from shardwell_server.coordinator.inspection import describe
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.errors import DeadlineError, StepStateError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2


async def at_version(
    run: Run, cluster: Cluster, version: int | None, wait_s: float
) -> coordinator_pb2.DescribeWeightsResponse:
    """The units and buffers of a version.

    Args:
        run: The run.
        cluster: Knows where servers are.
        version: None: the newest.
        wait_s: How long to wait for it to be committed.

    Raises:
        DeadlineError: It is not committed yet.
        VersionGoneError: A newer one is.
        StepStateError: A unit has no initial values, or there is no unit.
        RunDeletedError: The run was deleted meanwhile.
    """

    async def look() -> coordinator_pb2.DescribeWeightsResponse | None:
        run.check_not_deleted()
        if version is not None and version > run.committed_step:
            return None
        if version is not None and version < run.committed_step:
            raise VersionGoneError(
                f"run {run.name!r} is at version {run.committed_step}, {version} is over",
                version=version,
                newest=run.committed_step,
            )
        return _weights(run, cluster)

    found = await poll(run.changed, look, wait_s)
    if found is None:
        raise DeadlineError(
            f"waited {wait_s:.1f} s for version {version} of run {run.name!r}; the newest is {run.committed_step}",
            version=version,
            newest=run.committed_step,
        )
    return found


def _weights(run: Run, cluster: Cluster) -> coordinator_pb2.DescribeWeightsResponse:
    if not run.units:
        raise StepStateError(f"run {run.name!r} has no units yet: no trainer has called fully_shard", run=run.name)
    if missing := [unit.layout.unit for unit in run.units if not unit.published]:
        raise StepStateError(
            f"run {run.name!r} has no weights yet: the initial values of unit {missing[0]!r} are not complete",
            unit=missing[0],
        )
    return coordinator_pb2.DescribeWeightsResponse(
        version=run.committed_step,
        world=run.settings.world.to_proto(),
        units=[
            coordinator_pb2.UnitWeights(spec=unit.layout.to_proto(), shards=describe.shards(unit, cluster))
            for unit in run.units
        ],
        run_id=run.identity.run_id,
    )
