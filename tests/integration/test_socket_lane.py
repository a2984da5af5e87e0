"""The socket lane on a real server: the same bits, checks and errors as over gRPC, and nothing left of what broke."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.data_plane.lane_connection import LaneConnection
from shardwell.data_plane.shard_client import ShardClient
from shardwell.data_plane.socket_lane import SocketLane
from shardwell.processes.server_process import ServerProcess
from shardwell_server.shard import socket_lane
from shardwell_wire import codec, frames
from shardwell_wire.errors import (
    AccessError,
    ChunkError,
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    VersionGoneError,
    from_status_details,
    to_status_details,
)
from shardwell_wire.frames import Kind
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import (
    BIG,
    MIXED,
    PLAIN,
    ShardServer,
    error_of,
    in_background,
    layout_of,
    train,
    unit,
)


class LanedUnit:
    """One unit of a server, reached over a socket lane."""

    def __init__(self, server: ShardServer, layout: UnitLayout = PLAIN, **options: Any) -> None:
        self.server, self.one = server, unit(server, layout, **options)
        self.lane = SocketLane(server.client, self.one.run)

    def gather(
        self, version: int | None = None, *, timeout_s: float = 20.0, retry_for_s: float = 0.0, **fields: Any
    ) -> tuple[int, torch.Tensor]:
        flat = torch.empty(self.one.size, dtype=torch.uint8)
        request = self.one.gather_request(version, **fields)
        size = request.stop_bytes - request.start_bytes or self.one.size
        target = codec.memory_at(flat.data_ptr(), size)
        return self.lane.gather(request, target, timeout_s=timeout_s, retry_for_s=retry_for_s), flat[:size]

    def header(self, *, step: int = 0, rank: int = 0, epoch: int = 1, **changes: Any) -> shard_pb2.ReduceScatterHeader:
        fields = {
            "context": self.one.context(step, epoch),
            "unit": self.one.layout.unit,
            "dp_rank": rank,
            "parameter_indices": [segment.parameter_index for segment in self.one.segments],
            "start_bytes": self.one.start,
            "stop_bytes": self.one.stop,
        }
        return shard_pb2.ReduceScatterHeader(**{**fields, **changes})

    def push(self, gradients: list[torch.Tensor], **changes: Any) -> shard_pb2.ReduceScatterResponse:
        pieces = [codec.memory_at(each.data_ptr(), each.nbytes) for each in gradients]
        return self.lane.reduce_scatter(self.header(**changes), pieces, timeout_s=20.0, retry_for_s=0.0)

    def connections(self) -> int:
        return self.server.look(lambda: len(self.server.sockets._connections))

    def assert_nothing_came(self) -> None:
        """Nothing is kept of a push, and none is under way."""
        shard = self.one.shard
        self.server.until(lambda: len(shard.streams) == 0, "no stream is open")
        assert self.server.look(lambda: shard.contributions.by_rank) == {}
        assert (self.server.taken_bytes(), self.server.staged_bytes()) == (self.one.size, 0)


@pytest.fixture
def laned(server: ShardServer) -> Iterator[LanedUnit]:
    with closing_lane(LanedUnit(server)) as made:
        yield made


@pytest.fixture
def big(server: ShardServer) -> Iterator[LanedUnit]:
    """More than a connection's buffers hold."""
    with closing_lane(LanedUnit(server, BIG)) as made:
        yield made


class closing_lane(closing[Any]):
    def __init__(self, laned: LanedUnit) -> None:
        super().__init__(laned.lane)
        self.laned = laned

    def __enter__(self) -> LanedUnit:
        return self.laned


class Peer:
    """A client that says whatever a test has it say."""

    def __init__(self, laned: LanedUnit, *, hello: bytes | None = None) -> None:
        offer = laned.lane._offer
        self.socket = socket.create_connection(("127.0.0.1", offer.port), 20.0)
        self.send(frames.hello(offer.token) if hello is None else hello)
        if hello is None:
            assert self.frame() == (Kind.WELCOME, b"")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def request(self, kind: Kind, message: Any) -> None:
        self.send(frames.encode_request(kind, message, 1000.0))

    def push(self, laned: LanedUnit, *rest: bytes, **changes: Any) -> None:
        self.request(Kind.REDUCE_SCATTER, laned.header(**changes))
        self.send(*rest)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (part := self.socket.recv(size - len(data))):
            data += part
        return data

    def frame(self) -> tuple[Kind, bytes]:
        size, kind = struct.unpack("<IB", self.read(frames.HEAD_BYTES))
        return Kind(kind), self.read(size)

    def error(self) -> ShardwellError:
        """What the server says, which must be an error; DATA before it is skipped."""
        for kind, payload in iter(self.frame, None):
            if kind is Kind.ERROR:
                return from_status_details(payload, "server")
            assert kind in (Kind.GATHERING, Kind.DATA)
        raise AssertionError

    def is_closed(self) -> bool:
        try:
            return self.read(1) == b""
        except ConnectionResetError:
            return True


