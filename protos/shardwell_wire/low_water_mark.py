"""How much must have come over a socket before whoever waits for it is woken."""

from __future__ import annotations

import socket
from contextlib import suppress

WAKE_BYTES = 1 << 20
"""At the most: a link brings a frame in parts of a few KiB, and to wake a reader costs more than to copy one. The
kernel lets a socket hold twice as much of what nobody has read yet."""


class LowWaterMark:
    """Sets a socket's low-water mark (``SO_RCVLOWAT``), which polls heed, when it has to change.

    The end of the connection wakes a reader whatever the mark is, and so does the kernel when it has no room for more.

    Args:
        connected: The socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._bytes = 1

    def want(self, size_bytes: int) -> None:
        """Before waiting for so many bytes, at least 1."""
        mark = min(size_bytes, WAKE_BYTES)
        if mark != self._bytes:
            self._bytes = mark
            with suppress(OSError):  # a system that has no such mark wakes readers more often, which is no fault
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
