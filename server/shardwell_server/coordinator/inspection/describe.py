"""Converts the coordinator's state to messages, for inspection and for trainers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from shardwell_server.coordinator.inspection.events import timestamp
from shardwell_server.coordinator.inspection.stall import Stall, run_problems, run_status
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.ranks.rank_assignment import Replica
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.run_checkpoints import CheckpointInFlight
from shardwell_server.coordinator.servers.cluster import Cluster, Server
from shardwell_server.coordinator.signals import poll
from shardwell_server.coordinator.steps.step import Step, WorkState
from shardwell_server.coordinator.storage.records import BackupState, CheckpointRecord, ShardRecord
from shardwell_wire.errors import DeadlineError, InvalidRequestError, NotFoundError, StepStateError
from shardwell_wire.model.topology import AXIS_NUMBERS, Coordinates, World
from shardwell_wire.v1 import common_pb2, coordinator_pb2

MAX_LISTED_GROUP_MEMBERS = 1 << 20
"""Most group members in one response. A larger world is rejected, not truncated."""


_BACKUP_STATES = {
    BackupState.BUILDING: coordinator_pb2.BACKUP_STATE_BUILDING,
    BackupState.IN_SYNC: coordinator_pb2.BACKUP_STATE_IN_SYNC,
    BackupState.FORMER: coordinator_pb2.BACKUP_STATE_FORMER,
    BackupState.RELEASING: coordinator_pb2.BACKUP_STATE_RELEASING,
}


class RankDescriber:
    """Describes logical ranks of one world. Computes each group once, although many ranks share it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}

    def describe(self, global_rank: int) -> coordinator_pb2.RankAssignment:
        """Returns a logical rank with its coordinates, groups and neighbours."""
        at = self._world.coordinates(global_rank)
        previous_stage, next_stage = self._world.stage_neighbours(global_rank)
        return coordinator_pb2.RankAssignment(
            coordinates=common_pb2.Coordinates(
                global_rank=at.global_rank,
                dp_rank=at.dp_rank,
                tp_rank=at.tp_rank,
                pp_rank=at.pp_rank,
                cp_rank=at.cp_rank,
            ),
            groups=[
                coordinator_pb2.RankGroup(axis=AXIS_NUMBERS[axis], global_ranks=self._group(at, axis))
                for axis in self._world.axes
            ],
            previous_stage=previous_stage,
            next_stage=next_stage,
        )

    def _group(self, at: Coordinates, axis: str) -> tuple[int, ...]:
        coordinates = {f"{name}_rank": 0 if name == axis else at.along(name) for name in self._world.axes}
        key = (axis, self._world.global_rank(**coordinates))
        if key not in self._groups:
            self._groups[key] = self._world.group(at.global_rank, axis)
        return self._groups[key]


def describe_world(world: World, run: Run | None) -> coordinator_pb2.DescribeWorldResponse:
    """Describes every rank of a world and, if a run is given, which trainer plays it.

    Raises:
        InvalidRequestError: The world is too large for one response.
    """
    if world.size * (world.dp + world.cp + world.tp + world.pp) > MAX_LISTED_GROUP_MEMBERS:
        raise InvalidRequestError(f"{world} is too large to be listed: {world.size} ranks with their groups")
    describer, rank_assignments = RankDescriber(world), []
    for rank in range(world.size):
        member = run.members.by_name.get(run.owners.by_rank.get(rank, "")) if run is not None else None
        live = member if member is not None and member.live else None
        rank_assignments.append(
            coordinator_pb2.RankAssignmentSummary(
                rank_assignment=describer.describe(rank),
                trainer=live.name if live else "",
                host=live.host if live else "",
                device=live.device.to_proto() if live and live.device is not None else None,
            )
        )
    return coordinator_pb2.DescribeWorldResponse(
        world=world.to_proto(),
        world_size=world.size,
        rank_assignments=rank_assignments,
        replicas=_summarize_replicas(run) if run is not None and run.started else (),
        parallel_plan=run.parallel_plan if run is not None else None,
        ended=run is not None and run.started and run.ended,
    )


def _summarize_replicas(run: Run) -> list[coordinator_pb2.ReplicaSummary]:
    if run.settings.world.replica_size == 1:
        return []
    dp_ranks: dict[Replica, list[int]] = {}
    for dp_rank, replica in enumerate(run.owners.replicas):
        dp_ranks.setdefault(replica, []).append(dp_rank)
    live = run.members.live
    return [
        coordinator_pb2.ReplicaSummary(
            dp_ranks=played,
            replica_epoch=run.owners.replica_epochs[played[0]],
            trainers=replica,
            missing=[name for name in replica if name not in live],
            errors=[error for name in replica if (error := run.members.error_of(name))],
        )
        for replica, played in dp_ranks.items()
    ]


