"""The ``shardwell-server`` command: starts a server, checks or discards one, or makes certificates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from shardwell_wire.errors import ShardwellError, import_with_torch
from shardwell_wire.host.variables import add_config_options, take_config_options

_COMMANDS = {
    "coordinator": ("shardwell_server.coordinator.command", "add_parser"),
    "shard": ("shardwell_server.shard.process.command", "add_parser"),
    "relay": ("shardwell_server.shard.process.command", "add_relay_parser"),
    "discard": ("shardwell_server.shard.process.command", "add_discard_parser"),
    "health": ("shardwell_server.serving.process", "add_parser"),
    "certs": ("shardwell_server.certificates", "add_parser"),
}
"""The module of each command, and its function that takes the subparsers and sets the default
``handler(arguments) -> int``. Only the module of the requested command is imported: a coordinator imports no torch."""

_EPILOG = """\
To start a cluster manually, in three terminals (see also `docker compose up` and shardwell.LocalCluster):
    shardwell-server coordinator --state-dir /var/lib/shardwell
    shardwell-server shard --coordinator localhost:50051 --id shard-0
    shardwell servers --address localhost:50051
"""


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command. ``only``: the subcommand to include. None: all."""
    parser = argparse.ArgumentParser(
        prog="shardwell-server",
        description="The servers of Shardwell.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a part of --config would be accepted, and the file not be read
    )
    add_config_options(parser)
    parser.add_argument("--version", action="version", version=f"shardwell-server {version('shardwell')}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, (module, add_parser) in _COMMANDS.items():
        if only in (None, name):
            getattr(import_with_torch(module), add_parser)(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        given = take_config_options(given)
        only = given[0] if given and given[0] in _COMMANDS else None
        arguments = build_parser(only).parse_args(given)
        code: int = arguments.handler(arguments)
    except (ShardwellError, ValueError) as error:
        print(f"shardwell-server {''.join(given[:1])}: {error}", file=sys.stderr)
        return 1
    return code
