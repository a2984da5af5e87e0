"""The socket transport: accepts and authenticates connections."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from shardwell_server.authorization import CALLER
from shardwell_server.limits import Rate
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.transports.base import ServerTransports
from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_server.shard.transports.stream_requests import StreamRequests
from shardwell_wire import socket_frames
from shardwell_wire.errors import AccessError, DeadlineError, TooManyRequestsError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.socket_frames import Kind
from shardwell_wire.tls import Encryption, Tls, must_encrypt
from shardwell_wire.tokens import Identity
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
        store: The server's shards.
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
                    requests = StreamRequests(
                        self.name, self._store, session.run, connection, self._offered, session.caller
                    )
                    await requests.serve()
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


def _digest(token: bytes) -> bytes:
    return hashlib.blake2b(token).digest()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
