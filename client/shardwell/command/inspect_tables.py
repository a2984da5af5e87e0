"""Renders responses of the coordinator and the shard servers as tables. Pure functions."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.text import Text

from shardwell.tables import Listing, division_tables, format_seconds, format_size
from shardwell_wire.model.topology import AXES, AXIS_NAMES, CONTEXT_AXES, Consistency, World
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """The part of a parameter that one shard server holds."""

    server_id: str
    response: shard_pb2.PeekResponse


def duration(seconds: float) -> str:
    """Returns a duration in the largest unit of which it has at least two."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.1f} s"


def world_text(world: common_pb2.World) -> str:
    """Returns a world as ``dp x tp x pp``, with its order unless that is the default."""
    axes = CONTEXT_AXES if world.cp > 1 else AXES
    shape = " x ".join(str(getattr(world, axis)) for axis in axes)
    if world.cp > 1:
        shape = f"{shape} ({' x '.join(axes)})"
    order = tuple(AXIS_NAMES[axis] for axis in world.order) or axes
    return shape if order == axes else f"{shape} ({','.join(order)})"


def runs(response: coordinator_pb2.ListRunsResponse) -> RenderableType:
    """Renders ``shardwell runs``."""
    if not response.runs:
        return "no runs"
    listing = Listing(
        *("RUN", "STATUS", "STEP", "STEP TIME", "TRAINERS", "LAST COMMIT", "DP x TP x PP", "UNITS", "PARAMETERS"),
        *("CREATED", "BY", "ID"),
        optional=("ID", "BY", "UNITS", "CREATED", "DP x TP x PP", "PARAMETERS", "LAST COMMIT", "STEP TIME"),
    )
    for summary in response.runs:
        listing.add_row(
            summary.run,
            status_text(summary.status),
            str(summary.committed_step),
            step_time_text(summary),
            trainers_text(summary),
            ago(summary.last_commit) if summary.HasField("last_commit") else "none yet",
            world_text(summary.config.world),
            str(summary.unit_count),
            format_size(summary.parameter_bytes),
            ago(summary.created) if summary.HasField("created") else "-",
            creator(summary) or "-",
            summary.run_id,
        )
    return listing


def status_text(status: coordinator_pb2.RunStatus.ValueType) -> Text:
    """Returns the status of a run, in its color."""
    name = _name_of(coordinator_pb2.RunStatus.Name, status)
    return Text(name, {"running": "green", "stalled": "red", "waiting": "yellow", "loading": "yellow"}.get(name, ""))


def _name_of(name: Callable[[Any], str], value: int, unknown: str = "unknown") -> str:
    """Returns the name of a value of an enum, whose ``Name`` is given, without the prefix of the enum."""
    try:
        text = name(value) if value else ""
    except ValueError:  # a newer version has more values
        text = ""
    return text.removeprefix(name(0).removesuffix("UNSPECIFIED")).lower().replace("_", " ") or unknown


def step_time_text(summary: coordinator_pb2.RunSummary) -> str:
    """Returns the median time of a step."""
    return format_seconds(summary.step_s) if summary.step_s else "-"


def trainers_text(summary: coordinator_pb2.RunSummary) -> str:
    """Returns how many trainers are live, of how many that there are ranks for."""
    world = summary.config.world
    return f"{summary.live_trainer_count} of {world.dp * max(1, world.cp) * world.tp * world.pp}"


def creator(summary: coordinator_pb2.RunSummary) -> str:
    """Returns who created a run. Empty: not known."""
    host = f" on {summary.created_on}" if summary.created_on else ""
    return f"{summary.created_by}{host}" if summary.created_by else ""


def run(response: coordinator_pb2.DescribeRunResponse) -> RenderableType:
    """Renders ``shardwell run``."""
    summary = response.summary
    created = datetime.fromtimestamp(summary.created.ToMilliseconds() / 1000).strftime("%Y-%m-%d %H:%M:%S")
    by = f" by trainer {creator(summary)}" if creator(summary) else ""
    return Group(
        runs(coordinator_pb2.ListRunsResponse(runs=[summary])),
        f"created {created}{by}",
        f"id {summary.run_id}",
        "",
        _trainers(response.trainers),
        "",
        *_transports(response.trainers),
        *_consistency(summary),
        _work(response),
        "",
        _optimizer(response),
        *checkpoint_lines(response.checkpoints),
    )


def _trainers(trainers: Sequence[coordinator_pb2.TrainerSummary]) -> RenderableType:
    table = Listing(
        *("TRAINER", "HOST", "RANKS", "EPOCH", "STATE", "LAST HEARTBEAT"), optional=("EPOCH",), wrapped=("RANKS",)
    )
    for trainer in trainers:
        state = "live" if trainer.live else Text("gone", "red")
        ranks = ranks_text(trainer.global_ranks) or "spare"
        table.add_row(trainer.trainer, trainer.host, ranks, str(trainer.epoch), state, silent(trainer.silent_s))
    return table


