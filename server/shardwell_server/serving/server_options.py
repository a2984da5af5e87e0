"""The options that coordinator and shard servers have in common, and what a server needs to listen on a network.

Every option has a variable, ``SHARDWELL_`` and the name of the option, which is its default.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import re
import socket
from dataclasses import replace
from typing import Any

from shardwell_server.serving.authentication import ALL_STANDARD
from shardwell_server.serving.authorization import FORMER_FILES, MAX_FILE_BYTES
from shardwell_server.serving.metrics import METRICS_PATH
from shardwell_server.serving.process import Endpoint
from shardwell_wire.checkpoints.storage import ROOT_OPTION, CheckpointRoots
from shardwell_wire.errors import UsageError
from shardwell_wire.host.variables import variables
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials, read_key_file
from shardwell_wire.security.tls import (
    CERT_VARIABLE,
    ENCRYPT_CHOICES,
    KEY_VARIABLE,
    Encryption,
    Tls,
    add_tls_arguments,
    tls_options,
)

logger = logging.getLogger(__name__)

_INSECURE_VARIABLE = "SHARDWELL_INSECURE"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40})


def add_option(
    parser: argparse.ArgumentParser,
    name: str,
    what: str,
    default: object = "",
    *,
    shown: str = "%(default)s",
    required: bool = False,
    **settings: Any,
) -> None:
    """Adds an option with a variable.

    Args:
        name: Such as ``--lease-s``, whose variable is ``SHARDWELL_LEASE_S``.
        what: Says what the option means.
        default: Value without the option and the variable.
        shown: The default, as the help says it.
        required: Whether the option must be given if the variable is not set.
        settings: Further arguments of ``add_argument``.
    """
    variable = _variable_of(name)
    found = variables().get(variable, None if default is None or required else str(default))
    note = variable if required else f"{variable}, default: {shown}"
    parser.add_argument(name, default=found, required=required and found is None, help=f"{what} ({note})", **settings)


def add_switch(parser: argparse.ArgumentParser, name: str, what: str) -> None:
    """Adds an option that is on or off, and off unless its variable is 1."""
    variable = _variable_of(name)
    is_on = variables().get(variable, "") == "1"
    action = argparse.BooleanOptionalAction
    parser.add_argument(name, action=action, default=is_on, help=f"{what} ({variable}=1)")


def _variable_of(name: str) -> str:
    return f"SHARDWELL_{name.removeprefix('--').replace('-', '_').upper()}"


def add_common_options(parser: argparse.ArgumentParser, *, listen: str) -> None:
    """Adds the options that both servers have.

    Args:
        parser: The parser of a server's command.
        listen: Default of ``--listen``.
    """
    add_option(parser, "--listen", "address to listen on; port 0: a free port", listen, metavar="HOST:PORT")
    add_option(
        parser, "--advertise", "host by which clients reach this server", shown="the host of --listen", metavar="HOST"
    )
    add_option(
        parser,
        ROOT_OPTION,
        "folders or URLs below which trainers may name folders of checkpoints, such as /checkpoints or "
        "s3://bucket/folder; any: all that this process can open",
        shown="none with --token-file, any without",
        metavar="DIR[,DIR...]",
    )
    add_option(
        parser,
        "--token-file",
        "file with the cluster's key, readable by this user only; every rpc must carry a token that was made with it",
        shown="none, all rpcs are accepted",
        metavar="PATH",
    )
    add_option(
        parser,
        "--without-token",
        "services that need no token although the server has a key: health, reflection, both (with a comma) or none. "
        "With none, container probes need a token",
        ",".join(sorted(ALL_STANDARD)),
        type=_parse_names,
        metavar="NAMES",
    )
    add_option(
        parser,
        "--audit-log",
        "file for lines of JSON that say who did what and what was refused, at most "
        f"{(FORMER_FILES + 1) * MAX_FILE_BYTES >> 20} MiB with its former parts",
        shown="none",
        metavar="PATH",
    )
    _add_tls_options(parser)
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    levels = ("debug", "info", "warning", "error")
    add_option(parser, "--log-level", "level of the log on standard error", "info", choices=levels)
    forms = ("text", "json")
    add_option(parser, "--log-format", "json: one object per line, with run, step and request", "text", choices=forms)
    add_option(
        parser,
        "--metrics-port",
        f"port on which Prometheus reads http://HOST:PORT{METRICS_PATH}, without TLS and token; 0: a free port",
        shown="none, no metrics are served",
        type=parse_port,
        metavar="PORT",
    )
    add_option(parser, "--metrics-host", "host of --metrics-port to listen on", "127.0.0.1", metavar="HOST")


def _http_bind(arguments: argparse.Namespace, name: str) -> str:
    port = getattr(arguments, f"{name}_port", None)  # not every command has the option
    return "" if port is None else f"{getattr(arguments, f'{name}_host')}:{port}"


def _add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of TLS."""
    add_tls_arguments(parser)
    add_switch(parser, "--tls-require-client-cert", "mutual TLS: accept only clients with a certificate of --tls-ca")
    add_option(
        parser,
        "--encrypt",
        "with TLS: connections of the socket transport that are encrypted; rpcs always are",
        Encryption.OFF_HOST.text,
        choices=ENCRYPT_CHOICES,
    )
    add_switch(parser, "--insecure", "listen on a network although TLS or the token is missing")


