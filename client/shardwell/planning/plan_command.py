"""``shardwell plan``: estimates a training run before it starts."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console

from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy
from shardwell.parallel.pipeline import SCHEDULES
from shardwell.planning.plan import plan_run, to_json, to_tables
from shardwell.planning.plan_model import OPTIMIZER_CHOICES, DivisionOptions, PlanOptions
from shardwell.wrapping.policies import MemoryStrategy
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES, PUSH_NAMES
from shardwell_wire.model.layout import PARAMETER_ITEM_SIZES
from shardwell_wire.model.topology import CONTEXT_AXES, World

_EPILOG = """\
Your own model: a function that returns the model, or (model, (arguments of an example call))
  shardwell plan mymodels:make_gpt --dp 8 --servers 4 --bandwidth 10gbit

Divided over tensor and pipeline ranks, with the layers of each stage:
  shardwell plan mymodels:make_gpt --dp 2 --tp 2 --pp 2 --schedule 1F1B --micro-batches 4

A Hugging Face model, from its config alone:
  shardwell plan path/to/config.json --dp 8 --servers 4 --batch 4 --length 2048 --gather-dtype bfloat16

As auto_wrap(memory=MemoryStrategy.AGGRESSIVE) would train it, but with exact weights:
  shardwell plan mymodels:make_gpt --memory aggressive --gather-dtype float32

No memory is allocated: the model is built in shapes only.
"""

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(bit|b)(?:/s)?", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_PIPE_WIDTH = 160


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], help_line: str) -> None:
    """Adds the ``plan`` subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help=help_line,
        description="Estimates a training run: division of the model, memory of trainers and servers, bytes per step, "
        "transfer time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="module:callable, or a Hugging Face config.json")
    parser.add_argument(
        "--dtype", choices=sorted(PARAMETER_ITEM_SIZES), help="dtype of the parameters (default: the model's)"
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", help="sequences per work item (default: 1, or one per micro-batch)"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=1024,
        metavar="N",
        help="tokens per sequence, or per part of it with --cp (default: 1024)",
    )
    parser.add_argument("--json", action="store_true", help="print numbers (bytes, seconds) as JSON")
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_division(parser.add_argument_group("tensor and pipeline parallelism", "The options of shardwell.parallel."))
    _add_memory(parser.add_argument_group("memory and traffic", "The options of join and auto_wrap with these names."))
    parser.set_defaults(handler=_run)


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    for axis in CONTEXT_AXES:
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


def _add_division(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--schedule", choices=SCHEDULES, help="schedule of the pipeline (default: 1F1B)")
    group.add_argument(
        "--micro-batches",
        dest="num_micro_batches",
        type=int,
        metavar="N",
        help="micro-batches per work item (default: the size of the pp axis)",
    )
    group.add_argument("--stages-per-trainer", type=int, metavar="N", help="(default: 1, or 2 if the schedule needs 2)")
    group.add_argument("--split-by", choices=["layers", "cost"], help="split_model(by=...) (default: layers)")
    group.add_argument(
        "--whole-vocabulary", dest="vocabulary", action="store_false", help="embedding and head stay whole"
    )
    for name, text in (
        ("sequence-parallel", "norms and residual paths compute a part of the sequence each"),
        ("loss-parallel", "the loss is computed from split logits"),
        ("fused-by-head", "the rows of a fused qkv are ordered by head"),
    ):
        group.add_argument(f"--{name}", action="store_true", help=text)


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
    for name in ("keep", "prefetch", "push", "host-cache", "delta-cache"):
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
    plan = plan_run(
        arguments.model,
        options_of(arguments),
        division=division_options_of(arguments),
        batch=arguments.batch,
        length=arguments.length,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
    )
    if plan.division.unknown and plan.options.activation_bytes is None:
        print(
            f"shardwell plan: the activations are unknown: {plan.division.unknown}; pass their size with "
            "--activations BYTES",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        console = Console()
        Console(width=console.width if console.is_terminal else _PIPE_WIDTH).print(to_tables(plan))
    return 0


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
    return PlanOptions(world=World(arguments.dp, arguments.tp, arguments.pp, cp=arguments.cp), **{**preset, **given})


def division_options_of(arguments: argparse.Namespace) -> DivisionOptions:
    """Returns how the model is divided."""
    known = [field.name for field in fields(DivisionOptions)]
    return DivisionOptions(**{name: value for name in known if (value := getattr(arguments, name)) is not None})


def _member(kind: Any, name: str) -> Any:
    return kind[name.upper().replace("-", "_")]
