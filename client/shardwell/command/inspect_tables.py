"""Renders responses of the coordinator and the shard servers as tables. Pure functions."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwell.tables import division_tables, format_seconds, format_size, listing_table
from shardwell_wire.model.topology import AXES, AXIS_NAMES, CONTEXT_AXES, Consistency, World
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

_WORK_STATES = {
    coordinator_pb2.WORK_STATE_VACANT: "vacant",
    coordinator_pb2.WORK_STATE_LEASED: "leased",
    coordinator_pb2.WORK_STATE_FINISHED: "finished",
}

_SERVER_STATES = {
    coordinator_pb2.SERVER_STATE_UNCONFIRMED: "unconfirmed",
    coordinator_pb2.SERVER_STATE_LIVE: "live",
    coordinator_pb2.SERVER_STATE_LOST: "lost",
    coordinator_pb2.SERVER_STATE_ENDED: "ended",
    coordinator_pb2.SERVER_STATE_LEFT: "left",
    coordinator_pb2.SERVER_STATE_UNREACHABLE: "unreachable",
}


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
    table = listing_table("RUN", "ID", "DP x TP x PP", "STEP", "TRAINERS", "UNITS", "PARAMETERS", "LAST COMMIT")
    for summary in response.runs:
        table.add_row(
            summary.run,
            summary.run_id,
            world_text(summary.config.world),
            str(summary.committed_step),
            f"{summary.live_trainer_count} live",
            str(summary.unit_count),
            format_size(summary.parameter_bytes),
            _ago(summary.last_commit) if summary.HasField("last_commit") else "none yet",
        )
    return table


def run(response: coordinator_pb2.DescribeRunResponse) -> RenderableType:
    """Renders ``shardwell run``."""
    return Group(
        runs(coordinator_pb2.ListRunsResponse(runs=[response.summary])),
        "",
        _trainers(response.trainers),
        "",
        *_transports(response.trainers),
        *_consistency(response.summary),
        _work(response),
        "",
        _optimizer(response),
        *checkpoint_lines(response.checkpoints),
    )


def _trainers(trainers: Sequence[coordinator_pb2.TrainerSummary]) -> RenderableType:
    table = listing_table("TRAINER", "HOST", "RANKS", "EPOCH", "STATE", "LAST HEARTBEAT")
    for trainer in trainers:
        state = "live" if trainer.live else Text("gone", "red")
        ranks = _ranks(trainer.global_ranks) or "spare"
        table.add_row(trainer.trainer, trainer.host, ranks, str(trainer.epoch), state, _silent(trainer.silent_s))
    return table


def _transports(trainers: Sequence[coordinator_pb2.TrainerSummary]) -> Sequence[RenderableType]:
    """Returns a table of the trainers' transports and an empty line; nothing if no transport is open."""
    table = listing_table("TRAINER", "SERVER", "TRANSPORT", "MEASURED SPEED")
    for trainer in trainers:
        for transport in trainer.transports:
            kind = common_pb2.TransportKind.Name(transport.kind).removeprefix("TRANSPORT_KIND_").lower()
            rate = f"{format_size(round(transport.bytes_per_s))}/s" if transport.bytes_per_s else "-"
            table.add_row(trainer.trainer, transport.server_id or transport.address, kind, rate)
    return (table, "") if table.row_count else ()


def _consistency(summary: coordinator_pb2.RunSummary) -> list[str]:
    """Returns the consistency mode of an asynchronous run."""
    mode = Consistency.from_proto(summary.config)
    return [f"consistency {mode}"] if mode.asynchronous else []


def _work(response: coordinator_pb2.DescribeRunResponse) -> RenderableType:
    """Returns a table of the work items. In an asynchronous run, each has its own number and version."""
    newest, is_asynchronous = response.summary.committed_step, bool(_consistency(response.summary))
    progress = ("ITEM", "READS VERSION", "COMMITS SINCE") if is_asynchronous else ()
    table = listing_table("WORK ITEM OF RANK", "DP RANK", *progress, "STATE", "TRAINER", "EPOCH", "ATTEMPT")
    for entry in response.work:
        item, state = entry.item, _WORK_STATES.get(entry.state, "unknown")
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
        lines.append(f"    newest: step {at.step}, {_ago(at.ended)}, {at.url}")
    if checkpoints.HasField("last_failed"):
        at = checkpoints.last_failed
        lines.append(f"    failed: step {at.step}, {_ago(at.ended)}: {at.error}")
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
    table = listing_table("RANK", *names, *groups_of, "TRAINER", "HOST", *devices)
    for summary in response.rank_assignments:
        at, rank_assignment = summary.rank_assignment.coordinates, summary.rank_assignment
        own = (getattr(at, f"{axis}_rank") for axis in axes)
        groups = {AXIS_NAMES[group.axis]: _ranks(group.global_ranks) for group in rank_assignment.groups}
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
        f"{World.from_proto(response.world)}: {response.world_size} ranks",
        table,
        *_replicas(response),
        *division_tables(response.parallel_plan.models, response.world.tp),
    )