def _parse_names(text: str) -> str:
    names = {name.strip() for name in text.split(",")}
    if names != {"none"} and not names <= ALL_STANDARD:
        raise argparse.ArgumentTypeError(f"expected health, reflection, both with a comma, or none, got {text!r}")
    return ",".join(sorted(names))


def parse_port(text: str) -> int | None:
    """Returns the port in a text; None if it is empty. For argparse."""
    if text and not (text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text) if text else None


def parse_size(text: str) -> int:
    """Returns the bytes in a text such as ``4GiB``, ``512 MB`` or ``65536``. For argparse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a value such as 4GiB, 512MB or 65536")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def endpoint_of(arguments: argparse.Namespace) -> Endpoint:
    """Returns where a server listens, and how it is stopped."""
    return Endpoint(
        bind=arguments.listen,
        metrics_bind=_http_bind(arguments, "metrics"),
        dashboard_bind=_http_bind(arguments, "dashboard"),
        advertise=arguments.advertise,
        exit_with_parent=arguments.exit_with_parent,
        without_token=ALL_STANDARD & set(arguments.without_token.split(",")),
    )


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Returns the key in ``--token-file`` and the server's TLS. Raises UsageError if a file cannot be used."""
    credentials = read_key_file(arguments.token_file) if arguments.token_file else NO_CREDENTIALS
    return replace(credentials, tls=_tls_of(arguments))


def _tls_of(arguments: argparse.Namespace) -> Tls | None:
    """Returns the TLS of a server. None: it has none. Raises UsageError if an option or a file is invalid."""
    options = tls_options(arguments)
    if options is None:
        if arguments.tls_require_client_cert:
            raise UsageError("--tls-require-client-cert needs --tls-ca, --tls-cert and --tls-key")
        return None
    if not options.cert:
        raise UsageError(
            f"a server with TLS needs a certificate: set --tls-cert ({CERT_VARIABLE}) and --tls-key ({KEY_VARIABLE})"
        )
    return Tls(replace(options, encrypt=arguments.encrypt), require_client_cert=arguments.tls_require_client_cert)


def roots_of(arguments: argparse.Namespace, credentials: Credentials) -> CheckpointRoots:
    """Returns the folders that may be opened. Raises ValueError if the option is invalid."""
    return CheckpointRoots.from_option(arguments.checkpoint_root, is_protected=credentials.key is not None)


def insecurity(host: str, credentials: Credentials, arguments: argparse.Namespace, *, option: str = "--listen") -> str:
    """Returns what a server lacks although it listens on a network, such as ``no TLS``. Empty: nothing.

    Args:
        arguments: Its options.

    Raises:
        UsageError: Something is missing, and ``--insecure`` is not given.
    """
    missing = [*([] if credentials.tls else ["no TLS"]), *([] if credentials else ["no token"])]
    if not missing or _is_loopback(host):
        return ""
    lacks = " and ".join(missing)
    if not arguments.insecure:
        raise UsageError(
            f"{option} {host} is not a loopback address, and the server has {lacks}: anyone in the network could read "
            "or change its runs. Set --tls-ca, --tls-cert and --tls-key (`shardwell-server certs` makes them) and "
            f"--token-file, or accept this with --insecure ({_INSECURE_VARIABLE}=1)"
        )
    return lacks


def warn(bind: str, insecure: str) -> None:
    """Logs at the start of a server what ``insecurity`` returned."""
    if insecure:
        logger.warning("INSECURE: the server listens on %s with %s", bind, insecure)


def _is_loopback(host: str) -> bool:
    """Returns whether all addresses of a host are loopback addresses. A host without an address cannot be bound."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
