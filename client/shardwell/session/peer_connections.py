"""The TCP connections of a process group, which another thread can end.

Note: [Ending a collective]
    A collective of gloo in which a process does not answer ends at the group's timeout. With torch 2.13, ``abort`` and
    ``shutdown`` of the group in another thread do not end it. It fails at once when a connection of the group ends, as
    if the other process had ended. Gloo does not tell its connections. They are those that exist after the group was
    formed and did not exist before. A connection to a server that another thread opened meanwhile is ended, too; the
    trainer connects again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Any, NamedTuple

_DESCRIPTORS = "/dev/fd"
"""Folder that lists the open file descriptors of this process, on Linux and macOS."""


class Connection(NamedTuple):
    """The two ends of a TCP connection, as ``socket`` returns them."""

    local: Any
    remote: Any


def open_connections() -> frozenset[Connection]:
    """Returns the TCP connections of this process."""
    return frozenset(connection for connection, _ in _connected_sockets())


def end_connections(connections: Set[Connection]) -> int:
    """Ends those of the given connections that this process has. Returns their number.

    Their descriptors stay open: they belong to the process group. Pending data that has arrived can still be read.
    """
    count = 0
    for connection, connected in _connected_sockets():
        if connection in connections:
            with suppress(OSError):  # the other process has ended it
                connected.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _connected_sockets() -> Iterator[tuple[Connection, socket.socket]]:
    """Yields each TCP connection with a socket that is closed when the next one is requested."""
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        try:
            descriptor = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            duplicate = socket.socket(fileno=descriptor)
        except OSError:  # not a socket
            os.close(descriptor)
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                try:
                    connection = Connection(duplicate.getsockname(), duplicate.getpeername())
                except OSError:  # not connected
                    continue
                yield connection, duplicate
