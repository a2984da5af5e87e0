"""``shardwell token``: prints the header with a token for programs such as grpcurl, and makes tokens to hand over."""

from __future__ import annotations

import argparse
import re
import sys

from shardwell.command.arguments import Subparsers, add_address_argument, add_command, credentials_of, open_coordinator
from shardwell_wire.errors import NotFoundError, UsageError
from shardwell_wire.model.names import new_run_id
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE, Credentials
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import coordinator_pb2

_DESCRIPTION = """\
Without --role: prints the header with a token for a cluster, which every rpc to the cluster carries. Every local
cluster has a key, from which tokens are made (shardwell launch, shardwell.LocalCluster, shardwell.join() without an
address). Other clusters have one if their servers were started with --token-file. The commands of shardwell find it by
themselves.

With --role: makes a token from the cluster's key and prints it. The token can be given to someone who must not have the
key, in a file or pipe for --token-file or SHARDWELL_TOKEN_FILE, or in the variable SHARDWELL_TOKEN. A token for a run
has the run's id, which the command asks the coordinator for. It does not open a later run of the same name. If the run
does not exist, the token is for a new run, which the first trainer with this token creates.
"""
_EPILOG = """\
examples:
  shardwell token --address 127.0.0.1:40123
  grpcurl -plaintext -H "$(shardwell token)" -d '{"run": "gpt"}' localhost:50051 \\
      shardwell_wire.v1.CoordinatorService/ExplainStall

  (umask 077; shardwell token --role reader --run gpt --expires 7d > reader.token)
  shardwell export gpt weights.safetensors --token-file reader.token
  shardwell run gpt --token-file <(ssh operator shardwell token --role reader --run gpt)

On a host with other users, who can see the arguments of every program with `ps`:
  export HEADER="$(shardwell token)"
  grpcurl -plaintext -expand-headers -H '${HEADER}' localhost:50051 shardwell_wire.v1.CoordinatorService/ListRuns
"""
_ROLES = {Role.READER: "read one run", Role.TRAINER: "join one run", Role.OPERATOR: "read, change and delete all runs"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``shardwell token``."""
    help_line = "print the header with a token for grpcurl, or make a token for one run"
    parser = add_command(subparsers, "token", help_line, _token, description=_DESCRIPTION, epilog=_EPILOG)
    add_address_argument(parser, "address of a server of the cluster")
    what = ", ".join(f"{role}: {purpose}" for role, purpose in _ROLES.items())
    parser.add_argument("--role", choices=[*_ROLES], help=f"make a token; its holder may ({what})")
    parser.add_argument("--run", help="name of the run that a reader or trainer may use; it need not exist yet")
    parser.add_argument(
        "--run-id",
        type=_parse_run_id,
        metavar="ID",
        help="id of this run, 16 hexadecimal digits (default: as the coordinator says, or a new one). Makes further "
        "tokens for a run that does not exist yet",
    )
    parser.add_argument(
        "--expires",
        type=parse_duration,
        default="1h",
        metavar="TIME",
        help="how long the token is valid, such as 30m, 12h or 7d (default %(default)s). A trainer that has joined "
        "stays in its run",
    )


def parse_duration(text: str) -> int:
    """Returns the number of seconds in a text such as ``30m``. Raises ValueError if it has another form."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a number and s, m, h or d, such as 30m, got {text!r}")
    return int(match[1]) * _SECONDS[match[2]]


def _parse_run_id(text: str) -> str:
    if re.fullmatch(r"[0-9a-f]{16}", text) is None:
        raise argparse.ArgumentTypeError(f"expected 16 hexadecimal digits, got {text!r}")
    return text


def _token(arguments: argparse.Namespace) -> int:
    credentials = credentials_of(arguments)
    if not credentials:
        raise NotFoundError(
            f"no token is known for {arguments.address}: this user has no local cluster with a server at that address, "
            f"and {TOKEN_FILE_VARIABLE} is not set. A cluster without --token-file needs no token"
        )
    if arguments.role is None:
        if arguments.run is not None or arguments.run_id is not None:
            raise UsageError("--run and --run-id need --role reader or --role trainer")
        print(credentials.header)
    else:
        print(_make(credentials, arguments))
    return 0


def _make(credentials: Credentials, arguments: argparse.Namespace) -> str:
    role, run = Role(arguments.role), arguments.run
    if credentials.key is None:
        raise UsageError("a token is made with the cluster's key, but this user has only a token: ask an operator")
    if run is None and arguments.run_id is not None:
        raise UsageError("--run-id is the id of a run: add --run with its name")
    if (role is Role.OPERATOR) != (run is None):
        raise UsageError(f"a token for a {role} {'is for all runs: omit' if run else 'is for one run: add'} --run")
    if run is None:
        return credentials.key.mint(role, lifetime_s=arguments.expires)
    run_id = arguments.run_id or _find_run_id(arguments)
    return credentials.key.mint(role, run=run, run_id=run_id, lifetime_s=arguments.expires)


def _find_run_id(arguments: argparse.Namespace) -> str:
    """Returns the id of the run, or a new id if the run does not exist."""
    with open_coordinator(arguments) as coordinator:
        runs = coordinator.call("ListRuns", coordinator_pb2.ListRunsRequest()).runs
    for each in runs:
        if each.run == arguments.run:
            return str(each.run_id)
    run_id = new_run_id()
    print(
        f"run {arguments.run!r} does not exist: the token is for a new run with id {run_id}. Add --run-id {run_id} to "
        "make further tokens for it",
        file=sys.stderr,
    )
    return run_id
