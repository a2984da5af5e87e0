"""Serves the requests of one connection of a stream transport.

A new stream transport implements ``StreamConnection``. Only the socket transport uses this module so far: gRPC calls
``servicer.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from typing import ClassVar, Protocol

from google.protobuf.message import Message

from shardwell_server.authorization import check_session
from shardwell_server.rpc import DEADLINE_MARGIN_S
from shardwell_server.shard.requests import pushes, reading
from shardwell_server.shard.requests.streams import IncomingStream
from shardwell_server.shard.state.store import NamesRun, ShardStore
from shardwell_server.shard.transports import batch_requests, gather_batches, shm_requests
from shardwell_server.shard.transports.base import ServerTransports, measurement_chunks
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_wire.errors import AccessError, DeadlineError
from shardwell_wire.names import check_names
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.tokens import Identity
from shardwell_wire.v1 import shard_pb2

_RPCS = {
    shard_pb2.GatherRequest: "Gather",
    shard_pb2.MeasureTransportRequest: "MeasureTransport",
    shard_pb2.ReduceScatterHeader: "ReduceScatter",
    shard_pb2.ReduceGradientBufferRequest: "ReduceGradientBuffer",
    shard_pb2.ReduceBatchRequest: "ReduceBatch",
    shard_pb2.GatherBatchRequest: "GatherBatch",
}
"""The rpc that each request stands for."""


class StreamConnection(IncomingStream, Protocol):
    """One connection of a stream transport. After a ReduceScatter request, it is the stream of the gradient.

    Every method raises OSError if the connection broke, and DeadlineError if a transfer is too slow.
    """

    piece_bytes: ClassVar[int]
    """Size of the pieces of a stream that is sent."""
    peer: str
    """Address of the peer, for the log."""

    async def next_request(self) -> tuple[str, float, Message] | None:
        """Waits without limit for the next request. None: the peer has closed the connection.

        Returns:
            Name of the request for errors, its timeout in seconds, and its message.

        Raises:
            InvalidRequestError: The bytes are not a request.
        """
        ...

    async def send_response(self, response: Message) -> None:
        """Sends a response without a stream."""
        ...

    async def send_stream(
        self, pieces: Iterable[memoryview], header: Message | None = None, check: Callable[[], None] | None = None
    ) -> None:
        """Sends a header and a stream. After an error that ``pieces`` raises, ``send_error`` can be called.

        Args:
            pieces: Pieces of the stream. Raises if the memory of a piece has changed when the next one is requested.
            header: Message to send first. None: the stream has no header.
            check: Raises if the memory of the last piece has changed: its rest is not sent. None: it does not change.
        """
        ...

    async def send_whole(self, parts: Sequence[memoryview], header: Message, check: Callable[[], None]) -> None:
        """Sends a header and a stream whose memory may change while this method waits for the peer.

        Memory that has changed is not sent: it may belong to another run.

        Args:
            parts: The stream. At most ``piece_bytes``.
            header: Message to send first.
            check: Raises if the memory has changed. ``send_error`` can be called then.
        """
        ...

    async def send_error(self, reason: Exception) -> None:
        """Sends an error in place of a response, or of the rest of a stream. Raises OSError if that is impossible."""
        ...

    def while_silent(self) -> AbstractAsyncContextManager[None]:
        """Cancels the block if the peer closes the connection, or sends before it has the answer."""
        ...


class StreamRequests:
    """Serves the requests of one connection, one after the other.

    Args:
        name: Name of the transport, for errors.
        store: The server's shards.
        run: The run that requests must name, by name and id.
        connection: The connection.
        offered: The server's transports.
        caller: Who opened the session. None: the cluster admits every caller.
    """

    def __init__(
        self,
        name: str,
        store: ShardStore,
        run: RunIdentity,
        connection: StreamConnection,
        offered: ServerTransports,
        caller: Identity | None,
    ) -> None:
        self._name, self._store, self._run, self._caller = name, store, run, caller
        self._connection, self._offered = connection, offered

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
            run, shard = reading.requested_shard(self._store, request)
            readable = reading.is_readable(shard, request)
            async with nullcontext() if readable else self._connection.while_silent():
                found = await stack.enter_async_context(reading.reading(self._store, run, shard, request, wait_s))
            await self._connection.send_stream(
                found.pieces(self._connection.piece_bytes), found.header, found.check_unchanged
            )

    async def _push(self, header: shard_pb2.ReduceScatterHeader, wait_s: float) -> None:
        self._check_run(header.context)
        response = await pushes.push(self._store, header, self._connection, wait_s)
        await self._connection.send_response(response)

    async def _reduce_gradient_buffer(self, request: shard_pb2.ReduceGradientBufferRequest, wait_s: float) -> None:
        self._check_run(request.header.context)
        shm = self._offered.find(ShmTransport)
        response = await shm_requests.reduce_gradient_buffer(self._store, shm, request, wait_s)
        await self._connection.send_response(response)

    async def _gather_batch(self, request: shard_pb2.GatherBatchRequest, wait_s: float) -> None:
        self._check_run(request)
        connection = self._connection
        groups = gather_batches.groups(self._store, request, wait_s, connection.peer, connection.while_silent)
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
                f"the {self._name} session belongs to run {self._run.name!r} with id {self._run.run_id}, but the "
                f"request names run {request.run!r} with id {request.run_id or 'none'}: open another session",
                run=request.run,
            )
