"""Calls to shard servers: the only module of the coordinator that speaks gRPC as a client."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shardwell_server.coordinator.servers.cluster import Server
from shardwell_server.process_identity import has_ended
from shardwell_wire.channel import open_aio_channel
from shardwell_wire.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.errors import ShardwellError, UnavailableError, from_rpc_error
from shardwell_wire.v1 import shard_pb2

CALL_TIMEOUT_S = 120.0
"""Deadline of one try; preparing and updating take as long as the tensors are large."""

_PROBE_S = 2.0
"""How long a process may take to say which one it is."""

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0


class ShardCalls(Protocol):
    """How the coordinator reaches shard servers."""

    async def call(self, address: str, rpc_name: str, request: Message, *, retry_for_s: float) -> Any:
        """Calls a unary rpc of ``ShardService``.

        Args:
            address: host:port.
            rpc_name: Its name in the proto file.
            request: Its request message.
            retry_for_s: While the server is unavailable, try again for this long.

        Returns:
            Its response message.

        Raises:
            ShardwellError: What the server raised, or UnavailableError, or DeadlineError.
        """
        ...

    async def is_running(self, server: Server) -> bool:
        """Whether the process of a shard server still runs.

        Returns:
            True: it has answered. False: it is known to have ended, since its process is gone from this host, or
            another process of the same server answers at its address.

        Raises:
            UnavailableError: It did not answer. That tells nothing of the process, even if the connection was refused.
        """
        ...


class GrpcShardCalls:
    """``ShardCalls`` over gRPC, with one channel per address.

    Args:
        credentials: Of the cluster; every rpc carries them.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
        self._service = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[str, str], Any] = {}

    async def call(self, address: str, rpc_name: str, request: Message, *, retry_for_s: float) -> Any:
        """See ``ShardCalls.call``."""
        stub = self._stubs.get((address, rpc_name)) or self._new_stub(address, rpc_name)
        give_up, delay = time.monotonic() + retry_for_s, _FIRST_DELAY_S
        while True:
            try:
                return await stub(request, timeout=CALL_TIMEOUT_S, metadata=self._credentials.metadata)
            except grpc.aio.AioRpcError as rpc_error:
                error = from_rpc_error(rpc_error, f"shard server at {address}")
                if not isinstance(error, UnavailableError) or time.monotonic() + delay > give_up:
                    raise error from rpc_error
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, _LONGEST_DELAY_S)

    async def is_running(self, server: Server) -> bool:
        """See ``ShardCalls.is_running``."""
        if has_ended(server.process):
            return False
        request, address = shard_pb2.DescribeServerRequest(), server.address
        try:
            async with asyncio.timeout(_PROBE_S):
                await asyncio.to_thread(_connect, address)
                response = await self.call(address, "DescribeServer", request, retry_for_s=0.0)
        except (OSError, ShardwellError) as error:
            reason = getattr(error, "strerror", None) or str(error) or f"no answer within {_PROBE_S:g} s"
            raise UnavailableError(f"the coordinator cannot reach {address}: {reason}") from error
        if response.incarnation == server.incarnation:
            return True
        if response.server_id == server.server_id:
            return False
        raise UnavailableError(f"another shard server, {response.server_id!r}, answers at {address}")

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _new_stub(self, address: str, rpc_name: str) -> Any:
        if address not in self._channels:
            self._channels[address] = open_aio_channel(address)
        method = self._service.methods_by_name[rpc_name]
        stub = self._channels[address].unary_unary(
            f"/{self._service.full_name}/{rpc_name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        self._stubs[address, rpc_name] = stub
        return stub


def _connect(address: str) -> None:
    """Raises OSError if no connection can be made, with a shorter reason than gRPC gives."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