def data(*payloads: bytes) -> bytes:
    return b"".join(struct.pack("<IB", len(payload), Kind.DATA) + payload for payload in payloads)


def assert_holds(flat: torch.Tensor, value: float) -> None:
    """Every 32-bit float is the value."""
    assert bool((flat.view(torch.float32) == value).all())


def end_of(payload: bytes) -> bytes:
    sender = frames.StreamSender()
    sender.data([payload])
    return sender.end()


# The same as over gRPC.


@pytest.mark.parametrize("layout", [MIXED, PLAIN, layout_of(a=((0,), "float32"))], ids=["mixed", "plain", "empty"])
def test_bits_are_those_of_grpc(server: ShardServer, layout: UnitLayout) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(like: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in like]

    with closing_lane(LanedUnit(server, layout, dp=2)) as laned:
        one = laned.one
        gradients = random(one.zeros())
        for part, ways in enumerate([(one.push, laned.push), (laned.push, one.push)]):
            for rank, push in enumerate(ways):
                assert not push(gradients, rank=rank, part=part).duplicate
        over_grpc, over_socket = (server.look(lambda r=r: one.shard.contributions.by_rank[r]) for r in range(2))
        assert over_grpc.checksums == over_socket.checksums
        assert all(map(torch.equal, over_grpc.views, over_socket.views))
        one.prepare(0, (0, 0, 2), (1, 0, 2))
        one.update(0)
        version, flat = laned.gather()
        expected_version, expected = one.gather()
        assert (version, expected_version) == (1, 1)
        assert all(map(torch.equal, one.split(flat), expected))


