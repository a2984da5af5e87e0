"""gRPC client of the shard servers. No other module of the coordinator's core uses gRPC."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shardwell_server.coordinator.servers.call_line import CallLine
from shardwell_server.coordinator.servers.cluster import Server
from shardwell_wire import call_frames
from shardwell_wire.call_frames import CallConnectionError
from shardwell_wire.channel import open_aio_channel
from shardwell_wire.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.errors import ShardwellError, UnavailableError
from shardwell_wire.process_identity import has_ended
from shardwell_wire.retry import retry_async
from shardwell_wire.tls_problems import server_call_error
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0
"""Deadline of one attempt in seconds. Preparing and updating take longer for larger tensors."""

REFUSED = "refused"
"""Value of ``connection`` in the data of a probe's error: the host answered, and nothing listens at the address."""

_PROBE_TIMEOUT_S = 2.0
"""Deadline of a probe in seconds."""


class ShardCalls(Protocol):
    """Performs rpcs to shard servers."""

    async def call(self, address: str, rpc_name: str, request: Message, *, retry_for_s: float) -> Any:
        """Calls a unary rpc of ``ShardService``.

        Args:
            address: host:port of the server.
            rpc_name: Name of the rpc in the proto file.
            request: Its request.
            retry_for_s: How long to retry while the server is unavailable, in seconds.

        Returns:
            The response.

        Raises:
            ShardwellError: The error that the server raised, or UnavailableError or DeadlineError.
        """
        ...

    async def is_running(self, server: Server) -> bool:
        """Probes the process of a shard server.

        Returns:
            True if the process answered. False if the process has ended: it is gone from this host, or another process
            of the same server id answers at its address.

        Raises:
            UnavailableError: The process did not answer. It may still run, even if the connection was refused.
        """
        ...

    async def use_calls(self, address: str, calls: common_pb2.CallPort) -> None:
        """Sends rpcs to a port beside gRPC that a server has announced, as long as it can be reached.

        Args:
            address: host:port of the server.
            calls: The port.
        """
        ...


class GrpcShardCalls:
    """``ShardCalls`` over call connections where servers offer them, otherwise over gRPC. For one event loop.

    There is one channel and at most one call connection per address.

    Args:
        credentials: What this process proves itself with.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
        self._service = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[str, str], Any] = {}
        self._lines: dict[str, CallLine] = {}

    async def call(self, address: str, rpc_name: str, request: Message, *, retry_for_s: float) -> Any:
        """See ``ShardCalls.call``."""
        stub = self._stubs.get((address, rpc_name)) or self._new_stub(address, rpc_name)

        async def attempt() -> Any:
            line, deadline = self._lines.get(address), time.monotonic() + CALL_TIMEOUT_S
            if line is not None and request.ByteSize() <= call_frames.MAX_BODY_BYTES:
                try:
                    return await self._call_line(line, rpc_name, request)
                except CallConnectionError as error:
                    logger.info("%s goes over gRPC: %s", rpc_name, error)
                    if self._lines.get(address) is line:
                        del self._lines[address]
            timeout_s = max(0.0, deadline - time.monotonic())  # less if the connection broke
            try:
                return await stub(request, timeout=timeout_s, metadata=self._credentials.metadata)
            except grpc.aio.AioRpcError as error:
                raise await server_call_error(
                    error, f"shard server at {address}", address, self._credentials.tls
                ) from error

        return await retry_async(attempt, limit_s=retry_for_s)

    async def _call_line(self, line: CallLine, rpc_name: str, request: Message) -> Any:
        method, token = self._service.methods_by_name[rpc_name], self._credentials.token
        path, body = f"/{self._service.full_name}/{rpc_name}", request.SerializeToString()
        return GetMessageClass(method.output_type).FromString(await line.call(path, token, body, CALL_TIMEOUT_S))

    async def use_calls(self, address: str, calls: common_pb2.CallPort) -> None:
        """See ``ShardCalls.use_calls``."""
        host, _, port = address.rpartition(":")
        if not calls.port or calls.grpc_port != int(port) or self._credentials.tls is not None:
            return
        try:
            line = await CallLine.connect(host.strip("[]"), calls, f"shard server at {address}")
        except (OSError, OverflowError) as error:  # OverflowError: there is no such port
            logger.info("shard server at %s cannot be reached at its port for calls: %s", address, error)
            return
        if (former := self._lines.pop(address, None)) is not None:
            former.close()
        self._lines[address] = line

    async def is_running(self, server: Server) -> bool:
        """See ``ShardCalls.is_running``."""
        if has_ended(server.process):
            return False
        request, address = shard_pb2.DescribeServerRequest(), server.address
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await asyncio.to_thread(_connect, address)
                response = await self.call(address, "DescribeServer", request, retry_for_s=0.0)
        except (OSError, ShardwellError) as error:
            reason = getattr(error, "strerror", None) or str(error) or f"no answer within {_PROBE_TIMEOUT_S:g} s"
            refused = {"connection": REFUSED} if isinstance(error, ConnectionRefusedError) else {}
            raise UnavailableError(f"the coordinator cannot reach {address}: {reason}", **refused) from error
        if response.incarnation == server.incarnation:
            return True
        if response.server_id == server.server_id:
            return False
        raise UnavailableError(f"another shard server, {response.server_id!r}, answers at {address}")

    async def close(self) -> None:
        """Closes all connections."""
        for line in self._lines.values():
            line.close()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _new_stub(self, address: str, rpc_name: str) -> Any:
        if address not in self._channels:
            self._channels[address] = open_aio_channel(address, self._credentials.tls)
        method = self._service.methods_by_name[rpc_name]
        stub = self._channels[address].unary_unary(
            f"/{self._service.full_name}/{rpc_name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        self._stubs[address, rpc_name] = stub
        return stub


def _connect(address: str) -> None:
    """Raises OSError if the server accepts no connection. The error is shorter than gRPC's."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
