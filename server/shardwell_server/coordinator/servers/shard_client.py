"""The coordinator's client of the shard servers: over gRPC, and over call connections (docs/wire-format.md)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shardwell_server.coordinator.servers.cluster import Server
from shardwell_wire.connection import call_frames
from shardwell_wire.connection.call_frames import CallConnectionError, End
from shardwell_wire.connection.channel import open_aio_channel, open_stub, retry_async
from shardwell_wire.connection.socket_frames import set_options
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError, from_status_details
from shardwell_wire.host.server_folders import has_ended
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.security.tls import server_call_error
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

_Response = asyncio.Future[tuple[bytes, bool]]
"""Body of a response, and whether it is an error."""


class CallLine(asyncio.Protocol):
    """One call connection, for any number of rpcs at once. Created by ``connect``.

    Args:
        calls: What the server announced over gRPC.
    """

    def __init__(self, peer: str, calls: common_pb2.CallPort) -> None:
        self._peer, self._calls, self._loop = peer, calls, asyncio.get_running_loop()
        self._nonce = secrets.token_bytes(call_frames.NONCE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._number = 0
        self._waiting: dict[int, _Response] = {}
        self._heard_s = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._greeted = self._loop.create_future()

    @classmethod
    async def connect(cls, host: str, calls: common_pb2.CallPort, peer: str) -> CallLine:
        """Connects to the port that a server announced.

        Raises:
            OSError: The server cannot be reached there, or another process listens at the port.
        """
        line = cls(peer, calls)
        try:
            async with asyncio.timeout(call_frames.HANDSHAKE_LIMIT_S):
                await asyncio.get_running_loop().create_connection(lambda: line, host, calls.port)
                await line._greeted
        except BaseException:
            line.close()
            raise
        return line

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, path: str, token: str, body: bytes, timeout_s: float) -> bytes:
        """Calls an rpc; returns the encoded response.

        Args:
            path: /SERVICE/RPC.
            token: A token of the coordinator. Empty: none.
            body: The encoded request.
            timeout_s: Deadline.

        Raises:
            ShardwellError: The error that the server returned.
            DeadlineError: The server did not answer in time.
            CallConnectionError: The connection broke. The server may have executed the request.
        """
        if self._transport is None or not self.is_open:
            raise CallConnectionError("the connection is closed")
        self._number = self._number % 0xFFFF_FFFF + 1
        number = self._number
        response: _Response = self._loop.create_future()
        # The silence of a connection without requests shows nothing.
        if not self._waiting:
            self._heard_s = self._loop.time()
        self._waiting[number] = response
        self._transport.write(call_frames.encode_request(number, path, token, body, timeout_s))
        if self._watch is None:
            self._watch = self._loop.call_later(call_frames.SILENCE_S, self._ping)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                answer, failed = await response
        except TimeoutError:
            # The response may carry a TimeoutError of its own.
            if not limit.expired():
                raise
            raise DeadlineError(f"{self._peer} did not answer in time", peer=self._peer) from None
        finally:
            self._waiting.pop(number, None)
        if failed:
            raise from_status_details(answer, self._peer)
        return answer

    def close(self) -> None:
        """Closes the connection. Calls in progress raise CallConnectionError."""
        if self._transport is not None:
            self._transport.abort()

    # ---- silence ----

    def _ping(self) -> None:
        """Sends a ping if the server has been silent while calls wait. Gives the connection up if it stays silent."""
        self._watch = None
        if not self._waiting or self._transport is None or not self.is_open:
            return
        silent_s = self._loop.time() - self._heard_s
        if silent_s < call_frames.SILENCE_S:
            self._watch = self._loop.call_later(call_frames.SILENCE_S - silent_s, self._ping)
        else:
            self._transport.write(call_frames.PING)
            self._watch = self._loop.call_later(call_frames.PING_LIMIT_S, self._give_up, self._heard_s)

    def _give_up(self, heard_s: float) -> None:
        self._watch = None
        if self._heard_s == heard_s:
            logger.info("the call connection to %s is closed: it does not answer a ping", self._peer)
            self.close()
        else:
            self._ping()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with suppress(OSError):  # the server is gone; the connection ends at once
            set_options(transport.get_extra_info("socket"))
        transport.write(call_frames.MAGIC + self._calls.client_id + self._nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        lost = CallConnectionError(f"the call connection to {self._peer} is closed")
        for waiting in (self._greeted, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(lost)
        if self._greeted.done() and not self._greeted.cancelled():
            self._greeted.exception()  # retrieved, if nobody waits for it

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._heard_s = self._loop.time()
        try:
            if self._greeted.done() or self._check_proof():
                while self._take_response():
                    pass
        except CallConnectionError as error:
            logger.info("the call connection to %s is closed: %s", self._peer, error)
            self.close()

    def _check_proof(self) -> bool:
        if len(self._received) < call_frames.WELCOME_BYTES or self._transport is None:
            return False
        given = bytes(self._received[: call_frames.PROOF_BYTES])
        if not call_frames.is_proof(given, End.SERVER, self._calls.secret, self._nonce):
            raise CallConnectionError("another process listens at the port")
        challenge = bytes(self._received[call_frames.PROOF_BYTES : call_frames.WELCOME_BYTES])
        del self._received[: call_frames.WELCOME_BYTES]
        self._transport.write(call_frames.proof(End.CLIENT, self._calls.secret, challenge))
        self._greeted.set_result(None)
        return True

    def _take_response(self) -> bool:
        if len(self._received) < call_frames.RESPONSE_HEADER_BYTES:
            return False
        header = call_frames.decode_response(self._received)
        end = call_frames.RESPONSE_HEADER_BYTES + header.body_bytes
        if len(self._received) < end:
            return False
        body = bytes(self._received[call_frames.RESPONSE_HEADER_BYTES : end])
        del self._received[:end]
        response = self._waiting.get(header.number)
        if response is not None and not response.done():  # otherwise the caller has given up
            response.set_result((body, header.failed))
        return True


CALL_TIMEOUT_S = 120.0
"""Deadline of one attempt in seconds. Preparing and updating take longer for larger tensors."""

REFUSED = "refused"
"""Value of ``connection`` in the data of a probe's error: the host answered, and nothing listens at the address."""

_PROBE_TIMEOUT_S = 2.0
"""Deadline of a probe in seconds."""


class ShardCalls:
    """Performs rpcs to shard servers, over call connections where servers offer them, otherwise over gRPC.

    For one event loop.

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
        """Sends rpcs to a port beside gRPC that a server has announced, as long as it can be reached."""
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
        """Probes the process of a shard server.

        Returns:
            True if the process answered. False if the process has ended: it is gone from this host, or another process
            of the same server id answers at its address.

        Raises:
            UnavailableError: The process did not answer. It may still run, even if the connection was refused.
        """
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
        stub = self._stubs[address, rpc_name] = open_stub(self._channels[address], self._service, rpc_name)
        return stub


def _connect(address: str) -> None:
    """Raises OSError if the server accepts no connection. The error is shorter than gRPC's."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
