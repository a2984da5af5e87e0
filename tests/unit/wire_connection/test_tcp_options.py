"""TCP options of the socket transport: an end that waits notices that the other end has lost the connection."""

from __future__ import annotations

import socket
import struct

import pytest

from shardwell_wire.connection.socket_frames import set_options

_TCP_REPAIR = 19
"""Socket option of Linux with which a socket is closed without a packet to its peer."""


def test_waiting_end_notices_that_the_other_end_has_lost_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as waiting:
        waiting.connect(listener.getsockname())
        other, _ = listener.accept()
        set_options(waiting)
        with other:
            try:
                other.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            except OSError as error:
                pytest.skip(f"closing a connection without a packet needs root: {error}")
        waiting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 60, 0))
        with pytest.raises(ConnectionResetError):
            waiting.recv(1)
