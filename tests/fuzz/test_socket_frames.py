"""Random frames to the socket transport: precise errors, and nothing of them is kept."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwell_server.serving import rpc
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import Kind
from shardwell_wire.errors import InvalidRequestError, ShardwellError
from tests.fuzz.handlers import FAILURES
from tests.fuzz.messages import Mutator, Values
from tests.support.shard_server import ShardServer, assert_all
from tests.support.socket_transport import ConnectedUnit, Peer, closing_transport, data, end_of

OPTIONS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

sizes = st.sampled_from([0, 1, 4, 8, 64, 4096, 64 << 10, 4 << 20, (4 << 20) + 1, (1 << 32) - 1])


@pytest.fixture(scope="module")
def connected() -> Iterator[ConnectedUnit]:
    rpc.logger.addHandler(FAILURES)
    with ShardServer() as server, closing_transport(ConnectedUnit(server)) as open_transport:
        yield open_transport
    rpc.logger.removeHandler(FAILURES)


@settings(OPTIONS, max_examples=1000)
@given(st.binary(max_size=200))
def test_parsers_raise_precise_errors_only(received: bytes) -> None:
    for parse in (
        lambda: socket_frames.token_of(received[: socket_frames.HELLO_BYTES].ljust(socket_frames.HELLO_BYTES, b"\0")),
        lambda: socket_frames.parse_head(received[:5].ljust(5, b"\0"), *Kind),
        *(lambda kind=kind: socket_frames.parse_request(kind, received) for kind in socket_frames.REQUESTS),
    ):
        with suppress(InvalidRequestError):
            parse()


@settings(OPTIONS, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from([*Kind, 0, 99]), sizes, st.binary(max_size=64))), st.integers(0, 256))
def test_stream_receiver_takes_what_fits_only(frames: list[tuple[int, int, bytes]], total_bytes: int) -> None:
    target = bytearray(total_bytes)
    receiver = socket_frames.StreamReceiver([memoryview(target)], total_bytes, "a stream")
    stream = memoryview(b"".join(struct.pack("<IB", size, kind) + payload for kind, size, payload in frames))
    try:
        while stream and not receiver.over:
            taken = 0
            for place in receiver.places:
                part = stream[taken : taken + len(place)]
                place[: len(part)] = part
                taken += len(part)
            receiver.took(taken)
            stream = stream[taken:]
    except ShardwellError:
        pass
    assert receiver.checksum is None or receiver.left_bytes == 0


def frames_of(rng: random.Random, connected: ConnectedUnit) -> bytes:
    """Returns a few frames, which resemble those of a trainer."""
    gradients = b"".join(each.numpy().tobytes() for each in connected.one.filled(1.0))
    named = {"run": connected.one.run, "run_id": connected.one.context().run_id}
    gathers = [connected.one.gather_request(0), connected.one.gather_request(1)]
    known = {
        Kind.GATHER: gathers[0],
        Kind.GATHER_BATCH: socket_frames.REQUESTS[Kind.GATHER_BATCH](ranges=gathers, **named),
        Kind.REDUCE_BATCH: socket_frames.REQUESTS[Kind.REDUCE_BATCH](
            parts=[{"header": connected.header(), "stream": gradients}], **named
        ),
        Kind.REDUCE_SCATTER: connected.header(),
        Kind.MEASURE: socket_frames.REQUESTS[Kind.MEASURE](size_bytes=100),
        Kind.REDUCE_GRADIENT_BUFFER: socket_frames.REQUESTS[Kind.REDUCE_GRADIENT_BUFFER](header=connected.header()),
    }
    values = Values()
    for message in known.values():
        values.learn(message)
    mutator, sent = Mutator(rng, values), b""
    for _ in range(rng.randrange(1, 4)):
        kind = rng.choice(list(known))
        message = mutator.changed(known[kind]) if rng.random() < 0.7 else known[kind]
        payload = struct.pack("<I", rng.choice((0, 1, 1000, 60_000))) + mutator.bytes_of(message)
        size = rng.choice((0, 1, 1 << 22, (1 << 32) - 1)) if rng.random() < 0.1 else len(payload)
        sent += struct.pack("<IB", size, rng.choice((kind, kind, kind, kind, 0, 255))) + payload
        if kind is Kind.REDUCE_SCATTER:
            part = gradients[: rng.choice((0, 1, 100, len(gradients), len(gradients) + 1))]
            sent += data(part) * rng.choice((0, 1, 2)) + (end_of(part) if rng.random() < 0.7 else b"")
    return sent[: rng.randrange(len(sent) + 1)] if rng.random() < 0.2 else sent


@settings(OPTIONS, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_server_keeps_nothing_of_random_frames(connected: ConnectedUnit, rng: random.Random) -> None:
    FAILURES.last = ""
    server, before = connected.server, connected.connections()
    with Peer(connected) as peer, suppress(OSError):  # the server may have closed the connection
        peer.send(frames_of(rng, connected))
    server.until(lambda: len(server.sockets._connections) <= before, "the connection has ended")
    assert FAILURES.last == ""
    server.until(lambda: len(connected.one.shard.streams) == 0, "no stream is open")
    server.evaluate(connected.one.shard.gradient.contributions.by_rank.clear)
    assert_all(connected.one.gather()[1], 0.0)
