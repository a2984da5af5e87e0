"""The transport over TCP: frames from and to the memory of tensors, without copies in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardwell.transport.base import BatchAnswers, ByteCounter, NearlyDone, StreamTransport, ignore
from shardwell.transport.incoming import Place
from shardwell.transport.shard_client import ShardClient
from shardwell.transport.socket_connection import SocketConnection
from shardwell_wire.errors import AccessError, UnavailableError
from shardwell_wire.retry import retry
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

Result = TypeVar("Result")

_MAX_IDLE = 8
"""Idle connections kept for later requests."""


class SocketTransport(StreamTransport):
    """Moves bytes over TCP connections, within a session that ends with its rpc.

    Connections are opened on demand, one for each request in flight. Their number is not limited: fetches that wait for
    a version must not block the pushes that produce this version.

    Args:
        client: Calls the server. The caller closes it.
        run: The run. The server rejects requests for other runs.
        counter: See ``StreamTransport``.
        timeout_s: Deadline for opening the session and the first connection.

    Raises:
        ConflictError: The server does not offer the transport.
        UnavailableError: The server or its port cannot be reached.
        DeadlineError: The server did not answer in time.
    """

    name = "socket"
    kind = common_pb2.TRANSPORT_KIND_SOCKET

    def __init__(
        self, client: ShardClient, run: RunIdentity, counter: ByteCounter | None = None, *, timeout_s: float = 10.0
    ) -> None:
        super().__init__(counter)
        self._peer, self._endpoint = f"socket transport to {client.address}", client.endpoint
        self._lock = threading.Lock()
        self._connections: set[SocketConnection] = set()
        self._idle: list[SocketConnection] = []
        self._open = True
        request = shard_pb2.OpenTransportRequest(run=run.name, run_id=run.run_id, kind=self.kind)
        self._rpc = client.open("OpenTransport", request, timeout_s=timeout_s)
        self._offer: shard_pb2.SocketOffer = self._rpc.answer.socket
        self._rpc.when_ended(self._end)
        try:
            # A firewall may block this port and not the port of the rpcs.
            self._release(self._acquire(timeout_s))
        except BaseException:
            self.close()
            raise

    def fetch_stream(
        self,
        request: shard_pb2.GatherRequest,
        place: Place,
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> int:
        """See ``StreamTransport``."""
        what = f"Gather of unit {request.unit!r}"
        return self._attempt(
            lambda connection: connection.fetch_stream(
                request, place, what=what, timeout_s=timeout_s, nearly_done=nearly_done
            ),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )

    def push_stream(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> shard_pb2.ReduceScatterResponse:
        """See ``StreamTransport``."""
        what = f"ReduceScatter of unit {header.unit!r}"
        return self._attempt(
            lambda connection: connection.push_stream(
                header, pieces, what=what, timeout_s=timeout_s, nearly_done=nearly_done
            ),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )

    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """See ``StreamTransport``."""
        what = f"ReduceGradientBuffer of unit {request.header.unit!r}"
        return self._attempt(
            lambda connection: connection.control(request, what=what, timeout_s=timeout_s),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )

    def fetch_batch(self, request: shard_pb2.GatherBatchRequest, answers: BatchAnswers, *, timeout_s: float) -> None:
        """See ``StreamTransport``."""
        self._attempt(
            lambda connection: connection.fetch_batch(request, answers, timeout_s=timeout_s),
            timeout_s=timeout_s,
            retry_for_s=0.0,
        )

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        """See ``StreamTransport``."""
        return self._attempt(
            lambda connection: connection.push_batch(request, timeout_s=timeout_s), timeout_s=timeout_s, retry_for_s=0.0
        )

    def measure_stream(self, size_bytes: int, *, timeout_s: float) -> float:
        """See ``StreamTransport``."""
        target = memoryview(bytearray(size_bytes))
        started = time.perf_counter()
        self._attempt(
            lambda connection: connection.measure(target, timeout_s=timeout_s), timeout_s=timeout_s, retry_for_s=0.0
        )
        return size_bytes / (time.perf_counter() - started)

    @property
    def broke(self) -> bool:
        """See ``Transport``."""
        return self._rpc.broke

    def close(self) -> None:
        """See ``Transport``."""
        self._rpc.end()
        self._end()

    def _end(self) -> None:
        """Closes all connections. Also called by a thread of gRPC when the session's rpc ends."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
            for connection in self._connections:
                connection.abort()
            self._connections.difference_update(idle)
        for connection in idle:
            connection.close()

    def _attempt(self, action: Callable[[SocketConnection], Result], *, timeout_s: float, retry_for_s: float) -> Result:
        def once() -> Result:
            connection = self._acquire(timeout_s)
            try:
                return action(connection)
            finally:
                self._release(connection)

        def check(error: Exception) -> None:
            if not self._open:
                raise error

        return retry(once, limit_s=retry_for_s, check=check)

    def _acquire(self, timeout_s: float) -> SocketConnection:
        """Returns a connection without a request: an idle one, or a new one."""
        while True:
            with self._lock:
                if not self._open:
                    raise UnavailableError(f"{self._peer} is closed")
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.usable:
                return connection
            self._discard(connection)
        try:
            connection = SocketConnection(self._endpoint, self._offer, peer=self._peer, timeout_s=timeout_s)
        except AccessError as error:
            raise UnavailableError(f"{self._peer} is closed: {error}") from error
        with self._lock:
            if self._open:
                self._connections.add(connection)
                return connection
        connection.close()
        raise UnavailableError(f"{self._peer} is closed")

    def _release(self, connection: SocketConnection) -> None:
        with self._lock:
            if self._open and connection.is_idle and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: SocketConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()