def test_part_of_a_shard_can_be_gathered(server: ShardServer) -> None:
    with closing_lane(LanedUnit(server, BIG)) as laned:
        laned.push([torch.arange(BIG.size_bytes // 4, dtype=torch.float32)])
        laned.one.prepare(0)
        laned.one.update(0)
        _, whole = laned.gather(1)
        _, part = laned.gather(1, start_bytes=4096, stop_bytes=(3 << 20) + 4)
        assert torch.equal(part, whole[4096 : (3 << 20) + 4])


def test_a_push_is_known_again_over_another_way(laned: LanedUnit) -> None:
    ones = laned.one.filled(1.0)
    laned.one.push(ones)
    assert laned.push(ones).duplicate
    assert laned.push(laned.one.filled(2.0)).duplicate
    assert laned.one.push(ones).duplicate
    step = laned.server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="r"))
    assert (step.duplicate_count, step.differing_duplicate_count) == (3, 1)


def test_a_request_id_is_known_again_over_another_way(laned: LanedUnit) -> None:
    ones = laned.one.filled(1.0)
    laned.one.push(ones, request_id="one")
    assert laned.push(ones, context=laned.one.context(request_id="one")).duplicate
    error = error_of(lambda: laned.push(ones, part=1, context=laned.one.context(request_id="one")))
    assert "request id 'one' was used for another request" in str(error)


def test_a_version_is_waited_for(laned: LanedUnit) -> None:
    waiting = in_background(partial(laned.gather, 1))
    laned.server.until(lambda: len(laned.one.shard.values._changed._waiters) == 1, "somebody waits")
    train(laned.one, 0)
    version, flat = next(waiting)
    assert version == 1
    assert_holds(flat, -1.0)


def test_waiting_ends_with_the_deadline_and_says_for_what(laned: LanedUnit) -> None:
    error = error_of(lambda: laned.gather(3, timeout_s=0.3))
    assert isinstance(error, DeadlineError)
    assert "version 3 of unit 'u' of run 'r'; the newest is 0" in str(error)
    assert laned.gather()[0] == 0
    assert laned.connections() == 1


def test_waiting_ends_with_the_connection(laned: LanedUnit) -> None:
    with Peer(laned) as peer:
        peer.request(Kind.GATHER, laned.one.gather_request(1))
        laned.server.until(lambda: len(laned.one.shard.values._changed._waiters) == 1, "somebody waits")
    laned.server.until(lambda: len(laned.one.shard.values._changed._waiters) == 0, "nobody waits")


def test_two_gathers_at_once_are_not_mixed_up(big: LanedUnit) -> None:
    gathers = [in_background(big.gather) for _ in range(2)]
    for version, flat in map(next, gathers):
        assert version == 0
        assert_holds(flat, 0.0)
    assert big.connections() <= 2


def test_readers_never_see_a_mixture(server: ShardServer) -> None:
    with closing_lane(LanedUnit(server, layout_of(a=((1 << 19,), "float32")))) as laned:

        def read(until: int) -> None:
            version = -1
            while version < until:
                version, flat = laned.gather()
                assert_holds(flat, -float(version))

        readers = [in_background(partial(read, 15)) for _ in range(2)]
        for step in range(15):
            train(laned.one, step)
        for reader in readers:
            next(reader)
        server.until(lambda: server.store.memory.pool.taken_bytes == laned.one.size, "every copy is given back")


# Refusals.


def test_a_version_that_is_gone_is_said_to_be(laned: LanedUnit) -> None:
    train(laned.one, 0)
    assert isinstance(error_of(lambda: laned.gather(0)), VersionGoneError)
    assert laned.gather(1)[0] == 1
    assert laned.connections() == 1


def test_a_slow_reader_learns_that_its_version_is_gone(big: LanedUnit) -> None:
    server, one = big.server, big.one
    with Peer(big) as slow:
        slow.request(Kind.GATHER, one.gather_request())
        assert slow.frame()[0] is Kind.GATHERING
        train(one, 0)
        assert isinstance(slow.error(), VersionGoneError)
        slow.request(Kind.GATHER, one.gather_request())
        assert slow.frame()[0] is Kind.GATHERING
        received = b""
        while (frame := slow.frame())[0] is Kind.DATA:
            received += frame[1]
        assert frame[0] is Kind.END
        assert_holds(torch.frombuffer(bytearray(received), dtype=torch.uint8), -1.0)
    server.until(lambda: server.store.memory.pool.taken_bytes == one.size, "the old version is given back")


def test_bytes_that_moved_under_a_reader_are_not_vouched_for(big: LanedUnit) -> None:
    with Peer(big) as peer:
        peer.request(Kind.GATHER, big.one.gather_request())
        assert peer.frame()[0] is Kind.GATHERING

        def move() -> None:
            parameters = big.one.shard.values.parameters
            assert parameters is not None
            parameters.buffer = parameters.buffer.clone()

        big.server.look(move)
        assert isinstance(peer.error(), VersionGoneError)


def test_a_stale_push_is_refused_before_it_is_received(big: LanedUnit) -> None:
    big.one.fence(0, (0, 5, 0))
    assert isinstance(error_of(lambda: big.push(big.one.filled(1.0), epoch=4)), StaleEpochError)
    big.assert_nothing_came()
    assert not big.push(big.one.filled(1.0), epoch=5).duplicate


def test_a_refused_push_is_not_sent_to_its_end() -> None:
    refusal = frames.encode(Kind.ERROR, to_status_details(StaleEpochError("too late", newest=7)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        connecting = in_background(
            partial(LaneConnection, "127.0.0.1", port, bytes(32), peer="socket lane", timeout_s=20.0)
        )
        peer, _ = listener.accept()
        with peer:
            peer.sendall(frames.encode(Kind.WELCOME) + refusal)  # and reads nothing
            with closing(next(connecting)) as connection:
                much = memoryview(bytearray(64 << 20))
                header = shard_pb2.ReduceScatterHeader()
                error = error_of(lambda: connection.reduce_scatter(header, [much], what="a push", timeout_s=20.0))
    assert (type(error), error.data) == (StaleEpochError, {"newest": "7"})


def test_a_newer_stream_ends_an_older_one(big: LanedUnit) -> None:
    with Peer(big) as older:
        older.push(big, data(bytes(1 << 20)))
        big.server.until(lambda: len(big.one.shard.streams) == 1, "the stream is open")
        assert not big.push(big.one.filled(1.0)).duplicate
        assert isinstance(older.error(), StaleEpochError)
        assert older.is_closed()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"context": common_pb2.RequestContext(run="other", epoch=1)}, AccessError),
        ({"unit": "other"}, NotFoundError),
        ({"stop_bytes": 64}, InvalidRequestError),
        ({"wire_dtype": 99}, InvalidRequestError),
    ],
)
def test_a_push_that_does_not_fit_is_refused(
    laned: LanedUnit, changes: dict[str, Any], error: type[ShardwellError]
) -> None:
    assert type(error_of(lambda: laned.push(laned.one.filled(1.0), **changes))) is error
    laned.assert_nothing_came()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"run": "other"}, AccessError),
        ({"unit": "other"}, NotFoundError),
        ({"start_bytes": 64, "stop_bytes": 1 << 40}, InvalidRequestError),
        ({"wire_dtype": 99}, InvalidRequestError),
    ],
)
def test_a_gather_that_does_not_fit_is_refused(
    laned: LanedUnit, fields: dict[str, Any], error: type[ShardwellError]
) -> None:
    request = laned.one.gather_request()
    request.MergeFrom(shard_pb2.GatherRequest(**fields))
    nowhere = memoryview(bytearray(64))
    assert type(error_of(lambda: laned.lane.gather(request, nowhere, timeout_s=20.0, retry_for_s=0.0))) is error
    assert laned.connections() == 1


