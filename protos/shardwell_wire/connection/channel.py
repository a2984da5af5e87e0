"""gRPC channels with the options that both ends share, and retries of calls, for threads and for asyncio.

Retries do not use tenacity: it adds 30 to 50 µs to every call that succeeds at once, and its retry state keeps the
traceback of a failed attempt, with the buffers in its frames, until a garbage collection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from shardwell_wire.errors import STATUS_DETAILS_KEY, UnavailableError, UsageError
from shardwell_wire.model.names import is_address
from shardwell_wire.security.tls import Certificates, Tls

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Errors = type[Exception] | tuple[type[Exception], ...]
Check = Callable[[Exception], None]
"""Called with the error of each failed attempt, before the pause. Raises to stop retrying."""

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message that either end accepts: four times the largest chunk."""

_FRAME_BYTES = 4 << 20
"""Size of HTTP/2 frames. 1 MiB chunks are twice as fast as with the default of 16 KiB."""

_PROXY_VARIABLE = "grpc_proxy"

_LONGEST_BACKOFF_MS = 1_000

RECONNECT_S = 1.2 * _LONGEST_BACKOFF_MS / 1000
"""Longest time until a channel reconnects to a peer that is available again, in seconds. gRPC varies its pauses by a
fifth."""

_SHARED_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", _FRAME_BYTES),
    ("grpc.http2.write_buffer_size", _FRAME_BYTES),
    ("grpc.http2.lookahead_bytes", _FRAME_BYTES),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", _LONGEST_BACKOFF_MS),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of every channel, in addition to ``_channel_options``. A channel detects a dead peer within 15 s, also on an
idle connection, and reconnects to a restarted peer within about 1 s. A busy peer has 5 s to answer a connection attempt
(in gRPC's terms, the minimum backoff)."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SHARED_OPTIONS,
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_allowed_incoming_connections", 16_384),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
"""Options of every server. A connection that has not finished its handshakes, of TLS and HTTP/2, in time is closed."""


def open_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """Returns a blocking channel to ``host:port``, which connects on first use.

    Args:
        address: host:port. Several, separated by commas: those of servers of which one serves, see ``FailoverChannel``.
        tls: Encrypts the connection. None: it is not encrypted.

    Raises:
        UsageError: See ``check_address``.
    """
    if len(addresses := check_address(address)) > 1:
        return FailoverChannel(addresses, [open_channel(each, tls) for each in addresses])
    if tls is None:
        return grpc.insecure_channel(address, options=_channel_options())
    return _SecureChannel(address, tls, grpc.secure_channel)


def open_aio_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """As ``open_channel``, for asyncio."""
    if len(addresses := check_address(address)) > 1:
        return _FailoverAioChannel(addresses, [open_aio_channel(each, tls) for each in addresses])
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_channel_options())
    return _SecureAioChannel(address, tls, grpc.aio.secure_channel)


def open_stub(
    channel: Any, service: ServiceDescriptor, rpc_name: str, *, raw_request: bool = False, raw_response: bool = False
) -> Callable[..., Any]:
    """Returns a stub of an rpc, of the kind that the service says.

    Args:
        channel: A channel of gRPC, blocking or not.
        service: The service, from the generated module's ``DESCRIPTOR``.
        rpc_name: Name of the rpc in the proto file.
        raw_request: Whether the stub takes encoded request messages.
        raw_response: Whether the stub returns response messages undecoded.
    """
    method = service.methods_by_name[rpc_name]
    request, response = (
        "stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)
    )
    stub: Callable[..., Any] = getattr(channel, f"{request}_{response}")(
        f"/{service.full_name}/{rpc_name}",
        request_serializer=None if raw_request else GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=None if raw_response else GetMessageClass(method.output_type).FromString,
    )
    return stub


