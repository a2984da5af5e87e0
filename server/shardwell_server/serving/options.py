"""The options of ``shardwell-server``'s commands. Each can also be given by an environment variable."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from shardwell_server.serving import authentication, authorization
from shardwell_server.serving.process import Endpoint


def add_option(
    parser: argparse.ArgumentParser,
    flag: str,
    metavar: str,
    text: str,
    default: object = "",
    *,
    required: bool = False,
    note: str = "default %(default)s",
    parse: Callable[[str], Any] = str,
) -> None:
    """Adds an option whose default is in an environment variable, such as ``SHARDWELL_LEASE_S`` for ``--lease-s``.

    Args:
        parser: The command's parser.
        flag: The option.
        metavar: Name of its value.
        text: What the option does.
        default: Its value if the variable is not set.
        required: Whether the option must be given if the variable is not set.
        note: Describes the default.
        parse: Converts the text of the value.
    """
    variable = _variable_of(flag)
    given = os.environ.get(variable, None if default is None or required else str(default))
    parser.add_argument(
        flag,
        metavar=metavar,
        type=parse,
        default=given,
        required=required and given is None,
        help=f"{text} ({variable})" if required else f"{text} ({variable}, {note})",
    )


def add_switch(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    """Adds an option that is on or off, and off unless its environment variable is 1."""
    variable = _variable_of(flag)
    is_on = os.environ.get(variable, "") == "1"
    action = argparse.BooleanOptionalAction
    parser.add_argument(flag, action=action, default=is_on, help=f"{text} ({variable}=1)")


def _variable_of(flag: str) -> str:
    return f"SHARDWELL_{flag.removeprefix('--').replace('-', '_').upper()}"


def add_server_options(parser: argparse.ArgumentParser, *, listen: str) -> None:
    """Adds the options of every server.

    Args:
        parser: The command's parser.
        listen: Where the server listens by default, as host:port.
    """
    add_option(parser, "--listen", "HOST:PORT", "address to listen on; port 0: a free port", listen)
    add_option(
        parser,
        "--advertise",
        "HOST",
        "host by which clients reach this server",
        note="default: the host of --listen",
    )
    authorization.add_root_argument(parser)
    authentication.add_argument(parser)
    authorization.add_audit_argument(parser)
    authentication.add_tls_options(parser)
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=os.environ.get("SHARDWELL_LOG_LEVEL", "info"),
        help="level of the log on standard error (SHARDWELL_LOG_LEVEL, default %(default)s)",
    )


def endpoint_of(arguments: argparse.Namespace) -> Endpoint:
    """Returns where a server listens. Raises ValueError if an option is invalid."""
    return Endpoint(
        bind=arguments.listen,
        advertise=arguments.advertise,
        exit_with_parent=arguments.exit_with_parent,
        without_token=authentication.without_token(arguments),
    )