def test_a_target_of_another_size_is_noticed(laned: LanedUnit) -> None:
    for size in (laned.one.size - 64, laned.one.size + 64):
        target = memoryview(bytearray(size))
        error = error_of(
            partial(laned.lane.gather, laned.one.gather_request(), target, timeout_s=20.0, retry_for_s=0.0)
        )
        assert isinstance(error, ChunkError)
    assert laned.gather()[0] == 0


# Who may connect.


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (frames.hello(bytes(32)), AccessError),
        (b"GET / HTTP/1.1\r\nHost: here\r\n".ljust(frames.HELLO_BYTES), InvalidRequestError),
        (b"shrdlane" + struct.pack("<I", 7) + bytes(32), InvalidRequestError),
    ],
)
def test_who_has_no_token_is_told_and_cut_off(laned: LanedUnit, hello: bytes, error: type[ShardwellError]) -> None:
    with Peer(laned, hello=hello) as peer:
        assert type(peer.error()) is error
        assert peer.is_closed()
    assert laned.gather()[0] == 0


def test_who_says_nothing_is_cut_off(laned: LanedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_lane, "HELLO_LIMIT_S", 0.05)
    with Peer(laned, hello=b"shrd") as peer:
        assert "no token within 0.05 s" in str(peer.error())
        assert peer.is_closed()


def test_opening_is_given_up_in_time() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, closing(ShardClient(f"127.0.0.1:{silent.getsockname()[1]}")) as client:
        error = error_of(lambda: SocketLane(client, "r", timeout_s=0.1))
    assert isinstance(error, DeadlineError)
    assert "did not answer OpenLane within 0.1 s" in str(error)


def test_a_port_out_of_reach_is_noticed_when_the_lane_is_opened(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = unit(server)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setattr(server.sockets, "_port", nobody.getsockname()[1])
        error = error_of(lambda: SocketLane(server.client, one.run))
    assert isinstance(error, UnavailableError)
    server.until(lambda: not server.sockets._lanes, "the lane is closed")


def test_a_lane_needs_a_run(server: ShardServer) -> None:
    assert isinstance(error_of(lambda: SocketLane(server.client, "nowhere")), NotFoundError)


# Bytes that are wrong.


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (struct.pack("<IB", 1 << 31, Kind.GATHER), "a GATHER frame of 2147483648 bytes: at most"),
        (struct.pack("<IB", 0, 99), "a frame of kind 99: expected GATHER or REDUCE_SCATTER"),
        (data(b"abc"), "a frame of kind 7: expected GATHER or REDUCE_SCATTER"),
        (frames.encode(Kind.GATHER, b"\0"), "a GATHER frame of 1 bytes"),
        (frames.encode(Kind.GATHER, b"\0\0\0\0\xff\xff"), "do not decode as shardwell.v1.GatherRequest"),
        (bytes(range(256)) * 512, "a frame of kind 4: expected GATHER or REDUCE_SCATTER"),
    ],
)
def test_garbage_closes_its_connection_and_no_other(laned: LanedUnit, sent: bytes, complaint: str) -> None:
    with Peer(laned) as peer:
        peer.send(sent)
        error = peer.error()
        assert isinstance(error, InvalidRequestError)
        assert complaint in str(error)
        assert peer.is_closed()
    assert laned.gather()[0] == 0


