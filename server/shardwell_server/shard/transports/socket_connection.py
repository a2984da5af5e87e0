"""One connection of the socket transport, on the event loop: frames, and streams directly from and to memory."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import ClassVar, Protocol

from google.protobuf.message import Message

from shardwell_server.serving.rpc import reported_error
from shardwell_server.shard.requests import client_streams
from shardwell_wire import fault_points
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import (
    ByteStream,
    EncryptedStream,
    Kind,
    PlainStream,
    StreamReceiver,
    set_options,
)
from shardwell_wire.encoding.chunk_streams import Buffer
from shardwell_wire.errors import ShardwellError, to_status_details

_ZEROS = bytes(64 << 10)


class PeerClosedError(ConnectionResetError):
    """Raised when the peer closes the connection before a transfer is complete."""

    def __init__(self) -> None:
        super().__init__("the peer closed the connection during a transfer")


class Transfer(Protocol):
    """Bytes that are being sent or received on a non-blocking socket."""

    receives: ClassVar[bool]
    """True if the bytes are received."""

    @property
    def missing_bytes(self) -> int:
        """Minimum number of bytes that are still to be moved. 0: the transfer is complete."""
        ...

    def move(self) -> int:
        """Moves bytes with one system call; returns how many.

        Raises:
            BlockingIOError: The socket is not ready.
            PeerClosedError: The peer has closed the connection.
            OSError: The connection broke.
        """
        ...


class SendTransfer:
    """Sends buffers one after the other.

    Note: [Memory of others]
        A peer may read so slowly that the memory of a stream is released meanwhile, and used for another run. Then
        zeros are sent in its place, so that the frame is complete. The peer receives an error after it.

    Args:
        stream: The bytes of the connection.
        memory_bytes: Size of the last buffers together whose memory may be released. See Note: [Memory of others].
        check: Raises ShardwellError if this memory may have changed. None: it does not change.
    """

    receives: ClassVar[bool] = False

    def __init__(
        self,
        stream: ByteStream,
        buffers: Sequence[Buffer],
        memory_bytes: int = 0,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._stream, self._left = stream, socket_frames.unsent(buffers, 0)
        self._memory_bytes, self._check = memory_bytes, check

    @property
    def missing_bytes(self) -> int:
        return sum(map(len, self._left))

    def move(self) -> int:
        if self._check is not None:
            try:
                self._check()
            except ShardwellError:
                self._replace_memory()
        sent_bytes = self._stream.send(self._left)
        self._left = socket_frames.unsent(self._left, sent_bytes)
        return sent_bytes

    def _replace_memory(self) -> None:
        """Replaces the memory by zeros of the same size."""
        zeros_bytes = min(self._memory_bytes, self.missing_bytes)
        head = b"".join(self._left)[: self.missing_bytes - zeros_bytes]
        count, rest_bytes = divmod(zeros_bytes, len(_ZEROS))
        self._left, self._check = [head, *[_ZEROS] * count, _ZEROS[:rest_bytes]], None


class ReceiveTransfer:
    """Receives bytes into one buffer.

    Args:
        stream: The bytes of the connection.
        enough: The transfer is complete after this many bytes.
    """

    receives: ClassVar[bool] = True

    def __init__(self, stream: ByteStream, target: memoryview, enough: int) -> None:
        self._stream, self._target, self._enough = stream, target, enough
        self.count = 0
        """Bytes received."""

    @property
    def missing_bytes(self) -> int:
        return max(0, self._enough - self.count)

    def move(self) -> int:
        received = self._stream.receive([self._target[self.count :]])
        if not received:
            raise PeerClosedError
        self.count += received
        return received


class ReceiveStreamTransfer:
    """Receives a stream. Raises the receiver's errors."""

    receives: ClassVar[bool] = True

    def __init__(self, stream: ByteStream, receiver: StreamReceiver) -> None:
        self._stream, self._receiver = stream, receiver

    @property
    def missing_bytes(self) -> int:
        return 0 if self._receiver.over else self._receiver.wanted_bytes

    def move(self) -> int:
        received = self._stream.receive(self._receiver.places)
        if not received:
            raise PeerClosedError
        self._receiver.took(received)
        if not self._receiver.over:
            fault_points.reach("server.stream.middle")
        return received


