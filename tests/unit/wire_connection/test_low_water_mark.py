"""A reader is woken when enough data has arrived, and when no more data can arrive."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from shardwell_wire.connection.socket_frames import WAKE_BYTES, PlainStream


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields both ends of a TCP connection. Other sockets do not support the option."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), 20.0)
        far, _ = listener.accept()
        with near, far:
            yield near, far


def arrives(near: socket.socket, timeout_s: float = 20.0) -> bool:
    poll = select.poll()
    poll.register(near, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def test_reader_is_woken_at_the_requested_size(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    mark = PlainStream(near)
    mark.want(1000)
    far.sendall(bytes(999))
    assert not arrives(near, 0.05)
    mark.want(999)
    assert arrives(near)
    mark.want(1000)
    assert not arrives(near, 0.0)
    far.sendall(bytes(1))
    assert arrives(near)


def test_mark_is_limited_to_wake_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    PlainStream(near).want(100 * WAKE_BYTES)
    sending = threading.Thread(target=far.sendall, args=(bytes(WAKE_BYTES),))
    sending.start()
    assert arrives(near)
    received = 0
    while received < WAKE_BYTES:
        received += len(near.recv(WAKE_BYTES))
    sending.join()


def test_end_of_connection_wakes_the_reader(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    PlainStream(near).want(1000)
    far.sendall(b"little")
    far.close()
    assert arrives(near)
    assert near.recv(100) == b"little"


def test_missing_socket_option_is_ignored() -> None:
    class Without:
        asked, sendmsg = 0, None

        def setsockopt(self, *_: object) -> None:
            self.asked += 1
            raise OSError("protocol not available")

    PlainStream(without := Without()).want(1000)  # type: ignore[arg-type]
    assert without.asked == 1