RIGHT = bytes(PLAIN.size_bytes)


@pytest.mark.parametrize("known", [False, True], ids=["new", "duplicate"])
@pytest.mark.parametrize(
    ("stream", "error", "complaint"),
    [
        (data(RIGHT[1:]) + end_of(RIGHT[1:]), ChunkError, "ended after 239999 of 240000 bytes"),
        (data(RIGHT, b"\0") + end_of(RIGHT + b"\0"), ChunkError, "240001 bytes or more, expected 240000"),
        (data(b"", RIGHT) + end_of(RIGHT), ChunkError, "an empty frame at byte 0"),
        (struct.pack("<IB", (4 << 20) + 1, Kind.DATA), InvalidRequestError, "a DATA frame of 4194305 bytes"),
        (data(RIGHT) + end_of(b"other"), CorruptDataError, "was announced"),
        (data(RIGHT[1:]) + frames.encode(Kind.GATHER), InvalidRequestError, "expected DATA or END"),
    ],
    ids=["short", "long", "empty frame", "large frame", "checksum", "request within"],
)
def test_nothing_is_kept_of_a_stream_that_is_wrong(
    laned: LanedUnit, stream: bytes, error: type[ShardwellError], complaint: str, known: bool
) -> None:
    if known:
        laned.push(laned.one.zeros())
    with Peer(laned) as peer:
        peer.push(laned, stream)
        refused = peer.error()
        assert peer.is_closed()
    assert type(refused) is error
    assert complaint in str(refused)
    if not known:
        laned.assert_nothing_came()
    assert laned.push(laned.one.zeros()).duplicate == known


# Connections that break.


@pytest.mark.parametrize("sent", [0, 1, 3 << 20])
def test_a_push_cut_in_mid_stream_leaves_no_trace(big: LanedUnit, sent: int) -> None:
    with Peer(big) as peer:
        peer.push(big, data(bytes(4 << 20))[: frames.HEAD_BYTES + sent])
        big.server.until(lambda: len(big.one.shard.streams) == 1, "the stream is open")
    big.assert_nothing_came()
    assert not big.push(big.one.filled(1.0)).duplicate


def test_a_reader_that_vanishes_releases_what_it_read(big: LanedUnit) -> None:
    with Peer(big) as peer:
        peer.request(Kind.GATHER, big.one.gather_request())
        assert peer.frame()[0] is Kind.GATHERING
        parameters = big.one.shard.values.parameters
        assert parameters is not None
        assert big.server.look(lambda: parameters.readers) == 1
    big.server.until(lambda: parameters.readers == 0, "nobody reads")


def test_a_deadline_within_a_frame_ends_the_connection_and_nothing_else(big: LanedUnit) -> None:
    with Peer(big) as slow:
        slow.send(frames.encode_request(Kind.GATHER, big.one.gather_request(), 1.0))
        assert slow.frame()[0] is Kind.GATHERING
        parameters = big.one.shard.values.parameters
        assert parameters is not None
        big.server.until(lambda: parameters.readers == 0, "nobody reads")
        rest = slow.read(big.one.size)
        frame_bytes = frames.HEAD_BYTES + frames.DATA_BYTES
        heads = {
            rest[start : start + frames.HEAD_BYTES] for start in range(0, len(rest) - frames.HEAD_BYTES, frame_bytes)
        }
    assert heads == {struct.pack("<IB", frames.DATA_BYTES, Kind.DATA)}
    assert len(rest) < big.one.size
    assert big.gather()[0] == 0


def cut(laned: LanedUnit) -> None:
    """Has the server drop every connection."""
    laned.server.look(lambda: [task.cancel() for task in laned.server.sockets._connections])


def test_a_connection_that_broke_while_idle_is_replaced(laned: LanedUnit) -> None:
    laned.gather()
    cut(laned)
    laned.server.until(lambda: not laned.server.sockets._connections, "every connection is closed")
    assert laned.gather()[0] == 0


