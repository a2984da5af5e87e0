"""The transport of kind socket: who may connect to it, and for how long."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shardwell_server.shard.requests.socket_requests import Requests
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.transports.shm_transport import ShmTransports
from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire import frames
from shardwell_wire.errors import AccessError, DeadlineError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

HELLO_LIMIT_S = 5.0
"""A connection that has not shown a token by then is closed."""

_MAX_CONNECTIONS = 4096
"""Of all transports together; further ones are closed at once."""

_ACCEPT_PAUSE_S = 0.5
"""After a connection could not be accepted, as when there are no file descriptors left."""


@dataclass(eq=False)
class _Transport:
    run: RunIdentity
    token: bytes = field(default_factory=lambda: secrets.token_bytes(frames.TOKEN_BYTES))
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class SocketTransports:
    """Offers transports of kind socket on one port; a ``TransportOffer``.

    Args:
        store: What requests are about.
        listener: Listens already; owned from now on.
        shm: The transports whose gradient buffers requests may name, if there are any.
    """

    def __init__(self, store: ShardStore, listener: socket.socket, shm: ShmTransports | None = None) -> None:
        listener.setblocking(False)
        self._store, self._listener, self._shm = store, listener, shm
        self._port: int = listener.getsockname()[1]
        self._transports: set[_Transport] = set()
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def accepting(self) -> AsyncIterator[None]:
        """Lets clients connect until the block ends; then no connection is left."""
        accepting = asyncio.ensure_future(self._accept())
        try:
            yield
        finally:
            await _end(accepting, *self._connections)
            self._listener.close()

    @asynccontextmanager
    async def open(self, run: RunIdentity) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        """A transport; its connections end with it."""
        transport = _Transport(run)
        self._transports.add(transport)
        try:
            yield shard_pb2.OpenTransportResponse(socket=shard_pb2.SocketOffer(port=self._port, token=transport.token))
        finally:
            self._transports.remove(transport)
            await _end(*transport.connections)

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
                logger.warning("%d connections of socket transports are open: refused another", _MAX_CONNECTIONS)
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
                    transport = await self._welcome(connection)
                    await Requests(self._store, transport.run, connection, self._shm).serve()
                except Exception as error:
                    await connection.refuse(error)
                    await connection.linger()
            except OSError as error:
                logger.info("a connection of a socket transport broke: %s", error)

    async def _welcome(self, connection: Connection) -> _Transport:
        """The transport whose token a new connection shows; closing the transport ends the connection from now on."""
        try:
            async with asyncio.timeout(HELLO_LIMIT_S):
                token = frames.token_of(await connection.exactly(frames.HELLO_BYTES))
        except TimeoutError:
            raise DeadlineError(f"no token within {HELLO_LIMIT_S:g} s") from None
        transport = next(
            (transport for transport in self._transports if hmac.compare_digest(transport.token, token)), None
        )
        if transport is None:
            raise AccessError("no transport that is open has this token")
        task = asyncio.current_task()
        assert task is not None
        transport.connections.add(task)
        task.add_done_callback(transport.connections.discard)
        await connection.send(frames.encode(frames.Kind.WELCOME))
        return transport


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of a host; IPv6 in brackets, as gRPC has it."""
    name = host.strip("[]")
    both = name == "::" and socket.has_dualstack_ipv6()
    try:
        family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise SystemExit(f"cannot listen on {host}: {error}") from error


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
