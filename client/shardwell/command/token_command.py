"""``shardwell token``: prints the header that other programs send to a cluster, such as ``grpcurl -H``."""

from __future__ import annotations

import argparse
import os

from shardwell.command.inspect_commands import DEFAULT_ADDRESS, add_token_file_argument
from shardwell.credentials import find_credentials
from shardwell_wire.credentials import TOKEN_FILE_VARIABLE
from shardwell_wire.errors import NotFoundError

_DESCRIPTION = """\
Prints the header with a cluster's token, which every rpc must carry. Every local cluster has one (shardwell launch,
shardwell.LocalCluster, shardwell.join() without an address), other clusters if their servers have --token-file.
Commands of shardwell find the token by themselves.
"""
_EPILOG = """\
examples:
  shardwell token --address 127.0.0.1:40123
  grpcurl -plaintext -H "$(shardwell token)" -d '{"run": "gpt"}' localhost:50051 \\
      shardwell_wire.v1.CoordinatorService/ExplainStall

On a host with other users, where `ps` shows them the arguments of every program:
  export HEADER="$(shardwell token)"
  grpcurl -plaintext -expand-headers -H '${HEADER}' localhost:50051 shardwell_wire.v1.CoordinatorService/ListRuns
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``shardwell token``."""
    parser = subparsers.add_parser(
        "token",
        help="print the header with a cluster's token, for grpcurl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--address",
        default=os.environ.get("SHARDWELL_ADDRESS") or DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="a server of the cluster (default: SHARDWELL_ADDRESS, else localhost:50051)",
    )
    add_token_file_argument(parser)
    parser.set_defaults(handler=_token)


def _token(arguments: argparse.Namespace) -> int:
    credentials = find_credentials(arguments.address, arguments.token_file)
    if not credentials:
        raise NotFoundError(
            f"no token is known for {arguments.address}: no local cluster of this user has a server there, and "
            f"{TOKEN_FILE_VARIABLE} is not set. A cluster whose servers were started without --token-file needs none"
        )
    print(credentials.header)
    return 0
