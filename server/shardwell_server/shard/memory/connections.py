"""Closing a connection that gRPC has accepted: gRPC's Python API has no call for it."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

_DESCRIPTORS = Path("/proc/self/fd")


def close_connection(peer: str) -> bool:
    """Shuts down the TCP connection of a peer, which ends its rpcs and frees what gRPC holds for them.

    Args:
        peer: As gRPC names it, such as ``ipv4:127.0.0.1:40000``.

    Returns:
        Whether there was such a connection.
    """
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return False
    wanted = (host.strip("[]"), int(port))
    with suppress(OSError):
        for entry in list(_DESCRIPTORS.iterdir()):
            if _is_connection(int(entry.name), wanted):
                return True
    return False


def _is_connection(descriptor: int, wanted: tuple[str, int]) -> bool:
    """Shuts a descriptor down if it is a socket that is connected to an address; returns whether it is."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connected:
            if connected.family not in (socket.AF_INET, socket.AF_INET6) or connected.type != socket.SOCK_STREAM:
                return False
            host, port, *_ = connected.getpeername()
            if (_plain(host), port) != (_plain(wanted[0]), wanted[1]):
                return False
            connected.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # it was closed a moment ago, or listens


def _plain(host: str) -> str:
    """An IPv4 address as such, though an IPv6 socket names it."""
    return host.removeprefix("::ffff:")
