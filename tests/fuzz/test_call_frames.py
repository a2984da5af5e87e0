"""Random frames to a call server: no handler fails, and nothing of them is kept."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwell_server.serving import rpc
from shardwell_wire.connection import call_frames
from shardwell_wire.connection.call_frames import CallConnectionError
from shardwell_wire.security.credentials import new_key
from shardwell_wire.security.tokens import Role
from tests.fuzz.handlers import FAILURES
from tests.integration.test_call_connections import ADMIN, SERVICE, Served, connect, is_closed, until

OPTIONS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
KEY = new_key()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    rpc.logger.addHandler(FAILURES)
    server = Served(KEY)
    yield server
    server.close()
    rpc.logger.removeHandler(FAILURES)


@settings(OPTIONS, max_examples=1000)
@given(st.binary(min_size=16, max_size=64))
def test_parsers_raise_precise_errors_only(received: bytes) -> None:
    for parse in (call_frames.decode_request, call_frames.decode_response):
        with suppress(CallConnectionError):
            parse(received)


def frames_of(rng: random.Random) -> bytes:
    """Returns a few requests, most of them damaged."""
    tokens = ["", "x", "\N{SNOWMAN}", KEY.mint(Role.OPERATOR), KEY.mint(Role.OPERATOR), KEY.mint(Role.SERVER)]
    paths = [ADMIN, ADMIN, "", "/", SERVICE + "WatchEvents", "/grpc.health.v1.Health/Check", "/\x1b\n"]
    sent = b""
    for _ in range(rng.randrange(1, 5)):
        body = rng.randbytes(rng.choice((0, 1, 300, 70_000)))
        number = rng.choice((0, 1, 1, 2, 0xFFFF_FFFF))
        frame = bytearray(call_frames.encode_request(number, rng.choice(paths), rng.choice(tokens), body, 1.0))
        if rng.random() < 0.3:
            frame[rng.randrange(min(len(frame), 40))] = rng.randrange(256)
        sent += rng.choice((bytes(frame), bytes(frame), call_frames.PING))
    return sent[: rng.randrange(len(sent) + 1)] if rng.random() < 0.2 else sent


@settings(OPTIONS, max_examples=200)
@given(st.randoms(use_true_random=False))
def test_server_keeps_nothing_of_random_frames(served: Served, rng: random.Random) -> None:
    FAILURES.last = ""
    sent = frames_of(rng)
    connection = connect(served)
    with suppress(OSError):  # the server may have closed the connection
        connection._socket.sendall(sent)
        connection._socket.shutdown(socket.SHUT_WR)
        is_closed(connection._socket)
    connection.close()
    until(lambda: not served.connection_count)
    assert FAILURES.last == ""
    bad = [(path, caller) for _, path, caller in served.calls if caller is None or caller.role is not Role.OPERATOR]
    assert not bad
    served.calls.clear()


@settings(OPTIONS, max_examples=100)
@given(st.binary(max_size=100), st.booleans())
def test_server_keeps_nothing_of_random_handshakes(served: Served, received: bytes, begins_well: bool) -> None:
    with socket.create_connection(("127.0.0.1", served.offer.port)) as peer, suppress(OSError):
        peer.sendall(call_frames.MAGIC * begins_well + received)
        peer.shutdown(socket.SHUT_WR)
        is_closed(peer)
    until(lambda: not served.connection_count)
    assert not served.calls