def _transports(trainers: Sequence[coordinator_pb2.TrainerSummary]) -> Sequence[RenderableType]:
    """Returns a table of the trainers' transports and an empty line; nothing if no transport is open."""
    table = Listing("TRAINER", "SERVER", "TRANSPORT", "MEASURED SPEED")
    for trainer in trainers:
        for transport in trainer.transports:
            kind = transport_kind(transport)
            rate = f"{format_size(round(transport.bytes_per_s))}/s" if transport.bytes_per_s else "-"
            table.add_row(trainer.trainer, transport.server_id or transport.address, kind, rate)
    return (table, "") if table.row_count else ()


def transport_kind(transport: coordinator_pb2.TransportReport) -> str:
    """Returns the name of a transport."""
    return _name_of(common_pb2.TransportKind.Name, transport.kind, "unspecified")


def _consistency(summary: coordinator_pb2.RunSummary) -> list[str]:
    """Returns the consistency mode of an asynchronous run."""
    mode = Consistency.from_proto(summary.config)
    return [f"consistency {mode}"] if mode.asynchronous else []


def _work(response: coordinator_pb2.DescribeRunResponse) -> RenderableType:
    """Returns a table of the work items. In an asynchronous run, each has its own number and version."""
    newest, is_asynchronous = response.summary.committed_step, bool(_consistency(response.summary))
    progress = ("ITEM", "READS VERSION", "COMMITS SINCE") if is_asynchronous else ()
    table = Listing(
        *("WORK ITEM OF RANK", "DP RANK", *progress, "STATE", "TRAINER", "EPOCH", "ATTEMPT"),
        optional=("EPOCH", "ATTEMPT"),
    )
    for entry in response.work:
        item, state = entry.item, _name_of(coordinator_pb2.WorkState.Name, entry.state)
        numbers = (item.number, entry.version, newest - entry.version) if is_asynchronous else ()
        table.add_row(
            str(item.global_rank),
            str(item.dp_rank),
            *map(str, numbers),
            state,
            entry.trainer or "-",
            str(item.epoch),
            str(item.attempt),
        )
    return table


def _optimizer(response: coordinator_pb2.DescribeRunResponse) -> RenderableType:
    algorithms = [group.algorithm or response.optimizer.algorithm for group in response.optimizer.groups]
    if not algorithms:
        return "no step committed yet"
    lines = [f"last committed step: {', '.join(dict.fromkeys(algorithms))}, gradient norm {response.grad_norm:.6g}"]
    for index, group in enumerate(response.optimizer.groups):
        numbers = ", ".join(f"{name}={value:g}" for name, value in sorted(group.hyperparameters.items()))
        lines.append(f"    group {index}: {numbers}")
    return "\n".join(lines)


def checkpoint_lines(checkpoints: coordinator_pb2.CheckpointSummary) -> list[str]:
    """Returns what is known of a run's checkpoints, one line each. Empty if the run has none."""
    lines = []
    if checkpoints.checkpoint_dir:
        every = f"after every {checkpoints.checkpoint_every} commits" if checkpoints.checkpoint_every else "on request"
        kept = f"the newest {checkpoints.checkpoint_keep}" if checkpoints.checkpoint_keep else "all"
        lines.append(f"checkpoints: {every} in {checkpoints.checkpoint_dir}, keeps {kept}")
    if checkpoints.HasField("in_flight"):
        at = checkpoints.in_flight
        lines.append(
            f"    step {at.step} is being written: {format_size(at.written_bytes)} of {format_size(at.total_bytes)}"
        )
    if checkpoints.HasField("last_saved"):
        at = checkpoints.last_saved
        lines.append(f"    newest: step {at.step}, {ago(at.ended)}, {at.url}")
    if checkpoints.HasField("last_failed"):
        at = checkpoints.last_failed
        lines.append(f"    failed: step {at.step}, {ago(at.ended)}: {at.error}")
    elif checkpoints.problem:
        lines.append(f"    cannot be saved: {checkpoints.problem}")
    if checkpoints.rollback_count:
        lines.append(f"    rolled back {checkpoints.rollback_count} times")
    if checkpoints.loading:
        lines.append(checkpoints.loading)
    return ["", *lines] if lines else []


