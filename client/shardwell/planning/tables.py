"""Plans as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.table import Table

from shardwell.module.strategy import ShardingStrategy
from shardwell.planning import division_tables
from shardwell.planning.plan import Plan, TrainerPlan
from shardwell.sizes import format_size

_COUNTS = ("num_parameters", "model_bytes", "num_units", "replica_bytes", "host_cache_bytes")
"""Fields of ``Plan``."""


def to_json(plan: Plan) -> dict[str, object]:
    """Returns the plan as numbers of bytes and seconds."""
    schedule, model = plan.division.schedule, plan.division.description
    return {
        "world": asdict(plan.options.world),
        "num_servers": plan.options.num_servers,
        "bandwidth": plan.options.bandwidth,
        "schedule": None if schedule is None else asdict(schedule),
        "model": None
        if model is None
        else MessageToDict(model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
        **{name: getattr(plan, name) for name in _COUNTS},
        "trainers": [{**asdict(trainer), "total_bytes": trainer.total_bytes} for trainer in plan.trainers],
        "server": asdict(plan.server),
        "server_total_bytes": plan.server.total_bytes,
        "link_seconds": plan.link_seconds,
        "transfer_seconds": plan.transfer_seconds,
        "assumptions": list(assumptions(plan)),
    }


def to_tables(plan: Plan) -> RenderableType:
    """Returns tables of stages, trainers, servers and steps, and the assumptions."""
    world, num_servers = plan.options.world, plan.options.num_servers
    model, schedule = plan.division.description, plan.division.schedule
    return Group(
        f"{plan.num_parameters:,} parameters, {format_size(plan.model_bytes)}, in {plan.num_units} units; "
        f"{world.size} trainers as {world}, {num_servers} servers",
        *([] if model is None else division_tables.of_models([model], world.tp)),
        *([] if schedule is None else ["", schedule.describe()]),
        "",
        _trainer_table(plan),
        "",
        _table("EACH SERVER", _server_rows(plan)),
        "",
        _table("EACH STEP", _step_rows(plan)),
        "",
        "Assumed:",
        *(f"- {line}" for line in assumptions(plan)),
    )


def describe(plan: Plan, *, width: int = 160) -> str:
    """Returns the tables as text.

    Args:
        plan: The plan.
        width: Characters per line.
    """
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(to_tables(plan))
    return capture.get()


def assumptions(plan: Plan) -> Iterator[str]:
    """Yields the assumptions of the numbers, which a run may not meet."""
    options, world = plan.options, plan.options.world
    if plan.division.schedule is not None:
        yield "a step is one call of the schedule by each replica"
    else:
        yield "a step is one forward and one backward of each rank, and uses units in the model's order"
    yield "trainers compute on the CPU; the interpreter and libraries are not included"
    if world.tp > 1:
        yield "tp: activations are not divided; rank 0 is shown, which alone sends the gradients of whole parameters"
    if world.tp * world.pp > 1:
        yield "transfers inside a replica are not part of the links' times"
    if options.same_host:
        yield "servers run on the trainers' hosts: no bytes cross a link"
    if plan.host_cache_bytes:
        ranks = options.ranks_per_host
        yield f"{ranks} data-parallel {'ranks share' if ranks > 1 else 'rank uses'} a host, its link and its cache"
    if any(trainer.bases_bytes for trainer in plan.trainers):
        yield "deltas: servers send what has changed, which depends on the values: weights are counted as a whole"
    if options.checkpoint_activations:
        yield "checkpoints: around the outermost units, except those with batch normalisation"
    if options.strategy is ShardingStrategy.NO_SHARD:
        yield "replicas: gradients are pushed in buckets of the default size"


def _trainer_table(plan: Plan) -> Table:
    headings = ["EACH TRAINER"]
    for pp_rank, trainer in enumerate(plan.trainers):
        stages = ", ".join(map(str, trainer.stages))
        headings.append("" if len(plan.trainers) == 1 else f"PP {pp_rank} (STAGE {stages})")
    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for row in zip(*(_trainer_rows(trainer, plan) for trainer in plan.trainers), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    return table


def _trainer_rows(trainer: TrainerPlan, plan: Plan) -> Iterator[tuple[str, str]]:
    yield "weights, maximum at once", format_size(trainer.weights_bytes)
    yield "  prefetched", format_size(trainer.ahead_bytes)
    yield "  kept for their next use in the step", format_size(trainer.kept_bytes)
    yield "idle buffers for the next weights", format_size(trainer.idle_bytes)
    if any(each.bases_bytes for each in plan.trainers):
        yield f"weights kept as {plan.options.gather_dtype}, as bases of deltas", format_size(trainer.bases_bytes)
    yield "gradients", format_size(trainer.gradients_bytes)
    yield "gradients being sent, maximum", format_size(trainer.push_bytes)
    yield (
        "activations",
        "unknown: pass --activations" if trainer.activation_bytes is None else format_size(trainer.activation_bytes),
    )
    if any(each.stage_buffers_bytes for each in plan.trainers):
        yield "buffers for values of other stages", format_size(trainer.stage_buffers_bytes)
    yield "total", format_size(trainer.total_bytes)
    if plan.host_cache_bytes:
        yield "weights in shared memory, for all trainers of the host", format_size(plan.host_cache_bytes)
    yield "for comparison: a replica's weights, gradients and optimizer state", format_size(plan.replica_bytes)


def _server_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    server = plan.server
    yield "weights", format_size(server.weights_bytes)
    yield "optimizer state", format_size(server.optimizer_bytes)
    yield f"contributions of {plan.options.world.dp} ranks", format_size(server.contributions_bytes)
    yield "mean gradient", format_size(server.mean_bytes)
    if server.encoded_bytes:
        yield (
            f"weights encoded as {plan.options.gather_dtype}, while memory suffices",
            format_size(server.encoded_bytes),
        )
    yield "total", format_size(server.total_bytes)
    yield "reserved part of --memory-budget", format_size(server.reserved_bytes)


def _step_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    seconds, ranks = plan.link_seconds, plan.options.ranks_per_host
    trainers, verb = ("a trainer", "s") if ranks == 1 else (f"the {ranks} trainers of a host", "")
    received = max(trainer.received_bytes for trainer in plan.trainers) * ranks
    sent = max(trainer.sent_bytes for trainer in plan.trainers) * ranks
    yield f"{trainers} receive{verb} weights", f"{format_size(received)} in {seconds['trainer in']:.3g} s"
    yield f"{trainers} send{verb} gradients", f"{format_size(sent)} in {seconds['trainer out']:.3g} s"
    yield "a server sends weights", f"{format_size(plan.server.sent_bytes)} in {seconds['server out']:.3g} s"
    yield "a server receives gradients", f"{format_size(plan.server.received_bytes)} in {seconds['server in']:.3g} s"
    if collectives := max(trainer.collective_bytes for trainer in plan.trainers):
        yield "payload of a trainer's tensor-parallel collectives", format_size(collectives)
    if to_stages := max(trainer.sent_to_stages_bytes for trainer in plan.trainers):
        yield "a trainer sends to other stages", format_size(to_stages)
    busiest = max(seconds, key=lambda link: seconds[link])
    rate = f"{plan.options.bandwidth * 8 / 1e9:g} Gbit/s"
    yield "minimum time of the links alone", f"{plan.transfer_seconds:.3g} s at {rate} (busiest: {busiest})"


def _table(heading: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(heading, "", box=None, pad_edge=False, header_style="bold")
    for name, value in rows:
        table.add_row(name, value)
    return table
