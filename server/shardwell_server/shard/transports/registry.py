"""The transports that a shard server offers: one entry for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwell_server.serving.call_server import listen
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.transports.server_transport import ServerTransport, ServerTransports
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_server.shard.transports.socket_transport import SocketTransport
from shardwell_wire.security.tls import Tls


@dataclass(frozen=True, kw_only=True)
class TransportResources:
    """What transports are built from."""

    store: ShardStore
    host: str
    """Host to listen on, without a port."""
    shared: SharedMemory | None
    """None: the server offers no shared memory."""
    tls: Tls | None = None
    """None: connections of the socket transport are not encrypted."""


def _build_shm(resources: TransportResources, _: ServerTransports) -> ServerTransport | None:
    return None if resources.shared is None else ShmTransport(resources.shared, resources.store.memory)


def _build_socket(resources: TransportResources, offered: ServerTransports) -> ServerTransport:
    return SocketTransport(resources.store, listen(resources.host), offered, resources.tls)


TRANSPORTS: tuple[Callable[[TransportResources, ServerTransports], ServerTransport | None], ...] = (
    _build_shm,
    _build_socket,
)
"""Each entry builds one transport, or returns None if this server cannot offer it."""


def build_transports(server_id: str, resources: TransportResources) -> ServerTransports:
    """Builds every transport that a server can offer."""
    offered = ServerTransports(server_id)
    for build in TRANSPORTS:
        if (transport := build(resources, offered)) is not None:
            offered.add(transport)
    return offered
