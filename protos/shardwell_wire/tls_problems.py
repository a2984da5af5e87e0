"""Finds out why no connection to a server was possible, if TLS is the reason.

gRPC reports such failures as UNAVAILABLE, often as "Socket closed". If no connection to the server has worked before,
retries would only delay the error. Otherwise, certificates may be about to be replaced.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

import grpc

from shardwell_wire.errors import ShardwellError, TlsError, UnavailableError, from_rpc_error
from shardwell_wire.tls import CA_VARIABLE, Tls

_PROBE_TIMEOUT_S = 1.0
_NOT_CONNECTED, _UNREACHABLE = "failed to connect to all addresses", "Failed to connect to remote host"
"""Parts of gRPC's messages: it made no usable connection, and it made no TCP connection."""

_CLIENT_CERT_ADVICE = (
    "set SHARDWELL_TLS_CERT and SHARDWELL_TLS_KEY to a certificate of an authority that the server trusts, and its key"
)


def connection_error(error: grpc.RpcError, peer: str, address: str, tls: Tls | None) -> ShardwellError:
    """As ``from_rpc_error``. If TLS prevented a connection, returns an error that says what to change.

    The error is a TlsError, or an UnavailableError, which is retried, if the failure may be temporary (see
    ``Tls.may_recover``). Blocks for at most some seconds, to try a connection.

    Args:
        error: The error from gRPC.
        peer: Name of the peer, for errors.
        address: host:port of the peer.
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
        address: host:port of a gRPC server.
        tls: TLS of this process. None: without.

    Returns:
        What is wrong and what to do. None: TLS is not the reason, or the server cannot be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S) as connected:
            return _without_tls(connected) if tls is None else _with_tls(connected, address, tls)
    except OSError:
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
