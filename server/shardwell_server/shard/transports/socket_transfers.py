"""Bytes on their way through a socket that does not block, a system call at a time."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import ClassVar, Protocol

from shardwell_wire import frames
from shardwell_wire.codec import Buffer
from shardwell_wire.frames import StreamReceiver


class PeerEnded(ConnectionResetError):
    """The peer closed the connection where more was expected."""

    def __init__(self) -> None:
        super().__init__("the peer closed the connection in mid-stream")


class Transfer(Protocol):
    """Something that is sent or received."""

    arrives: ClassVar[bool]
    """Whether it is received."""

    @property
    def missing_bytes(self) -> int:
        """What is still to be moved before anything has to be decided; 0: it is done."""
        ...

    def move(self) -> int:
        """Moves what can be moved by one system call; returns how much.

        Raises:
            BlockingIOError: The socket is not ready.
            PeerEnded: Nothing more will come.
            OSError: The connection broke.
        """
        ...


class Leaving:
    """Buffers that are sent one after the other."""

    arrives: ClassVar[bool] = False

    def __init__(self, connected: socket.socket, buffers: Sequence[Buffer]) -> None:
        self._socket, self._left = connected, frames.unsent(buffers, 0)

    @property
    def missing_bytes(self) -> int:
        return sum(map(len, self._left))

    def move(self) -> int:
        sent_bytes = self._socket.sendmsg(self._left)
        self._left = frames.unsent(self._left, sent_bytes)
        return sent_bytes


class Arriving:
    """Bytes that are received into one place.

    Args:
        connected: The socket.
        target: Their place.
        enough: At least so many.
    """

    arrives: ClassVar[bool] = True

    def __init__(self, connected: socket.socket, target: memoryview, enough: int) -> None:
        self._socket, self._target, self._enough = connected, target, enough
        self.count = 0
        """What came."""

    @property
    def missing_bytes(self) -> int:
        return max(0, self._enough - self.count)

    def move(self) -> int:
        came = self._socket.recv_into(self._target[self.count :])
        if not came:
            raise PeerEnded
        self.count += came
        return came


class ArrivingStream:
    """A stream that is received; raises what its receiver finds wrong."""

    arrives: ClassVar[bool] = True

    def __init__(self, connected: socket.socket, receiver: StreamReceiver) -> None:
        self._socket, self._receiver = connected, receiver

    @property
    def missing_bytes(self) -> int:
        return 0 if self._receiver.over else self._receiver.wanted_bytes

    def move(self) -> int:
        came, *_ = self._socket.recvmsg_into(self._receiver.places())
        if not came:
            raise PeerEnded
        self._receiver.took(came)
        return came
