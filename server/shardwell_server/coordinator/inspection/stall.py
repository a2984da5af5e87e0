"""Explains what a run waits for (``ExplainStall``), and judges whether runs and servers are all right."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster, ServerState, describe_unreachable
from shardwell_server.coordinator.servers.shard_servers import availability_errors
from shardwell_server.coordinator.steps.step import MemberWork, Step, WorkItem, WorkState
from shardwell_wire.v1 import coordinator_pb2

MAX_LINES = 64

_LATE_S, _LATE_STEPS, _FIRST_STEP_S = 60.0, 10, 600.0
"""A step is late after as many times the median of the last steps, but at least ``_LATE_S``; the first one, which may
compile the model, after ``_FIRST_STEP_S``. Both in seconds."""


@dataclass(frozen=True, slots=True)
class Stall:
    """What a run waits for."""

    phase: str
    phase_s: float
    """Duration of the phase so far, in seconds."""
    lines: list[str]


def explain_stall(run: Run, cluster: Cluster, now: float, min_servers: int) -> Stall:
    """Explains what a run waits for at clock time ``now``. Sends no requests.

    Args:
        min_servers: Servers for which a run waits before its first unit.
    """
    if (restore := run.checkpoints.restore) is not None:
        progress = run.checkpoints.restoring
        return Stall("loading", now - progress.begun_s, _shorten([progress.describe(restore)]))
    if not run.started:
        return Stall("starting", now - run.created_s, _shorten(_starting(run)))
    phase, since = min((_phase(run, step) for step in run.work.steps), key=lambda found: found[1])
    if phase == "working" and not run.committed_step and (run.units.unpublished or not run.units):
        return Stall("declaring", now - since, _shorten([*_declaring(run, cluster, min_servers), *_checkpoints(run)]))
    lines = [
        *map(str, availability_errors(run, cluster)),
        *_silent_servers(run, cluster),
        *_cut_off_trainers(run, cluster, now),
        *_updates(run, now),
        *_promotions(run),
        *(f"trainer {name!r}: has not joined again since the rollback" for name in run.members.returning),
        *_checkpoints(run),
    ]
    if phase == "idle":
        lines.append(
            f"no trainers: all have left or are gone. {run.committed_step} steps are committed; the run continues when "
            "a trainer joins"
        )
        return Stall(phase, now - since, _shorten(lines))
    for step in run.work.steps:
        if step.failure is not None:
            lines.append(
                f"step {step.number} cannot be committed: {step.failure}; the step continues when a trainer resets its "
                "work (zero_grad, then backward)"
            )
        elif (of_step := _phase(run, step)[0]) == "preparing" and run.units.servers:
            servers = ", ".join(map(repr, run.units.servers))
            lines.append(f"servers {servers}: reducing the gradients of step {step.number}")
        elif of_step == "awaiting commit":
            lines += _proposals(run, step, now)
        lines += [line for item in step.unfinished for line in _work_item(run, item, now)]
    return Stall(phase, now - since, _shorten(lines))


def run_status(run: Run, cluster: Cluster, now: float) -> coordinator_pb2.RunStatus.ValueType:
    """Returns the status of a run at clock time ``now``."""
    if run.checkpoints.restore is not None:
        fatal = run.checkpoints.restoring.fatal
        return coordinator_pb2.RUN_STATUS_STALLED if fatal else coordinator_pb2.RUN_STATUS_LOADING
    if run.started and run.ended:
        return coordinator_pb2.RUN_STATUS_FINISHED
    if run.started and not (run.members.live or run.members.expired):
        return coordinator_pb2.RUN_STATUS_IDLE
    if availability_errors(run, cluster):
        return coordinator_pb2.RUN_STATUS_STALLED
    if not run.started or (not run.committed_step and (run.units.unpublished or not run.units)):
        return coordinator_pb2.RUN_STATUS_WAITING
    starts = (
        start for step in run.work.steps for start in (step.started_s, *(item.since_s for item in step.items.values()))
    )
    since = max(starts, default=now)
    late_s = max(_LATE_S, _LATE_STEPS * run.commits.step_s) if run.commits.step_s else _FIRST_STEP_S
    is_stalled = now - since > late_s or any(step.failure is not None for step in run.work.steps)
    return coordinator_pb2.RUN_STATUS_STALLED if is_stalled else coordinator_pb2.RUN_STATUS_RUNNING


def run_problems(run: Run, cluster: Cluster, now: float, missing_backups: int) -> list[str]:
    """Returns what is wrong with a run, one line each.

    Args:
        missing_backups: Number of backups in sync that shards lack.
    """
    lines = [*map(str, availability_errors(run, cluster)), *_checkpoints(run)]
    lines = [] if run.checkpoints.restore is not None and not run.checkpoints.restoring.fatal else lines
    if run_status(run, cluster, now) == coordinator_pb2.RUN_STATUS_STALLED and not lines:
        lines.append(f"no progress in step {run.committed_step}: `shardwell stall {run.name}` says what it waits for")
    if missing_backups:
        copies = "1 backup is" if missing_backups == 1 else f"{missing_backups} backups are"
        lines.append(f"{copies} missing or not in sync: a lost server can lose shards until they are complete")
    return _shorten(lines)


def server_problems(cluster: Cluster) -> list[str]:
    """Returns what is wrong with the shard servers, one line each."""
    lines = [describe_unreachable(server) for server in cluster.unreachable]
    for server in cluster.servers.values():
        at = f"server {server.server_id!r} at {server.address}"
        if server.state is ServerState.ENDED:
            lines.append(
                f"{at} has ended: start it again under its id, or remove it from the list (`shardwell forget-server "
                f"{server.server_id}`)"
            )
        elif server.state in (ServerState.UNCONFIRMED, ServerState.LOST):
            lines.append(
                f"{at} has sent no heartbeat for {cluster.silent_s(server):.1f} s: check its process and network"
            )
    return _shorten(lines)


def _phase(run: Run, step: Step) -> tuple[str, float]:
    """Returns the phase of the step, and the clock time at which the phase started."""
    if not run.members.live and not run.members.expired:
        return "idle", max((member.last_seen_s for member in run.members), default=step.started_s)
    if run.commits.pending_updates:
        return "updating", min(pending.since_s for pending in run.commits.pending_updates.values())
    if step.finished_s is None:
        return "working", step.started_s
    if run.calls.preparing.in_flight or run.commits.writing:
        return "preparing", step.finished_s
    return "awaiting commit", step.finished_s


def _checkpoints(run: Run) -> list[str]:
    """Returns why checkpoints of a run are not saved."""
    if not run.checkpoints.problem:
        return []
    return [f"no checkpoint is saved, though training goes on: {run.checkpoints.problem}"]


def _silent_servers(run: Run, cluster: Cluster) -> list[str]:
    """Returns a line per silent or unreachable server that ``availability_errors`` does not report."""
    owners, lines = run.units.servers, [describe_unreachable(server) for server in cluster.unreachable]
    for server in cluster.servers.values():
        owns = "it owns shards of this run" if server.server_id in owners else "it owns no shards of this run"
        silent = f"has sent no heartbeat for {cluster.silent_s(server):.1f} s"
        reason = f" ({server.unreachable_because})" if server.unreachable_because else ""
        if server.state is ServerState.UNCONFIRMED:
            lines.append(
                f"server {server.server_id!r} at {server.address} {silent}, since the coordinator was restarted"
                f"{reason}; {owns}"
            )
        elif server.state is ServerState.LOST and server.server_id not in owners:
            lines.append(f"server {server.server_id!r} at {server.address} {silent}{reason}; {owns}")
    return lines


def _cut_off_trainers(run: Run, cluster: Cluster, now: float) -> list[str]:
    """Returns a line per server that a trainer reports as unreachable. Addresses of former servers do not count."""
    names = {server.address: server.server_id for server in cluster.servers.values() if not server.ended}
    return [
        f"{member} has not reached server {names[cut.address]!r} at {cut.address} for "
        f"{now - cut.since_s:.1f} s ({cut.reason}): check the network between them. The trainer's work is reassigned "
        "when a trainer that can reach the server waits in step.batches"
        for member in run.members.live.values()
        for cut in member.unreachable
        if cut.address in names
    ]


def _starting(run: Run) -> list[str]:
    joined = len(run.members.live)
    missing = run.settings.min_trainers - joined
    head = f"{joined} of {run.settings.min_trainers} trainers have joined: {missing} more must join"
    return [head, *(f"{member} has joined" for member in run.members.live.values())]


def _declaring(run: Run, cluster: Cluster, min_servers: int) -> list[str]:
    """Returns what keeps a run from having its first weights, and who has joined."""
    lines = [*map(str, availability_errors(run, cluster)), *_silent_servers(run, cluster)]
    wanted = 1 if len(run.units) else min_servers
    if not cluster.can_place(wanted):
        lines.insert(0, f"the run {cluster.describe_waiting(wanted)}")
    elif unpublished := run.units.unpublished:
        lines.append(
            f"the initial values of {len(unpublished)} units are not complete: the first is {unpublished[0]!r}"
        )
    else:
        lines.append("no unit is declared: no trainer has called fully_shard or auto_wrap yet")
    return [*lines, *(f"{member} has joined" for member in run.members.live.values())]


def _updates(run: Run, now: float) -> list[str]:
    return [
        f"server {server_id!r}: Update of step {pending.step} not acknowledged for {now - pending.since_s:.1f} s"
        + (f": {pending.error}" if pending.error else "")
        for server_id, pending in run.commits.pending_updates.items()
    ]


def _promotions(run: Run) -> list[str]:
    return [
        *(
            f"server {server_id!r}: PromoteShards of placement {run.relocations.count} not acknowledged"
            for server_id in sorted(run.relocations.unconfirmed)
        ),
        *(
            f"server {server_id!r}: shards that moved to other servers are not released yet"
            for server_id, _ in sorted(run.relocations.releasing)
        ),
    ]


def _proposals(run: Run, step: Step, now: float) -> list[str]:
    leaders, rank = run.work.leaders(step), min(step.items)
    if not leaders:
        return ["step proposal: every trainer of the run is gone; the step continues when a trainer joins"]
    if missing := [leader for leader in leaders if leader not in step.proposals]:
        expired = {member.name for member in run.members.expired}
        trainers = ", ".join(f"trainer {at!r}" + " (its lease expired)" * (at in expired) for at in missing)
        return [f"step proposal of rank {rank}: {trainers} has not called optimizer.step()"]
    proposal = step.proposals.leading(leaders, run.units.layouts)
    if proposal is None:
        return [f"step proposal of rank 0: trainers {', '.join(map(repr, leaders))} have proposed different steps"]
    if proposal.updates_on_trainers and not step.partitions.all_staged:
        return step.partitions.waiting_for(run.members.live)
    if readers := run.readers.waited_for(run.committed_step, now):
        return readers
    return [f"step proposal of rank {rank} has arrived: the next CommitStep request commits step {step.number}"]


def _work_item(run: Run, item: WorkItem, now: float) -> list[str]:
    """Returns a line per unfinished rank of an item, or one line if the item is vacant."""
    if item.state is WorkState.VACANT:
        return [_vacant_item(run, item, now)]
    return [_leased_rank(run, item, member, now) for member in item.unfinished]


def _leased_rank(run: Run, item: WorkItem, work: MemberWork, now: float) -> str:
    duration, member = f"{now - item.since_s:.1f} s", run.members.by_name[work.trainer]
    status = f"last request {member.silent_s(now):.1f} s ago"
    if member.expired:
        status += (
            "; its lease expired: the step continues when the trainer sends a request, or its work is reassigned "
            "to the first trainer that waits in step.batches or joins"
        )
    what = f"item {item.number}" if run.asynchronous else f"step {run.committed_step}"
    return f"rank {work.global_rank}: {member} has been computing {what} for {duration} ({status})"


def _vacant_item(run: Run, item: WorkItem, now: float) -> str:
    vacant, error = f"{item}: vacant for {now - item.since_s:.1f} s", f": {run.fence_error}" if run.fence_error else ""
    if run.asynchronous and run.owners.replicas[item.dp_rank][0] in run.members.live and item.fenced:
        slowest, limit = min(run.work.items, key=lambda each: each.number), run.settings.consistency.max_staleness
        if limit is None or item.number - slowest.number <= limit:
            return f"{item}: item {item.number} starts when a trainer asks for it"
        return (
            f"{item}: item {item.number} waits until it is at most {limit} items ahead of the slowest rank: "
            f"{slowest} is at item {slowest.number}"
        )
    if len(item.members) == 1:
        gone = f"{vacant}: trainer {item.first_trainer!r} is gone"
        if not item.fenced:
            return f"{gone} and is being fenced on the servers{error}"
        return (
            f"{gone}; its work is leased to the first trainer that waits in step.batches, or to the same trainer if it "
            "joins again"
        )
    owners = zip(item.members, run.owners.replicas[item.dp_rank], strict=True)
    missing = [f"trainer {name!r} (rank {rank})" for rank, name in owners if name not in run.members.live]
    lacks = f"its replica lacks {', '.join(missing)}" if missing else "its replica was broken and is complete again"
    if not item.fenced:
        return f"{vacant}: {lacks}; the former trainers are being fenced on the servers{error}"
    return (
        f"{vacant}: {lacks}; the work is leased to the first complete replica whose trainers all wait in step.batches, "
        "or to its own replica when the missing trainers join"
    )


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 1], f"... and {len(lines) - MAX_LINES + 1} more"]
