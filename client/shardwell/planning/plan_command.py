"""``shardwell plan``: what a run will take, before there is one."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table

from shardwell.planning.plan import OPTIMIZER_STATES, Plan, PlanOptions, make_plan
from shardwell.sizes import format_size
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import PARAMETER_ITEM_SIZES
from shardwell_wire.topology import World
from shardwell_wire.wire_dtypes import NAMES

_EPILOG = """\
A model of your own: a function that returns the model, or (model, arguments of an example call)
  shardwell plan mymodels:make_gpt --dp 8 --servers 4 --bandwidth 10gbit

A Hugging Face model, from its config alone:
  shardwell plan path/to/config.json --dp 8 --servers 4 --batch 4 --length 2048 --gather-dtype bfloat16

Nothing is allocated: the model is built in shapes only.
"""

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(bit|b)(?:/s)?", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_PIPE_WIDTH = 120


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``plan`` subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="estimate memory, bytes per step and their time for a model",
        description="Estimates what training a model takes: memory of trainers and servers, bytes per step, time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="module:callable, or a Hugging Face config.json")
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"size of the {axis} axis (default: 1)")
    parser.add_argument("--servers", type=int, default=1, metavar="N", help="shard servers (default: 1)")
    parser.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        default="1gbit",
        metavar="RATE",
        help="of each trainer's and server's link, such as 1gbit or 300MB (default: 1gbit)",
    )
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZER_STATES), default="adamw", help="(default: adamw)")
    parser.add_argument(
        "--dtype", choices=sorted(PARAMETER_ITEM_SIZES), help="of the parameters (default: the model's)"
    )
    parser.add_argument("--gather-dtype", choices=list(NAMES), default="float32", help="of float32 weights on the wire")
    parser.add_argument("--push-dtype", choices=list(NAMES), default="float32", help="of gradients on the wire")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per trainer (default: 1)")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="tokens per sequence (default: 1024)")
    parser.add_argument("--activations", type=int, metavar="BYTES", help="kept by autograd; worked out if not given")
    parser.add_argument("--prefetch-bytes", type=int, default=PlanOptions().prefetch_bytes, metavar="N")
    parser.add_argument("--push-bytes", type=int, default=PlanOptions().push_bytes, metavar="N")
    parser.add_argument("--same-host", action="store_true", help="trainers run where the servers do, and share memory")
    parser.add_argument("--json", action="store_true", help="print numbers (bytes, seconds) as JSON")
    parser.set_defaults(handler=_run)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of a rate such as ``1gbit``, ``100 Mbit/s`` or ``300MB/s``; ``B`` are bytes.

    Raises:
        ArgumentTypeError: It is no rate.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    rate = float(match[1]) * _FACTORS[match[2].lower()] / (8 if match[3].lower() == "bit" else 1) if match else 0.0
    if not rate:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a rate such as 1gbit, 100mbit or 300MB")
    return rate


def _run(arguments: argparse.Namespace) -> int:
    from shardwell.planning import plan_model  # takes seconds to import, which the other commands need not wait for

    if arguments.batch < 1 or arguments.length < 1:
        raise UsageError(f"--batch {arguments.batch} --length {arguments.length}: expected at least 1")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    shapes = plan_model.load(arguments.model, batch=arguments.batch, length=arguments.length, dtype=dtype)
    activations = arguments.activations
    options = PlanOptions(
        world=World(arguments.dp, arguments.tp, arguments.pp),
        num_servers=arguments.servers,
        bandwidth=arguments.bandwidth,
        optimizer=arguments.optimizer,
        gather_dtype=arguments.gather_dtype,
        push_dtype=arguments.push_dtype,
        prefetch_bytes=arguments.prefetch_bytes,
        push_bytes=arguments.push_bytes,
        same_host=arguments.same_host,
        activation_bytes=plan_model.count_saved_bytes(shapes) if activations is None else activations,
    )
    plan = make_plan(plan_model.plan_units(shapes.module), options)
    if arguments.json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        console = Console()
        Console(width=console.width if console.is_terminal else _PIPE_WIDTH).print(to_tables(plan))
    return 0


def to_json(plan: Plan) -> dict[str, object]:
    """The plan as numbers: bytes and seconds."""
    return {
        **asdict(plan),
        "trainer_total_bytes": plan.trainer.total_bytes,
        "server_total_bytes": plan.server.total_bytes,
        "link_seconds": plan.link_seconds,
        "transfer_seconds": plan.transfer_seconds,
    }


def to_tables(plan: Plan) -> RenderableType:
    """The plan for people."""
    return Group(
        f"{plan.num_parameters:,} parameters, {format_size(plan.model_bytes)}, in {plan.num_units} units; "
        f"{plan.world.size} trainers as {plan.world}, {plan.num_servers} servers",
        "",
        _table("EACH TRAINER", _trainer_rows(plan)),
        "",
        _table("EACH SERVER", _server_rows(plan)),
        "",
        _table("EACH STEP", _step_rows(plan)),
    )


def _trainer_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    trainer = plan.trainer
    yield "weights in use", format_size(trainer.weights_bytes)
    yield "weights fetched ahead, at most", format_size(trainer.prefetch_bytes)
    yield "gradients", format_size(trainer.gradients_bytes)
    yield "gradients on their way, at most", format_size(trainer.push_bytes)
    yield (
        "activations",
        "not known: give --activations" if trainer.activation_bytes is None else format_size(trainer.activation_bytes),
    )
    yield "together", format_size(trainer.total_bytes)
    yield "a replica's weights, gradients and optimizer state", format_size(plan.replica_bytes)


def _server_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    server = plan.server
    yield "weights", format_size(server.weights_bytes)
    yield "optimizer state", format_size(server.optimizer_bytes)
    yield f"contributions of {plan.world.dp} ranks", format_size(server.contributions_bytes)
    yield "mean gradient", format_size(server.mean_bytes)
    yield "together", format_size(server.total_bytes)
    yield "set aside, of --memory-budget", format_size(server.reserved_bytes)


def _step_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    seconds = plan.link_seconds
    yield "a trainer receives weights", f"{format_size(plan.trainer.received_bytes)} in {seconds['trainer in']:.3g} s"
    yield "a trainer sends gradients", f"{format_size(plan.trainer.sent_bytes)} in {seconds['trainer out']:.3g} s"
    yield "a server sends weights", f"{format_size(plan.server.sent_bytes)} in {seconds['server out']:.3g} s"
    yield "a server receives gradients", f"{format_size(plan.server.received_bytes)} in {seconds['server in']:.3g} s"
    busiest = max(seconds, key=lambda link: seconds[link])
    rate = f"{plan.bandwidth * 8 / 1e9:g} Gbit/s"
    yield "the links alone take, at least", f"{plan.transfer_seconds:.3g} s at {rate} (busiest: {busiest})"


def _table(heading: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(heading, "", box=None, pad_edge=False, header_style="bold")
    for name, value in rows:
        table.add_row(name, value)
    return table
