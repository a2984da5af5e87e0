"""How bytes travel between a trainer's tensors and one shard server over plain TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from shardwell.lane_connection import LaneConnection
from shardwell.rpc import retry
from shardwell.shard_client import ShardClient
from shardwell_wire.errors import AccessError, DeadlineError, UnavailableError, from_rpc_error
from shardwell_wire.v1 import common_pb2, shard_pb2

Result = TypeVar("Result")

_MAX_IDLE = 8
"""Connections kept for later requests."""


class SocketLane:
    """A lane over TCP connections of its own, open as long as its rpc; a ``Lane``.

    Connections are opened as requests need them, one for each that is under way. There is no limit:
    a gather that waits for a version must not keep the pushes waiting that the version comes of.

    Args:
        client: Calls the server; stays the caller's.
        run: What requests may be about.
        timeout_s: How long opening may take.

    Raises:
        ConflictError: The server offers no such lane.
        UnavailableError: It cannot be reached.
        DeadlineError: It did not answer in time.
    """

    kind = "socket"

    def __init__(self, client: ShardClient, run: str, *, timeout_s: float = 10.0) -> None:
        self._peer = f"socket lane to {client.address}"
        self._host = client.address.rpartition(":")[0].strip("[]")
        self._lock = threading.Lock()
        self._connections: set[LaneConnection] = set()
        self._idle: list[LaneConnection] = []
        self._open = True
        self._rpc = client.byte_response_stub("OpenLane")(
            shard_pb2.OpenLaneRequest(run=run, kind=common_pb2.LANE_KIND_SOCKET)
        )
        self._offer = self._first_answer(client.peer, timeout_s)
        if not self._rpc.add_callback(self._end):
            self._end()
        try:
            self._give(self._take(timeout_s))  # the port may be out of reach where the rpcs' is not
        except BaseException:
            self.close()
            raise

    def gather(
        self, request: shard_pb2.GatherRequest, target: memoryview, *, timeout_s: float, retry_for_s: float
    ) -> int:
        """Fetches one version of a shard, waiting until it exists; see ``Lane``."""
        what = f"Gather of unit {request.unit!r}"
        return self._attempt(
            lambda connection: connection.gather(request, target, what=what, timeout_s=timeout_s),
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
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes one part of a contribution; see ``Lane``."""
        what = f"ReduceScatter of unit {header.unit!r}"
        return self._attempt(
            lambda connection: connection.reduce_scatter(header, pieces, what=what, timeout_s=timeout_s),
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
        )

    def close(self) -> None:
        """Gives the lane up; what is in flight fails."""
        self._rpc.cancel()
        self._end()

    def _first_answer(self, peer: str, timeout_s: float) -> shard_pb2.SocketOffer:
        # Not the rpc's deadline: that would end the lane too.
        timer, give_up = threading.Timer(timeout_s, self._rpc.cancel), time.monotonic() + timeout_s
        timer.start()
        try:
            return shard_pb2.OpenLaneResponse.FromString(next(self._rpc)).socket
        except grpc.RpcError as error:
            if time.monotonic() >= give_up:
                raise DeadlineError(f"{peer} did not open a socket lane within {timeout_s:g} s") from error
            raise from_rpc_error(error, peer) from error
        finally:
            timer.cancel()

    def _end(self) -> None:
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
            for connection in self._connections:
                connection.abort()
            self._connections.difference_update(idle)
        for connection in idle:
            connection.close()

    def _attempt(self, action: Callable[[LaneConnection], Result], *, timeout_s: float, retry_for_s: float) -> Result:
        def once() -> Result:
            connection = self._take(timeout_s)
            try:
                return action(connection)
            finally:
                self._give(connection)

        return retry(once, retry_for_s=retry_for_s, while_open=lambda: self._open)

    def _take(self, timeout_s: float) -> LaneConnection:
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
            connection = LaneConnection(
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

    def _give(self, connection: LaneConnection) -> None:
        with self._lock:
            if self._open and connection.in_step and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        self._forget(connection)

    def _forget(self, connection: LaneConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()
