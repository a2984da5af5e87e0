"""Renders ``shardwell status``, ``top`` and ``report`` as tables. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwell.command.inspect_tables import (
    WORK_STATES,
    ago,
    ranks_text,
    server_state,
    silent,
    status_text,
    step_time_text,
    trainers_text,
    transport_kind,
)
from shardwell.tables import Listing, format_seconds, format_size
from shardwell_wire.v1 import coordinator_pb2


def cluster(response: coordinator_pb2.DescribeClusterResponse, address: str) -> RenderableType:
    """Renders ``shardwell status``."""
    problems = [*response.problems, *(line for health in response.runs for line in _problems(health))]
    live = sum(server.live for server in response.servers)
    used, budget = (sum(getattr(server, name) for server in response.servers if server.live) for name in _MEMORY)
    head = f"coordinator {address}: version {response.shardwell_version}, term {response.term}"
    servers_line = (
        f"servers: {live} of {len(response.servers)} live, {format_size(used)} of {format_size(budget)} in use"
        if response.servers
        else "servers: none"
    )
    return Group(
        Text.assemble("degraded", style="red") if problems else Text("healthy", "green"),
        *(Text(f"  - {line}", "red") for line in problems),
        "",
        head,
        servers_line,
        *([_short_servers(response.servers)] if response.servers else []),
        "",
        _healths(response.runs) if response.runs else "no runs",
        *_waits(response.runs),
    )


_MEMORY = ("used_bytes", "budget_bytes")


def _problems(health: coordinator_pb2.RunHealth) -> list[str]:
    return [f"run {health.summary.run!r}: {line}" for line in health.problems]


def _short_servers(servers: Sequence[coordinator_pb2.ServerSummary]) -> RenderableType:
    listing = Listing("SERVER", "ADDRESS", "STATE", "IN USE", "BUDGET", "HEARTBEAT", optional=("HEARTBEAT", "BUDGET"))
    for server in servers:
        sizes = map(format_size, (server.used_bytes, server.budget_bytes))
        listing.add_row(server.server_id, server.address, server_state(server), *sizes, silent(server.silent_s))
    return listing


def _healths(healths: Sequence[coordinator_pb2.RunHealth]) -> RenderableType:
    listing = Listing(
        *("RUN", "STATUS", "STEP", "STEP TIME", "TRAINERS", "BACKUPS", "LAST CHECKPOINT"),
        optional=("STEP TIME", "LAST CHECKPOINT"),
    )
    for health in healths:
        summary, saved = health.summary, health.checkpoints.last_saved
        wanted, missing = summary.config.backups, summary.missing_backup_count
        backups = Text(f"{missing} missing", "red") if missing else f"{wanted} of each" if wanted else "none"
        checkpoint = f"step {saved.step}, {ago(saved.ended)}" if health.checkpoints.HasField("last_saved") else "none"
        listing.add_row(
            summary.run,
            status_text(summary.status),
            str(summary.committed_step),
            step_time_text(summary),
            trainers_text(summary),
            backups,
            checkpoint,
        )
    return listing


def _waits(healths: Sequence[coordinator_pb2.RunHealth]) -> list[str]:
    """Returns what runs wait for that do not progress, one line each."""
    waiting = (
        coordinator_pb2.RUN_STATUS_WAITING,
        coordinator_pb2.RUN_STATUS_STALLED,
        coordinator_pb2.RUN_STATUS_LOADING,
    )
    lines = [
        f"run {health.summary.run!r} waits: {line}"
        for health in healths
        if health.summary.status in waiting
        for line in health.stall.waiting_for
    ]
    return ["", *lines] if lines else []


def is_degraded(response: coordinator_pb2.DescribeClusterResponse) -> bool:
    """Returns whether anything is wrong with the servers or the runs."""
    return bool(response.problems or any(health.problems for health in response.runs))


def top(
    run: coordinator_pb2.DescribeRunResponse,
    cluster: coordinator_pb2.DescribeClusterResponse,
    performance: coordinator_pb2.DescribePerformanceResponse,
) -> RenderableType:
    """Renders ``shardwell top``."""
    (health,), summary = cluster.runs, run.summary
    rate = f" ({1 / summary.step_s:.3g} steps/s)" if summary.step_s else ""
    rate += "".join(f", {each}" for each in _rates(performance))
    norm = f", gradient norm {run.grad_norm:.6g}" if summary.HasField("last_commit") else ""
    listing = Listing(
        *("RANK", "TRAINER", "HOST", "STATE", "FOR", "PER STEP", "LONGEST PARTS", "SLOWEST TRANSPORT", "HEARTBEAT"),
        optional=("HEARTBEAT", "HOST", "SLOWEST TRANSPORT"),
    )
    reports = {each.trainer: each.report for each in performance.trainers}
    by_name = {trainer.trainer: trainer for trainer in run.trainers}
    for work in run.work:
        trainer = by_name.get(work.trainer, coordinator_pb2.TrainerSummary(host="-"))
        leased = work.state == coordinator_pb2.WORK_STATE_LEASED
        slowest = min(trainer.transports, key=lambda each: each.bytes_per_s, default=None)
        listing.add_row(
            str(work.item.global_rank),
            work.trainer or "-",
            trainer.host,
            "computing" if leased else WORK_STATES.get(work.state, "unknown"),
            format_seconds(work.state_s),
            *_steps_cells(reports.get(work.trainer, coordinator_pb2.StepReport()), 2)[1:],
            f"{transport_kind(slowest)} {format_size(round(slowest.bytes_per_s))}/s" if slowest else "-",
            silent(trainer.silent_s) if trainer.trainer else "-",
        )
    return Group(
        Text.assemble(f"run {summary.run}: ", status_text(summary.status), f", {health.stall.phase}"),
        f"step {summary.committed_step}, {step_time_text(summary)} per step{rate}{norm}",
        f"{trainers_text(summary)} trainers, {summary.unit_count} units, {format_size(summary.parameter_bytes)}",
        *(Text(f"  - {line}", "red") for line in (*cluster.problems, *health.problems)),
        "",
        listing,
        "",
        _short_servers(cluster.servers),
    )


_SHOWN_SHARE = 0.01
"""Parts of a step that take less are left out."""


def report(response: coordinator_pb2.DescribePerformanceResponse) -> RenderableType:
    """Renders ``shardwell report``."""
    interval_s = response.commit_interval_s
    head = [f"step {response.committed_step}"]
    head += [f"{format_seconds(interval_s)} from commit to commit"] if interval_s else []
    head += _rates(response)
    wrapped = "SHARES OF THE TIME"
    table = Listing("TRAINER", "RANKS", "STEPS", "PER STEP", wrapped, wrapped=[wrapped])
    for trainer in response.trainers:
        table.add_row(trainer.trainer, ranks_text(trainer.global_ranks) or "spare", *_steps_cells(trainer.report))
    advice: list[RenderableType] = [
        Text.assemble((f"{trainer.trainer}: {each.severity}: ", "bold"), f"{each.finding}. {each.advice}")
        for trainer in response.trainers
        for each in trainer.report.bottlenecks
    ]
    logged = [
        f"step {at.step}: " + ", ".join(f"{name} {value:.6g}" for name, value in sorted(at.means.items()))
        for at in response.logged
    ]
    return Group(", ".join(head), table, *(["", *advice] if advice else []), *(["", *logged] if logged else []))


def _rates(response: coordinator_pb2.DescribePerformanceResponse) -> list[str]:
    """Returns what the trainers count per second."""
    rates = ((response.tokens_per_s, "tokens/s"), (response.samples_per_s, "samples/s"))
    return [f"{rate:,.1f} {what}" for rate, what in rates if rate]


def _steps_cells(steps: coordinator_pb2.StepReport, count: int | None = None) -> tuple[str, str, str]:
    """Returns the steps of a trainer's report, their duration, and the shares of the ``count`` longest parts."""
    if not steps.step_s:
        return "-", "-", "no step is measured yet"
    shares = sorted(((seconds / steps.step_s, part) for part, seconds in steps.part_s.items()), reverse=True)[:count]
    shown = ", ".join(f"{part.replace('_', ' ')} {share:.0%}" for share, part in shares if share >= _SHOWN_SHARE)
    return f"{steps.first_step} to {steps.last_step}", format_seconds(steps.step_s), shown
