"""The interface of a shard server's transports, and the lookup of the transport that OpenTransport opens.

CONTRIBUTING.md lists the steps of adding a transport. ``servicer.py`` builds them, and serves gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import ClassVar, Protocol, TypeVar

from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import ConflictError, InvalidRequestError
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.tokens import Identity
from shardwell_wire.v1 import shard_pb2

_MAX_MEASURED_BYTES = 64 << 20


class ServerTransport(Protocol):
    """One transport that a server offers. Used on the event loop."""

    kind: ClassVar[int]
    """The value of ``OpenTransportRequest.kind`` that selects the transport."""
    name: ClassVar[str]
    """Name in errors."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Accepts clients while the block runs."""
        ...

    def open(
        self, run: RunIdentity, caller: Identity | None
    ) -> AbstractAsyncContextManager[shard_pb2.OpenTransportResponse]:
        """Opens a session for one trainer and one run. The session ends when the block ends.

        Args:
            run: The run. Requests over the session must name the same id: another run may have the same name.
            caller: Who opens the session. None: the cluster admits every caller.

        Returns:
            The answer for the trainer.

        Raises:
            CapacityError: There is no memory for another session.
        """
        ...


AnyTransport = TypeVar("AnyTransport", bound=ServerTransport)


class ServerTransports:
    """The transports that one server offers besides gRPC."""

    def __init__(self, server_id: str) -> None:
        self._server_id = server_id
        self._by_kind: dict[int, ServerTransport] = {}

    def add(self, transport: ServerTransport) -> None:
        """Offers a transport."""
        self._by_kind[transport.kind] = transport

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Accepts clients over all transports while the block runs."""
        async with AsyncExitStack() as stack:
            for transport in self._by_kind.values():
                await stack.enter_async_context(transport.serving())
            yield

    def open(
        self, kind: int, run: RunIdentity, caller: Identity | None
    ) -> AbstractAsyncContextManager[shard_pb2.OpenTransportResponse]:
        """Opens a session; see ``ServerTransport.open``. Raises ConflictError if the kind is not offered."""
        transport = self._by_kind.get(kind)
        if transport is None:
            raise ConflictError(f"server {self._server_id!r} does not offer transport kind {kind}: use another one")
        return transport.open(run, caller)

    def find(self, transport: type[AnyTransport]) -> AnyTransport:
        """Returns the transport of a class. Raises ConflictError if the server does not offer it."""
        found = self._by_kind.get(transport.kind)
        if not isinstance(found, transport):
            raise ConflictError(
                f"server {self._server_id!r} does not offer the {transport.name} transport: use another one"
            )
        return found


def measurement_chunks(request: shard_pb2.MeasureTransportRequest, default_bytes: int) -> Iterator[memoryview]:
    """Yields the chunks of zeros that MeasureTransport sends.

    Args:
        default_bytes: Size of a chunk if the request does not set one.

    Raises:
        InvalidRequestError: The request exceeds a limit.
    """
    if request.size_bytes > _MAX_MEASURED_BYTES or request.chunk_bytes > chunk_streams.MAX_CHUNK_BYTES:
        raise InvalidRequestError(
            f"size_bytes is {request.size_bytes} and chunk_bytes is {request.chunk_bytes}, expected at most "
            f"{_MAX_MEASURED_BYTES} and {chunk_streams.MAX_CHUNK_BYTES}"
        )
    chunk_bytes = max(request.chunk_bytes or default_bytes, chunk_streams.MIN_CHUNK_BYTES)
    zeros = memoryview(bytes(min(chunk_bytes, request.size_bytes)))
    return (zeros[: request.size_bytes - start] for start in range(0, request.size_bytes, chunk_bytes))