def world(response: coordinator_pb2.DescribeWorldResponse) -> RenderableType:
    """Renders ``shardwell world``."""
    axes = World.from_proto(response.world).axes
    names = [axis.upper() for axis in axes]
    devices = ("DEVICE",) if any(each.HasField("device") for each in response.rank_assignments) else ()
    groups_of = (*(f"{name} GROUP" for name in names), "STAGES")
    table = Listing(
        *("RANK", *names, *groups_of, "TRAINER", "HOST", *devices), optional=reversed(groups_of), wrapped=groups_of
    )
    for summary in response.rank_assignments:
        at, rank_assignment = summary.rank_assignment.coordinates, summary.rank_assignment
        own = (getattr(at, f"{axis}_rank") for axis in axes)
        groups = {AXIS_NAMES[group.axis]: ranks_text(group.global_ranks) for group in rank_assignment.groups}
        table.add_row(
            str(at.global_rank),
            *map(str, own),
            *(groups.get(axis, "-") for axis in axes),
            _stages(rank_assignment),
            summary.trainer or "-",
            summary.host or "-",
            *(summary.device.name or "-" for _ in devices),
        )
    return Group(
        f"{World.from_proto(response.world)}: {response.world_size} {'rank' if response.world_size == 1 else 'ranks'}",
        table,
        *_replicas(response),
        *division_tables(response.parallel_plan.models, response.world.tp),
    )


def _replicas(response: coordinator_pb2.DescribeWorldResponse) -> list[RenderableType]:
    """Returns a table of the trainers that compute work items together, if there are replicas of several trainers."""
    if not response.replicas:
        return []
    table = Listing("DP RANKS", "EPOCH", "TRAINERS", "MISSING", wrapped=("DP RANKS", "TRAINERS", "MISSING"))
    for replica in response.replicas:
        table.add_row(
            ranks_text(replica.dp_ranks),
            str(replica.replica_epoch),
            ", ".join(replica.trainers),
            ", ".join(replica.missing) or "-",
        )
    count = len(response.replicas)
    return [f"\n{count} {'replica' if count == 1 else 'replicas'}", table]


def _stages(rank_assignment: coordinator_pb2.RankAssignment) -> str:
    before = f"{rank_assignment.previous_stage} -> " if rank_assignment.HasField("previous_stage") else ""
    after = f" -> {rank_assignment.next_stage}" if rank_assignment.HasField("next_stage") else ""
    return f"{before}{rank_assignment.coordinates.global_rank}{after}"


