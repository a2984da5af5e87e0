"""One connection of a socket lane: requests and their streams, straight from and to memory."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwell_wire import codec, frames
from shardwell_wire.codec import Buffer
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError, from_status_details
from shardwell_wire.frames import Kind
from shardwell_wire.v1 import shard_pb2

_TIMEVAL = struct.Struct("ll")

_MAX_BUFFERS = 512
"""Per system call; the least limit of the systems in use is 1024."""


class LaneConnection:
    """Sends one request after the other. For one thread at a time, except ``abort``.

    Args:
        host: Of the shard server.
        port: Of the lane.
        token: Of the lane.
        peer: Names the server in errors.
        timeout_s: How long connecting may take.

    Raises:
        UnavailableError: Nobody answers there.
        AccessError: The lane is closed.
        DeadlineError: It took too long.
    """

    def __init__(self, host: str, port: int, token: bytes, *, peer: str, timeout_s: float) -> None:
        self._peer, self._give_up = peer, time.monotonic() + timeout_s
        self.in_step = False
        """Nothing is under way: the next bytes either way begin a frame of a new request."""
        with self._request("connect", timeout_s):
            self._socket = socket.create_connection((host, port), timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Blocking, so that one call receives a whole frame; ``_limit`` says how long it may take.
            self._socket.settimeout(None)
            self._arrived = select.poll()
            self._arrived.register(self._socket, select.POLLIN)
            try:
                self._send([frames.hello(token)])
                self._message(Kind.WELCOME)
            except BaseException:
                self._socket.close()
                raise

    @property
    def usable(self) -> bool:
        """Whether another request may be sent; not if the server closed the connection meanwhile."""
        return self.in_step and not self._arrived.poll(0)

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """Makes the request under way in another thread fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def gather(self, request: shard_pb2.GatherRequest, target: memoryview, *, what: str, timeout_s: float) -> int:
        """Fetches a version into ``target``; returns which."""
        with self._request(what, timeout_s):
            self._send([frames.encode_request(Kind.GATHER, request, timeout_s)])
            header = frames.parse_message(self._message(Kind.GATHERING), shard_pb2.GatherHeader)
            self._receive_stream(target, what)
            return header.version

    def measure(self, target: memoryview, *, timeout_s: float) -> None:
        """Receives bytes without meaning."""
        what = "a measurement"
        with self._request(what, timeout_s):
            request = shard_pb2.MeasureLaneRequest(size_bytes=len(target))
            self._send([frames.encode_request(Kind.MEASURE, request, timeout_s)])
            self._receive_stream(target, what)

    def reduce_scatter(
        self, header: shard_pb2.ReduceScatterHeader, pieces: Sequence[memoryview], *, what: str, timeout_s: float
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes the bytes of ``pieces``."""
        with self._request(what, timeout_s):
            # A server that refuses says so at once, in mid-stream, and may be gone before the stream is.
            with contextlib.suppress(ConnectionError):
                self._send([frames.encode_request(Kind.REDUCE_SCATTER, header, timeout_s)])
                self._send_stream(pieces)
            try:
                payload = self._message(Kind.REDUCE_SCATTERED)
            except ShardwellError:
                self.in_step = False  # the server reads nothing more here
                raise
            return frames.parse_message(payload, shard_pb2.ReduceScatterResponse)

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

    def _send_stream(self, pieces: Sequence[memoryview]) -> None:
        sender = frames.StreamSender()
        for parts in codec.batches(pieces, frames.DATA_BYTES):
            if self._arrived.poll(0):
                return
            if parts:
                self._send(sender.data(parts))
        self._send([sender.end()])

    def _receive_stream(self, target: memoryview, what: str) -> None:
        receiver = frames.StreamReceiver([target], len(target), what)
        head = memoryview(bytearray(frames.HEAD_BYTES))
        self._fill(head)
        while True:
            kind, size_bytes = self._parse_head(head, Kind.DATA, Kind.END)
            if kind is Kind.END:
                receiver.end(self._exactly(size_bytes))
                return
            receiver.begin(size_bytes)
            place = receiver.place()
            self._fill(place, head)  # another frame follows this one
            receiver.took(len(place))

    def _message(self, expected: Kind) -> bytes:
        _, size_bytes = self._head(expected)
        return self._exactly(size_bytes)

    def _head(self, *expected: Kind) -> tuple[Kind, int]:
        """The head of the next frame of an answer; raises what the server says instead."""
        return self._parse_head(self._exactly(frames.HEAD_BYTES), *expected)

    def _parse_head(self, head: Buffer, *expected: Kind) -> tuple[Kind, int]:
        kind, size_bytes = frames.parse_head(head, *expected, Kind.ERROR)
        if kind is Kind.ERROR:
            error = from_status_details(self._exactly(size_bytes), self._peer)
            self.in_step = True
            raise error
        return kind, size_bytes

    # ---- bytes ----

    def _send(self, buffers: Sequence[Buffer]) -> None:
        left = buffers
        while left:
            self._limit(socket.SO_SNDTIMEO)
            with contextlib.suppress(BlockingIOError):
                left = frames.unsent(left, self._socket.sendmsg(left[:_MAX_BUFFERS]))

    def _exactly(self, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, *targets: memoryview) -> None:
        left: Sequence[Buffer] = frames.unsent(targets, 0)
        while left:
            self._limit(socket.SO_RCVTIMEO)
            with contextlib.suppress(BlockingIOError):
                # The interpreter lock is given up once for all of it, however small the parts are in which it comes.
                count, *_ = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionResetError("it was closed in mid-answer")
                left = frames.unsent(left, count)

    def _limit(self, option: int) -> None:
        """Lets the next call take as long as is left of the request's time; then it raises BlockingIOError."""
        remaining_s = self._give_up - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        seconds, rest_s = divmod(remaining_s, 1.0)
        # Two zeros would mean: without limit.
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), max(1, int(rest_s * 1e6))))
