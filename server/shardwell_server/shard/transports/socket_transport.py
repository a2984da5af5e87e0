"""The socket transport: accepts and authenticates connections, and serves their requests.

gRPC needs nothing here: it calls ``servicer.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

from google.protobuf.message import Message

from shardwell_server.serving.authorization import CALLER, check_session
from shardwell_server.serving.limits import Rate
from shardwell_server.serving.rpc import DEADLINE_MARGIN_S
from shardwell_server.shard.requests import pushes, weight_reads
from shardwell_server.shard.state.shard_store import NamesRun, ShardStore
from shardwell_server.shard.transports import batch_requests, shm_transport
from shardwell_server.shard.transports.server_transport import ServerTransports, measurement_chunks
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import Kind
from shardwell_wire.errors import AccessError, DeadlineError, TooManyRequestsError
from shardwell_wire.model.names import RunIdentity, check_names
from shardwell_wire.security.tls import Encryption, Tls, must_encrypt
from shardwell_wire.security.tokens import Identity
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

HELLO_LIMIT_S = 5.0
"""A connection that has not sent its token within this time is closed."""

MAX_CONNECTIONS, MAX_SESSION_CONNECTIONS = 4096, 64
"""Maximum number of connections of all sessions, and of one. A trainer keeps a few per server."""

MAX_UNPROVEN = 128
"""Maximum number of connections that have not sent the token of a session. One more closes the oldest of them. A client
sends its token within milliseconds, so that only connections that wait for nothing get old."""

_UNPROVEN_DRAIN_BYTES = 64 << 10
"""Bytes that are read from a connection after its token was rejected, so that the error arrives."""

ACCEPTED_PER_S, ACCEPT_BURST = 200.0, 1000
"""Connections that are accepted per second, and at once after a pause. The others wait in the kernel's queue."""

_ENCRYPTION = {
    Encryption.NEVER: shard_pb2.SOCKET_ENCRYPTION_NEVER,
    Encryption.OFF_HOST: shard_pb2.SOCKET_ENCRYPTION_OFF_HOST,
    Encryption.ALWAYS: shard_pb2.SOCKET_ENCRYPTION_ALWAYS,
}
"""Values of a ``SocketOffer``, by those of the option ``encrypt``. The numbers are equal."""

_ACCEPT_PAUSE_S = 0.5
"""Pause after a connection could not be accepted, such as when the process has no file descriptor left."""