def units(response: coordinator_pb2.ListUnitsResponse) -> RenderableType:
    """Renders ``shardwell units``."""
    in_grid = any(any(unit.pp_ranks) or unit.HasField("tp_rank") for unit in response.units)
    places = ("STAGE", "TP RANK") if in_grid else ()
    table = Listing(
        *("UNIT", "NAME", *places, "PARAMETERS", "ELEMENTS", "SIZE", "PRIMARY", "BYTE RANGE", "BACKUPS"),
        optional=("PARAMETERS", "ELEMENTS", "BYTE RANGE", "UNIT"),
        wrapped=("BACKUPS",),
    )
    for unit in response.units:
        backups: dict[int, list[str]] = {}
        for each in unit.backups:
            copy = f"{each.shard.server_id} ({_name_of(coordinator_pb2.BackupState.Name, each.state)})"
            backups.setdefault(each.shard.start_bytes, []).append(copy)
        cells: tuple[str, ...] = (
            str(unit.unit_index),
            unit.unit,
            *((ranks_text(unit.pp_ranks), str(unit.tp_rank) if unit.HasField("tp_rank") else "all") if in_grid else ()),
            str(unit.parameter_count),
            f"{unit.element_count:,}",
            format_size(unit.size_bytes),
        )
        for shard in unit.shards:
            copies = ", ".join(backups.get(shard.start_bytes, ()))
            table.add_row(*cells, shard.server_id, f"[{shard.start_bytes:,}, {shard.stop_bytes:,})", copies or "-")
            cells = ("",) * len(cells)
    unpublished = [unit.unit for unit in response.units if not unit.published]
    notes = [f"version {response.version}"]
    if unpublished:
        notes.append(f"without initial values yet: {', '.join(unpublished)}")
    states = Counter(
        _name_of(coordinator_pb2.BackupState.Name, each.state) for unit in response.units for each in unit.backups
    )
    if states:
        notes.append("backups: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items())))
    return Group("; ".join(notes), table)


def readers(response: coordinator_pb2.ListReadersResponse) -> RenderableType:
    """Renders ``shardwell readers``."""
    if not response.readers:
        return f"no readers; the newest version is {response.newest}"
    table = Listing("READER", "HOST", "VERSION", "BEHIND", "RECEIVED", "LAST REQUEST", optional=("RECEIVED", "HOST"))
    for reader in response.readers:
        version, lag = (str(reader.version), str(reader.lag)) if reader.HasField("version") else ("none yet", "-")
        table.add_row(
            reader.name, reader.host, version, lag, format_size(reader.received_bytes), silent(reader.silent_s)
        )
    return Group(table, f"newest version: {response.newest}")


def servers(response: coordinator_pb2.ListServersResponse) -> RenderableType:
    """Renders ``shardwell servers``."""
    insecure = [("the coordinator", response.coordinator_insecure)] if response.coordinator_insecure else []
    insecure += [(f"server {server.server_id}", server.insecure) for server in response.servers if server.insecure]
    warnings = [Text(f"INSECURE: {name} listens on a network with {lacks}", "red") for name, lacks in insecure]
    table = _server_table(response) if response.servers else "no shard servers"
    reasons = [
        Text(f"server {server.server_id}: {server.unreachable_because}", "red")
        for server in response.servers
        if server.unreachable_because
    ]
    return Group(*warnings, table, *reasons) if warnings or reasons else table


def server_state(server: coordinator_pb2.ServerSummary) -> Text:
    """Returns the state of a shard server, in its color."""
    state = _name_of(coordinator_pb2.ServerState.Name, server.state, "live" if server.live else "lost")
    text = f"{state}, draining" if server.draining else state
    return Text(text, {"live": "", "live, draining": "yellow"}.get(text, "red"))


def _server_table(response: coordinator_pb2.ListServersResponse) -> Listing:
    headings = ("IN USE", "RESERVED", "BUDGET", "PRIMARIES", "BACKUPS", "SENT TO BACKUPS", "LAST HEARTBEAT", "VERSION")
    table = Listing(
        *("SERVER", "ADDRESS", "STATE", *headings),
        optional=("VERSION", "SENT TO BACKUPS", "RESERVED", "LAST HEARTBEAT", "BUDGET", "BACKUPS", "PRIMARIES"),
    )
    for server in response.servers:
        table.add_row(
            server.server_id,
            server.address,
            server_state(server),
            *map(format_size, (server.used_bytes, server.reserved_bytes, server.budget_bytes)),
            _shards(server.primary_count, server.primary_bytes),
            _shards(server.backup_count, server.backup_bytes),
            format_size(server.replicated_bytes) if server.replicated_bytes else "-",
            silent(server.silent_s),
            server.shardwell_version or "-",
        )
    return table


def _shards(count: int, size_bytes: int) -> str:
    return f"{count} ({format_size(size_bytes)})" if count else "-"


def stall(response: coordinator_pb2.ExplainStallResponse) -> RenderableType:
    """Renders ``shardwell stall``."""
    head = f"step {response.step}: {response.phase}, for {duration(response.phase_s)}"
    lines = [f"  - {reason}" for reason in response.waiting_for] or ["  not waiting for anything"]
    return "\n".join([head, *lines])


def event(message: coordinator_pb2.WatchEventsResponse) -> RenderableType:
    """Renders one line of ``shardwell events``."""
    clock = datetime.fromtimestamp(message.time.ToMilliseconds() / 1000).strftime("%H:%M:%S.%f")[:-3]
    return f"{clock}  {message.run or '-':16} {message.kind:20} {message.message}"


def peek(parameter: str, pieces: Sequence[ParameterPiece]) -> RenderableType:
    """Renders ``shardwell peek``."""
    table = Listing(
        *("SERVER", "ELEMENTS", "VERSION", "NORM", "MIN", "MAX", "NON-FINITE", "VALUES"),
        optional=("VERSION", "NON-FINITE"),
        wrapped=("VALUES",),
    )
    for piece in pieces:
        seen = piece.response
        part = f" of the part at ({', '.join(map(str, seen.offsets))})" if seen.offsets else ""  # of a split parameter
        table.add_row(
            piece.server_id,
            f"[{seen.start_element:,}, {seen.stop_element:,}){part}",
            str(seen.version),
            *(f"{number:.5g}" for number in (seen.norm, seen.min, seen.max)),
            str(seen.non_finite_count),
            " ".join(f"{value:.4g}" for value in seen.values),
        )
    norm = math.hypot(*(piece.response.norm for piece in pieces))
    elements = sum(piece.response.stop_element - piece.response.start_element for piece in pieces)
    return Group(f"{parameter}: {elements:,} elements, norm {norm:.5g}", table)


def ranks_text(global_ranks: Sequence[int]) -> str:
    """Returns logical ranks in one line."""
    return " ".join(map(str, global_ranks))


def silent(seconds: float) -> str:
    """Returns how long ago a heartbeat came."""
    return f"{duration(seconds)} ago"


def ago(timestamp: Timestamp) -> str:
    """Returns how long ago a time was."""
    return f"{duration(max(0.0, time.time() - timestamp.ToMilliseconds() / 1000))} ago"


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
            "computing" if leased else _name_of(coordinator_pb2.WorkState.Name, work.state),
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
