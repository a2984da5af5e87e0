"""The command line options with the TLS files of a process, for the commands of both ends."""

from __future__ import annotations

import argparse
import os

from shardwell_wire.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, SERVER_NAME_VARIABLE, TlsOptions

_OPTIONS = {"tls_ca": CA_VARIABLE, "tls_cert": CERT_VARIABLE, "tls_key": KEY_VARIABLE}
_OPTIONS["tls_server_name"] = SERVER_NAME_VARIABLE


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--tls-ca``, ``--tls-cert``, ``--tls-key`` and ``--tls-server-name``."""
    parser.add_argument(
        "--tls-ca",
        metavar="PATH",
        help=f"PEM file with the authorities that sign the cluster's certificates ({CA_VARIABLE}, default: none, "
        "connections are not encrypted)",
    )
    parser.add_argument(
        "--tls-cert", metavar="PATH", help=f"PEM file with the certificate chain of this process ({CERT_VARIABLE})"
    )
    parser.add_argument(
        "--tls-key",
        metavar="PATH",
        help=f"PEM file with the certificate's private key, readable by this user only ({KEY_VARIABLE})",
    )
    parser.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help=f"name that the certificate of every server must have ({SERVER_NAME_VARIABLE}, default: the host in the "
        "server's address)",
    )


def has_tls_arguments(arguments: argparse.Namespace) -> bool:
    """Returns whether any of the options was given."""
    return any(getattr(arguments, name) for name in _OPTIONS)


def tls_options(arguments: argparse.Namespace) -> TlsOptions | None:
    """Returns the options, which override the environment. None: neither names an authority.

    Raises:
        UsageError: A value is invalid.
    """
    given = {variable: getattr(arguments, name) for name, variable in _OPTIONS.items() if getattr(arguments, name)}
    return TlsOptions.from_env({**os.environ, **given})
