"""Format of call connections: unary rpcs in short frames over TCP, beside gRPC.

docs/wire-format.md describes the format. A connection begins with a handshake, by which both ends prove that they know
the secret that the server announced over gRPC. The client sends no token to a process that does not know it. Then the
client sends requests and the server responses, each with a header of fixed length. Every request carries a token, as
with gRPC.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import Enum

MAGIC = b"SWC1"
"""First bytes of a hello. The digit is the version of the format."""

CLIENT_ID_BYTES, NONCE_BYTES, PROOF_BYTES, SECRET_BYTES = 16, 16, 32, 32

HELLO_BYTES = len(MAGIC) + CLIENT_ID_BYTES + NONCE_BYTES
"""The client's first bytes: magic, ``CallPort.client_id`` and nonce."""

WELCOME_BYTES = PROOF_BYTES + NONCE_BYTES
"""The server's first bytes: its proof, and a nonce. The client's proof follows."""

MAX_BODY_BYTES = 16 << 20
"""Largest message. gRPC has the same limit."""

MAX_PATH_BYTES, MAX_TOKEN_BYTES = 256, 8192

HANDSHAKE_LIMIT_S = 10.0
"""Deadline for connecting and for the handshake, on both sides. No rpc waits for it."""

SILENCE_S, PING_LIMIT_S = 10.0, 5.0
"""A client that waits for a response for this long sends a ping, and gives the connection up if nothing arrives in the
time after it. gRPC's keepalive has the same times."""

_REQUEST = struct.Struct("<IIIHH")
_RESPONSE = struct.Struct("<IIB")
REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES = _REQUEST.size, _RESPONSE.size

PING = _REQUEST.pack(0, 0, 0, 0, 0)
PONG = _RESPONSE.pack(0, 0, 0)
_MAX_TIMEOUT_MS = (1 << 32) - 1


class CallConnectionError(ConnectionError):
    """Raised when a call connection cannot be used. The request may have been executed; repeat it over gRPC."""


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The first bytes of a request. The path, the token and the body follow."""

    number: int
    """Repeated by the response. 0: a ping, which the server answers at once."""
    timeout_s: float
    path_bytes: int
    token_bytes: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """The first bytes of a response. The body follows."""

    number: int
    failed: bool
    """True if the body is a ``google.rpc.Status`` instead of the response message."""
    body_bytes: int


class End(Enum):
    """An end of a connection. Each has another proof, so that none can be sent back."""

    CLIENT = b"client"
    SERVER = b"server"


def proof(end: End, secret: bytes, nonce: bytes) -> bytes:
    """Returns the proof that an end knows the secret.

    Args:
        end: The end that proves it.
        secret: What the server announced over gRPC.
        nonce: What the other end has sent.
    """
    return hmac.digest(secret, MAGIC + end.value + nonce, "sha256")


def is_proof(given: bytes, end: End, secret: bytes, nonce: bytes) -> bool:
    """Returns whether an end has proven that it knows the secret. Arguments as those of ``proof``."""
    return bool(secret) and hmac.compare_digest(given, proof(end, secret, nonce))


def encode_request(number: int, path: str, token: str, body: bytes, timeout_s: float) -> bytes:
    """Returns a request.

    Args:
        number: From 1 on. Different from those of the connection's other unanswered requests.
        token: The caller's token. Empty: none.
        body: The encoded request message.
        timeout_s: Time after which the caller gives up.
    """
    name, proven = path.encode(), token.encode()
    timeout_ms = max(1, min(int(timeout_s * 1000), _MAX_TIMEOUT_MS))
    return b"".join((_REQUEST.pack(len(body), number, timeout_ms, len(name), len(proven)), name, proven, body))


def decode_request(data: bytes | bytearray) -> RequestHeader:
    """Returns the header in the first bytes of a request.

    Raises:
        CallConnectionError: A length is above its limit.
    """
    body_bytes, number, timeout_ms, path_bytes, token_bytes = _REQUEST.unpack_from(data)
    if body_bytes > MAX_BODY_BYTES or path_bytes > MAX_PATH_BYTES or token_bytes > MAX_TOKEN_BYTES:
        raise CallConnectionError(f"a request has {path_bytes} + {token_bytes} + {body_bytes} bytes, which is too long")
    return RequestHeader(number, timeout_ms / 1000, path_bytes, token_bytes, body_bytes)


def encode_response(number: int, body: bytes, *, failed: bool = False) -> bytes:
    """Returns a response: an encoded message, or a ``google.rpc.Status`` if the rpc has failed."""
    return _RESPONSE.pack(len(body), number, failed) + body


def decode_response(data: bytes | bytearray) -> ResponseHeader:
    """Returns the header in the first bytes of a response. Raises CallConnectionError if it is too long."""
    body_bytes, number, failed = _RESPONSE.unpack_from(data)
    if body_bytes > MAX_BODY_BYTES:
        raise CallConnectionError(f"a response has {body_bytes} bytes, which is too long")
    return ResponseHeader(number, bool(failed), body_bytes)
