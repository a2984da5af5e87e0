"""Options of TCP connections that the socket transport opens."""

from __future__ import annotations

import socket

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 2, 1, 10
"""Silence before the first probe, time between two probes, and number of probes without an answer that end a
connection. A host that does not answer for 12 s counts as gone."""


def set_options(connected: socket.socket) -> None:
    """Makes a connection send small messages at once, and notice that the other end is gone.

    An end that waits for data sends nothing. Without keepalive probes it would never learn that the other end has lost
    the connection, for example because a firewall reset it in one direction. A host that does not know the connection
    answers the first probe with a reset.

    Args:
        connected: The connected socket.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
