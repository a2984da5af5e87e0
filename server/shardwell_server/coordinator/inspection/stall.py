"""What a run waits for, and on whom, in words."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell_server.coordinator.runs import partitions
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Item, Step, WorkState
from shardwell_server.coordinator.servers.cluster import Cluster, ServerState
from shardwell_server.coordinator.servers.lost_shards import problems
from shardwell_wire.partitions import runs_on_trainers

MAX_LINES = 64


@dataclass(frozen=True, slots=True)
class Stall:
    """Where a run stands."""

    phase: str
    phase_s: float
    """How long the phase has lasted."""
    lines: list[str]


def explain(run: Run, cluster: Cluster, now: float) -> Stall:
    """Says what a run waits for. Looks at what is known; asks nobody."""
    if run.step is None:
        return Stall("starting", now - run.created_s, _shorten(_starting(run)))
    phase, since = _phase(run, run.step)
    lines = [
        *map(str, problems(run, cluster)),
        *_silent_servers(run, cluster),
        *_cut_off(run, cluster, now),
        *_updates(run, now),
    ]
    if phase == "idle":
        lines.append(
            f"no trainers: all have left or are gone. {run.committed_step} steps are committed; the run goes on when a "
            "trainer joins it"
        )
        return Stall(phase, now - since, _shorten(lines))
    if run.step.failure is not None:
        lines.append(
            f"step {run.step.number} cannot be committed: {run.step.failure}; it goes on once a rank begins "
            "its work anew (zero_grad and backward)"
        )
    elif phase == "preparing" and run.units.servers:
        lines.append(
            f"servers {', '.join(map(repr, run.units.servers))}: they reduce the gradients of step {run.step.number}"
        )
    elif phase == "awaiting commit":
        lines += _decision(run, run.step)
    lines += [_item(run, item, now) for item in run.step.unfinished]
    return Stall(phase, now - since, _shorten(lines))


def _phase(run: Run, step: Step) -> tuple[str, float]:
    if not run.members.live and not run.members.lapsed:
        return "idle", max((member.heard_s for member in run.members), default=step.started_s)
    if run.updates:
        return "updating", min(pending.since_s for pending in run.updates.values())
    if step.finished_s is None:
        return "working", step.started_s
    if run.preparing.in_flight or run.writing_commit:
        return "preparing", step.finished_s
    return "awaiting commit", step.finished_s


def _silent_servers(run: Run, cluster: Cluster) -> list[str]:
    """Registered servers that are not heard of, beside those that ``problems`` names."""
    owners, lines = run.units.servers, []
    for server in cluster.servers.values():
        holds = "it holds shards of this run" if server.server_id in owners else "it holds nothing of this run"
        silent = f"has not been heard of for {cluster.silent_s(server):.1f} s"
        why = f" ({server.silence})" if server.silence else ""
        if server.state is ServerState.UNCONFIRMED:
            lines.append(
                f"server {server.server_id!r} at {server.address} {silent}, since the coordinator was restarted{why}; "
                f"{holds}"
            )
        elif server.state is ServerState.LOST and server.server_id not in owners:
            lines.append(f"server {server.server_id!r} at {server.address} {silent}{why}; {holds}")
    return lines


def _cut_off(run: Run, cluster: Cluster, now: float) -> list[str]:
    """What trainers say of servers that they cannot reach."""
    names = {server.address: server.server_id for server in cluster.servers.values()}
    return [
        f"{member} has not reached server {names.get(cut.address, 'unknown')!r} at {cut.address} for "
        f"{now - cut.since_s:.1f} s ({cut.reason}): check the network between the two. Its work goes to a trainer that "
        "waits in step.batches and can reach the server, if there is one"
        for member in run.members.live.values()
        for cut in member.unreachable
    ]


def _starting(run: Run) -> list[str]:
    there = len(run.members.live)
    missing = run.settings.min_trainers - there
    head = f"{there} of {run.settings.min_trainers} trainers are there: {missing} more must join"
    return [head, *(f"{member} is there" for member in run.members.live.values())]


def _updates(run: Run, now: float) -> list[str]:
    return [
        f"server {server_id!r}: Update of step {pending.step} not acknowledged for {now - pending.since_s:.1f} s"
        + (f": {pending.error}" if pending.error else "")
        for server_id, pending in run.updates.items()
    ]


def _decision(run: Run, step: Step) -> list[str]:
    decider, decision = run.decider(), run.decision()
    if decider is None:
        return ["hyper-parameters: every trainer of the run is gone; the step goes on when one joins"]
    if decision is None:
        return [f"hyper-parameters from rank 0: trainer {decider!r} has not called optimizer.step()"]
    if runs_on_trainers(decision.optimizer.algorithm) and not partitions.all_staged(step):
        return partitions.waiting_for(run, step)
    return [f"hyper-parameters from rank 0 are there: the next poll of CommitStep commits step {step.number}"]


def _item(run: Run, item: Item, now: float) -> str:
    where, since = f"rank {item.global_rank}", f"{now - item.since_s:.1f} s"
    member = run.members.members.get(item.holder)
    if item.state is WorkState.LEASED and member is not None:
        silent = f"last heard of {member.silent_s(now):.1f} s ago"
        if member.lapsed:
            silent += (
                "; its lease ran out: it goes on when it is heard of again, or its work goes to the first trainer that "
                "waits in step.batches or joins"
            )
        return f"{where}: {member} has computed step {run.committed_step} for {since} ({silent})"
    if not item.fenced:
        error = f": {run.fence_error}" if run.fence_error else ""
        return f"{where}: vacant for {since}: trainer {item.holder!r} is gone and is being fenced on the servers{error}"
    return (
        f"{where}: vacant for {since}: trainer {item.holder!r} is gone; its work goes to the first trainer that "
        "waits in step.batches, or to it when it comes back"
    )


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 1], f"... and {len(lines) - MAX_LINES + 1} more"]