def summarize_run(run: Run, cluster: Cluster, now: float) -> coordinator_pb2.RunSummary:
    """Summarizes a run at clock time ``now``."""
    last = run.commits.last
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
        status=run_status(run, cluster, now),
        step_s=run.commits.step_s,
        created_by=run.created_by,
        created_on=run.created_on,
        missing_backup_count=_count_missing_backups(run),
    )


def _count_missing_backups(run: Run) -> int:
    wanted, missing = run.settings.backups, 0
    for unit in run.units if wanted else ():
        found = Counter(backup.start_bytes for backup in unit.backups if backup.in_sync)
        missing += sum(max(0, wanted - found[shard.start_bytes]) for shard in unit.shards)
    return missing


def describe_run(run: Run, cluster: Cluster, now: float) -> coordinator_pb2.DescribeRunResponse:
    """Describes a run with its trainers, their transports, and the step in flight."""
    last = run.commits.last
    ids = {server.address: server.server_id for server in cluster.servers.values()}
    return coordinator_pb2.DescribeRunResponse(
        summary=summarize_run(run, cluster, now),
        trainers=[
            coordinator_pb2.TrainerSummary(
                trainer=member.name,
                host=member.host,
                epoch=member.epoch,
                global_ranks=run.owners.ranks_of(member.name),
                silent_s=round(member.silent_s(now), 3),
                live=member.live,
                transports=[at.to_proto(ids.get(at.address, "")) for at in member.transports if member.live],
            )
            for member in run.members
        ],
        work=_summarize_work(run.work.steps, now),
        grad_norm=last.grad_norm if last is not None else 0.0,
        optimizer=common_pb2.OptimizerStep.FromString(last.optimizer) if last is not None else None,
        checkpoints=_summarize_checkpoints(run),
    )


def describe_performance(run: Run, logged_count: int) -> coordinator_pb2.DescribePerformanceResponse:
    """Describes the last steps of a run, as its live trainers report them.

    Args:
        logged_count: Most steps with logged numbers.
    """
    world, commits = run.settings.world, run.commits
    live = [member for member in run.members if member.live]
    ranks = {member.name: run.owners.ranks_of(member.name) for member in live}
    # One rank of a replica counts its tokens: the others count the same.
    places = {each.name: [world.coordinates(rank) for rank in ranks[each.name]] for each in live}
    first = [each for each in live if any(not (at.tp_rank or at.pp_rank or at.cp_rank) for at in places[each.name])]
    reports = [member.report for member in first if member.report is not None]
    return coordinator_pb2.DescribePerformanceResponse(
        committed_step=run.committed_step,
        commit_interval_s=commits.step_s,
        tokens_per_s=sum(report.tokens_per_s for report in reports),
        samples_per_s=sum(report.samples_per_s for report in reports),
        trainers=[
            coordinator_pb2.TrainerPerformance(trainer=each.name, global_ranks=ranks[each.name], report=each.report)
            for each in live
        ],
        logged=[
            coordinator_pb2.LoggedStep(step=at.step, time=timestamp(at.time), means=json.loads(at.means))
            for at in list(commits.logged)[max(0, len(commits.logged) - logged_count) :]
        ],
    )


def _summarize_checkpoints(run: Run) -> coordinator_pb2.CheckpointSummary:
    checkpoints = run.checkpoints
    options, restore = checkpoints.options, checkpoints.restore
    saved = checkpoints.saved[-1] if checkpoints.saved else None
    failed = next(reversed(checkpoints.failed.values()), None)
    if failed is not None and saved is not None and failed.ended < saved.time:
        failed = None
    return coordinator_pb2.CheckpointSummary(
        checkpoint_dir=options.directory,
        checkpoint_every=options.every_commits,
        checkpoint_keep=options.keep,
        in_flight=None if checkpoints.in_flight is None else _progress(checkpoints.in_flight),
        last_saved=None if saved is None else _progress(saved),
        last_failed=None if failed is None else _progress(failed),
        loading="" if restore is None else checkpoints.restoring.describe(restore),
        rollback_count=checkpoints.rollback_count,
        problem=checkpoints.problem,
    )


