"""Limits how often a thread that waits for data from a socket is woken."""

from __future__ import annotations

import socket
from contextlib import suppress

WAKE_BYTES = 1 << 20
"""Largest low-water mark. Data arrives in parts of a few KiB, and waking a reader costs more than copying one part. The
kernel buffers up to twice as much unread data per socket."""


class LowWaterMark:
    """The receive low-water mark of a socket (``SO_RCVLOWAT``), which ``poll`` respects.

    A reader is woken below the mark if the connection ends or the kernel's buffer is full.

    Args:
        connected: The socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._bytes = 1

    def want(self, size_bytes: int) -> None:
        """Sets the mark before waiting for a number of bytes, at least 1."""
        mark = min(size_bytes, WAKE_BYTES)
        if mark != self._bytes:
            self._bytes = mark
            with suppress(OSError):  # without the option, readers are only woken more often
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
