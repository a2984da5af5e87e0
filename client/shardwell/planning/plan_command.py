"""``shardwell plan``: what a training run will take, before there is one."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy
from shardwell.planning.options import OPTIMIZERS, PlanOptions
from shardwell.planning.plan import Plan, make_plan
from shardwell.planning.plan_tables import assumptions, to_tables
from shardwell.wrapping.memory_strategy import MemoryStrategy
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import PARAMETER_ITEM_SIZES
from shardwell_wire.topology import World
from shardwell_wire.wire_dtypes import NAMES

if TYPE_CHECKING:
    from shardwell.planning.activations import SavedActivations
    from shardwell.planning.plan_model import ShapeModel

_EPILOG = """\
A model of your own: a function that returns the model, or (model, (arguments of an example call))
  shardwell plan mymodels:make_gpt --dp 8 --servers 4 --bandwidth 10gbit

A Hugging Face model, from its config alone:
  shardwell plan path/to/config.json --dp 8 --servers 4 --batch 4 --length 2048 --gather-dtype bfloat16

As auto_wrap(memory=MemoryStrategy.AGGRESSIVE) would train it, but with exact weights:
  shardwell plan mymodels:make_gpt --memory aggressive --gather-dtype float32

Nothing is allocated: the model is built in shapes only.
"""

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(bit|b)(?:/s)?", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_PIPE_WIDTH = 120


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], help_line: str) -> None:
    """Adds the ``plan`` subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help=help_line,
        description="Estimates what training a model takes: memory of trainers and servers, bytes per step, time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="module:callable, or a Hugging Face config.json")
    parser.add_argument(
        "--dtype", choices=sorted(PARAMETER_ITEM_SIZES), help="of the parameters (default: the model's)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per trainer (default: 1)")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="tokens per sequence (default: 1024)")
    parser.add_argument("--json", action="store_true", help="print numbers (bytes, seconds) as JSON")
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_memory(parser.add_argument_group("memory against bytes", "As arguments of join and auto_wrap of these names."))
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
        help="of each trainer host's and server's link, such as 1gbit or 300MB (default: 1gbit)",
    )
    group.add_argument(
        "--same-host", action="store_true", help="servers run where the trainers do, which read their memory"
    )
    group.add_argument("--optimizer", choices=OPTIMIZERS, help="(default: adamw)")


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--memory",
        choices=_names_of(MemoryStrategy),
        help="what auto_wrap(memory=...) sets; the options below replace parts of it",
    )
    group.add_argument("--strategy", choices=_names_of(ShardingStrategy), help="of every unit (default: full-shard)")
    group.add_argument(
        "--reshard-after-forward", action=argparse.BooleanOptionalAction, help="(default: but for the outermost unit)"
    )
    group.add_argument(
        "--checkpoint-activations",
        action=argparse.BooleanOptionalAction,
        help="units compute again in the backward; what the example call checkpoints itself is not counted anyway",
    )
    group.add_argument("--offload-to", metavar="WHERE", help="disk, a directory, or cpu, which moves nothing on a CPU")
    group.add_argument("--activations", dest="activation_bytes", type=int, metavar="BYTES", help="if known")
    for name in ("keep", "prefetch", "push", "host-cache"):
        group.add_argument(f"--{name}-bytes", type=int, metavar="N")
    group.add_argument("--backward-prefetch", choices=[str(mode) for mode in BackwardPrefetch], help="(default: pre)")
    group.add_argument("--gather-dtype", choices=list(NAMES), help="of float32 weights on the wire (default: float32)")
    group.add_argument("--push-dtype", choices=list(NAMES), help="of gradients on the wire (default: float32)")


def _names_of(kind: type[MemoryStrategy] | type[ShardingStrategy]) -> list[str]:
    return [member.name.lower().replace("_", "-") for member in kind]


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
            f"shardwell plan: the activations are not known: {recorded.reason}; --activations BYTES gives them",
            file=sys.stderr,
        )
        return None
    return recorded


def options_of(arguments: argparse.Namespace) -> PlanOptions:
    """What a memory strategy sets, as far as no option replaces it."""
    known = {field.name for field in fields(PlanOptions)}
    told = {name: value for name, value in vars(arguments).items() if name in known and value is not None}
    if "strategy" in told:
        told["strategy"] = _member(ShardingStrategy, told["strategy"])
    if "backward_prefetch" in told:
        told["backward_prefetch"] = BackwardPrefetch(told["backward_prefetch"])
    by_strategy: dict[str, Any] = {}
    if arguments.memory is not None:
        memory = _member(MemoryStrategy, arguments.memory).options()
        by_strategy = {name: getattr(memory, name) for name in known if getattr(memory, name, None) is not None}
        if not memory.of_units(told):
            by_strategy = {name: value for name, value in by_strategy.items() if name not in memory.of_units({})}
    return PlanOptions(world=World(arguments.dp, arguments.tp, arguments.pp), **{**by_strategy, **told})


def _member(kind: Any, name: str) -> Any:
    return kind[name.upper().replace("-", "_")]


def to_json(plan: Plan) -> dict[str, object]:
    """The plan as numbers: bytes and seconds."""
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
