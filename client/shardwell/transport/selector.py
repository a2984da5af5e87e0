"""This trainer's ways to one shard server: the rpcs, and the best transport there is."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardwell.transport.base import Transport
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.server_guard import ServerGuard
from shardwell.transport.shm_transport import ShmTransport
from shardwell.transport.socket_transport import SocketTransport
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import ConflictError, ShardwellError, UnavailableError
from shardwell_wire.run_identity import RunIdentity

logger = logging.getLogger(__name__)

AnyTransport = TypeVar("AnyTransport")
Result = TypeVar("Result")

_OPEN_TIMEOUT_S = 60.0
"""A server that takes in a large upload may be slow to answer; a transport given up too early costs more."""
_NOTICE_S = 1.0
"""A server may know sooner than this trainer that a transport broke."""

_WARMING_BYTES, _MEASURED_BYTES = 64 << 10, 1 << 20


class ServerConnection:
    """Connected to one shard server for one run.

    Args:
        address: host:port.
        run: The run, of which the server holds a unit already.
        kinds: Transports to try, in this order.
        chunk_bytes: Payload per message over gRPC.
        check: Called while the server is unavailable; raises when trying again is pointless.
        guard: Decides what a failed operation means. By default each fails at once.
        credentials: Of the cluster. None: what ``find_credentials`` finds for the address.

    Raises:
        UnavailableError: None of the transports can be opened.
    """

    def __init__(
        self,
        address: str,
        run: RunIdentity,
        *,
        kinds: Sequence[str],
        chunk_bytes: int,
        check: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
        guard: ServerGuard | None = None,
    ) -> None:
        self.guard = guard or ServerGuard(address)
        self.address, self._run, self._kinds, self._check = address, run, tuple(kinds), check
        self.client = ShardClient(address, chunk_bytes=chunk_bytes, check=check, credentials=credentials)
        self._count_lock, self._open_lock = threading.Lock(), threading.RLock()
        self.shm: ShmTransport | None = None
        self._stream: Transport | None = None
        try:
            if self._shm_is_preferred:
                self.shm = self._try("shm", self._open_shm)
            if self.shm is None:
                self._stream = self._open_stream()
            self.bytes_per_s = self.shm.measure() if self.shm is not None else self._measure(self.stream)
            """Of the transport, measured when it was opened."""
        except BaseException:
            self._close_transports()
            raise
        self.pushes_through_shm = self.shm is not None
        self.received_bytes = self.sent_bytes = 0
        """Streamed, as they travelled."""
        logger.info("shard server at %s: transport %s, %.2f GB/s", address, self.kind, self.bytes_per_s / 1e9)

    @property
    def _shm_is_preferred(self) -> bool:
        """A transport named before it, once open, would be used for everything."""
        return self._kinds[0] == "shm"

    @property
    def kind(self) -> str:
        """Of the transport that is used: ``shm``, ``socket`` or ``grpc``."""
        if self.shm is not None:
            return "shm"
        # Not self.stream, which opens another transport if this one broke: heartbeats, too, say what is used.
        return self._stream.kind if self._stream is not None else self.stream.kind

    @property
    def stream(self) -> Transport:
        """The transport for what cannot go through shared memory; another one if it broke."""
        with self._open_lock:
            if self._stream is None or self._stream.broke:
                self._stream = self._open_stream()
            return self._stream

    def streamed(self, action: Callable[[Transport], Result]) -> Result:
        """Does something over ``stream``, which may be repeated; raises as ``ServerGuard.run`` does."""
        return self.guard.run("a transfer", lambda: self._streamed(action))

    def _streamed(self, action: Callable[[Transport], Result]) -> Result:
        transport = self.stream
        try:
            return action(transport)
        except UnavailableError as error:
            if not transport.broke:
                raise
            logger.warning(
                "shard server at %s: transport %s broke, opening another: %s", self.address, transport.kind, error
            )
        return action(self.stream)

    def controlled(self, action: Callable[[Transport], Result]) -> Result:
        """Does something that only messages go to and fro for: over ``stream`` if there may be one, else by an rpc."""
        return self.by_rpc(action) if self._kinds == ("shm",) else self.streamed(action)

    def by_rpc(self, action: Callable[[ShardClient], Result]) -> Result:
        """Does something by rpcs, which may be repeated; raises as ``ServerGuard.run`` does."""
        return self.guard.run("a request", lambda: action(self.client))

    def through_shm(self, action: Callable[[ShmTransport], Result]) -> Result:
        """Does something over the transport through shared memory, which may be repeated; raises as
        ``ServerGuard.run``."""
        return self.guard.run("a transfer through shared memory", lambda: self._through_shm(action))

    def _through_shm(self, action: Callable[[ShmTransport], Result]) -> Result:
        transport = self._require_shm()
        try:
            return action(transport)
        except (ConflictError, UnavailableError):  # a server knows nothing any more of a transport that broke
            if not transport.broke_within(_NOTICE_S):
                raise
        return action(self._require_shm())

    def _require_shm(self) -> ShmTransport:
        with self._open_lock:
            assert self.shm is not None
            if self.shm.broke:
                logger.warning("shard server at %s: transport shm broke, opening another", self.address)
                self.shm = self._open_shm()
            return self.shm

    def count(self, *, received_bytes: int = 0, sent_bytes: int = 0) -> None:
        """Notes what was streamed; from any thread."""
        with self._count_lock:
            self.received_bytes += received_bytes
            self.sent_bytes += sent_bytes

    def describe(self) -> dict[str, Any]:
        """The transport and what it did, for people."""
        return {
            "server": self.address,
            "transport": self.kind,
            "bytes_per_s": self.bytes_per_s,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
        }

    def stream_gradients(self, reason: ShardwellError | OSError) -> None:
        """There is no room for gradients in shared memory: from now on they are streamed."""
        if self.pushes_through_shm:
            self.pushes_through_shm = False
            logger.warning(
                "shard server at %s: no shared memory for gradients, sending them over %s: %s",
                self.address,
                self.stream.kind,
                reason,
            )

    def release_gradient_buffers(self) -> None:
        """Has the server free the gradient buffers; those that are needed are opened anew. Nothing may be under way."""
        if self.shm is None or not self.shm.has_gradient_buffers:
            return
        transport = self._try("shm", self._open_shm)
        if transport is not None:
            former, self.shm = self.shm, transport
            former.close()

    def close(self) -> None:
        """Closes the transports and cancels what is in flight."""
        self.guard.close()
        self._close_transports()

    def _close_transports(self) -> None:
        for transport in (self.shm, self._stream):
            if transport is not None:
                transport.close()
        self.client.close()

    def _try(self, kind: str, open_transport: Callable[[], AnyTransport]) -> AnyTransport | None:
        try:
            return open_transport()
        except (ShardwellError, OSError) as error:
            # Elsewhere nobody expects shared memory.
            level = logging.INFO if kind == "shm" and not is_this_host(self.address) else logging.WARNING
            logger.log(level, "shard server at %s: no transport %s: %s", self.address, kind, error)
            return None

    def _measure(self, transport: Transport) -> float:
        transport.measure(_WARMING_BYTES, timeout_s=_OPEN_TIMEOUT_S)
        return transport.measure(_MEASURED_BYTES, timeout_s=_OPEN_TIMEOUT_S)

    def _open_shm(self) -> ShmTransport:
        return ShmTransport(self.client, self._run, timeout_s=_OPEN_TIMEOUT_S)

    def _open_stream(self) -> Transport:
        for kind in self._kinds:
            if kind == "grpc":
                return self.client
            if kind == "socket" and (transport := self._try("socket", self._open_socket)) is not None:
                return transport
        self._check()
        raise UnavailableError(
            f"shard server at {self.address}: none of the transports {', '.join(self._kinds)} can be opened; "
            "the log says why: allow grpc too"
        )

    def _open_socket(self) -> SocketTransport:
        return SocketTransport(self.client, self._run, timeout_s=_OPEN_TIMEOUT_S)


def is_this_host(address: str) -> bool:
    """Whether host:port is on this machine, as far as its name tells."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")
