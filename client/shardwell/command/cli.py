"""The ``shardwell`` command: launch training scripts, and look at what a cluster does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from shardwell.command import export_command, inspect_commands
from shardwell.planning import plan_command
from shardwell.processes import launch
from shardwell_wire.errors import ShardwellError

_EPILOG = """\
Train on this machine:             shardwell launch --num-trainers 2 --num-shards 2 train.py
Train on a cluster:                shardwell launch --coordinator HOST:PORT --run NAME train.py
What will a run take?              shardwell plan MODEL --dp 8 --servers 4 --bandwidth 10gbit
See what a cluster does:           shardwell runs; shardwell run NAME; shardwell servers
Why does nothing move?             shardwell stall NAME
Look at a weight while it trains:  shardwell peek NAME blocks.0.mlp.0.weight
Take the weights out meanwhile:    shardwell export NAME FOLDER
"""


INTERRUPTED = 130
"""What shells expect of a command that Ctrl-C ended."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="shardwell",
        description="Parameter service for PyTorch training: launch training scripts, inspect a cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardwell {version('shardwell')}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    launch.add_parser(subparsers)
    plan_command.add_parser(subparsers)
    inspect_commands.add_parsers(subparsers)
    export_command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 after an error message, or 130 after Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.handler(arguments)
    except ShardwellError as error:
        print(f"shardwell {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has seen enough; Python would complain while it exits
        return 0
    return code
