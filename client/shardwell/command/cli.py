"""The ``shardwell`` command: launches training scripts, inspects clusters, plans runs and exports weights.

``shardwell completion`` prints a script that completes commands and options in a shell, made by shtab.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

import shtab

from shardwell.command import inspect_commands, run_commands, token_command, upgrade_command
from shardwell.command.arguments import INTERRUPTED, UNREACHABLE, Subparsers, add_command
from shardwell.processes import launch
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError, import_with_torch
from shardwell_wire.host.variables import add_config_options, take_config_options

_EPILOG = """\
Train on this machine:             shardwell launch --num-trainers 2 --num-shards 2 train.py
Train on a cluster:                shardwell launch --coordinator HOST:PORT --run NAME train.py
How much memory does a run need?   shardwell plan MODEL --dp 8 --servers 4 --bandwidth 10gbit
Is everything all right?           shardwell status; shardwell top NAME
Inspect a cluster:                 shardwell runs; shardwell run NAME; shardwell servers
Why does a run not progress?       shardwell stall NAME
Why are its steps slow?            shardwell report NAME
Read a weight during training:     shardwell peek NAME blocks.0.mlp.0.weight
Export weights during training:    shardwell export NAME FOLDER
Which checkpoints are there?       shardwell checkpoints DIR; shardwell verify DIR
Take a server out of a cluster:    shardwell drain SERVER --wait
Restart servers one by one:        shardwell upgrade --restart-command "ssh {host} ..."

exit codes:
  0    the command did what it says
  1    an error, printed to standard error; or `shardwell verify` found a difference
  2    wrong arguments
  3    `shardwell status`: a server, a run, backups or checkpoints need attention
  4    a server cannot be reached, is not ready or does not answer in time: try again
  130  Ctrl-C
"""


_WITH_TORCH = {
    "plan": (
        "shardwell.planning.plan_command",
        "add_parser",
        "estimate the memory, bytes per step and transfer time of a model",
    ),
    "export": (
        "shardwell.command.export_commands",
        "add_export_parser",
        "write a run's weights to files during training",
    ),
    "digest": (
        "shardwell.command.export_commands",
        "add_digest_parser",
        "print a digest of all weights of a version of a run",
    ),
    "convert-checkpoint": (
        "shardwell.command.export_commands",
        "add_convert_parser",
        "convert a checkpoint to torch.distributed.checkpoint, or back",
    ),
}
"""Module, function and help line of each command that needs torch. The module is imported when the command is used,
because torch takes seconds to import."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the whole command.

    Args:
        command: The subcommand that will be used. Other subcommands that need torch get their help line only. None:
            every subcommand is complete.
    """
    parser = argparse.ArgumentParser(
        prog="shardwell",
        description="Parameter service for PyTorch training: launch training scripts, inspect a cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a part of --config would be accepted, and the file not be read
    )
    add_config_options(parser)
    parser.add_argument("--version", action="version", version=f"shardwell {version('shardwell')}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    launch.add_parser(subparsers)
    inspect_commands.add_parsers(subparsers)
    run_commands.add_parsers(subparsers)
    upgrade_command.add_parser(subparsers)
    token_command.add_parser(subparsers)
    _add_completion(subparsers)
    for name, (module, add_parser, help_line) in _WITH_TORCH.items():
        if command in (None, name):
            getattr(import_with_torch(module), add_parser)(subparsers, help_line)
        else:
            subparsers.add_parser(name, help=help_line)
    return parser


_COMPLETION_DESCRIPTION = """\
Prints a script that completes the commands of shardwell, their options and the values of these. The script knows the
commands of this version: make it again after an update.
"""
_COMPLETION_EPILOG = """\
examples:
  shardwell completion bash > ~/.local/share/bash-completion/completions/shardwell
  shardwell completion zsh > ~/.zfunc/_shardwell    with `fpath+=~/.zfunc` before compinit in ~/.zshrc
"""

_FILES = ("PATH", "FILE", "DIR", "FOLDER")
"""What the help calls arguments that the shell completes to files."""


def _add_completion(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "completion",
        "print a script that completes commands and options in bash or zsh",
        _print_completion,
        description=_COMPLETION_DESCRIPTION,
        epilog=_COMPLETION_EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def _print_completion(arguments: argparse.Namespace) -> int:
    try:
        parser = build_parser()
    except (ImportError, ShardwellError):  # without torch, the commands that need it get no options
        parser = build_parser("completion")
    commands = next(each.choices for each in parser._actions if isinstance(each.choices, dict))
    for command in commands.values():
        for action in command._actions:
            if action.metavar in _FILES or action.dest == "script":
                action.complete = shtab.FILE
    print(shtab.complete(parser, arguments.shell), end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, as its help lists them."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        given = take_config_options(given)
        arguments = build_parser(given[0] if given else "").parse_args(given)  # may import torch, for seconds
        code: int = arguments.handler(arguments)
    except ShardwellError as error:
        print(f"shardwell {''.join(given[:1])}: {error}", file=sys.stderr)
        return UNREACHABLE if isinstance(error, UnavailableError | DeadlineError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the pipe's reader has closed it; Python would report an error while it exits
        return 0
    return code
