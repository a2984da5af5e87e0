"""How bytes travel between a trainer's tensors and one shard server over plain TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardwell.transport.base import Nearly, unheard
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.rpc import retry
from shardwell.transport.socket_connection import SocketConnection
from shardwell_wire.errors import AccessError, UnavailableError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

Result = TypeVar("Result")

_MAX_IDLE = 8
"""Connections kept for later requests."""


class SocketTransport:
    """A transport over TCP connections of its own, open as long as its rpc; a ``Transport``.

    Connections are opened as requests need them, one for each that is under way. There is no limit:
    a gather that waits for a version must not keep the pushes waiting that the version comes of.

    Args:
        client: Calls the server; stays the caller's.
        run: What requests may be about.
        timeout_s: How long opening may take.

    Raises:
        ConflictError: The server offers no such transport.
        UnavailableError: It cannot be reached.
        DeadlineError: It did not answer in time.
    """

    kind = "socket"

    def __init__(self, client: ShardClient, run: RunIdentity, *, timeout_s: float = 10.0) -> None:
        self._peer = f"socket transport to {client.address}"
        self._host = client.address.rpartition(":")[0].strip("[]")
        self._lock = threading.Lock()
        self._connections: set[SocketConnection] = set()
        self._idle: list[SocketConnection] = []
        self._open = True
        request = shard_pb2.OpenTransportRequest(run=run.name, run_id=run.run_id, kind=common_pb2.TRANSPORT_KIND_SOCKET)
        self._rpc = client.open("OpenTransport", request, timeout_s=timeout_s)
        self._offer: shard_pb2.SocketOffer = self._rpc.answer.socket
        self._rpc.when_ended(self._end)
        try:
            self._give(self._take(timeout_s))  # the port may be out of reach where the rpcs' is not
        except BaseException:
            self.close()
            raise

    def gather(
        self,
        request: shard_pb2.GatherRequest,
        target: memoryview,
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly: Nearly = unheard,
    ) -> int:
        """Fetches one version of a shard, waiting until it exists; see ``Transport``."""
        what = f"Gather of unit {request.unit!r}"
        return self._attempt(
            lambda connection: connection.gather(request, target, what=what, timeout_s=timeout_s, nearly=nearly),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )

    def reduce_scatter(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly: Nearly = unheard,
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes one part of a contribution; see ``Transport``."""
        what = f"ReduceScatter of unit {header.unit!r}"
        return self._attempt(
            lambda connection: connection.reduce_scatter(header, pieces, what=what, timeout_s=timeout_s, nearly=nearly),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )

    def reduce_gradient_buffer(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Hands a gradient buffer over; see ``Transport``."""
        what = f"ReduceGradientBuffer of unit {request.header.unit!r}"
        return self._attempt(
            lambda connection: connection.reduce_gradient_buffer(request, what=what, timeout_s=timeout_s),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )

    def measure(self, size_bytes: int, *, timeout_s: float) -> float:
        """Receives bytes without meaning; returns bytes per second."""
        target = memoryview(bytearray(size_bytes))
        started = time.perf_counter()
        self._attempt(
            lambda connection: connection.measure(target, timeout_s=timeout_s), timeout_s=timeout_s, retry_for_s=0.0
        )
        return size_bytes / (time.perf_counter() - started)

    @property
    def broke(self) -> bool:
        """Whether it ended though nobody gave it up."""
        return self._rpc.broke

    def close(self) -> None:
        """Gives the transport up; what is in flight fails."""
        self._rpc.end()
        self._end()

    def _end(self) -> None:
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
            connection = self._take(timeout_s)
            try:
                return action(connection)
            finally:
                self._give(connection)

        return retry(once, retry_for_s=retry_for_s, while_open=lambda: self._open)

    def _take(self, timeout_s: float) -> SocketConnection:
        """A connection without a request: one that was used before, or a new one."""
        while True:
            with self._lock:
                if not self._open:
                    raise UnavailableError(f"{self._peer} is closed")
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.usable:
                return connection
            self._forget(connection)
        try:
            connection = SocketConnection(
                self._host, self._offer.port, self._offer.token, peer=self._peer, timeout_s=timeout_s
            )
        except AccessError as error:
            raise UnavailableError(f"{self._peer} is closed: {error}") from error
        with self._lock:
            if self._open:
                self._connections.add(connection)
                return connection
        connection.close()
        raise UnavailableError(f"{self._peer} is closed")

    def _give(self, connection: SocketConnection) -> None:
        with self._lock:
            if self._open and connection.in_step and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        self._forget(connection)

    def _forget(self, connection: SocketConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()
