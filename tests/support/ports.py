"""Ports that a test has to name before a server listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int = 1) -> Iterator[int]:
    """The first of some ports in a row on 127.0.0.1 that meanwhile go only to who asks for them by number.

    A socket that is bound and does not listen keeps a port from those who ask for any, and leaves it to a server,
    since both allow the address to be used again.
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
