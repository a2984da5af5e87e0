"""Calls to other shard servers, also to silent ones, and transfers with owners of shards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from shardwell_wire.connection.channel import open_aio_channel, open_stub
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.encoding.chunk_streams import StreamReceiver, decode_message
from shardwell_wire.errors import (
    ChunkError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    UsageError,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.security.tls import server_call_error
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

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
        async with self._channel(address) as channel:
            stub = open_stub(channel, self._service, rpc_name)
            try:
                return await stub(request, timeout=timeout_s, metadata=self._credentials.metadata)
            except grpc.aio.AioRpcError as error:
                raise await self._mapped(error, address) from error

    async def receive(self, address: str, rpc_name: str, request: Message, *, timeout_s: float) -> AsyncIterator[bytes]:
        """Calls an rpc of ``ShardService`` that answers with a stream; yields the serialised messages. Arguments and
        errors as ``call``."""
        async with self._channel(address) as channel:
            stub = open_stub(channel, self._service, rpc_name, raw_response=True)
            answers = stub(request, timeout=timeout_s, metadata=self._credentials.metadata)
            try:
                async for data in answers:
                    yield data
            except grpc.aio.AioRpcError as error:
                raise await self._mapped(error, address) from error
            finally:
                answers.cancel()  # has no effect at the end of the stream

    async def stream(self, address: str, rpc_name: str, messages: Iterator[bytes], *, timeout_s: float) -> Any:
        """Calls an rpc of ``ShardService`` with a stream of serialised messages. Arguments and errors as ``call``.

        An error that ``messages`` raises ends the rpc and is raised.
        """
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
            stub = open_stub(channel, self._service, rpc_name, raw_request=True)
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


_TRANSFER_S = 600.0
"""Deadline of a transfer."""

_MOVED = (NotFoundError, StaleEpochError, UnavailableError)
"""Errors of a server that may not own the shard any more."""

ListUnits = Callable[[str], Awaitable[coordinator_pb2.ListUnitsResponse]]
"""Asks the coordinator for the units of a run and the owners of their shards."""

Place = Callable[[shard_pb2.GatherHeader], memoryview]
"""Returns the memory for the stream that a header announces."""


class Owners:
    """The owners of shards, whose addresses only the coordinator knows. Used on the event loop.

    Args:
        list_units: See ``ListUnits``.
    """

    def __init__(self, list_units: ListUnits, peers: GrpcPeers) -> None:
        self._list_units, self._peers = list_units, peers
        self._addresses: dict[RunIdentity, dict[tuple[str, int, int], str]] = {}

    def forget(self, run: RunIdentity) -> None:
        """Forgets the owners of a run's shards. The next transfer asks for them again."""
        self._addresses.pop(run, None)

    async def gather(self, run: RunIdentity, request: shard_pb2.GatherRequest, place: Place) -> int:
        """Fetches a version of a shard from its owner; returns the bytes received.

        Args:
            place: See ``Place``. Not called for an owner that has no such shard any more.

        Raises:
            ShardwellError: The error of the present owner.
        """

        async def receive(address: str) -> int:
            what = f"Gather of unit {request.unit!r} from {address}"
            receiver: StreamReceiver | None = None
            async for data in self._peers.receive(address, "Gather", request, timeout_s=_TRANSFER_S):
                message, chunk = decode_message(data, shard_pb2.GatherResponse)
                receiver = receiver or StreamReceiver([place(message.header)], what)
                receiver.feed(chunk)
            if receiver is None:
                raise ChunkError(f"{what}: the stream has no message")
            receiver.require_complete()
            return receiver.received_bytes

        return await self._at_owner(run, (request.unit, request.start_bytes, request.stop_bytes), receive)

    async def push(
        self, run: RunIdentity, header: shard_pb2.ReduceScatterHeader, pieces: Sequence[memoryview]
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes a gradient to the owner of its shard.

        Args:
            pieces: The gradients of the header's parameters, clipped to the shard.

        Raises:
            ShardwellError: The error of the present owner.
        """

        async def push(address: str) -> shard_pb2.ReduceScatterResponse:
            messages = chunk_streams.encode_stream(shard_pb2.ReduceScatterRequest(header=header), pieces)
            response: shard_pb2.ReduceScatterResponse = await self._peers.stream(
                address, "ReduceScatter", iter(messages), timeout_s=_TRANSFER_S
            )
            return response

        return await self._at_owner(run, (header.unit, header.start_bytes, header.stop_bytes), push)

    async def _at_owner(
        self, run: RunIdentity, shard: tuple[str, int, int], transfer: Callable[[str], Awaitable[Result]]
    ) -> Result:
        """Runs a transfer at the owner of a shard. Repeats it at the new owner if the shard has moved.

        A trainer may know the new owner before the relay does. It would then not repeat a request that failed.
        """
        address = await self._address(run, *shard)
        while True:
            try:
                return await transfer(address)
            except _MOVED as error:
                self.forget(run)
                former = address
                if not isinstance(error, NotFoundError) or (address := await self._address(run, *shard)) == former:
                    raise

    async def _address(self, run: RunIdentity, unit: str, start_bytes: int, stop_bytes: int) -> str:
        if run not in self._addresses:
            try:
                listed = await self._list_units(run.name)
            except ShardwellError as error:
                raise UnavailableError(f"the owners of run {run.name!r} are not known: {error}") from error
            self._addresses[run] = {
                (each.unit, shard.start_bytes, shard.stop_bytes): shard.address
                for each in listed.units
                for shard in each.shards
            }
        address = self._addresses[run].get((unit, start_bytes, stop_bytes))
        if address is None:
            self.forget(run)
            raise NotFoundError(
                f"run {run.name!r} has no shard [{start_bytes}, {stop_bytes}) of unit {unit!r} now: its unit may have "
                "been cut anew",
                unit=unit,
            )
        return address
