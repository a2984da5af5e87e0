"""The options of a server's TLS, and what a server requires before it listens on a network."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from shardwell_wire.errors import UsageError
from shardwell_wire.tls import CERT_VARIABLE, ENCRYPT_CHOICES, ENCRYPT_VARIABLE, KEY_VARIABLE, Encryption, Tls
from shardwell_wire.tls_arguments import add_tls_arguments, tls_options

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