class FirstByteTransfer:
    """Waits for the first byte of a connection, which stays unread."""

    receives: ClassVar[bool] = True

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self.byte = connected, b""

    @property
    def missing_bytes(self) -> int:
        return 1 - len(self.byte)

    def move(self) -> int:
        self.byte = self._socket.recv(1, socket.MSG_PEEK)
        if not self.byte:
            raise PeerClosedError
        return 1


class HandshakeTransfer:
    """The handshake of TLS."""

    receives: ClassVar[bool] = True

    def __init__(self, stream: EncryptedStream) -> None:
        self._stream, self.missing_bytes = stream, 1

    def move(self) -> int:
        self._stream.handshake()
        self.missing_bytes = 0
        return 1


_SCRATCH_BYTES = 256 << 10

_TLS_HANDSHAKE = b"\x16"
"""First byte of a TLS connection. Other connections begin with the magic bytes of the hello."""

_ALLOCATED_BYTES = 64 << 10
"""A frame of up to this size has memory before its bytes arrive. The memory of a larger one grows with them."""

_LINGER_S, _LINGER_BYTES = 5.0, 16 << 10
"""How long to drain a rejected peer's bytes. Closing the socket earlier would reset the connection, and the peer would
not receive the error."""

_YIELD_AFTER_BYTES = 8 << 20
"""Other tasks on the event loop run after this many bytes were moved without waiting for the socket."""

_CALL_BYTES = 64 << 10
"""Each system call counts as this many bytes towards ``_YIELD_AFTER_BYTES``: copying them takes about as long as the
call."""


