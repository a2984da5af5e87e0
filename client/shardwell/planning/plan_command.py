"""``shardwell plan``: estimates a training run before it starts."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table

from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy
from shardwell.planning.options import OPTIMIZER_CHOICES, PlanOptions
from shardwell.planning.plan import Plan, make_plan
from shardwell.sizes import format_size
from shardwell.wrapping.memory_strategy import MemoryStrategy
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import PARAMETER_ITEM_SIZES
from shardwell_wire.topology import World
from shardwell_wire.wire_dtypes import GATHER_NAMES, PUSH_NAMES

if TYPE_CHECKING:
    from shardwell.planning.activations import SavedActivations
    from shardwell.planning.plan_model import ShapeModel

_EPILOG = """\
Your own model: a function that returns the model, or (model, (arguments of an example call))
  shardwell plan mymodels:make_gpt --dp 8 --servers 4 --bandwidth 10gbit

A Hugging Face model, from its config alone:
  shardwell plan path/to/config.json --dp 8 --servers 4 --batch 4 --length 2048 --gather-dtype bfloat16

As auto_wrap(memory=MemoryStrategy.AGGRESSIVE) would train it, but with exact weights:
  shardwell plan mymodels:make_gpt --memory aggressive --gather-dtype float32

No memory is allocated: the model is built in shapes only.
"""

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(bit|b)(?:/s)?", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_PIPE_WIDTH = 120


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], help_line: str) -> None:
    """Adds the ``plan`` subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help=help_line,
        description="Estimates a training run: memory of trainers and servers, bytes per step, transfer time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="module:callable, or a Hugging Face config.json")
    parser.add_argument(
        "--dtype", choices=sorted(PARAMETER_ITEM_SIZES), help="dtype of the parameters (default: the model's)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per trainer (default: 1)")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="tokens per sequence (default: 1024)")
    parser.add_argument("--json", action="store_true", help="print numbers (bytes, seconds) as JSON")
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_memory(parser.add_argument_group("memory and traffic", "The options of join and auto_wrap with these names."))
    parser.set_defaults(handler=_run)


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    for axis in ("dp", "tp", "pp"):
        group.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"size of the {axis} axis (default: 1)")
    group.add_argument("--servers", dest="num_servers", type=int, metavar="N", help="shard servers (default: 1)")
    group.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="data-parallel ranks on a host with one link (default: 1)"
    )
    group.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        metavar="RATE",
        help="bandwidth of each trainer host's and server's link, such as 1gbit or 300MB (default: 1gbit)",
    )
    group.add_argument(
        "--same-host",
        action="store_true",
        help="servers run on the trainers' hosts, and trainers read weights in their memory",
    )
    group.add_argument("--optimizer", choices=list(OPTIMIZER_CHOICES), help="(default: adamw)")


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--memory",
        choices=_names_of(MemoryStrategy),
        help="the preset of auto_wrap(memory=...); the options below override parts of it",
    )
    group.add_argument(
        "--strategy", choices=_names_of(ShardingStrategy), help="strategy of every unit (default: full-shard)"
    )
    group.add_argument(
        "--reshard-after-forward", action=argparse.BooleanOptionalAction, help="(default: all units except the root)"
    )
    group.add_argument(
        "--checkpoint-activations",
        action=argparse.BooleanOptionalAction,
        help="recompute units in the backward; what the example call itself checkpoints is never counted as saved",
    )
    group.add_argument(
        "--offload-to",
        metavar="WHERE",
        help="disk, a directory, or cpu (which moves nothing if trainers compute on the CPU)",
    )
    group.add_argument(
        "--activations", dest="activation_bytes", type=int, metavar="BYTES", help="size of the activations, if known"
    )
    for name in ("keep", "prefetch", "push", "host-cache"):
        group.add_argument(f"--{name}-bytes", type=int, metavar="N")
    group.add_argument("--backward-prefetch", choices=[str(mode) for mode in BackwardPrefetch], help="(default: pre)")
    group.add_argument(
        "--gather-dtype", choices=list(GATHER_NAMES), help="dtype of float32 weights on the wire (default: float32)"
    )
    group.add_argument(
        "--push-dtype", choices=list(PUSH_NAMES), help="dtype of gradients on the wire (default: float32)"
    )


def _names_of(kind: type[MemoryStrategy] | type[ShardingStrategy]) -> list[str]:
    return [member.name.lower().replace("_", "-") for member in kind]


