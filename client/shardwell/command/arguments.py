"""What the commands share: their parsers, and the options that name a cluster."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeAlias

from shardwell.find_credentials import find_credentials
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import DeadlineError, UnavailableError
from shardwell_wire.host.variables import variables
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Credentials
from shardwell_wire.security.tls import add_tls_arguments, has_tls_arguments, tls_options

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Handler = Callable[[argparse.Namespace], int]
"""Runs a command; returns its exit code."""
Call = Callable[[str, Any], Any]
"""Calls an rpc of the coordinator: name and request."""

DEGRADED, UNREACHABLE, INTERRUPTED = 3, 4, 130
"""Exit codes besides 0, 1 (an error) and 2 (wrong arguments): something is wrong with the cluster or its runs; a server
does not answer; Ctrl-C ended the command, as shells expect."""


_CONNECTION = "options of the connection"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of texts. The usage omits the options of the connection, which all commands share."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        own = [action for action in actions if getattr(action.container, "title", None) != _CONNECTION]
        super().add_usage(usage, own, groups, prefix)


def add_command(
    subparsers: Subparsers, name: str, help_line: str, handler: Handler, *, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Adds a subcommand, whose texts keep their line breaks; returns its parser.

    Args:
        help_line: What the list of subcommands says.
        handler: Runs it.
        description: What its help says first.
        epilog: What its help says last, such as examples.
    """
    parser = subparsers.add_parser(
        name, help=help_line, description=description, epilog=epilog, formatter_class=_HelpFormatter
    )
    parser.set_defaults(handler=handler)
    return parser


def add_coordinator_arguments(
    parser: argparse.ArgumentParser,
    condition: str = "",
    *,
    timeout_s: float = 60.0,
    what: str = "an answer of the coordinator",
) -> None:
    """Adds ``--address``, ``--token-file``, ``--timeout`` and the options of TLS.

    Args:
        condition: When the arguments are used, such as ``for a run: ``.
        timeout_s: Default of ``--timeout``.
        what: What the command waits for.
    """
    connection = add_address_argument(parser, f"{condition}address of the coordinator")
    connection.add_argument(
        "--timeout",
        type=positive_seconds,
        default=timeout_s,
        metavar="S",
        help=f"{condition}seconds to wait for {what} (default: {timeout_s:g})",
    )


def add_address_argument(parser: argparse.ArgumentParser, what: str) -> argparse._ArgumentGroup:
    """Adds ``--address``, ``--token-file`` and the options of TLS; returns their group in the help."""
    group = parser.add_argument_group(_CONNECTION)
    group.add_argument(
        "--address",
        default=variables().get("SHARDWELL_ADDRESS") or "localhost:50051",
        metavar="HOST:PORT[,HOST:PORT...]",
        help=f"{what} (default: SHARDWELL_ADDRESS, else localhost:50051)",
    )
    group.add_argument(
        "--token-file",
        metavar="PATH",
        help="file with the cluster's key or a token (default: the key of your local cluster at the address, else the "
        f"token in {TOKEN_VARIABLE}, else the file in {TOKEN_FILE_VARIABLE})",
    )
    add_tls_arguments(group)
    return group


def positive_seconds(text: str) -> float:
    """Parses a duration of more than 0 s, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return seconds


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Returns the credentials that the arguments name."""
    tls = tls_options(arguments) if has_tls_arguments(arguments) else None
    return find_credentials(arguments.address, arguments.token_file, tls)


@contextmanager
def open_coordinator(arguments: argparse.Namespace) -> Iterator[CoordinatorClient]:
    """Yields a client for the arguments. If the coordinator cannot be reached, the error says what to check."""
    address = arguments.address
    with closing(CoordinatorClient(address, credentials_of(arguments))) as client:
        try:
            yield client
        except UnavailableError as error:
            if error.data.get("peer") != client.peer:
                raise
            reason = (
                str(error).rpartition("last error: ")[2].rpartition("UNKNOWN: ")[2]
            )  # what gRPC's message ends with
            raise UnavailableError(
                f"no answer from a coordinator at {address} ({reason}). Start one with "
                "`shardwell-server coordinator`, or a whole cluster with `docker compose up`; or name another address "
                "with --address HOST:PORT or SHARDWELL_ADDRESS",
                **error.data,
            ) from error
        except DeadlineError as error:
            if error.data.get("peer") != client.peer:
                raise
            raise DeadlineError(
                f"the coordinator at {address} has not answered within {arguments.timeout:g} s ({error}): it is "
                "stopped, overloaded or cut off. Check its process and log, or wait longer with --timeout",
                **error.data,
            ) from error


@contextmanager
def calling(arguments: argparse.Namespace) -> Iterator[Call]:
    """Yields a function that calls an rpc of the coordinator, as ``open_coordinator``."""
    with open_coordinator(arguments) as coordinator:
        yield partial(coordinator.call, timeout_s=arguments.timeout)