def test_a_connection_that_breaks_is_tried_again_for_as_long_as_asked(laned: LanedUnit) -> None:
    for retry_for_s, outcome in ((0.0, "fails"), (20.0, "succeeds")):
        waiting = in_background(partial(laned.gather, 1, retry_for_s=retry_for_s))
        laned.server.until(lambda: len(laned.one.shard.values._changed._waiters) == 1, "somebody waits")
        cut(laned)
        if outcome == "fails":
            assert isinstance(error_of(partial(next, waiting)), UnavailableError)
            continue
        laned.server.until(lambda: len(laned.one.shard.values._changed._waiters) == 1, "it waits again")
        train(laned.one, 0)
        assert next(waiting)[0] == 1


def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        connect = partial(LaneConnection, "127.0.0.1", port, bytes(32), peer="socket lane", timeout_s=0.1)
        error = error_of(connect)
        assert isinstance(error, DeadlineError)
        assert "socket lane did not finish it within 0.1 s" in str(error)
    assert isinstance(error_of(connect), UnavailableError)


# The end of a lane.


def test_closing_the_lane_closes_its_connections_and_ends_what_is_in_flight(server: ShardServer) -> None:
    with closing_lane(LanedUnit(server)) as laned, closing_lane(LanedUnit(server)) as other, Peer(laned) as peer:
        waiting = in_background(partial(laned.gather, 1, retry_for_s=20.0))
        server.until(lambda: len(laned.one.shard.values._changed._waiters) == 1, "somebody waits")
        laned.lane.close()
        assert isinstance(error_of(partial(next, waiting)), UnavailableError)
        assert peer.is_closed()
        error = error_of(lambda: laned.gather(retry_for_s=20.0))
        assert isinstance(error, UnavailableError)
        assert f"socket lane to {server.client.address} is closed" in str(error)
        with Peer(laned, hello=frames.hello(laned.lane._offer.token)) as late:
            assert isinstance(late.error(), AccessError)
        assert other.gather()[0] == 0


def test_a_lane_that_the_server_closed_fails_at_once() -> None:
    with ShardServer() as server:
        laned = LanedUnit(server)
        waiting = in_background(partial(laned.gather, 1, retry_for_s=1000.0))
        server.until(lambda: len(laned.one.shard.values._changed._waiters) == 1, "somebody waits")
    assert isinstance(error_of(partial(next, waiting)), UnavailableError)
    assert isinstance(error_of(lambda: laned.gather(retry_for_s=1000.0)), UnavailableError)


def test_a_server_process_offers_the_lane_and_stops_under_it(tmp_path: Path) -> None:
    deadline = time.monotonic() + 60.0
    coordinator = ServerProcess("coordinator", ["coordinator", "--listen", "127.0.0.1:0"], tmp_path / "coordinator")
    processes = [coordinator]
    try:
        coordinator.wait_ready(deadline)
        arguments = ["shard", "--coordinator", coordinator.address, "--listen", "127.0.0.1:0"]
        processes.append(shard := ServerProcess("shard", arguments, tmp_path / "shard"))
        shard.wait_ready(deadline)
        with closing(ShardClient(shard.address)) as client:
            request = shard_pb2.OpenLaneRequest(run="nowhere", kind=common_pb2.LANE_KIND_SOCKET)
            with pytest.raises(NotFoundError):
                next(client.stream("OpenLane", request, timeout_s=20.0))
            client.call("ReserveUnit", reservation())
            lane = SocketLane(client, "r")
            shard.stop(20.0)
            assert shard.exit_code == 0
            gather = partial(lane.gather, shard_pb2.GatherRequest(run="r", unit="u"), memoryview(bytearray(64)))
            assert isinstance(error_of(lambda: gather(timeout_s=20.0, retry_for_s=1000.0)), UnavailableError)
        assert "Traceback" not in shard.log_path.read_text()
    finally:
        for each in processes:
            each.kill()


def reservation() -> shard_pb2.ReserveUnitRequest:
    context = common_pb2.RequestContext(run="r", epoch=1 << 30)
    return shard_pb2.ReserveUnitRequest(context=context, unit=PLAIN.to_proto(), stop_bytes=PLAIN.size_bytes, dp=1)
