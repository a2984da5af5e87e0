"""The transport over TCP: frames from and to the memory of tensors, without copies in this process."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from shardwell.transport.base import (
    NEARLY_DONE_BYTES,
    BatchAnswers,
    ByteCounter,
    NearlyDone,
    Place,
    StreamTransport,
    ignore,
)
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.service_client import Endpoint, StandingRpc
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import (
    HEAD_BYTES,
    WAKE_BYTES,
    EncryptedStream,
    Kind,
    encode_request,
    parse_message,
    set_options,
)
from shardwell_wire.encoding.chunk_streams import Buffer
from shardwell_wire.errors import AccessError, DeadlineError, ShardwellError, UnavailableError, from_status_details
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

_TIMEVAL = struct.Struct("ll")
_DONT_WAIT = int(socket.MSG_DONTWAIT)

_LONGEST_POLL_MS = 3_600_000
"""Longest timeout of one poll. The system call takes a 32-bit number of milliseconds."""

_TIMEOUT_SLACK_S = 0.1
"""How late a send may time out. Setting the kernel's timeout before every call costs more than a small call."""

_SMALL_BYTES = 4096
"""A reader that wants fewer bytes is woken by the first of them: another low-water mark costs a system call."""

_MAX_BUFFERS = 512
"""Buffers per system call. The lowest limit of the supported systems is 1024."""

_AHEAD_BYTES = 16 << 10
"""Bytes that may be received beyond those that are wanted, to receive several small frames with one call. They are
copied."""


