"""TLS of one process: its certificates, the errors that TLS causes, and the options of commands.

Both ends use the ``Tls`` class, which reads its files again when they change. It makes the credentials of gRPC channels
and servers, and the contexts of the socket transport's connections, which use TLS 1.3 only.

gRPC reports failures of TLS as UNAVAILABLE, often as "Socket closed". ``connection_error`` finds out whether TLS is the
reason. If no connection to the server has worked before, retries would only delay the error. Otherwise, certificates
may be about to be replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import logging
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import grpc

from shardwell_wire.errors import ShardwellError, TlsError, UnavailableError, UsageError, from_rpc_error
from shardwell_wire.host.variables import variables
from shardwell_wire.security.secret_files import read_secret_file

logger = logging.getLogger(__name__)

CA_VARIABLE = "SHARDWELL_TLS_CA"
CERT_VARIABLE, KEY_VARIABLE = "SHARDWELL_TLS_CERT", "SHARDWELL_TLS_KEY"
SERVER_NAME_VARIABLE, ENCRYPT_VARIABLE = "SHARDWELL_TLS_SERVER_NAME", "SHARDWELL_ENCRYPT"
TLS_VARIABLES = (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, SERVER_NAME_VARIABLE, ENCRYPT_VARIABLE)
"""The environment variables of ``TlsOptions``."""

_MAX_FILE_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 1.0
_NOT_CONNECTED, _UNREACHABLE = "failed to connect to all addresses", "Failed to connect to remote host"
"""Parts of gRPC's messages: it made no usable connection, and it made no TCP connection."""

_CLIENT_CERT_ADVICE = (
    "set SHARDWELL_TLS_CERT and SHARDWELL_TLS_KEY to a certificate of an authority that the server trusts, and its key"
)


class Encryption(enum.IntEnum):
    """Which connections of the socket transport are encrypted. Of two ends, the larger value counts."""

    NEVER = 1
    """None."""
    OFF_HOST = 2
    """Connections between different addresses. A connection within a host has the same address at both ends."""
    ALWAYS = 3
    """All."""

    @property
    def text(self) -> str:
        """The value of the option ``encrypt``."""
        return self.name.lower().replace("_", "-")


def must_encrypt(encryption: int, connected: socket.socket) -> bool:
    """Returns whether a connection of the socket transport must be encrypted.

    Args:
        encryption: The larger value of both ends.
    """
    if encryption != Encryption.OFF_HOST:
        return encryption > Encryption.OFF_HOST
    # Behind a dual-stack listener, an IPv4 address has this prefix.
    own, peer = (name[0].removeprefix("::ffff:") for name in (connected.getsockname(), connected.getpeername()))
    return bool(own != peer)


ENCRYPT_CHOICES = tuple(each.text for each in reversed(Encryption))
"""Values of the option ``encrypt``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsOptions:
    """TLS of the connections to a cluster, as files in the PEM format.

    Files that change are read again: the next connection uses them. Connections that are open stay open.

    Raises:
        UsageError: ``cert`` is given without ``key`` or the other way round, or ``encrypt`` is invalid.
    """

    ca: str
    """Certificates of the authorities that sign the certificates of the cluster's servers (``SHARDWELL_TLS_CA``)."""
    cert: str = ""
    """Certificate chain of this process (``SHARDWELL_TLS_CERT``). Clients need one only if the servers require it."""
    key: str = ""
    """Private key of ``cert`` (``SHARDWELL_TLS_KEY``). No other user may be able to read the file."""
    server_name: str = ""
    """Name that the certificate of every server must have (``SHARDWELL_TLS_SERVER_NAME``). Empty: the host in the
    server's address."""
    encrypt: str = Encryption.OFF_HOST.text
    """Which connections of the socket transport are encrypted: ``always``, ``off-host`` (those that leave the host) or
    ``never`` (``SHARDWELL_ENCRYPT``). A server has the same option, and the stricter one counts. Rpcs are always
    encrypted."""

    def __post_init__(self) -> None:
        if not self.ca:
            raise UsageError(f"TLS needs the file with the certificate authority: set ca ({CA_VARIABLE})")
        if bool(self.cert) != bool(self.key):
            raise UsageError(
                f"TLS: cert={self.cert!r} and key={self.key!r}: expected both, or neither ({CERT_VARIABLE}, "
                f"{KEY_VARIABLE})"
            )
        if self.encrypt not in ENCRYPT_CHOICES:
            raise UsageError(f"encrypt={self.encrypt!r}: expected one of {', '.join(ENCRYPT_CHOICES)}")

    @property
    def encryption(self) -> Encryption:
        """``encrypt`` as a number."""
        return Encryption[self.encrypt.upper().replace("-", "_")]

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Self | None:
        """Returns the options in the environment. None: it names no file.

        Raises:
            UsageError: A variable has an invalid value, or the authority is missing.
        """
        found = variables() if environment is None else environment
        if not any(found.get(name) for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)):
            return None
        return cls(
            ca=found.get(CA_VARIABLE, ""),
            cert=found.get(CERT_VARIABLE, ""),
            key=found.get(KEY_VARIABLE, ""),
            server_name=found.get(SERVER_NAME_VARIABLE, ""),
            encrypt=found.get(ENCRYPT_VARIABLE) or Encryption.OFF_HOST.text,
        )