class _SecureChannel:
    """A channel with TLS. Calls after a change of the certificates use a new connection; earlier ones go on.

    Args:
        open_: Opens a channel of gRPC.
    """

    def __init__(self, address: str, tls: Tls, open_: Callable[..., Any]) -> None:
        self._address, self._tls, self._open = address, tls, open_
        self._lock = threading.Lock()
        self._opened: list[tuple[Certificates, Any]] = []
        """The channels, each with its certificates. The last one is used by new calls."""
        self.unary_unary = partial(self._stub, "unary_unary")
        self.unary_stream = partial(self._stub, "unary_stream")
        self.stream_unary = partial(self._stub, "stream_unary")
        self.stream_stream = partial(self._stub, "stream_stream")

    def _channel(self) -> Any:
        """Returns the channel for a new call."""
        certificates = self._tls.current
        with self._lock:
            if not self._opened or self._opened[-1][0] is not certificates:
                options = [*_channel_options(), *self._tls.channel_options]
                channel = self._open(self._address, certificates.channel_credentials, options=options)
                self._opened.append((certificates, channel))
            return self._opened[-1][1]

    def _stub(self, kind: str, *arguments: Any, **options: Any) -> _SecureStub:
        """Returns a stub for one rpc, with the arguments of gRPC's function of the same name."""
        return _SecureStub(self._channel, lambda channel: getattr(channel, kind)(*arguments, **options))

    def close(self) -> Any:
        """Closes all connections."""
        for _, channel in self._opened:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SecureStub:
    """A stub of a ``_SecureChannel``. ``channel``: returns the channel for a new call."""

    def __init__(self, channel: Callable[[], Any], make: Callable[[Any], Any]) -> None:
        self._channel, self._make = channel, make
        self._newest: tuple[Any, Any] = (None, None)
        """Channel and stub of the last call. Replaced as a whole, because threads share it."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._stub()(*arguments, **options)

    def future(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC's stub of a blocking channel."""
        return self._stub().future(*arguments, **options)

    def _stub(self) -> Any:
        channel, stub = self._newest
        if (current := self._channel()) is not channel:
            stub = self._make(current)
            self._newest = (current, stub)
        return stub


class _SecureAioChannel(_SecureChannel):
    """As ``_SecureChannel``, for asyncio."""

    async def close(self) -> None:
        """Closes all connections."""
        for _, channel in self._opened:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class FailoverChannel:
    """A channel to the one of several servers that serves, such as the coordinator that leads.

    A call goes to the server that the last one has reached. If it does not reach the server, or the server is a
    stand-by, it fails as on any channel, and later calls go to the next server. Errors that a server raises itself
    change nothing. Calls do not wait for a connection (``wait_for_ready``), because another server may be reached.

    Args:
        channels: A channel to each of them.
    """

    def __init__(self, addresses: Sequence[str], channels: Sequence[Any]) -> None:
        self._addresses, self._channels, self._current = addresses, channels, 0
        self.unary_unary = partial(self._stub, "unary_unary")
        self.unary_stream = partial(self._stub, "unary_stream")
        self.stream_unary = partial(self._stub, "stream_unary")
        self.stream_stream = partial(self._stub, "stream_stream")

    @property
    def address(self) -> str:
        """host:port of the server to which calls go."""
        return self._addresses[self._current]

    def _stub(self, kind: str, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Returns a stub for one rpc, with the arguments of gRPC's function of the same name."""
        stubs = [getattr(channel, kind)(*arguments, **options) for channel in self._channels]

        def call(*arguments: Any, wait_for_ready: bool | None = None, **options: Any) -> Any:
            current = self._current
            return self._watched(lambda: stubs[current](*arguments, **options), current)

        return call

    def _watched(self, start: Callable[[], Any], current: int) -> Any:
        """Starts a call to one of the servers, and moves to the next one if the call does not reach the server."""
        try:
            call = start()
        except grpc.RpcError as error:
            self._note(error.code(), error.trailing_metadata(), current)
            raise

        def note() -> None:
            self._note(call.code(), call.trailing_metadata(), current)

        if isinstance(call, grpc.RpcContext) and not call.add_callback(note):
            note()
        return call

    def _note(self, code: grpc.StatusCode, metadata: Iterable[tuple[str, Any]] | None, current: int) -> None:
        """Moves to the next server if a call to one has ended with an error of gRPC itself."""
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return
        if current == self._current and not any(key == STATUS_DETAILS_KEY for key, _ in metadata or ()):
            self._current = (current + 1) % len(self._addresses)
            logger.debug("calls go to %s, because a call to %s failed", self.address, self._addresses[current])

    def close(self) -> Any:
        """Closes all connections."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _FailoverAioChannel(FailoverChannel):
    """As ``FailoverChannel``, for asyncio."""

    def __init__(self, addresses: Sequence[str], channels: Sequence[Any]) -> None:
        super().__init__(addresses, channels)
        self._noting: set[asyncio.Future[None]] = set()

    def _watched(self, start: Callable[[], Any], current: int) -> Any:
        async def note(call: Any) -> None:
            with suppress(asyncio.CancelledError):
                self._note(await call.code(), await call.trailing_metadata(), current)

        def end(call: Any) -> None:
            task = asyncio.ensure_future(note(call))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

        call = start()
        call.add_done_callback(end)
        return call

    async def close(self) -> None:
        """Closes all connections."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _channel_options() -> list[tuple[str, int]]:
    """Returns ``CHANNEL_OPTIONS`` and the proxy option.

    Only gRPC's own variable ``grpc_proxy`` makes a channel use a proxy. The proxies in ``http_proxy`` and
    ``https_proxy`` rarely reach members of a cluster.
    """
    return [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(bool(os.environ.get(_PROXY_VARIABLE))))]