def parse_bandwidth(text: str) -> float:
    """Returns the bytes per second of a rate such as ``1gbit``, ``100 Mbit/s`` or ``300MB/s``; ``B`` means bytes.

    Raises:
        ArgumentTypeError: The text is not a rate.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    rate = float(match[1]) * _FACTORS[match[2].lower()] / (8 if match[3].lower() == "bit" else 1) if match else 0.0
    if not rate:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a rate such as 1gbit, 100mbit or 300MB")
    return rate


def _run(arguments: argparse.Namespace) -> int:
    from shardwell.planning import plan_model  # imported here because it takes seconds

    if arguments.batch < 1 or arguments.length < 1:
        raise UsageError(f"--batch {arguments.batch} --length {arguments.length}: expected at least 1")
    options = options_of(arguments)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    shapes = plan_model.load(arguments.model, batch=arguments.batch, length=arguments.length, dtype=dtype)
    plan = make_plan(plan_model.plan_units(shapes.module), options, _record(shapes, options))
    if arguments.json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        console = Console()
        Console(width=console.width if console.is_terminal else _PIPE_WIDTH).print(to_tables(plan))
    return 0


def _record(shapes: ShapeModel, options: PlanOptions) -> SavedActivations | None:
    from shardwell.planning import plan_model

    if options.activation_bytes is not None:
        return None
    recorded = plan_model.record_activations(shapes)
    if isinstance(recorded, plan_model.NotRecorded):
        print(
            f"shardwell plan: the activations are unknown: {recorded.reason}; pass their size with --activations BYTES",
            file=sys.stderr,
        )
        return None
    return recorded


def options_of(arguments: argparse.Namespace) -> PlanOptions:
    """Returns the options of a plan: the preset of ``--memory``, overridden by the other arguments."""
    known = {field.name for field in fields(PlanOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in known and value is not None}
    if "strategy" in given:
        given["strategy"] = _member(ShardingStrategy, given["strategy"])
    if "backward_prefetch" in given:
        given["backward_prefetch"] = BackwardPrefetch(given["backward_prefetch"])
    preset: dict[str, Any] = {}
    if arguments.memory is not None:
        memory = _member(MemoryStrategy, arguments.memory).options()
        preset = {name: getattr(memory, name) for name in known if getattr(memory, name, None) is not None}
        if not memory.unit_arguments(given):
            preset = {name: value for name, value in preset.items() if name not in memory.unit_arguments({})}
    return PlanOptions(world=World(arguments.dp, arguments.tp, arguments.pp), **{**preset, **given})


def _member(kind: Any, name: str) -> Any:
    return kind[name.upper().replace("-", "_")]


def to_json(plan: Plan) -> dict[str, object]:
    """Returns the plan as numbers of bytes and seconds."""
    numbers = asdict(plan)
    del numbers["options"]
    return {
        "world": asdict(plan.options.world),
        "num_servers": plan.options.num_servers,
        "bandwidth": plan.options.bandwidth,
        **numbers,
        "trainer_total_bytes": plan.trainer.total_bytes,
        "server_total_bytes": plan.server.total_bytes,
        "link_seconds": plan.link_seconds,
        "transfer_seconds": plan.transfer_seconds,
        "assumptions": list(assumptions(plan)),
    }


# Tables.


def to_tables(plan: Plan) -> RenderableType:
    """Returns tables of trainers, servers and steps, and the assumptions."""
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
    """Yields the assumptions of the numbers, which a run may not meet."""
    options, world = plan.options, plan.options.world
    yield "a step is one forward and one backward of each rank, and uses units in the model's order"
    yield "trainers compute on the CPU; the interpreter and libraries are not included"
    if world.tp > 1:
        yield f"tp: every matrix is cut along its first dim into {world.tp} parts, vectors are whole on each rank"
    if world.pp > 1:
        yield "pp: blocks are split evenly; all other units are on the first stage, whose trainer is shown"
    if world.tp * world.pp > 1 and plan.trainer.activation_bytes is not None and options.activation_bytes is None:
        yield "activations: those of the whole batch at once, not divided by tp"
    if options.same_host:
        yield "servers run on the trainers' hosts: no bytes cross a link"
    if plan.host_cache_bytes:
        ranks = options.ranks_per_host
        yield f"{ranks} data-parallel {'ranks share' if ranks > 1 else 'rank uses'} a host, its link and its cache"
    if options.checkpoint_activations:
        yield "checkpoints: around the outermost units, except those with batch normalisation"
    if options.strategy is ShardingStrategy.NO_SHARD:
        yield "replicas: gradients are pushed in buckets of the default size"


def _trainer_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    trainer = plan.trainer
    yield "weights, maximum at once", format_size(trainer.weights_bytes)
    yield "  prefetched", format_size(trainer.ahead_bytes)
    yield "  kept for their next use in the step", format_size(trainer.kept_bytes)
    yield "idle buffers for the next weights", format_size(trainer.idle_bytes)
    yield "gradients", format_size(trainer.gradients_bytes)
    yield "gradients being sent, maximum", format_size(trainer.push_bytes)
    yield (
        "activations",
        "unknown: pass --activations" if trainer.activation_bytes is None else format_size(trainer.activation_bytes),
    )
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
    received, sent = plan.trainer.received_bytes * ranks, plan.trainer.sent_bytes * ranks
    yield f"{trainers} receive{verb} weights", f"{format_size(received)} in {seconds['trainer in']:.3g} s"
    yield f"{trainers} send{verb} gradients", f"{format_size(sent)} in {seconds['trainer out']:.3g} s"
    yield "a server sends weights", f"{format_size(plan.server.sent_bytes)} in {seconds['server out']:.3g} s"
    yield "a server receives gradients", f"{format_size(plan.server.received_bytes)} in {seconds['server in']:.3g} s"
    busiest = max(seconds, key=lambda link: seconds[link])
    rate = f"{plan.options.bandwidth * 8 / 1e9:g} Gbit/s"
    yield "minimum time of the links alone", f"{plan.transfer_seconds:.3g} s at {rate} (busiest: {busiest})"


def _table(heading: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(heading, "", box=None, pad_edge=False, header_style="bold")
    for name, value in rows:
        table.add_row(name, value)
    return table
