"""gRPC client of other shard servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shardwell_wire.connection.channel import open_aio_channel
from shardwell_wire.errors import InvalidRequestError, ShardwellError, UsageError
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.security.tls import server_call_error
from shardwell_wire.v1 import shard_pb2

MAX_IDLE_CHANNELS = 64
"""Channels without a call. Servers come and go, and each has another address."""


@dataclass(slots=True)
class _Peer:
    """The channel to one address."""

    channel: grpc.aio.Channel
    calls: int = 0
    """Calls in progress."""


class GrpcPeers:
    """``Peers`` over gRPC, with one channel per address. Used on one event loop.

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
        """See ``Peers.call``."""
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
        """See ``Peers.stream``."""
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
