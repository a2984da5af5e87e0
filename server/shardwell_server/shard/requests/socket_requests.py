"""Answers the requests on one connection of a socket transport."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext

from google.protobuf.message import Message

from shardwell_server.rpc import DEADLINE_MARGIN_S
from shardwell_server.shard.requests import transfers
from shardwell_server.shard.state.store import NamesRun, ShardStore
from shardwell_server.shard.transports.shm_transport import ShmTransports
from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire import frames
from shardwell_wire.errors import AccessError, ConflictError, DeadlineError
from shardwell_wire.frames import Kind
from shardwell_wire.names import check_names
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import shard_pb2


class Requests:
    """The requests of one connection, one after the other.

    Args:
        store: Of the server.
        run: What they may be about: this very run, not another one of its name.
        connection: Where they come from.
        shm: The transports whose gradient buffers they may name, if there are any.
    """

    def __init__(
        self, store: ShardStore, run: RunIdentity, connection: Connection, shm: ShmTransports | None = None
    ) -> None:
        self._store, self._run, self._connection, self._shm = store, run, connection, shm

    async def serve(self) -> None:
        """Answers until the peer closes the connection.

        Raises:
            Exception: Why no further request can be read from the connection; the peer was not told.
        """
        while (head := await self._connection.next_request()) is not None:
            kind, size_bytes = head
            timeout_s, request = frames.parse_request(kind, await self._connection.exactly(size_bytes))
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    await self._answer(request, max(0.0, timeout_s - DEADLINE_MARGIN_S))
            except Exception as error:
                reason = DeadlineError(f"{kind.name} was not done within {timeout_s:g} s") if limit.expired() else error
                if kind is Kind.REDUCE_SCATTER:
                    raise reason from None  # the rest of its stream may still be coming
                await self._connection.refuse(reason)

    async def _answer(self, request: Message, wait_s: float) -> None:
        check_names(request)
        if isinstance(request, shard_pb2.GatherRequest):
            await self._gather(request, wait_s)
        elif isinstance(request, shard_pb2.MeasureTransportRequest):
            await self._connection.send_stream(transfers.meaningless(request, frames.DATA_BYTES))
        elif isinstance(request, shard_pb2.ReduceGradientBufferRequest):
            await self._reduce_gradient_buffer(request)
        else:
            assert isinstance(request, shard_pb2.ReduceScatterHeader)
            await self._push(request, wait_s)

    async def _gather(self, request: shard_pb2.GatherRequest, wait_s: float) -> None:
        self._check(request)
        async with AsyncExitStack() as stack:
            async with nullcontext() if transfers.is_there(self._store, request) else self._connection.while_silent():
                reading = await stack.enter_async_context(transfers.reading(self._store, request, wait_s))
            head = frames.encode(Kind.GATHERING, reading.header.SerializeToString())
            await self._connection.send_stream(reading.pieces(frames.DATA_BYTES), before=head)

    async def _push(self, header: shard_pb2.ReduceScatterHeader, wait_s: float) -> None:
        self._check(header.context)
        response = await transfers.push(self._store, header, self._connection, wait_s)
        await self._connection.send(frames.encode(Kind.REDUCE_SCATTERED, response.SerializeToString()))

    async def _reduce_gradient_buffer(self, request: shard_pb2.ReduceGradientBufferRequest) -> None:
        self._check(request.header.context)
        if self._shm is None:
            raise ConflictError("this server offers no transport through shared memory")
        response = await transfers.reduce_gradient_buffer(self._store, self._shm, request)
        await self._connection.send(frames.encode(Kind.GRADIENT_BUFFER_REDUCED, response.SerializeToString()))

    def _check(self, request: NamesRun) -> None:
        if (request.run, request.run_id) != (self._run.name, self._run.run_id):
            raise AccessError(
                f"the transport was opened for run {self._run.name!r} with id {self._run.run_id}, "
                f"not for {request.run!r} "
                f"with id {request.run_id or 'none'}",
                run=request.run,
            )