def checkpoint_progress(run: Run, checkpoint_id: str) -> coordinator_pb2.CheckpointProgress:
    """Describes a checkpoint of a run.

    Raises:
        NotFoundError: The coordinator does not know the checkpoint.
    """
    checkpoint = run.checkpoints.find(checkpoint_id)
    if checkpoint is None:
        raise NotFoundError(
            f"run {run.name!r} has no checkpoint {checkpoint_id!r}: it was deleted, or the coordinator restarted while "
            "it was written. Save another one",
            run=run.name,
        )
    return _progress(checkpoint)


def _progress(checkpoint: CheckpointInFlight | CheckpointRecord) -> coordinator_pb2.CheckpointProgress:
    if isinstance(checkpoint, CheckpointRecord):
        return coordinator_pb2.CheckpointProgress(
            step=checkpoint.step,
            url=checkpoint.url,
            state=coordinator_pb2.CHECKPOINT_STATE_SAVED,
            written_bytes=checkpoint.size_bytes,
            total_bytes=checkpoint.size_bytes,
            ended=timestamp(checkpoint.time),
            checkpoint_id=checkpoint.checkpoint_id,
        )
    return coordinator_pb2.CheckpointProgress(
        step=checkpoint.step or 0,
        url=checkpoint.url,
        state=checkpoint.state.value,
        written_bytes=checkpoint.progress.done_bytes,
        total_bytes=checkpoint.progress.total_bytes,
        error=checkpoint.error,
        ended=timestamp(checkpoint.ended) if checkpoint.ended else None,
        checkpoint_id=checkpoint.checkpoint_id,
    )


def _summarize_work(steps: Iterable[Step], now: float) -> list[coordinator_pb2.WorkSummary]:
    return [
        coordinator_pb2.WorkSummary(
            item=item.to_proto(member.global_rank),
            state=(WorkState.FINISHED if member.finished else item.state).to_proto(),
            trainer="" if item.state is WorkState.VACANT else member.trainer,
            version=step.number,
            state_s=round(now - item.since_s, 3),
        )
        for step in steps
        for item in step.items.values()
        for member in item.members.values()
    ]


def describe_health(run: Run, cluster: Cluster, stall: Stall, now: float) -> coordinator_pb2.RunHealth:
    """Describes a run, what it waits for, and what is wrong with it."""
    summary = summarize_run(run, cluster, now)
    return coordinator_pb2.RunHealth(
        summary=summary,
        stall=describe_stall(run, stall),
        checkpoints=_summarize_checkpoints(run),
        problems=run_problems(run, cluster, now, summary.missing_backup_count),
    )


def describe_stall(run: Run, stall: Stall) -> coordinator_pb2.ExplainStallResponse:
    """Converts what a run waits for to a message."""
    return coordinator_pb2.ExplainStallResponse(
        step=run.committed_step, phase=stall.phase, phase_s=round(stall.phase_s, 3), waiting_for=stall.lines
    )


def list_units(run: Run, cluster: Cluster) -> coordinator_pb2.ListUnitsResponse:
    """Lists the units of a run and the servers that own their shards."""
    return coordinator_pb2.ListUnitsResponse(
        units=[
            coordinator_pb2.UnitSummary(
                unit_index=unit.index,
                unit=unit.layout.unit,
                pp_ranks=unit.layout.pp_ranks,
                tp_rank=unit.layout.tp_rank if unit.layout.holds_parts else None,
                parameter_count=len(unit.layout.parameters),
                element_count=sum(parameter.numel for parameter in unit.layout.parameters),
                size_bytes=unit.layout.size_bytes,
                shards=shard_ranges(unit, cluster),
                published=unit.published,
                backups=[
                    coordinator_pb2.BackupSummary(
                        shard=_shard_range(backup, cluster), state=_BACKUP_STATES[backup.state]
                    )
                    for backup in unit.backups
                ],
            )
            for unit in run.units
        ],
        version=run.committed_step,
        placement=run.relocations.count,
    )


def shard_ranges(unit: Unit, cluster: Cluster) -> list[common_pb2.ShardRange]:
    """Returns the shards of a unit with their servers, in the order of the flat vector."""
    return [_shard_range(shard, cluster) for shard in unit.shards]


def _shard_range(shard: ShardRecord, cluster: Cluster) -> common_pb2.ShardRange:
    server = cluster.servers.get(shard.server_id)
    return common_pb2.ShardRange(
        server_id=shard.server_id,
        address=server.address if server is not None else "",
        start_bytes=shard.start_bytes,
        stop_bytes=shard.stop_bytes,
        incarnation=shard.incarnation,
    )


