"""Ports that a test names before a server listens on them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int = 1) -> Iterator[int]:
    """Reserves ``count`` consecutive ports on 127.0.0.1 and yields the first.

    A bound socket that does not listen reserves a port: the kernel never gives the port to a process that binds port
    0. A server can still listen on the port by its number, because both sockets set SO_REUSEADDR.
    """
    for _ in range(100):
        with ExitStack() as stack:
            try:
                first: int = _bind(stack, 0)
                for offset in range(1, count):
                    _bind(stack, first + offset)
            except (OSError, OverflowError):
                continue
            yield first
            return
    raise AssertionError(f"no {count} free ports in a row")


def _bind(stack: ExitStack, port: int) -> int:
    bound = stack.enter_context(socket.socket())
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    number: int = bound.getsockname()[1]
    return number