class SocketConnection:
    """One connection. Used by one thread at a time, except ``abort``.

    A request is a ``with`` block: ``with connection.request(...)``. It maps the errors of the socket.

    Args:
        endpoint: Connects to the shard server.
        offer: Port and token of the session, and the encryption that the server requires.

    Raises:
        UnavailableError: The port cannot be reached.
        AccessError: The session is closed.
        DeadlineError: The server did not answer in time.
    """

    def __init__(self, endpoint: Endpoint, offer: shard_pb2.SocketOffer, *, peer: str, timeout_s: float) -> None:
        self._peer = peer
        self.release: Callable[[SocketConnection], None] | None = None
        """Called when a request has ended. None: the connection is not shared."""
        with self.request("connect", timeout_s):
            self._socket = endpoint.connect(offer.port, timeout_s)
            set_options(self._socket)
            # Blocking, so that one call sends a whole frame. `_limit_send` sets the timeout of a call.
            self._socket.settimeout(None)
            self._readable = select.poll()
            self._readable.register(self._socket, select.POLLIN)
            self._send_limit_s = 0.0
            self._scratch = memoryview(bytearray(_AHEAD_BYTES))
            self._ahead = self._scratch[:0]
            """Bytes that were received and not wanted yet."""
            try:
                self.stream = endpoint.byte_stream(self._socket, offer.encryption)
                """Bytes of the socket."""
                self._shake_hands()
                self.send([socket_frames.hello(offer.token)])
                self.receive(Kind.WELCOME)
            except BaseException:
                self._socket.close()
                raise

    def close(self) -> None:
        """Closes the connection, which no thread uses."""
        self._socket.close()

    def abort(self) -> None:
        """Makes the request in flight fail. Called by other threads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # ---- one request ----

    def request(self, what: str, timeout_s: float) -> SocketConnection:
        """Starts a request, which ends with the ``with`` block of the result."""
        self._what, self._timeout_s, self._deadline = what, timeout_s, time.monotonic() + timeout_s
        self.is_idle = False
        """Whether no request is in flight: the next bytes in either direction start a frame of a new request."""
        self._has_sent_stream = False
        return self

    def __enter__(self) -> SocketConnection:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.is_idle = True
            elif isinstance(error, OSError) and not isinstance(error, ShardwellError):
                if isinstance(error, TimeoutError):
                    raise DeadlineError(
                        f"{self._what}: {self._peer} did not finish within {self._timeout_s:g} s"
                    ) from None
                raise UnavailableError(
                    f"{self._what}: the connection of the {self._peer} failed: {error}", peer=self._peer
                ) from error
        finally:
            if self.release is not None:
                self.release(self)

    def send_stream(self, message: Message, pieces: Sequence[memoryview]) -> None:
        """Sends a ReduceScatter request and its stream. Stops early if the server answers before the stream ends."""
        self._has_sent_stream = True
        before = [encode_request(Kind.REDUCE_SCATTER, message, self._timeout_s)]
        # A server that rejects the push answers mid-stream and may close the connection before the stream ends.
        with contextlib.suppress(ConnectionError):
            for frame in socket_frames.stream_frames(pieces, sum(map(len, pieces))):
                if self.has_input():
                    return
                self.send([*before, *frame])
                before = []

    def receive(self, expected: Kind) -> Buffer:
        """Returns the payload of the next frame, which is valid until more bytes are received.

        Raises the error that the server sent in place of the frame.
        """
        if not self._ahead:
            self._receive(())  # mostly the whole frame
        if len(self._ahead) >= HEAD_BYTES:
            head, self._ahead = self._ahead[:HEAD_BYTES], self._ahead[HEAD_BYTES:]
        else:
            head = memoryview(self._exactly(HEAD_BYTES))
        kind, size_bytes = socket_frames.parse_head(head, expected, Kind.ERROR)
        if kind is Kind.ERROR:
            raise self._receive_error(size_bytes)
        if size_bytes > len(self._ahead):
            return self._exactly(size_bytes)
        payload, self._ahead = self._ahead[:size_bytes], self._ahead[size_bytes:]
        return payload

    def receive_stream(self, targets: Sequence[memoryview], nearly_done: NearlyDone = ignore) -> None:
        """Receives one stream into consecutive places. Raises the error that the server sent in its place."""
        receiver = socket_frames.StreamReceiver(targets, sum(map(len, targets)), self._what, may_be_refused=True)
        is_nearly_done = False
        while not receiver.over:
            if self._ahead:
                count = 0
                for place in receiver.places:
                    part = self._ahead[count : count + len(place)]
                    place[: len(part)] = part
                    count += len(part)
                self._ahead = self._ahead[count:]
            else:
                count = self._receive(receiver.places)
            receiver.took(count)
            if not is_nearly_done and receiver.left_bytes <= NEARLY_DONE_BYTES:
                is_nearly_done = True
                nearly_done()
        if receiver.refusal_bytes is not None:
            raise self._receive_error(receiver.refusal_bytes)

    def _receive_error(self, size_bytes: int) -> ShardwellError:
        error = from_status_details(self._exactly(size_bytes), self._peer)
        self.is_idle = not self._has_sent_stream  # the server does not read the rest of a stream
        return error

    # ---- bytes ----

    def _shake_hands(self) -> None:
        """Waits for the TLS handshake, if the connection is encrypted."""
        while isinstance(self.stream, EncryptedStream):
            self._limit_send()
            try:
                return self.stream.handshake()
            except BlockingIOError:
                self._readable.poll(min(_LONGEST_POLL_MS, math.ceil(1000 * self._remaining_s())))
        return None

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Sends frames, or parts of frames."""
        left, left_bytes = buffers, sum(map(len, buffers))
        while left_bytes:
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0 or not 0 <= self._send_limit_s - remaining_s < _TIMEOUT_SLACK_S:
                self._limit_send()
            try:
                sent_bytes = self.stream.send(left[:_MAX_BUFFERS])
            except BlockingIOError:
                continue
            left_bytes -= sent_bytes
            if left_bytes:
                left = socket_frames.unsent(left, sent_bytes)

    def _limit_send(self) -> None:
        """Makes the next send raise BlockingIOError at about the deadline of the request."""
        # A little later, so that the limit also serves the next requests with the same timeout.
        self._send_limit_s = self._remaining_s() + _TIMEOUT_SLACK_S / 2
        seconds, rest_s = divmod(self._send_limit_s, 1.0)
        limit = _TIMEVAL.pack(int(seconds), int(rest_s * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def has_input(self) -> bool:
        """Whether the server has sent a byte or closed the connection. Then no other request can be sent."""
        if self.stream.mark_bytes != 1:
            self.stream.want(1)
        return bool(self._ahead or self.stream.buffered_bytes or self._readable.poll(0))

    def _exactly(self, size_bytes: int) -> bytes:
        """Returns the next bytes."""
        ahead = self._ahead[:size_bytes]
        self._ahead = self._ahead[len(ahead) :]
        if len(ahead) == size_bytes:
            return bytes(ahead)
        data = bytearray(size_bytes)
        data[: len(ahead)] = ahead
        left = memoryview(data)[len(ahead) :]
        while left:
            left = left[self._receive([left]) :]
        return bytes(data)

    def _receive(self, places: Sequence[memoryview]) -> int:
        """Waits for bytes and writes them to consecutive places; returns their number.

        Bytes that follow them become ``_ahead``, which must be empty.
        """
        stream, wanted_bytes = self.stream, sum(map(len, places))
        mark_bytes = 1 if wanted_bytes < _SMALL_BYTES else min(wanted_bytes, WAKE_BYTES)
        has_bytes = stream.buffered_bytes > 0
        while True:
            # Poll first. A blocking receive starts to copy at once, and the kernel then compares the mark with the
            # missing bytes only, which may be fewer than the mark.
            if not has_bytes:
                if mark_bytes != stream.mark_bytes:
                    stream.want(mark_bytes)
                remaining_s = self._deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError
                self._readable.poll(min(_LONGEST_POLL_MS, math.ceil(1000 * remaining_s)))
            try:
                buffers = [*places, self._scratch]
                plain = stream.plain
                count = stream.receive(buffers) if plain is None else plain.recvmsg_into(buffers, 0, _DONT_WAIT)[0]
            except BlockingIOError:
                has_bytes = False
                continue
            if not count:
                raise ConnectionResetError("the server closed the connection in the middle of a response")
            if count > wanted_bytes:
                self._ahead = self._scratch[: count - wanted_bytes]
            return min(count, wanted_bytes)

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s


_MAX_IDLE = 8
"""Idle connections kept for later requests."""


class SocketTransport(StreamTransport):
    """Moves bytes over TCP connections, within a session that ends with its rpc.

    Connections are opened on demand, one for each request in flight. Their number is not limited: fetches that wait for
    a version must not block the pushes that produce this version.

    Args:
        client: Calls the server. The caller closes it.
        run: The run. The server rejects requests for other runs.
        counter: See ``StreamTransport``.
        timeout_s: Deadline for opening the session and the first connection.
        retry_for_s: See ``ShmTransport``.

    Raises:
        ConflictError: The server does not offer the transport.
        UnavailableError: The server or its port cannot be reached.
        DeadlineError: The server did not answer in time.
    """

    name = "socket"
    kind = common_pb2.TRANSPORT_KIND_SOCKET
    session: StandingRpc

    def __init__(
        self,
        client: ShardClient,
        run: RunIdentity,
        counter: ByteCounter | None = None,
        *,
        timeout_s: float = 10.0,
        retry_for_s: float | None = None,
    ) -> None:
        super().__init__(counter)
        self._peer, self._endpoint = f"socket transport to {client.address}", client.endpoint
        self._lock = threading.Lock()
        self._connections: set[SocketConnection] = set()
        self._idle: list[SocketConnection] = []
        self._open = True
        request = shard_pb2.OpenTransportRequest(run=run.name, run_id=run.run_id, kind=self.kind)
        self.session = client.open("OpenTransport", request, timeout_s=timeout_s, retry_for_s=retry_for_s)
        self._offer: shard_pb2.SocketOffer = self.session.answer.socket
        self.session.when_ended(self._end)
        try:
            # A firewall may block this port and not the port of the rpcs.
            self._release(self._connect(timeout_s))
        except BaseException:
            self.close()
            raise

    def fetch_stream(
        self, request: shard_pb2.GatherRequest, place: Place, *, timeout_s: float, nearly_done: NearlyDone = ignore
    ) -> int:
        with self._request(f"Gather of unit {request.unit!r}", timeout_s) as connection:
            connection.send([encode_request(Kind.GATHER, request, timeout_s)])
            header = parse_message(connection.receive(Kind.GATHERING), shard_pb2.GatherHeader)
            target = place(header.version, header.deltas if header.HasField("deltas") else None)
            connection.receive_stream([target], nearly_done)
        return header.version

    def push_stream(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        nearly_done: NearlyDone = ignore,
    ) -> shard_pb2.ReduceScatterResponse:
        with self._request(f"ReduceScatter of unit {header.unit!r}", timeout_s) as connection:
            connection.send_stream(header, pieces)
            nearly_done()
            return parse_message(connection.receive(Kind.REDUCE_SCATTERED), shard_pb2.ReduceScatterResponse)

    def control(
        self, request: shard_pb2.ReduceGradientBufferRequest, timeout_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        with self._request(f"ReduceGradientBuffer of unit {request.header.unit!r}", timeout_s) as connection:
            connection.send([encode_request(Kind.REDUCE_GRADIENT_BUFFER, request, timeout_s)])
            return parse_message(
                connection.receive(Kind.GRADIENT_BUFFER_REDUCED), shard_pb2.ReduceGradientBufferResponse
            )

    def fetch_batch(self, request: shard_pb2.GatherBatchRequest, answers: BatchAnswers, *, timeout_s: float) -> None:
        with self._request(f"GatherBatch of {len(request.ranges)} ranges", timeout_s) as connection:
            connection.send([encode_request(Kind.GATHER_BATCH, request, timeout_s)])
            while answers.are_missing:
                response = parse_message(connection.receive(Kind.BATCH_GATHERED), shard_pb2.GatherBatchResponse)
                connection.receive_stream(answers.places(response))
                answers.finish(response)

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, *, timeout_s: float) -> shard_pb2.ReduceBatchResponse:
        with self._request(f"ReduceBatch of {len(request.parts)} parts", timeout_s) as connection:
            connection.send([encode_request(Kind.REDUCE_BATCH, request, timeout_s)])
            return parse_message(connection.receive(Kind.BATCH_REDUCED), shard_pb2.ReduceBatchResponse)

    def measure_stream(self, size_bytes: int, *, timeout_s: float) -> float:
        target = memoryview(bytearray(size_bytes))
        started = time.perf_counter()
        with self._request("a measurement", timeout_s) as connection:
            request = shard_pb2.MeasureTransportRequest(size_bytes=size_bytes)
            connection.send([encode_request(Kind.MEASURE, request, timeout_s)])
            connection.receive_stream([target])
        return size_bytes / (time.perf_counter() - started)

    def close(self) -> None:
        self.session.end()
        self._end()

    def _end(self) -> None:
        """Closes all connections. Also called by a thread of gRPC when the session's rpc ends."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
            for connection in self._connections:
                connection.abort()
            self._connections.difference_update(idle)
        for connection in idle:
            connection.close()

    def _request(self, what: str, timeout_s: float) -> SocketConnection:
        """Returns a connection with a new request; see ``SocketConnection.request``."""
        while True:
            with self._lock:
                if not self._open:
                    raise UnavailableError(f"{self._peer} is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(timeout_s).request(what, timeout_s)
            if not (connection.stream.is_worn_out or connection.has_input()):
                return connection.request(what, timeout_s)
            self._discard(connection)

    def _connect(self, timeout_s: float) -> SocketConnection:
        """Returns a new connection."""
        try:
            connection = SocketConnection(self._endpoint, self._offer, peer=self._peer, timeout_s=timeout_s)
        except AccessError as error:
            raise UnavailableError(f"{self._peer} is closed: {error}") from error
        with self._lock:
            if self._open:
                self._connections.add(connection)
                connection.release = self._release
                return connection
        connection.close()
        raise UnavailableError(f"{self._peer} is closed")

    def _release(self, connection: SocketConnection) -> None:
        """Keeps a connection whose request has ended, or closes it."""
        with self._lock:
            if self._open and connection.is_idle and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: SocketConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()
