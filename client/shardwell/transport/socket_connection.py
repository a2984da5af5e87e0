"""One connection of a socket transport: requests and their streams, straight from and to memory."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwell.transport.base import NEARLY_BYTES, Nearly, unheard
from shardwell_wire import codec, frames
from shardwell_wire.codec import Buffer
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError, from_status_details
from shardwell_wire.frames import Kind
from shardwell_wire.low_water_mark import LowWaterMark
from shardwell_wire.v1 import shard_pb2

_TIMEVAL = struct.Struct("ll")

_LONGEST_POLL_MS = 3_600_000
"""Then it is asked again: the system call takes no number of 32 bits or more."""

_LATE_S = 0.1
"""A call may be given up so much too late: telling the kernel anew before each one costs more than small calls do."""

_MAX_BUFFERS = 512
"""Per system call; the least limit of the systems in use is 1024."""


class SocketConnection:
    """Sends one request after the other. For one thread at a time, except ``abort``.

    Args:
        host: Of the shard server.
        port: Of the transport.
        token: Of the transport.
        peer: Names the server in errors.
        timeout_s: How long connecting may take.

    Raises:
        UnavailableError: Nobody answers there.
        AccessError: The transport is closed.
        DeadlineError: It took too long.
    """

    def __init__(self, host: str, port: int, token: bytes, *, peer: str, timeout_s: float) -> None:
        self._peer, self._give_up = peer, time.monotonic() + timeout_s
        self.in_step = False
        """Nothing is under way: the next bytes either way begin a frame of a new request."""
        with self._request("connect", timeout_s):
            self._socket = socket.create_connection((host, port), timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Blocking, so that one call sends a whole frame; ``_limit_call`` says how long it may take.
            self._socket.settimeout(None)
            self._arrived = select.poll()
            self._arrived.register(self._socket, select.POLLIN)
            self._mark = LowWaterMark(self._socket)
            self._call_limit_s = 0.0
            try:
                self._send([frames.hello(token)])
                self._message(Kind.WELCOME)
            except BaseException:
                self._socket.close()
                raise

    @property
    def usable(self) -> bool:
        """Whether another request may be sent; not if the server closed the connection meanwhile."""
        return self.in_step and not self._speaks()

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """Makes the request under way in another thread fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def gather(
        self,
        request: shard_pb2.GatherRequest,
        target: memoryview,
        *,
        what: str,
        timeout_s: float,
        nearly: Nearly = unheard,
    ) -> int:
        """Fetches a version into ``target``; returns which."""
        with self._request(what, timeout_s):
            self._send([frames.encode_request(Kind.GATHER, request, timeout_s)])
            header = frames.parse_message(self._message(Kind.GATHERING), shard_pb2.GatherHeader)
            self._receive_stream(target, what, nearly)
            return header.version

    def measure(self, target: memoryview, *, timeout_s: float) -> None:
        """Receives bytes without meaning."""
        what = "a measurement"
        with self._request(what, timeout_s):
            request = shard_pb2.MeasureTransportRequest(size_bytes=len(target))
            self._send([frames.encode_request(Kind.MEASURE, request, timeout_s)])
            self._receive_stream(target, what, nearly=unheard)

    def reduce_scatter(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        what: str,
        timeout_s: float,
        nearly: Nearly = unheard,
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes the bytes of ``pieces``."""
        with self._request(what, timeout_s):
            # A server that refuses says so at once, in mid-stream, and may be gone before the stream is.
            with contextlib.suppress(ConnectionError):
                self._send_stream(frames.encode_request(Kind.REDUCE_SCATTER, header, timeout_s), pieces)
            nearly()
            try:
                payload = self._message(Kind.REDUCE_SCATTERED)
            except ShardwellError:
                self.in_step = False  # the server reads nothing more here
                raise
            return frames.parse_message(payload, shard_pb2.ReduceScatterResponse)

    def reduce_gradient_buffer(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, what: str, timeout_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Hands a gradient buffer over."""
        with self._request(what, timeout_s):
            self._send([frames.encode_request(Kind.REDUCE_GRADIENT_BUFFER, request, timeout_s)])
            return frames.parse_message(
                self._message(Kind.GRADIENT_BUFFER_REDUCED), shard_pb2.ReduceGradientBufferResponse
            )

    # ---- one request ----

    @contextmanager
    def _request(self, what: str, timeout_s: float) -> Iterator[None]:
        self._give_up, self.in_step = time.monotonic() + timeout_s, False
        try:
            yield
            self.in_step = True
        except ShardwellError:
            raise
        except TimeoutError:
            raise DeadlineError(f"{what}: {self._peer} did not finish it within {timeout_s:g} s") from None
        except OSError as error:
            raise UnavailableError(
                f"{what}: the connection of the {self._peer} failed: {error}", peer=self._peer
            ) from error

    def _send_stream(self, request: bytes, pieces: Sequence[memoryview]) -> None:
        """Sends a request and its stream, unless the server has something to say before the end of it."""
        sender, left_bytes = frames.StreamSender(), sum(map(len, pieces))
        buffers: list[Buffer] = [request]
        for parts in codec.batches(pieces, frames.DATA_BYTES):
            if parts:
                buffers += sender.data(parts)
            left_bytes -= sum(map(len, parts))
            if not left_bytes:
                buffers.append(sender.end())
            if self._speaks():
                return
            self._send(buffers)
            buffers = []

    def _receive_stream(self, target: memoryview, what: str, nearly: Nearly) -> None:
        receiver = frames.StreamReceiver([target], len(target), what, may_be_refused=True)
        while not receiver.over:
            receiver.took(self._receive(receiver.places()))
            if receiver.left_bytes <= NEARLY_BYTES:
                nearly()
        if receiver.refusal_bytes is not None:
            raise self._refusal(receiver.refusal_bytes)

    def _message(self, expected: Kind) -> bytes:
        """The payload of the next frame of an answer; raises what the server says instead."""
        kind, size_bytes = frames.parse_head(self._exactly(frames.HEAD_BYTES), expected, Kind.ERROR)
        if kind is Kind.ERROR:
            raise self._refusal(size_bytes)
        return self._exactly(size_bytes)

    def _refusal(self, size_bytes: int) -> ShardwellError:
        error = from_status_details(self._exactly(size_bytes), self._peer)
        self.in_step = True
        return error

    # ---- bytes ----

    def _send(self, buffers: Sequence[Buffer]) -> None:
        left = buffers
        while left:
            self._limit_call()
            with contextlib.suppress(BlockingIOError):
                left = frames.unsent(left, self._socket.sendmsg(left[:_MAX_BUFFERS]))

    def _limit_call(self) -> None:
        """Lets the next call send about as long as is left of the request's time; then it raises BlockingIOError."""
        remaining_s = self._remaining_s()
        if 0 <= self._call_limit_s - remaining_s < _LATE_S:
            return
        seconds, rest_s = divmod(remaining_s, 1.0)
        # Two zeros would mean: without limit.
        limit = _TIMEVAL.pack(int(seconds), max(1, int(rest_s * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._call_limit_s = remaining_s

    def _speaks(self) -> bool:
        """Whether the server has said something, or closed the connection."""
        self._mark.want(1)
        return bool(self._arrived.poll(0))

    def _exactly(self, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        left = memoryview(data)
        while left:
            left = left[self._receive([left]) :]
        return bytes(data)

    def _receive(self, places: Sequence[memoryview]) -> int:
        """Waits until much of what belongs in consecutive places has come, if not all; returns how much it was."""
        self._mark.want(sum(map(len, places)))
        while True:
            # Not a call that blocks until all is there: it begins to copy, and the kernel then counts for the mark
            # only what is still to come, which may be less than it.
            self._arrived.poll(min(_LONGEST_POLL_MS, math.ceil(1000 * self._remaining_s())))
            with contextlib.suppress(BlockingIOError):
                count, *_ = self._socket.recvmsg_into(places, 0, socket.MSG_DONTWAIT)
                if not count:
                    raise ConnectionResetError("it was closed in mid-answer")
                return count

    def _remaining_s(self) -> float:
        remaining_s = self._give_up - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s
