"""Bytes that a connection of the socket transport is sending or receiving."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from shardwell_wire import fault_points, socket_frames
from shardwell_wire.byte_streams import ByteStream, EncryptedStream
from shardwell_wire.chunk_streams import Buffer
from shardwell_wire.errors import ShardwellError
from shardwell_wire.socket_frames import StreamReceiver

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
        buffers: The buffers.
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
        target: The buffer.
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
        received = self._stream.receive(self._receiver.places())
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
