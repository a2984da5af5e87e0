"""``shardwell token``: prints the header with a cluster's token, for programs such as grpcurl."""

from __future__ import annotations

import argparse
import os

from shardwell.command.inspect_commands import DEFAULT_ADDRESS, add_credentials_arguments, credentials_of
from shardwell_wire.credentials import TOKEN_FILE_VARIABLE
from shardwell_wire.errors import NotFoundError

_DESCRIPTION = """\
Prints the header with a cluster's token, which every rpc to the cluster carries. Every local cluster has a token
(shardwell launch, shardwell.LocalCluster, shardwell.join() without an address). Other clusters have one if their
servers were started with --token-file. The commands of shardwell find the token by themselves.
"""
_EPILOG = """\
examples:
  shardwell token --address 127.0.0.1:40123
  grpcurl -plaintext -H "$(shardwell token)" -d '{"run": "gpt"}' localhost:50051 \\
      shardwell_wire.v1.CoordinatorService/ExplainStall

On a host with other users, who can see the arguments of every program with `ps`:
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
        help="address of a server of the cluster (default: SHARDWELL_ADDRESS, else localhost:50051)",
    )
    add_credentials_arguments(parser)
    parser.set_defaults(handler=_token)


def _token(arguments: argparse.Namespace) -> int:
    credentials = credentials_of(arguments)
    if not credentials:
        raise NotFoundError(
            f"no token is known for {arguments.address}: this user has no local cluster with a server at that address, "
            f"and {TOKEN_FILE_VARIABLE} is not set. A cluster without --token-file needs no token"
        )
    print(credentials.header)
    return 0
