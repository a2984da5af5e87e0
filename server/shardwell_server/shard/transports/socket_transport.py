"""The socket transport: accepts and authenticates connections, and serves their requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

from google.protobuf.message import Message

from shardwell_server.rpc import DEADLINE_MARGIN_S
from shardwell_server.shard.requests import pushes, reading
from shardwell_server.shard.state.store import NamesRun, ShardStore
from shardwell_server.shard.transports import shm_requests
from shardwell_server.shard.transports.base import ServerTransports, measurement_chunks
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire import socket_frames
from shardwell_wire.errors import AccessError, DeadlineError
from shardwell_wire.names import check_names
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.socket_frames import Kind
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

HELLO_LIMIT_S = 5.0
"""A connection that has not sent its token within this time is closed."""

_MAX_CONNECTIONS = 4096
"""Maximum number of connections of all sessions. Further connections are closed at once."""

_ACCEPT_PAUSE_S = 0.5
"""Pause after a connection could not be accepted, such as when the process has no file descriptor left."""


@dataclass(eq=False)
class _Session:
    run: RunIdentity
    token: bytes = field(default_factory=lambda: secrets.token_bytes(socket_frames.TOKEN_BYTES))
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class SocketTransport:
    """A ``ServerTransport`` that listens on one port for the connections of all sessions. Used on the event loop.

    Args:
        store: The server's shards.
        listener: A listening socket. The transport closes it.
        offered: The server's transports. Requests may name gradient buffers of the shm transport.
    """

    kind: ClassVar[int] = common_pb2.TRANSPORT_KIND_SOCKET
    name: ClassVar[str] = "socket"

    def __init__(self, store: ShardStore, listener: socket.socket, offered: ServerTransports) -> None:
        listener.setblocking(False)
        self._store, self._listener, self._offered = store, listener, offered
        self._port: int = listener.getsockname()[1]
        self._sessions: set[_Session] = set()
        self._connections: set[asyncio.Task[None]] = set()

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
    async def open(self, run: RunIdentity) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        """Opens a session; see ``ServerTransport.open``. Its connections end with it."""
        session = _Session(run)
        self._sessions.add(session)
        try:
            yield shard_pb2.OpenTransportResponse(socket=shard_pb2.SocketOffer(port=self._port, token=session.token))
        finally:
            self._sessions.remove(session)
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
            if len(self._connections) >= _MAX_CONNECTIONS:
                logger.warning("rejected a connection: %d connections of socket sessions are open", _MAX_CONNECTIONS)
                peer.close()
                continue
            task = asyncio.ensure_future(self._serve(peer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                connection = Connection(peer)
                try:
                    session = await self._authenticate(connection)
                    await _ConnectionRequests(self._store, session.run, connection, self._offered).serve()
                except Exception as error:
                    await connection.send_error(error)
                    await connection.linger()
            except OSError as error:
                logger.info("a connection of a socket session broke: %s", error)

    async def _authenticate(self, connection: Connection) -> _Session:
        """Returns the session whose token a new connection sends. Closing the session then ends the connection."""
        try:
            async with asyncio.timeout(HELLO_LIMIT_S):
                token = socket_frames.token_of(await connection.exactly(socket_frames.HELLO_BYTES))
        except TimeoutError:
            raise DeadlineError(f"the connection sent no token within {HELLO_LIMIT_S:g} s") from None
        session = next((session for session in self._sessions if hmac.compare_digest(session.token, token)), None)
        if session is None:
            raise AccessError("no open socket session has this token: open a session with OpenTransport")
        task = asyncio.current_task()
        assert task is not None
        session.connections.add(task)
        task.add_done_callback(session.connections.discard)
        await connection.send(socket_frames.encode(Kind.WELCOME))
        return session


class _ConnectionRequests:
    """Serves the requests of one connection, one after the other.

    Args:
        store: The server's shards.
        run: The run that requests must name, by name and id.
        connection: The connection.
        offered: The server's transports.
    """

    def __init__(self, store: ShardStore, run: RunIdentity, connection: Connection, offered: ServerTransports) -> None:
        self._store, self._run, self._connection, self._offered = store, run, connection, offered

    async def serve(self) -> None:
        """Serves requests until the peer closes the connection.

        Raises:
            Exception: No further request can be read. The error has not been sent to the peer.
        """
        while (head := await self._connection.next_request()) is not None:
            kind, size_bytes = head
            timeout_s, request = socket_frames.parse_request(kind, await self._connection.exactly(size_bytes))
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    await self._answer(request, max(0.0, timeout_s - DEADLINE_MARGIN_S))
            except Exception as error:
                reason = (
                    DeadlineError(f"{kind.name} did not finish within {timeout_s:g} s") if limit.expired() else error
                )
                if kind is Kind.REDUCE_SCATTER:
                    raise reason from None  # the rest of the stream may follow, so the connection cannot be reused
                await self._connection.send_error(reason)

    async def _answer(self, request: Message, wait_s: float) -> None:
        check_names(request)
        if isinstance(request, shard_pb2.GatherRequest):
            await self._gather(request, wait_s)
        elif isinstance(request, shard_pb2.MeasureTransportRequest):
            await self._connection.send_stream(measurement_chunks(request, socket_frames.DATA_BYTES))
        elif isinstance(request, shard_pb2.ReduceGradientBufferRequest):
            await self._reduce_gradient_buffer(request, wait_s)
        else:
            assert isinstance(request, shard_pb2.ReduceScatterHeader)
            await self._push(request, wait_s)

    async def _gather(self, request: shard_pb2.GatherRequest, wait_s: float) -> None:
        self._check_run(request)
        async with AsyncExitStack() as stack:
            readable = reading.is_readable(self._store, request)
            async with nullcontext() if readable else self._connection.while_silent():
                found = await stack.enter_async_context(reading.reading(self._store, request, wait_s))
            head = socket_frames.encode(Kind.GATHERING, found.header.SerializeToString())
            await self._connection.send_stream(found.pieces(socket_frames.DATA_BYTES), before=head)

    async def _push(self, header: shard_pb2.ReduceScatterHeader, wait_s: float) -> None:
        self._check_run(header.context)
        response = await pushes.push(self._store, header, self._connection, wait_s)
        await self._connection.send(socket_frames.encode(Kind.REDUCE_SCATTERED, response.SerializeToString()))

    async def _reduce_gradient_buffer(self, request: shard_pb2.ReduceGradientBufferRequest, wait_s: float) -> None:
        self._check_run(request.header.context)
        shm = self._offered.find(ShmTransport)
        response = await shm_requests.reduce_gradient_buffer(self._store, shm, request, wait_s)
        await self._connection.send(socket_frames.encode(Kind.GRADIENT_BUFFER_REDUCED, response.SerializeToString()))

    def _check_run(self, request: NamesRun) -> None:
        if (request.run, request.run_id) != (self._run.name, self._run.run_id):
            raise AccessError(
                f"the socket session belongs to run {self._run.name!r} with id {self._run.run_id}, but the request "
                f"names run {request.run!r} with id {request.run_id or 'none'}: open another session",
                run=request.run,
            )


def listen(host: str) -> socket.socket:
    """Returns a socket that listens on a free port of a host. An IPv6 address may be in brackets."""
    name = host.strip("[]")
    both = name == "::" and socket.has_dualstack_ipv6()
    try:
        family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise SystemExit(f"cannot listen on {host}: {error}") from error


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