@dataclass(eq=False)
class _Session:
    run: RunIdentity
    caller: Identity | None
    token: bytes = field(default_factory=lambda: secrets.token_bytes(socket_frames.TOKEN_BYTES), repr=False)
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class SocketTransport:
    """A ``ServerTransport`` that listens on one port for the connections of all sessions. Used on the event loop.

    Args:
        listener: A listening socket. The transport closes it.
        offered: The server's transports. Requests may name gradient buffers of the shm transport.
        tls: TLS of the server. None: connections are not encrypted.
    """

    kind: ClassVar[int] = common_pb2.TRANSPORT_KIND_SOCKET
    name: ClassVar[str] = "socket"

    def __init__(
        self, store: ShardStore, listener: socket.socket, offered: ServerTransports, tls: Tls | None = None
    ) -> None:
        listener.setblocking(False)
        self._store, self._listener, self._offered, self._tls = store, listener, offered, tls
        self._encryption = (
            shard_pb2.SOCKET_ENCRYPTION_UNSPECIFIED if tls is None else _ENCRYPTION[tls.options.encryption]
        )
        self._port: int = listener.getsockname()[1]
        self._sessions: dict[bytes, _Session] = {}
        """Open sessions, by the digest of their token: how long a search takes then reveals nothing about a token."""
        self._connections: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}
        """Connections that have not sent a token, or a wrong one. Oldest first."""
        self._accepted = Rate(ACCEPTED_PER_S, ACCEPT_BURST)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Accepts connections while the block runs, then closes all connections."""
        accepting = asyncio.ensure_future(self._accept())
        try:
            yield
        finally:
            await _cancel(accepting, *self._connections)
            self._listener.close()

    @asynccontextmanager
    async def open(self, run: RunIdentity, caller: Identity | None) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        """Opens a session; see ``ServerTransport.open``. Its connections end with it."""
        session = _Session(run, caller)
        self._sessions[_digest(session.token)] = session
        try:
            offer = shard_pb2.SocketOffer(port=self._port, token=session.token, encryption=self._encryption)
            yield shard_pb2.OpenTransportResponse(socket=offer)
        finally:
            del self._sessions[_digest(session.token)]
            await _cancel(*session.connections)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            task = asyncio.ensure_future(self._serve(peer))
            self._connections.add(task)
            self._unproven[task] = None
            task.add_done_callback(self._end)
            await asyncio.sleep(self._accepted.count(""))

    def _end(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._unproven.pop(task, None)

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                connection = Connection(peer)
                try:
                    session = await self._authenticate(connection, peer)
                    CALLER.set(session.caller)
                    await StreamRequests(self._store, self._offered, connection, session).serve()
                except Exception as error:
                    await connection.send_error(error)
                    proven = asyncio.current_task() not in self._unproven
                    await connection.linger(None if proven else _UNPROVEN_DRAIN_BYTES)
            except OSError as error:
                logger.info("a connection of a socket session broke: %s", error)

    async def _authenticate(self, connection: Connection, peer: socket.socket) -> _Session:
        """Returns the session whose token a new connection sends. Closing the session then ends the connection."""
        try:
            async with asyncio.timeout(HELLO_LIMIT_S):
                await self._encrypt(connection, peer)
                token = socket_frames.token_of(await connection.exactly(socket_frames.HELLO_BYTES))
        except TimeoutError:
            raise DeadlineError(f"the connection sent no token within {HELLO_LIMIT_S:g} s") from None
        session = self._sessions.get(_digest(token))
        if session is None:
            raise AccessError("no open socket session has this token: open a session with OpenTransport")
        proven = len(self._connections) - len(self._unproven)
        if len(session.connections) >= MAX_SESSION_CONNECTIONS or proven >= MAX_CONNECTIONS:
            raise TooManyRequestsError(
                f"{len(session.connections)} connections of this socket session are open, {proven} of all sessions; "
                f"the limits are {MAX_SESSION_CONNECTIONS} and {MAX_CONNECTIONS}: close some before opening more"
            )
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)
        session.connections.add(task)
        task.add_done_callback(session.connections.discard)
        await connection.send(socket_frames.encode(Kind.WELCOME))
        return session

    async def _encrypt(self, connection: Connection, peer: socket.socket) -> None:
        """Encrypts a connection if the client begins a TLS handshake. Raises AccessError if it had to begin one."""
        if self._tls is None:
            return
        if await connection.wants_tls():
            context = self._tls.current.server_context
            assert context is not None
            await connection.encrypt(context)
        elif must_encrypt(self._encryption, peer):
            raise AccessError(
                f"this server encrypts connections (encrypt={self._tls.options.encrypt}), and the connection does not "
                "use TLS: if a proxy makes both ends believe that they share a host, set encrypt=always on the client"
            )


_RPCS = {
    shard_pb2.GatherRequest: "Gather",
    shard_pb2.MeasureTransportRequest: "MeasureTransport",
    shard_pb2.ReduceScatterHeader: "ReduceScatter",
    shard_pb2.ReduceGradientBufferRequest: "ReduceGradientBuffer",
    shard_pb2.ReduceBatchRequest: "ReduceBatch",
    shard_pb2.GatherBatchRequest: "GatherBatch",
}
"""The rpc that each request stands for."""


class StreamRequests:
    """Serves the requests of one connection, one after the other.

    Args:
        offered: The server's transports.
        session: Its session. Requests must name the session's run, by name and id.
    """

    def __init__(self, store: ShardStore, offered: ServerTransports, connection: Connection, session: _Session) -> None:
        self._store, self._offered, self._connection = store, offered, connection
        self._run, self._caller = session.run, session.caller

    async def serve(self) -> None:
        """Serves requests until the peer closes the connection.

        Raises:
            Exception: No further request can be read. The error has not been sent to the peer.
        """
        while (received := await self._connection.next_request()) is not None:
            name, timeout_s, request = received
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    await self._answer(request, max(0.0, timeout_s - DEADLINE_MARGIN_S))
            except Exception as error:
                reason = DeadlineError(f"{name} did not finish within {timeout_s:g} s") if limit.expired() else error
                if isinstance(request, shard_pb2.ReduceScatterHeader):
                    raise reason from None  # the rest of the stream may follow, so the connection cannot be reused
                await self._connection.send_error(reason)

    async def _answer(self, request: Message, wait_s: float) -> None:
        check_names(request)
        if self._caller is not None:
            check_session(self._caller, _RPCS[type(request)])
        if isinstance(request, shard_pb2.GatherRequest):
            await self._gather(request, wait_s)
        elif isinstance(request, shard_pb2.MeasureTransportRequest):
            await self._connection.send_stream(measurement_chunks(request, self._connection.piece_bytes))
        elif isinstance(request, shard_pb2.ReduceGradientBufferRequest):
            await self._reduce_gradient_buffer(request, wait_s)
        elif isinstance(request, shard_pb2.ReduceBatchRequest):
            await self._reduce_batch(request, wait_s)
        elif isinstance(request, shard_pb2.GatherBatchRequest):
            await self._gather_batch(request, wait_s)
        else:
            assert isinstance(request, shard_pb2.ReduceScatterHeader)
            await self._push(request, wait_s)

    async def _gather(self, request: shard_pb2.GatherRequest, wait_s: float) -> None:
        self._check_run(request)
        async with AsyncExitStack() as stack:
            run, shard = weight_reads.requested_shard(self._store, request)
            readable = weight_reads.is_readable(shard, request)
            async with nullcontext() if readable else self._connection.while_silent():
                found = await stack.enter_async_context(weight_reads.reading(self._store, run, shard, request, wait_s))
            await self._connection.send_stream(
                found.pieces(self._connection.piece_bytes), found.header, found.check_unchanged
            )
            self._store.traffic.gathered_bytes += found.size_bytes

    async def _push(self, header: shard_pb2.ReduceScatterHeader, wait_s: float) -> None:
        self._check_run(header.context)
        response = await pushes.push(self._store, header, self._connection, wait_s)
        await self._connection.send_response(response)

    async def _reduce_gradient_buffer(self, request: shard_pb2.ReduceGradientBufferRequest, wait_s: float) -> None:
        self._check_run(request.header.context)
        shm = self._offered.find(ShmTransport)
        response = await shm_transport.reduce_gradient_buffer(self._store, shm, request, wait_s)
        await self._connection.send_response(response)

    async def _gather_batch(self, request: shard_pb2.GatherBatchRequest, wait_s: float) -> None:
        self._check_run(request)
        connection = self._connection
        groups = batch_requests.groups(self._store, request, wait_s, connection.peer, connection.while_silent)
        async with aclosing(groups):
            async for group in groups:
                await connection.send_whole(group.memory(), group.response, group.check)

    async def _reduce_batch(self, request: shard_pb2.ReduceBatchRequest, wait_s: float) -> None:
        self._check_run(request)
        response = await batch_requests.reduce_batch(self._store, self._offered, request, wait_s, self._connection.peer)
        await self._connection.send_response(response)

    def _check_run(self, request: NamesRun) -> None:
        if (request.run, request.run_id) != (self._run.name, self._run.run_id):
            raise AccessError(
                f"the socket session belongs to run {self._run.name!r} with id {self._run.run_id}, but the "
                f"request names run {request.run!r} with id {request.run_id or 'none'}: open another session",
                run=request.run,
            )


def _digest(token: bytes) -> bytes:
    return hashlib.blake2b(token).digest()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