class Connection:
    """One connected socket. Used by one task at a time. After a ReduceScatter request, an ``IncomingStream``.

    Every method raises OSError if the connection broke, and DeadlineError if a transfer is too slow.
    """

    piece_bytes: ClassVar[int] = socket_frames.DATA_BYTES
    """Size of the pieces of a stream that is sent."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        set_options(peer)
        # The loop watches the descriptor's number: for a socket object, asyncio would format its repr at every call.
        self._socket, self._number, self._loop = peer, peer.fileno(), asyncio.get_running_loop()
        self._stream: ByteStream = PlainStream(peer)
        self.peer = _name_of(peer)
        """Address of the peer, for the log."""
        self._since_wait_bytes = 0
        self._torn = False
        """True if part of a frame was sent: the peer cannot interpret any further bytes."""

    async def wants_tls(self) -> bool:
        """Waits for the first byte; returns whether a TLS handshake begins."""
        first = FirstByteTransfer(self._socket)
        await self._drive(first, client_streams.IDLE_LIMIT_S)
        return first.byte == _TLS_HANDSHAKE

    async def encrypt(self, context: ssl.SSLContext) -> None:
        """Encrypts the connection, after a handshake in which this end is the server."""
        self._stream = EncryptedStream(self._socket, context)
        await self._drive(HandshakeTransfer(self._stream), client_streams.IDLE_LIMIT_S)

    # ---- frames ----

    async def send(self, *buffers: Buffer, memory_bytes: int = 0, check: Callable[[], None] | None = None) -> None:
        """Sends whole frames, or the rest of them; for the options see ``SendTransfer``."""
        self._torn = True
        await self._drive(SendTransfer(self._stream, buffers, memory_bytes, check), client_streams.IDLE_LIMIT_S)
        self._torn = False

    async def send_response(self, response: Message) -> None:
        """Sends a response without a stream."""
        await self.send(socket_frames.encode_response(response))

    async def next_request(self) -> tuple[str, float, Message] | None:
        """Waits without limit for the next request. None: the peer has closed the connection.

        Returns:
            Name of the request for errors, its timeout in seconds, and its message.

        Raises:
            InvalidRequestError: The bytes are not a request.
        """
        head = bytearray(socket_frames.HEAD_BYTES)
        count = await self._receive_some(memoryview(head))
        if count == 0:
            return None
        await self._fill(memoryview(head)[count:])
        kind, size_bytes = socket_frames.parse_head(head, *socket_frames.REQUESTS)
        timeout_s, request = socket_frames.parse_request(kind, await self.exactly(size_bytes))
        return kind.name, timeout_s, request

    async def exactly(self, size_bytes: int) -> bytearray:
        """Receives this many bytes. A peer that announces many bytes and sends few occupies little memory."""
        data = bytearray(min(size_bytes, _ALLOCATED_BYTES))
        with memoryview(data) as place:  # no view may be left when the array grows
            await self._fill(place)
        while (known := len(data)) < size_bytes:
            more = bytearray(min(size_bytes - known, known))
            await self._fill(memoryview(more))
            data += more
        return data

    # ---- streams ----

    async def send_stream(
        self, pieces: Iterable[memoryview], header: Message | None = None, check: Callable[[], None] | None = None
    ) -> None:
        """Sends a header and a stream: DATA frames and END.

        If ``pieces`` raises an error, the connection is between two frames, and ``send_error`` can be called.

        Args:
            pieces: Pieces of the stream. Raises if the memory of a piece has changed when the next one is requested.
            header: Message to send first. None: the stream has no header.
            check: Raises if the memory of the last piece has changed: its rest is not sent. None: it does not change.
        """
        before = b"" if header is None else socket_frames.encode_response(header)
        sender = socket_frames.StreamSender()
        for piece in pieces:
            await self.send(before, *sender.data([piece]), memory_bytes=len(piece), check=check)
            before = b""
        await self.send(before, sender.end())

    async def send_whole(self, parts: Sequence[memoryview], header: Message, check: Callable[[], None]) -> None:
        """Sends a header and a stream whose memory may change while this method waits for the peer.

        Memory that has changed is not sent: it may belong to another run.

        Args:
            parts: The stream. At most ``piece_bytes``.
            header: Message to send first.
            check: Raises if the memory has changed. ``send_error`` can be called then.
        """
        sender = socket_frames.StreamSender()
        head = socket_frames.encode_response(header)
        frames: list[Buffer] = [head, *sender.data(parts)] if parts else [head]
        end, memory_bytes = sender.end(), sum(map(len, parts))
        if isinstance(self._stream, PlainStream) and not fault_points.are_armed("server.gather.middle"):
            # The memory does not change before the next await. Mostly the kernel takes all bytes at once.
            try:
                left = socket_frames.unsent([*frames, end], self._stream.send([*frames, end]))
            except BlockingIOError:
                left = [*frames, end]
            self._torn = True
            if len(left) > 1:
                await self.send(*left[:-1], memory_bytes=memory_bytes, check=check)
                check()
            if left:
                await self.send(left[-1])
            self._torn = False
            return
        await self.send(*frames, memory_bytes=memory_bytes, check=check)
        fault_points.reach("server.gather.middle", response=header.DESCRIPTOR.name)
        check()
        await self.send(end)

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        """Receives a stream into memory; see ``IncomingStream``."""
        return await self._receive(targets, sum(len(target) for target in targets), what)

    async def checksum(self, total_bytes: int, what: str) -> int:
        """Receives a stream without storing it; see ``IncomingStream``."""
        return await self._receive(_scratch(total_bytes), total_bytes, what)

    async def _receive(self, targets: Iterable[memoryview], total_bytes: int, what: str) -> int:
        receiver = socket_frames.StreamReceiver(targets, total_bytes, what)
        await self._drive(ReceiveStreamTransfer(self._stream, receiver), client_streams.IDLE_LIMIT_S)
        assert receiver.checksum is not None
        return receiver.checksum

    # ---- the end of the connection ----

    @asynccontextmanager
    async def while_silent(self) -> AsyncIterator[None]:
        """Cancels the block if the peer closes the connection, or sends bytes before it receives the answer."""
        task, ended = asyncio.current_task(), False
        assert task is not None

        def end() -> None:
            nonlocal ended
            self._loop.remove_reader(self._number)
            ended = True
            task.cancel()

        # A peer that waits for an answer sends nothing, so the socket becomes readable only if the peer gives up.
        self._stream.want(1)
        self._loop.add_reader(self._number, end)
        try:
            yield
        except asyncio.CancelledError:
            if ended and task.uncancel() == 0:  # nothing but ``end`` cancelled the task
                raise ConnectionResetError(
                    "the peer closed the connection, or sent bytes, before it received the answer"
                ) from None
            raise
        finally:
            self._loop.remove_reader(self._number)

    async def send_error(self, reason: Exception) -> None:
        """Sends an error to the peer. Raises OSError if the connection broke, or ended within a frame."""
        if isinstance(reason, OSError) and not isinstance(reason, ShardwellError):
            raise reason
        error = reported_error("a request over a socket transport", reason, self.peer)
        if self._torn:
            raise ConnectionAbortedError(f"the connection ended within a frame: {error}") from error
        await self.send(socket_frames.encode(Kind.ERROR, to_status_details(error)))

    async def linger(self, max_bytes: int | None = None) -> None:
        """Closes the sending side and drains the receiving side for a while, so that the last frame arrives.

        Args:
            max_bytes: Maximum number of bytes to drain. None: no maximum.
        """
        self._socket.shutdown(socket.SHUT_WR)
        scratch, drained = memoryview(bytearray(_LINGER_BYTES)), 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (max_bytes is None or drained < max_bytes) and (count := await self._receive_some(scratch)):
                    drained += count
                    await asyncio.sleep(0)

    # ---- bytes ----

    async def _fill(self, target: memoryview) -> None:
        if target:
            await self._drive(ReceiveTransfer(self._stream, target, len(target)), client_streams.IDLE_LIMIT_S)

    async def _receive_some(self, target: memoryview) -> int:
        """Waits without limit for at least one byte; returns the number received. 0 if the peer has closed."""
        transfer = ReceiveTransfer(self._stream, target, 1)
        with suppress(PeerClosedError):
            await self._drive(transfer, None)
        return transfer.count

    # Note: [One wake-up per stream]
    # A network delivers a stream in many small parts. ``_drive`` moves them in a callback of the event loop and wakes
    # the waiting task once, when the transfer is complete. The socket's low-water mark lets the kernel collect parts.

    async def _drive(self, transfer: Transfer, idle_limit_s: float | None) -> None:
        """Moves bytes until the transfer is complete. See Note: [One wake-up per stream]."""
        if await self._move_without_waiting(transfer):
            return
        done: asyncio.Future[None] = self._loop.create_future()
        moved_bytes, timer = 0, None

        def move() -> None:
            nonlocal moved_bytes
            if done.done():
                return  # the loop had already scheduled this call when the transfer ended
            try:
                while transfer.missing_bytes:
                    moved_bytes += transfer.move()
                    if not self._stream.buffered_bytes:
                        break
            except BlockingIOError:
                pass
            except Exception as error:
                done.set_exception(error)
                return
            if transfer.missing_bytes:
                self._set_mark(transfer)
            else:
                done.set_result(None)

        def check_rate(again: Callable[..., None], limit_s: float) -> None:
            # Gets itself as an argument: if it named itself, the cycle would keep the transfer's memory until Python
            # collects it.
            nonlocal moved_bytes, timer
            # On a slow network, fewer bytes than the low-water mark may have arrived. They do not wake the task.
            move()
            if done.done():
                return
            if moved_bytes < client_streams.MIN_STREAM_BYTES:
                done.set_exception(client_streams.too_slow(moved_bytes))
            else:
                moved_bytes, timer = 0, self._loop.call_later(limit_s, again, again, limit_s)

        watch, unwatch = (
            (self._loop.add_reader, self._loop.remove_reader)
            if transfer.receives
            else (self._loop.add_writer, self._loop.remove_writer)
        )
        self._set_mark(transfer)
        if idle_limit_s is not None:
            timer = self._loop.call_later(idle_limit_s, check_rate, check_rate, idle_limit_s)
        watch(self._number, move)
        try:
            await done
        finally:
            unwatch(self._number)
            if timer is not None:
                timer.cancel()

    def _set_mark(self, transfer: Transfer) -> None:
        if transfer.receives:
            self._stream.want(max(1, transfer.missing_bytes))

    async def _move_without_waiting(self, transfer: Transfer) -> bool:
        """Moves bytes until the socket would block; returns True if the transfer is complete."""
        try:
            while transfer.missing_bytes:
                self._since_wait_bytes += transfer.move() + _CALL_BYTES
                if self._since_wait_bytes > _YIELD_AFTER_BYTES:
                    self._since_wait_bytes = 0
                    await asyncio.sleep(0)
        except BlockingIOError:
            self._since_wait_bytes = 0
            return False
        return True


def _scratch(total_bytes: int) -> Iterator[memoryview]:
    """Yields views with this total size, all of the same memory."""
    scratch = memoryview(bytearray(min(total_bytes, _SCRATCH_BYTES)))
    for start in range(0, total_bytes, _SCRATCH_BYTES):
        yield scratch[: total_bytes - start]


def _name_of(peer: socket.socket) -> str:
    try:
        return ":".join(map(str, peer.getpeername()[:2]))
    except OSError:
        return "a disconnected peer"
