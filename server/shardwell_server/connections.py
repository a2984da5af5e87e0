"""Closes TCP connections of gRPC, for which its Python API has no call."""

from __future__ import annotations

import os
import socket
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import unquote

_DESCRIPTORS = "/proc/self/fd"

_ports: Counter[int] = Counter()
"""Ports on which gRPC servers of this process listen."""


@contextmanager
def grpc_port(port: int) -> Iterator[None]:
    """Lets the functions of this module close connections to a port while the block runs.

    The same peer may also be connected to another port of this process, such as that of the socket transport: a client,
    or a router that translates addresses, may use one local port for several destinations.
    """
    _ports[port] += 1
    try:
        yield
    finally:
        _ports[port] -= 1


def close_connection(peer: str) -> bool:
    """Shuts down the TCP connection of a peer, which ends its rpcs and frees the memory that gRPC holds for them.

    Args:
        peer: As gRPC names it, such as ``ipv4:127.0.0.1:40000``.

    Returns:
        True if the connection was found.
    """
    return close_connections([peer]) > 0


def close_connections(peers: Iterable[str]) -> int:
    """Closes several connections with one search of the process's file descriptors; returns how many were found."""
    wanted = {address for peer in peers if (address := _address_of(peer)) is not None}
    found = 0
    with suppress(OSError):
        for descriptor in map(int, os.listdir(_DESCRIPTORS)):
            if found == len(wanted):
                break
            found += _shut_down_if_connected(descriptor, wanted)
    return found


def host_of(peer: str) -> str:
    """Returns the host of a peer, without its port."""
    address = _address_of(peer)
    return peer if address is None else address[0]


def _address_of(peer: str) -> tuple[str, int] | None:
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _without_mapping(host.strip("[]")), int(port)


def _shut_down_if_connected(descriptor: int, wanted: set[tuple[str, int]]) -> bool:
    """Shuts a descriptor down if it is a connection of one of several peers to gRPC; returns True if it is."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        # A duplicate, because gRPC owns the descriptor and must close it itself.
        with socket.socket(fileno=os.dup(descriptor)) as connected:
            if connected.family not in (socket.AF_INET, socket.AF_INET6) or connected.type != socket.SOCK_STREAM:
                return False
            host, port, *_ = connected.getpeername()
            if (_without_mapping(host), port) not in wanted or not _ports[connected.getsockname()[1]]:
                return False
            connected.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # closed a moment ago, or a listening socket


def _without_mapping(host: str) -> str:
    """Strips the prefix with which an IPv6 socket names an IPv4 address."""
    return host.removeprefix("::ffff:")
