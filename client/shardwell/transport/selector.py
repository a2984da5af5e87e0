"""Selects the transports to one shard server, and opens another when one breaks."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from shardwell.transport.base import ByteCounter, SharedTransport, StreamTransport, Transport
from shardwell.transport.grpc_transport import GrpcTransport, ShardClient
from shardwell.transport.shm_transport import ShmTransport
from shardwell.transport.socket_transport import SocketTransport
from shardwell_wire.errors import (
    ConflictError,
    ShardwellError,
    UnavailableError,
    UsageError,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

AnyTransport = TypeVar("AnyTransport", bound=Transport)

_NOTICE_S = 1.0
"""How long to wait, after the server rejected a session, for this process to notice that the session broke."""

SHARED_TRANSPORTS: dict[str, Callable[[TransportSelector], SharedTransport]] = {
    ShmTransport.name: lambda server: ShmTransport(
        server.client, server.run, server.control, timeout_s=server.open_timeout_s, relay=server.relay
    ),
}
STREAM_TRANSPORTS: dict[str, Callable[[TransportSelector], StreamTransport]] = {
    SocketTransport.name: lambda server: SocketTransport(
        server.client, server.run, server.counter, timeout_s=server.open_timeout_s
    ),
    GrpcTransport.name: lambda server: GrpcTransport(server.client, server.counter),
}

TRANSPORT_NAMES = (*SHARED_TRANSPORTS, *STREAM_TRANSPORTS)
"""Names of all transports, the fastest first."""


def parse_transports(text: str) -> tuple[str, ...]:
    """Returns the transports that a list such as ``shm,grpc`` names, in its order.

    Raises:
        UsageError: The list is no text, a name is unknown, or a transport through shared memory is not the first.
    """
    if not isinstance(text, str):
        raise UsageError(f"transports={text!r}: expected one text with commas, such as {','.join(TRANSPORT_NAMES)!r}")
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or any(name not in TRANSPORT_NAMES for name in names):
        raise UsageError(f"transports={text!r}: expected some of {', '.join(TRANSPORT_NAMES)}, the preferred one first")
    for name in names[1:]:
        if name in SHARED_TRANSPORTS:
            raise UsageError(f"transports={text!r}: {name} must come first, because it is the fastest where it works")
    return names


class TransportSelector:
    """The transports of this trainer to one shard server, for one run. Thread-safe.

    A transport through shared memory is used if it is the first in the list and can be opened. Everything else uses
    the first stream transport that can be opened.

    Args:
        client: Calls the server's rpcs.
        run: The run. The server must own a shard of it already.
        names: Names of the transports to try, in this order.
        check: Called when no transport can be opened; raises if the server is not to be used any more.
        open_timeout_s: Deadline for opening a transport.
        relay: See ``ShmTransport``.

    Raises:
        UnavailableError: None of the transports can be opened.
    """

    client: ShardClient
    run: RunIdentity
    counter: ByteCounter
    """Streamed bytes, in their encoded size."""
    open_timeout_s: float
    relay: shard_pb2.RelaySession | None

    def __init__(
        self,
        client: ShardClient,
        run: RunIdentity,
        *,
        names: Sequence[str],
        check: Callable[[], None],
        open_timeout_s: float,
        relay: shard_pb2.RelaySession | None = None,
    ) -> None:
        self.relay = relay
        self.client, self.run, self.open_timeout_s = client, run, open_timeout_s
        self._names, self._check = tuple(names), check
        self._streams = any(name in STREAM_TRANSPORTS for name in self._names)
        """Whether a stream transport is allowed."""
        self.counter = ByteCounter()
        self._open_lock = threading.RLock()
        self.shared: SharedTransport | None = None
        """The transport through shared memory, if there is one."""
        self._stream: StreamTransport | None = None
        self._not_offered = set[str]()
        """Transports that the server refused because it does not offer them."""
        try:
            if self._names[0] in SHARED_TRANSPORTS:
                self.shared = self._try_open(SHARED_TRANSPORTS, self._names[0])
            if self.shared is None:
                self._stream = self._open_stream()
        except BaseException:
            self.close()
            raise

    @property
    def transport(self) -> Transport:
        """The transport in use."""
        if self.shared is not None:
            return self.shared
        # Heartbeats read this after the stream broke. They must not open another one.
        return self._stream or self.require_stream()

    @property
    def stream_name(self) -> str | None:
        """Name of the stream transport, if one was opened."""
        return None if self._stream is None else self._stream.name

    # ---- the transports of the next attempt ----

    def require_stream(self) -> StreamTransport:
        """Returns the stream transport. Opens one if there is none, or if the last one broke."""
        stream = self._stream
        if stream is not None and not stream.broke:
            return stream
        with self._open_lock:
            if self._stream is None or self._stream.broke:
                self._stream = self._open_stream()
            return self._stream

    def require_shared(self) -> SharedTransport:
        """Returns the transport through shared memory. Opens another if the last one broke."""
        with self._open_lock:
            assert self.shared is not None
            if self.shared.broke:
                logger.warning(
                    "shard server at %s: transport %s broke, opening another", self.client.address, self.shared.name
                )
                self.shared = SHARED_TRANSPORTS[self.shared.name](self)
            return self.shared

    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, timeout_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Sends a control message of a shared transport: over a stream transport, or by an rpc if none is allowed."""
        path = self.require_stream() if self._streams else self.client
        return path.control(request, timeout_s=timeout_s)

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        """Sends a batch of small pushes, on the way of ``control``."""
        path = self.require_stream() if self._streams else self.client
        return path.push_batch(request, timeout_s=timeout_s)

    def lost(self, error: ShardwellError, *, is_shared: bool) -> bool:
        """Returns whether an operation failed because its transport broke.

        Args:
            error: Its error. A server rejects messages about a session of shared memory that broke.
            is_shared: Whether the operation needs the transport through shared memory.
        """
        if is_shared and self.shared is not None and self.shared.session.broke_within(_NOTICE_S):
            return True
        if not isinstance(error, UnavailableError) or self._stream is None or not self._stream.broke:
            return False
        logger.warning(
            "shard server at %s: transport %s broke, opening another: %s",
            self.client.address,
            self._stream.name,
            error,
        )
        return True

    # ---- opening and closing ----

    def _open_stream(self) -> StreamTransport:
        for name in self._names:
            if name in STREAM_TRANSPORTS and (stream := self._try_open(STREAM_TRANSPORTS, name)) is not None:
                return stream
        self._check()
        # A server that does not offer a transport will not offer it later.
        kind = ConflictError if self._not_offered.issuperset(self._names) else UnavailableError
        raise kind(
            f"shard server at {self.client.address}: none of the transports {', '.join(self._names)} can be opened; "
            f"the log says why. Allow grpc too: transports={','.join(self._names)},grpc"
        )

    def _try_open(
        self, openers: Mapping[str, Callable[[TransportSelector], AnyTransport]], name: str
    ) -> AnyTransport | None:
        try:
            return openers[name](self)
        except (ShardwellError, OSError) as error:
            # Shared memory cannot work with a server on another host, and a server need not offer every stream
            # transport. Neither needs a warning.
            expected = (
                not is_this_host(self.client.address) if name in SHARED_TRANSPORTS else type(error) is ConflictError
            )
            if type(error) is ConflictError:
                self._not_offered.add(name)
            level = logging.INFO if expected else logging.WARNING
            logger.log(level, "shard server at %s: no transport %s: %s", self.client.address, name, error)
            return None

    def close(self) -> None:
        """Closes the transports. Transfers in flight fail."""
        for transport in (self.shared, self._stream):
            if transport is not None:
                transport.close()


def is_this_host(address: str) -> bool:
    """Returns whether host:port names this host."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")
