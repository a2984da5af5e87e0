"""A plan for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from shardwell.module.strategy import ShardingStrategy
from shardwell.planning.plan import Plan
from shardwell.sizes import format_size


def to_tables(plan: Plan) -> RenderableType:
    """Trainers, servers, steps, and what was assumed."""
    world, num_servers = plan.options.world, plan.options.num_servers
    return Group(
        f"{plan.num_parameters:,} parameters, {format_size(plan.model_bytes)}, in {plan.num_units} units; "
        f"{world.size} trainers as {world}, {num_servers} servers",
        "",
        _table("EACH TRAINER", _trainer_rows(plan)),
        "",
        _table("EACH SERVER", _server_rows(plan)),
        "",
        _table("EACH STEP", _step_rows(plan)),
        "",
        "Assumed:",
        *(f"- {line}" for line in assumptions(plan)),
    )


def assumptions(plan: Plan) -> Iterator[str]:
    """What the numbers rest on that the run may not keep to."""
    options, world = plan.options, plan.options.world
    yield "a step is one forward and one backward of each rank, and uses units in the model's order"
    yield "trainers compute on the CPU; the interpreter and libraries come on top"
    if world.tp * world.pp > 1:
        yield f"{world} can be planned and joined, but only worlds with tp=1 and pp=1 train today"
    if world.tp > 1:
        yield f"tp: every matrix is cut along its first dim in {world.tp} parts, vectors are whole on each rank"
    if world.pp > 1:
        yield "pp: blocks are split evenly, all else is on the first stage; this is a trainer of that stage"
    if world.tp * world.pp > 1 and plan.trainer.activation_bytes is not None and options.activation_bytes is None:
        yield "activations: of the whole batch at once, not divided by tp"
    if options.same_host:
        yield "servers run on the trainers' hosts: nothing crosses a link"
    if plan.host_cache_bytes:
        ranks = options.ranks_per_host
        yield f"{ranks} data-parallel {'ranks share' if ranks > 1 else 'rank is on'} a host, its link and its cache"
    if options.checkpoint_activations:
        yield "checkpoints: around the outermost units, but for those with batch normalisation"
    if options.strategy is ShardingStrategy.NO_SHARD:
        yield "replicas: gradients leave in buckets of the default size"


def _trainer_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    trainer = plan.trainer
    yield "weights, at most at once", format_size(trainer.weights_bytes)
    yield "  fetched ahead of their use", format_size(trainer.ahead_bytes)
    yield "  kept for their next use in the step", format_size(trainer.kept_bytes)
    yield "buffers for the next weights", format_size(trainer.idle_bytes)
    yield "gradients", format_size(trainer.gradients_bytes)
    yield "gradients on their way, at most", format_size(trainer.push_bytes)
    yield (
        "activations",
        "not known: give --activations" if trainer.activation_bytes is None else format_size(trainer.activation_bytes),
    )
    yield "together", format_size(trainer.total_bytes)
    if plan.host_cache_bytes:
        yield "weights in its host's shared memory, for all there", format_size(plan.host_cache_bytes)
    yield "a replica's weights, gradients and optimizer state", format_size(plan.replica_bytes)


def _server_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    server = plan.server
    yield "weights", format_size(server.weights_bytes)
    yield "optimizer state", format_size(server.optimizer_bytes)
    yield f"contributions of {plan.options.world.dp} ranks", format_size(server.contributions_bytes)
    yield "mean gradient", format_size(server.mean_bytes)
    if server.encoded_bytes:
        yield f"weights as {plan.options.gather_dtype}, while there is room", format_size(server.encoded_bytes)
    yield "together", format_size(server.total_bytes)
    yield "set aside, of --memory-budget", format_size(server.reserved_bytes)


def _step_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    seconds, ranks = plan.link_seconds, plan.options.ranks_per_host
    trainers, verb = ("a trainer", "s") if ranks == 1 else (f"the {ranks} trainers of a host", "")
    received, sent = plan.trainer.received_bytes * ranks, plan.trainer.sent_bytes * ranks
    yield f"{trainers} receive{verb} weights", f"{format_size(received)} in {seconds['trainer in']:.3g} s"
    yield f"{trainers} send{verb} gradients", f"{format_size(sent)} in {seconds['trainer out']:.3g} s"
    yield "a server sends weights", f"{format_size(plan.server.sent_bytes)} in {seconds['server out']:.3g} s"
    yield "a server receives gradients", f"{format_size(plan.server.received_bytes)} in {seconds['server in']:.3g} s"
    busiest = max(seconds, key=lambda link: seconds[link])
    rate = f"{plan.options.bandwidth * 8 / 1e9:g} Gbit/s"
    yield "the links alone take, at least", f"{plan.transfer_seconds:.3g} s at {rate} (busiest: {busiest})"


def _table(heading: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(heading, "", box=None, pad_edge=False, header_style="bold")
    for name, value in rows:
        table.add_row(name, value)
    return table