def _replicas(response: coordinator_pb2.DescribeWorldResponse) -> list[RenderableType]:
    """Returns a table of the trainers that compute work items together, if there are replicas of several trainers."""
    if not response.replicas:
        return []
    table = listing_table("DP RANKS", "EPOCH", "TRAINERS", "MISSING")
    for replica in response.replicas:
        table.add_row(
            _ranks(replica.dp_ranks),
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
    table = listing_table("UNIT", "NAME", *places, "PARAMETERS", "ELEMENTS", "SIZE", "PRIMARY", "BYTE RANGE", "BACKUPS")
    for unit in response.units:
        backups: dict[int, list[str]] = {}
        for each in unit.backups:
            copy = f"{each.shard.server_id} ({_backup_state(each)})"
            backups.setdefault(each.shard.start_bytes, []).append(copy)
        cells: tuple[str, ...] = (
            str(unit.unit_index),
            unit.unit,
            *((_ranks(unit.pp_ranks), str(unit.tp_rank) if unit.HasField("tp_rank") else "all") if in_grid else ()),
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
    states = Counter(_backup_state(backup) for unit in response.units for backup in unit.backups)
    if states:
        notes.append("backups: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items())))
    return Group("; ".join(notes), table)


def _backup_state(backup: coordinator_pb2.BackupSummary) -> str:
    return coordinator_pb2.BackupState.Name(backup.state).removeprefix("BACKUP_STATE_").lower().replace("_", " ")


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


def _server_table(response: coordinator_pb2.ListServersResponse) -> Table:
    headings = ("IN USE", "RESERVED", "BUDGET", "PRIMARIES", "BACKUPS", "SENT TO BACKUPS", "LAST HEARTBEAT")
    table = listing_table("SERVER", "ADDRESS", "STATE", *headings)
    for server in response.servers:
        state = _SERVER_STATES.get(server.state, "live" if server.live else "lost")
        table.add_row(
            server.server_id,
            server.address,
            _colored(f"{state}, draining" if server.draining else state),
            *map(format_size, (server.used_bytes, server.reserved_bytes, server.budget_bytes)),
            _shards(server.primary_count, server.primary_bytes),
            _shards(server.backup_count, server.backup_bytes),
            format_size(server.replicated_bytes) if server.replicated_bytes else "-",
            _silent(server.silent_s),
        )
    return table


def _shards(count: int, size_bytes: int) -> str:
    return f"{count} ({format_size(size_bytes)})" if count else "-"


def _colored(server_state: str) -> Text:
    colors = {"live": "", "live, draining": "yellow"}
    return Text(server_state, colors.get(server_state, "red"))


def stall(response: coordinator_pb2.ExplainStallResponse) -> RenderableType:
    """Renders ``shardwell stall``."""
    head = f"step {response.step}: {response.phase}, for {duration(response.phase_s)}"
    lines = [f"  - {reason}" for reason in response.waiting_for] or ["  not waiting for anything"]
    return "\n".join([head, *lines])


_SHOWN_SHARE = 0.01
"""Parts of a step that take less are left out."""


def report(response: coordinator_pb2.DescribePerformanceResponse) -> RenderableType:
    """Renders ``shardwell report``."""
    interval_s = response.commit_interval_s
    rates = ((response.tokens_per_s, "tokens/s"), (response.samples_per_s, "samples/s"))
    head = [f"step {response.committed_step}"]
    head += [f"{format_seconds(interval_s)} from commit to commit"] if interval_s else []
    head += [f"{rate:,.1f} {what}" for rate, what in rates if rate]
    table = listing_table("TRAINER", "RANKS", "STEPS", "PER STEP", "SHARES OF THE TIME")
    for trainer in response.trainers:
        table.add_row(trainer.trainer, _ranks(trainer.global_ranks) or "spare", *_steps_cells(trainer.report))
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


def _steps_cells(steps: coordinator_pb2.StepReport) -> tuple[str, str, str]:
    """Returns the steps of a trainer's report, their duration, and the shares of the parts, the largest first."""
    if not steps.step_s:
        return "-", "-", "no step is measured yet"
    shares = sorted(((seconds / steps.step_s, part) for part, seconds in steps.part_s.items()), reverse=True)
    shown = ", ".join(f"{part.replace('_', ' ')} {share:.0%}" for share, part in shares if share >= _SHOWN_SHARE)
    return f"{steps.first_step} to {steps.last_step}", format_seconds(steps.step_s), shown


def event(message: coordinator_pb2.WatchEventsResponse) -> RenderableType:
    """Renders one line of ``shardwell events``."""
    clock = datetime.fromtimestamp(message.time.ToMilliseconds() / 1000).strftime("%H:%M:%S.%f")[:-3]
    return f"{clock}  {message.run or '-':16} {message.kind:20} {message.message}"


def peek(parameter: str, pieces: Sequence[ParameterPiece]) -> RenderableType:
    """Renders ``shardwell peek``."""
    table = listing_table("SERVER", "ELEMENTS", "VERSION", "NORM", "MIN", "MAX", "NON-FINITE", "VALUES")
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


def _ranks(global_ranks: Sequence[int]) -> str:
    return " ".join(map(str, global_ranks))


def _silent(seconds: float) -> str:
    return f"{duration(seconds)} ago"


def _ago(timestamp: Timestamp) -> str:
    return f"{duration(max(0.0, time.time() - timestamp.ToMilliseconds() / 1000))} ago"