async def describe_weights(
    run: Run, cluster: Cluster, request: coordinator_pb2.DescribeWeightsRequest, wait_s: float
) -> coordinator_pb2.DescribeWeightsResponse:
    """Describes the units and buffers of one version of the weights. Waits until the version is committed.

    Args:
        request: Names the version: a number, a published name, or neither for the newest.

    Raises:
        DeadlineError: The version is not committed yet.
        VersionGoneError: A newer version is committed, and the run does not keep the version.
        NotFoundError: No version is published under the name.
        StepStateError: The run has no units, or a unit has no initial values.
        RunDeletedError: The run was deleted meanwhile.
    """

    version, name = request.version if request.HasField("version") else None, request.published_name

    async def check() -> coordinator_pb2.DescribeWeightsResponse | None:
        run.check_not_deleted()
        run.checkpoints.check_loaded(run.name)
        wanted = run.kept_versions.find(name) if name and version is None else version
        if wanted is not None and wanted > run.committed_step:
            return None
        if wanted is not None:
            run.kept_versions.check_kept(wanted, run.committed_step)
        described = run.committed_step if wanted is None else wanted
        return _weights(run, cluster, described, with_units=not request.without_units)

    found = await poll(run.changed, check, wait_s)
    if found is None:
        raise DeadlineError(
            f"waited {wait_s:.1f} s for version {version} of run {run.name!r}; the newest is {run.committed_step}",
            version=version,
            newest=run.committed_step,
        )
    return found


def _weights(run: Run, cluster: Cluster, version: int, *, with_units: bool) -> coordinator_pb2.DescribeWeightsResponse:
    if not run.units:
        raise StepStateError(f"run {run.name!r} has no units yet: no trainer has called fully_shard", run=run.name)
    if unpublished := run.units.unpublished:
        raise StepStateError(
            f"run {run.name!r} has no weights yet: the initial values of unit {unpublished[0]!r} are not complete",
            unit=unpublished[0],
        )
    return coordinator_pb2.DescribeWeightsResponse(
        version=version,
        world=run.settings.world.to_proto(),
        units=[
            coordinator_pb2.UnitWeights(spec=unit.layout.to_proto(), shards=shard_ranges(unit, cluster))
            for unit in run.units
            if with_units
        ],
        run_id=run.identity.run_id,
        rollback_count=run.checkpoints.rollback_count,
        newest=run.committed_step,
        kept_versions=run.kept_versions.before(run.committed_step),
        published=run.kept_versions.names,
        lost={name: f"version {version}: {why}" for name, (version, why) in run.kept_versions.lost.items()},
    )


def describe_server_state(server: Server) -> coordinator_pb2.ServerState.ValueType:
    """Returns the state of a shard server, as users see it."""
    if server.live and not server.reached:
        return coordinator_pb2.SERVER_STATE_UNREACHABLE
    return server.state.value


def list_servers(cluster: Cluster, runs: Iterable[Run], now: float) -> coordinator_pb2.ListServersResponse:
    """Lists every registered shard server, with the shards that it has."""
    primaries: Counter[str] = Counter()
    backups: Counter[str] = Counter()
    primary_bytes: Counter[str] = Counter()
    backup_bytes: Counter[str] = Counter()
    for unit in (unit for run in runs for unit in run.units):
        for shard in unit.shards:
            primaries[shard.server_id] += 1
            primary_bytes[shard.server_id] += shard.size_bytes
        for backup in unit.backups:
            backups[backup.server_id] += 1
            backup_bytes[backup.server_id] += backup.size_bytes
    return coordinator_pb2.ListServersResponse(
        servers=[
            coordinator_pb2.ServerSummary(
                server_id=server.server_id,
                address=server.address,
                epoch=server.epoch,
                live=server.live and server.reached,
                silent_s=round(max(0.0, now - server.last_seen_s), 3),
                budget_bytes=server.budget_bytes,
                reserved_bytes=server.reserved_bytes,
                used_bytes=server.used_bytes,
                state=describe_server_state(server),
                unreachable_because=server.unreachable_because,
                owns_nothing=server.owns_nothing,
                draining=server.draining,
                primary_count=primaries[server.server_id],
                primary_bytes=primary_bytes[server.server_id],
                backup_count=backups[server.server_id],
                backup_bytes=backup_bytes[server.server_id],
                replicated_bytes=server.replicated_bytes,
                insecure=server.insecure,
                shardwell_version=server.shardwell_version,
            )
            for _, server in sorted(cluster.servers.items())
        ]
    )
