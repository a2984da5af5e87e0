"""TCP connections between the trainers that add gradients together.

A connection starts with a hello: magic bytes, the secret of the accepting trainer and the position of the connecting
one. The accepting trainer answers with one byte. Then both sides send frames: kind (1 byte), size of the body (8 bytes,
little-endian), body, XXH3-64 of the body (8 bytes). The body of a frame is defined in ``peer_exchange.py``.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import xxhash

from shardwell_wire import socket_frames
from shardwell_wire.chunk_streams import Buffer, memory_at
from shardwell_wire.errors import CorruptDataError, UnavailableError
from shardwell_wire.tcp_options import set_options

SECRET_BYTES = 16
_MAGIC, _WELCOME = b"shrdpeer", b"\x01"
_HELLO = struct.Struct(f"<8s{SECRET_BYTES}sI")
_HEAD, _CHECKSUM = struct.Struct("<BQ"), struct.Struct("<Q")
_HELLO_LIMIT_S = 1.0
"""How long the accepting trainer waits for a hello. Others may connect to its port, too."""
_FLUSH_LIMIT_S = 5.0
_MAX_BUFFERS = 1024
"""Limit of Linux for one call of sendmsg."""

Body = Callable[[], Sequence[memoryview | bytes]]
"""Returns the body of a frame. Called by the thread that sends it, and may wait for the body."""


class Listener:
    """Accepts the connections of the members with higher positions.

    Args:
        host: Address of this host under which the other members reach it.
        position: Position of this member.
        size: Number of members.
    """

    def __init__(self, host: str, position: int, size: int) -> None:
        self._position, self._size = position, size
        self.secret = secrets.token_bytes(SECRET_BYTES)
        """What a connecting trainer has to know."""
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=size)
        self.port: int = self._socket.getsockname()[1]
        """The port."""

    def accept_all(self, deadline_s: float) -> dict[int, socket.socket]:
        """Returns the connections of all members with a higher position.

        Args:
            deadline_s: End of the wait, by ``time.monotonic``.

        Raises:
            UnavailableError: Not all of them have connected in time.
        """
        found: dict[int, socket.socket] = {}
        try:
            while len(found) < self._size - self._position - 1:
                self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
                connected, _ = self._socket.accept()
                position = self._identify(connected)
                if position is None or position in found:
                    connected.close()
                else:
                    found[position] = connected
        except OSError as error:
            for connected in found.values():
                connected.close()
            missing = sorted(set(range(self._position + 1, self._size)) - found.keys())
            raise UnavailableError(f"members {missing} have not connected: {error}") from error
        return found

    def _identify(self, connected: socket.socket) -> int | None:
        """Returns the position of the member that has connected. None: it is no member."""
        try:
            connected.settimeout(_HELLO_LIMIT_S)
            magic, secret, position = _HELLO.unpack(_receive_exactly(connected, _HELLO.size))
            if magic != _MAGIC or not hmac.compare_digest(secret, self.secret):
                return None
            if not self._position < position < self._size:
                return None
            connected.sendall(_WELCOME)
        except OSError:
            return None
        return int(position)

    def close(self) -> None:
        """Stops accepting connections."""
        self._socket.close()


def connect(host: str, port: int, secret: bytes, position: int, deadline_s: float) -> socket.socket:
    """Connects this member to one with a lower position.

    Args:
        host: Host of the other member.
        port: Its port.
        secret: Its secret.
        position: Position of this member.
        deadline_s: End of the attempt, by ``time.monotonic``.

    Raises:
        UnavailableError: The member cannot be reached.
    """
    try:
        connected = socket.create_connection((host, port), timeout=max(0.001, deadline_s - time.monotonic()))
        try:
            connected.settimeout(max(0.001, deadline_s - time.monotonic()))
            connected.sendall(_HELLO.pack(_MAGIC, secret, position))
            _receive_exactly(connected, len(_WELCOME))
        except BaseException:
            connected.close()
            raise
    except OSError as error:
        raise UnavailableError(f"the trainer at {host}:{port} cannot be reached: {error}") from error
    return connected


class PeerOwner(Protocol):
    """Receives what arrives over the links of a trainer. Called by the threads of the links."""

    def note_frame(self, position: int, kind: int, body: memoryview) -> None:
        """Called for each frame of a member, in the order in which it was sent."""
        ...

    def note_lost(self, position: int, why: str) -> None:
        """Called once when the connection to a member has ended."""
        ...


class PeerLink:
    """The connection to one member. Sends and receives in threads of its own. Thread-safe.

    Args:
        connected: The connection.
        position: Position of the other member.
        owner: Receives the frames.
    """

    def __init__(self, connected: socket.socket, position: int, owner: PeerOwner) -> None:
        self._socket, self._position, self._owner = connected, position, owner
        self._frames: queue.SimpleQueue[tuple[int, Body, Callable[[], None]] | None] = queue.SimpleQueue()
        self._broken = threading.Event()
        connected.settimeout(None)
        set_options(connected)
        self._sender = threading.Thread(target=self._send_all, name="shardwell-peer-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name="shardwell-peer-receive", daemon=True)
        self._sender.start()
        self._receiver.start()

    def send(self, kind: int, body: Body, done: Callable[[], None] = lambda: None) -> None:
        """Starts to send a frame after those before. Does not wait.

        Args:
            kind: Kind of the frame.
            body: Returns the body.
            done: Called once when the frame is sent or dropped, because the connection has ended.
        """
        self._frames.put((kind, body, done))

    def close(self) -> None:
        """Sends what is left, for a limited time, and closes the connection."""
        self._frames.put(None)
        self._sender.join(0.0 if self._broken.is_set() else _FLUSH_LIMIT_S)
        self.abort()
        self._sender.join(_FLUSH_LIMIT_S)
        self._receiver.join(_FLUSH_LIMIT_S)
        self._socket.close()

    def abort(self) -> None:
        """Ends the connection at once. Frames that are not sent are dropped."""
        self._broken.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        while (frame := self._frames.get()) is not None:
            kind, body, done = frame
            try:
                if not self._broken.is_set():
                    self._send(kind, body())
            except Exception as error:  # as in `_receive_all`
                self._end(error)
            finally:
                del frame, body
                done()

    def _send(self, kind: int, body: Sequence[memoryview | bytes]) -> None:
        checksum = xxhash.xxh3_64()
        for piece in body:
            checksum.update(piece)
        size = sum(map(len, body))
        left: Sequence[Buffer] = [
            _HEAD.pack(kind, size),
            *body,
            _CHECKSUM.pack(checksum.intdigest()),
        ]
        while left:
            left = socket_frames.unsent(left, self._socket.sendmsg(left[:_MAX_BUFFERS]))

    def _receive_all(self) -> None:
        try:
            while True:
                kind, size = _HEAD.unpack(_receive_exactly(self._socket, _HEAD.size))
                body = memory_of(size)
                _receive_into(self._socket, body)
                (expected,) = _CHECKSUM.unpack(_receive_exactly(self._socket, _CHECKSUM.size))
                if xxhash.xxh3_64_intdigest(body) != expected:
                    raise CorruptDataError("a frame of another trainer has a wrong checksum")
                self._owner.note_frame(self._position, kind, body)
        except Exception as error:  # any failure ends the link, and the owner learns why
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Reports the end of the connection. The receiver reports as well; the first reason counts."""
        self.abort()
        self._owner.note_lost(self._position, str(error) or type(error).__name__)


def memory_of(size_bytes: int) -> memoryview:
    """Returns new memory, aligned for tensors."""
    buffer = torch.empty(max(1, size_bytes), dtype=torch.uint8)
    return memory_at(buffer.data_ptr(), size_bytes, buffer)


def _receive_exactly(connected: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    _receive_into(connected, memoryview(data))
    return bytes(data)


def _receive_into(connected: socket.socket, target: memoryview) -> None:
    while target:
        count = connected.recv_into(target)
        if not count:
            raise ConnectionResetError("the other trainer closed the connection")
        target = target[count:]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
