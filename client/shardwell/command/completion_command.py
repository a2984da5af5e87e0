"""``shardwell completion``: prints a script that completes commands and options in a shell, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import shtab

from shardwell.command.arguments import Subparsers, add_command
from shardwell_wire.errors import ShardwellError

_DESCRIPTION = """\
Prints a script that completes the commands of shardwell, their options and the values of these. The script knows the
commands of this version: make it again after an update.
"""
_EPILOG = """\
examples:
  shardwell completion bash > ~/.local/share/bash-completion/completions/shardwell
  shardwell completion zsh > ~/.zfunc/_shardwell    with `fpath+=~/.zfunc` before compinit in ~/.zshrc
"""

_FILES = ("PATH", "FILE", "DIR", "FOLDER")
"""What the help calls arguments that the shell completes to files."""


def add_parser(subparsers: Subparsers, build_parser: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """Adds ``shardwell completion``.

    Args:
        subparsers: The subcommands.
        build_parser: Returns the parser of the whole command. See ``cli.build_parser``.
    """
    parser = add_command(
        subparsers,
        "completion",
        "print a script that completes commands and options in bash or zsh",
        partial(_print_script, build_parser),
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def _print_script(build_parser: Callable[[str | None], argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    try:
        parser = build_parser(None)
    except (ImportError, ShardwellError):  # without torch, the commands that need it get no options
        parser = build_parser("completion")
    for each in _commands(parser).values():
        for action in each._actions:
            if action.metavar in _FILES or action.dest == "script":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell), end="")
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the subcommands by name."""
    return next(dict(each.choices) for each in parser._actions if isinstance(each.choices, dict))
