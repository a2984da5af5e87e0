"""gRPC client of other shard servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shardwell_wire.channel import open_aio_channel
from shardwell_wire.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.errors import InvalidRequestError, ShardwellError, UsageError
from shardwell_wire.tls_problems import server_call_error
from shardwell_wire.v1 import shard_pb2


class GrpcPeers:
    """``Peers`` over gRPC, with one channel per address. Used on one event loop.

    Args:
        credentials: What this process proves itself with.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
        self._service = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def call(self, address: str, rpc_name: str, request: Message, *, timeout_s: float) -> Any:
        """See ``Peers.call``."""
        method = self._service.methods_by_name[rpc_name]
        stub = self._channel(address).unary_unary(
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
        stub = self._channel(address).stream_unary(
            f"/{self._service.full_name}/{rpc_name}",
            request_serializer=None,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        failures: list[Exception] = []

        async def requests() -> AsyncIterator[bytes]:
            try:
                for message in messages:
                    yield message
            except Exception as error:
                # gRPC cancels the call and does not pass the exception on.
                failures.append(error)
                raise

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
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            try:
                self._channels[address] = open_aio_channel(address, self._credentials.tls)
            except UsageError as error:  # the address comes from a request
                raise InvalidRequestError(f"shard server at {error}") from error
        return self._channels[address]
