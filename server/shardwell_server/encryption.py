"""The options of a server's TLS, and what a server requires before it listens on a network."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import socket
from dataclasses import replace

from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import UsageError
from shardwell_wire.tls import CERT_VARIABLE, ENCRYPT_CHOICES, ENCRYPT_VARIABLE, KEY_VARIABLE, Encryption, Tls
from shardwell_wire.tls_arguments import add_tls_arguments, tls_options

logger = logging.getLogger(__name__)

_INSECURE_VARIABLE = "SHARDWELL_INSECURE"
_REQUIRE_VARIABLE = "SHARDWELL_TLS_REQUIRE_CLIENT_CERT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of TLS."""
    env = os.environ.get
    add_tls_arguments(parser)
    parser.add_argument(
        "--tls-require-client-cert",
        action=argparse.BooleanOptionalAction,
        default=env(_REQUIRE_VARIABLE, "") == "1",
        help=f"accept only clients with a certificate of --tls-ca (mutual TLS; {_REQUIRE_VARIABLE}=1)",
    )
    parser.add_argument(
        "--encrypt",
        choices=ENCRYPT_CHOICES,
        default=env(ENCRYPT_VARIABLE, Encryption.OFF_HOST.text),
        help=f"with TLS: connections of the socket transport that are encrypted; rpcs always are ({ENCRYPT_VARIABLE}, "
        "default %(default)s)",
    )
    parser.add_argument(
        "--insecure",
        action=argparse.BooleanOptionalAction,
        default=env(_INSECURE_VARIABLE, "") == "1",
        help=f"listen on a network although TLS or the token is missing ({_INSECURE_VARIABLE}=1)",
    )


def insecurity(host: str, credentials: Credentials, arguments: argparse.Namespace) -> str:
    """Returns what a server lacks although it listens on a network, such as ``no TLS``. Empty: nothing.

    Args:
        host: Host to listen on.
        credentials: Credentials of the server.
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
            f"--listen {host} is not a loopback address, and the server has {lacks}: anyone in the network could read "
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


def from_arguments(arguments: argparse.Namespace) -> Tls | None:
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
