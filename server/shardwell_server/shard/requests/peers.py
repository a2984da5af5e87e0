"""Calls to other shard servers, also to such as fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shardwell_wire.connection.channel import open_aio_channel
from shardwell_wire.errors import DeadlineError, InvalidRequestError, ShardwellError, UnavailableError, UsageError
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.security.tls import server_call_error
from shardwell_wire.v1 import shard_pb2

Result = TypeVar("Result")

MAX_IDLE_CHANNELS = 64
"""Channels without a call. Servers come and go, and each has another address."""


@dataclass(slots=True)
class _Peer:
    """The channel to one address."""

    channel: grpc.aio.Channel
    calls: int = 0
    """Calls in progress."""


class GrpcPeers:
    """Performs rpcs to other shard servers over gRPC, with one channel per address. Used on one event loop.

    Closes the channels that were not used for longest.

    Args:
        credentials: What this process proves itself with.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
        self._service = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
        self._peers: dict[str, _Peer] = {}
        """By address, the one used last at the end."""

    async def call(self, address: str, rpc_name: str, request: Message, *, timeout_s: float) -> Any:
        """Calls a unary rpc of ``ShardService``.

        Args:
            address: host:port of the server.
            rpc_name: Name of the rpc in the proto file.
            request: Its request.
            timeout_s: Deadline in seconds.

        Returns:
            The response.

        Raises:
            ShardwellError: The error that the server raised, or UnavailableError or DeadlineError.
        """
        method = self._service.methods_by_name[rpc_name]
        async with self._channel(address) as channel:
            stub = channel.unary_unary(
                f"/{self._service.full_name}/{rpc_name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            try:
                return await stub(request, timeout=timeout_s, metadata=self._credentials.metadata)
            except grpc.aio.AioRpcError as error:
                raise await self._mapped(error, address) from error

    async def stream(self, address: str, rpc_name: str, messages: Iterator[bytes], *, timeout_s: float) -> Any:
        """Calls an rpc of ``ShardService`` with a stream of serialised messages. Arguments and errors as ``call``.

        An error that ``messages`` raises ends the rpc and is raised.
        """
        method = self._service.methods_by_name[rpc_name]
        failures: list[Exception] = []

        async def requests() -> AsyncIterator[bytes]:
            try:
                for message in messages:
                    yield message
            except Exception as error:
                # gRPC cancels the call and does not pass the exception on.
                failures.append(error)
                raise

        async with self._channel(address) as channel:
            stub = channel.stream_unary(
                f"/{self._service.full_name}/{rpc_name}",
                request_serializer=None,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            try:
                return await stub(requests(), timeout=timeout_s, metadata=self._credentials.metadata)
            except grpc.aio.AioRpcError as error:
                if failures:
                    raise failures[0] from None
                raise await self._mapped(error, address) from error
            except asyncio.CancelledError:
                if failures:
                    raise failures[0] from None
                raise

    async def _mapped(self, error: grpc.aio.AioRpcError, address: str) -> ShardwellError:
        return await server_call_error(error, f"shard server at {address}", address, self._credentials.tls)

    async def close(self) -> None:
        """Closes all connections."""
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(peer.channel.close() for peer in peers.values()))

    @asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yields the channel to an address for one call. Closes channels afterwards if too many have no calls."""
        peer = self._peers.pop(address, None) or _Peer(self._open(address))
        self._peers[address] = peer
        peer.calls += 1
        try:
            yield peer.channel
        finally:
            peer.calls -= 1
            idle = [address for address, peer in self._peers.items() if not peer.calls]
            closed = [self._peers.pop(address) for address in idle[:-MAX_IDLE_CHANNELS]]
            await asyncio.gather(*(each.channel.close() for each in closed))

    def _open(self, address: str) -> grpc.aio.Channel:
        try:
            return open_aio_channel(address, self._credentials.tls)
        except UsageError as error:  # the address comes from a request
            raise InvalidRequestError(f"shard server at {error}") from error


_ASK_AFTER_S = 1.0
"""Longest time that a call is in flight before the server is asked whether it lives."""
_LEAST_ANSWER_S = 2.0
"""How long to wait for the answer at least, unless a lease is shorter. A busy host may stall a process for a second."""


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """How long a server may be silent while a call to it is in flight. Both together are less than a lease and 1 s."""

    ask_after_s: float
    """Time in seconds after which the server is asked whether it lives. It is asked again after each answer."""
    answer_s: float
    """Longest time in seconds until it answers."""

    @classmethod
    def of_lease(cls, lease_s: float) -> SilenceLimits:
        """Returns the limits for a lease of a server."""
        return cls(min(_ASK_AFTER_S, lease_s / 4), max(lease_s / 2, min(_LEAST_ANSWER_S, lease_s)))


async def unless_silent(
    work: Awaitable[Result], ask: Callable[[float], Awaitable[object]], limits: SilenceLimits
) -> Result:
    """Awaits work on another server while that server answers questions. Cancels the work otherwise.

    The work may take any time. A server that is busy with it still answers, because requests do not block its event
    loop.

    Args:
        work: Calls to the server.
        ask: Sends a question to it, with a deadline in seconds.
        limits: How long the server may be silent.

    Raises:
        UnavailableError: The server did not answer a question in time.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=limits.ask_after_s))[0]:
            try:
                await ask(limits.answer_s)
            except DeadlineError as error:
                if not task.done():
                    raise UnavailableError(f"its server has been silent for {limits.answer_s:g} s") from error
            except ShardwellError:
                pass  # an error is an answer, and the work finds out what it means
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