def check_address(address: str) -> list[str]:
    """Returns the addresses in a text with commas. Raises UsageError unless each has the form ``host:port``.

    gRPC would try to resolve any other string as a name until the caller's deadline.
    """
    addresses = address.split(",")
    for each in addresses:
        if not is_address(each):
            raise UsageError(f"{each!r} is not an address: expected HOST:PORT, such as localhost:50051")
    return addresses


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

PAUSES = random.Random()
"""Generator of pauses. A trainer seeds the global one for each batch, and its model may draw from it."""

MAX_CORRUPT = 3
"""Attempts of one transfer whose bytes may arrive with a wrong checksum, one after the other, before it fails."""


def backoff(first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """Yields growing pauses in seconds, without end.

    Each pause is 0.5 to 1 times a bound that doubles up to ``longest_s``. The random factor keeps clients that failed
    together from retrying together.
    """
    bound_s = first_s
    while True:
        yield bound_s * PAUSES.uniform(0.5, 1.0)
        bound_s = min(2 * bound_s, longest_s)


def retry(
    action: Callable[[], Result],
    *,
    limit_s: float = math.inf,
    errors: Errors = UnavailableError,
    check: Check | None = None,
    longest_pause_s: float = LONGEST_PAUSE_S,
    sleep: Callable[[float], object] = time.sleep,
) -> Result:
    """Calls ``action`` until it succeeds.

    Args:
        action: Must be safe to repeat.
        limit_s: Seconds since the first attempt after which no other attempt starts. 0: a single attempt.
        errors: Errors that are retried. Any other error is raised at once.
        check: See ``Check``.
        longest_pause_s: Upper bound of the pause between two attempts, in seconds.
        sleep: Pauses for a number of seconds, such as ``threading.Event.wait``.

    Returns:
        What ``action`` returned.

    Raises:
        Exception: The last error of ``action`` once ``limit_s`` is over, or what ``check`` raised.
    """
    deadline = time.monotonic() + limit_s
    pauses: Iterator[float] | None = None
    while True:
        try:
            return action()
        except errors as error:
            pauses = pauses or backoff(longest_s=longest_pause_s)
            if (pause_s := _pause_after(error, next(pauses), deadline, check)) is None:
                raise
        sleep(pause_s)


async def retry_async(
    action: Callable[[], Awaitable[Result]],
    *,
    limit_s: float = math.inf,
    errors: Errors = UnavailableError,
    check: Check | None = None,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> Result:
    """``retry`` on an event loop: awaits ``action``, and does not block while it pauses. Uses the loop's clock."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + limit_s
    pauses: Iterator[float] | None = None
    while True:
        try:
            return await action()
        except errors as error:
            pauses = pauses or backoff(longest_s=longest_pause_s)
            if (pause_s := _pause_after(error, next(pauses), deadline, check, clock)) is None:
                raise
        await asyncio.sleep(pause_s)


def _pause_after(
    error: Exception, pause_s: float, deadline: float, check: Check | None, clock: Callable[[], float] = time.monotonic
) -> float | None:
    """Returns the pause before the next attempt in seconds; None if there is no time left for one."""
    if check is not None:
        check(error)
    if clock() + pause_s > deadline:
        return None
    logger.debug("retrying in %.2f s: %s", pause_s, error)
    return pause_s