@dataclass(frozen=True, eq=False, slots=True)
class Certificates:
    """The contents of the files at one time."""

    ca: bytes
    chain: bytes | None
    key: bytes | None
    client_context: ssl.SSLContext
    server_context: ssl.SSLContext | None
    """None: there is no certificate."""

    @property
    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC channel."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    @property
    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Certificates of a gRPC server."""
        assert self.chain is not None
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.ca)


class Tls:
    """The certificates of this process. Thread-safe.

    Args:
        options: The files.
        require_client_cert: Whether connections to this server need a certificate of the authority. Servers only.

    Raises:
        UsageError: A file cannot be read or is invalid, the key does not belong to the certificate, or the certificate
            has expired.
    """

    def __init__(self, options: TlsOptions, *, require_client_cert: bool = False) -> None:
        self.options, self._require_client_cert = options, require_client_cert
        self._lock = threading.Lock()
        self._stamps = _stamps(options)
        self._certificates = _read(options, require_client_cert)
        self._reached: set[str] = set()
        self.is_in_use = False
        """Set when this process would lose work by an error, such as when a trainer has committed a step."""

    def __repr__(self) -> str:
        return f"Tls({self.options!r})"

    @property
    def current(self) -> Certificates:
        """The certificates. Another object after the files have changed.

        Files that cannot be used are ignored with a warning, for example while only one of two files is replaced.
        """
        with self._lock:
            stamps = _stamps(self.options)
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    self._certificates = _read(self.options, self._require_client_cert)
                    logger.info("read the changed TLS files: %s", self.options)
                except UsageError as error:
                    logger.warning("the former TLS files stay in use, because the changed ones are invalid: %s", error)
            return self._certificates

    def note_reached(self, address: str) -> None:
        """Records that a connection to host:port has worked."""
        self._reached.add(address)

    def may_recover(self, address: str) -> bool:
        """Returns whether a failed handshake with the server at host:port may be temporary.

        The files of either end may be about to be replaced if connections to the server have worked before. Otherwise,
        a setting is probably wrong, and waiting would only delay the error.
        """
        return self.is_in_use or address in self._reached

    def server_name(self, address: str) -> str:
        """Returns the name that the certificate of the server at host:port must have."""
        return self.options.server_name or address.rpartition(":")[0].strip("[]")

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        """Options of secure gRPC channels."""
        name = self.options.server_name
        return [("grpc.ssl_target_name_override", name)] if name else []

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials of a gRPC server, which reads changed files before the next handshake."""
        used = self.current

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            former, used = used, self.current
            return None if used is former else used.server_configuration

        return grpc.dynamic_ssl_server_credentials(
            used.server_configuration, changed, require_client_authentication=self._require_client_cert
        )

    def server_context(self) -> ssl.SSLContext:
        """Returns the context of a server of Python, which reads changed files before the next handshake."""
        context = self.current.server_context
        assert context is not None

        def use_current(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
            found = self.current.server_context
            assert found is not None
            connection.context = found

        context.sni_callback = use_current  # called in every handshake, with a name or without
        return context


def _stamps(options: TlsOptions) -> tuple[tuple[int, int, int] | None, ...]:
    """Returns a value that changes when a file is changed or replaced."""
    return tuple(_stamp(path) for path in (options.ca, options.cert, options.key) if path)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(options: TlsOptions, require_client_cert: bool) -> Certificates:
    ca = _read_certificate("certificate authority", options.ca)
    if not options.cert:
        return Certificates(ca, None, None, _client_context(options), None)
    chain = _read_certificate("certificate", options.cert)
    _require_valid(options.cert, chain)
    key = read_secret_file(options.key, "key file", max_bytes=_MAX_FILE_BYTES)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Sessions are not resumed. Their tickets would arrive while a client expects no bytes.
    server_context.num_tickets = 0
    if require_client_cert:
        _load_ca(server_context, options)
        server_context.verify_mode = ssl.CERT_REQUIRED
    _load_chain(server_context, options)
    return Certificates(ca, chain, key, _client_context(options), server_context)


def _client_context(options: TlsOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_ca(context, options)
    if options.cert:
        _load_chain(context, options)
    return context


def _load_ca(context: ssl.SSLContext, options: TlsOptions) -> None:
    try:
        context.load_verify_locations(options.ca)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"certificate authority {options.ca} is not a PEM file with certificates: {error}") from error


def _load_chain(context: ssl.SSLContext, options: TlsOptions) -> None:
    def no_password() -> str:
        raise UsageError(f"key file {options.key} is encrypted: expected a key without a password")

    try:
        context.load_cert_chain(options.cert, options.key, no_password)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"certificate {options.cert} and key {options.key} cannot be used together: expected a PEM certificate "
            f"chain and its private key ({error})"
        ) from error


def _read_certificate(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from error


def _require_valid(path: str, chain: bytes) -> None:
    from cryptography import x509  # takes 50 ms to import, and only processes with a certificate need it

    try:
        until = x509.load_pem_x509_certificates(chain)[0].not_valid_after_utc
    except ValueError as error:
        raise UsageError(f"certificate {path} is not a PEM file with certificates: {error}") from error
    if until < datetime.now(UTC):
        raise UsageError(f"certificate {path} expired on {until:%Y-%m-%d %H:%M} UTC: replace it and its key")


def connection_error(error: grpc.RpcError, peer: str, address: str, tls: Tls | None) -> ShardwellError:
    """As ``from_rpc_error``. If TLS prevented a connection, returns an error that says what to change.

    The error is a TlsError, or an UnavailableError, which is retried, if the failure may be temporary (see
    ``Tls.may_recover``). Blocks for at most some seconds, to try a connection.

    Args:
        error: The error from gRPC.
        tls: TLS of the channel. None: the channel is not encrypted.
    """
    found = from_rpc_error(error, peer)
    if not _may_be_tls(found):
        return found
    problem = tls_problem(address, tls)
    if problem is None:
        return found
    kind = UnavailableError if tls is not None and tls.may_recover(address) else TlsError
    return kind(f"{peer}: {problem}", peer=peer)


async def server_call_error(error: grpc.RpcError, peer: str, address: str, tls: Tls | None) -> ShardwellError:
    """As ``connection_error``, for calls between servers, which go on when a certificate is replaced.

    Does not block the event loop, and returns an UnavailableError instead of a TlsError.
    """
    found = from_rpc_error(error, peer)
    if not _may_be_tls(found):
        return found
    explained = await asyncio.to_thread(connection_error, error, peer, address, tls)
    return UnavailableError(str(explained), **explained.data) if isinstance(explained, TlsError) else explained


def _may_be_tls(error: ShardwellError) -> bool:
    text = str(error)
    return isinstance(error, UnavailableError) and _NOT_CONNECTED in text and _UNREACHABLE not in text


def tls_problem(address: str, tls: Tls | None) -> str | None:
    """Tries a connection; returns how TLS prevents it.

    Args:
        address: host:port of a gRPC server. Of several, with commas, the first one that TLS prevents counts.
        tls: TLS of this process. None: without.

    Returns:
        What is wrong and what to do. None: TLS is not the reason, or the server cannot be reached.
    """
    for each in address.split(","):
        host, _, port = each.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S) as connected:
            if problem := _without_tls(connected) if tls is None else _with_tls(connected, each, tls):
                return problem
    return None


def _without_tls(connected: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connected).close()
    except ssl.SSLError:
        return None
    return f"the server requires TLS: set {CA_VARIABLE} (or tls=, --tls-ca) to the file with its certificate authority"


def _with_tls(connected: socket.socket, address: str, tls: Tls) -> str | None:
    context, name = tls.current.client_context, tls.server_name(address)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connected, server_hostname=name) as encrypted:
            # A gRPC server sends its settings first. In TLS 1.3, it checks a client's certificate after the handshake.
            if encrypted.recv(1):
                return None
    except ssl.SSLCertVerificationError as error:
        return describe_untrusted(error, tls)
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return (
                f"the server does not use TLS, and this process does: unset {CA_VARIABLE}, or start the server with TLS"
            )
        return f"the TLS handshake failed: {error}; {_CLIENT_CERT_ADVICE}"
    has_certificate = "does not trust the certificate of this process" if tls.options.cert else "requires a certificate"
    return f"the server {has_certificate}: {_CLIENT_CERT_ADVICE}"


def describe_untrusted(error: ssl.SSLCertVerificationError, tls: Tls) -> str:
    """Returns why the certificate of a server was refused, and what to do."""
    return (
        f"the certificate of the server is refused: {error.verify_message.rstrip('.')}. Expected a valid one that the "
        f"authority in {tls.options.ca} has signed for {tls.options.server_name or 'the host in the address'}"
    )


_OPTIONS = {"tls_ca": CA_VARIABLE, "tls_cert": CERT_VARIABLE, "tls_key": KEY_VARIABLE}
_OPTIONS["tls_server_name"] = SERVER_NAME_VARIABLE


def add_tls_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
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
    return TlsOptions.from_env({**variables(), **given})
