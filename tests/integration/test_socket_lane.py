"""The socket lane on a real server: the same bits, checks and errors as over gRPC, and nothing left of what broke."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.data_plane.lane_connection import LaneConnection
from shardwell.data_plane.lanes import NEARLY_BYTES, Lane
from shardwell.data_plane.shard_client import ShardClient
from shardwell.data_plane.socket_lane import SocketLane
from shardwell.processes.server_process import ServerProcess
from shardwell_wire import codec, frames
from shardwell_wire.errors import (
    AccessError,
    ChunkError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    VersionGoneError,
    to_status_details,
)
from shardwell_wire.frames import Kind
from shardwell_wire.layout import UnitLayout
from shardwell_wire.run_identity import RunIdentity
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
)
from tests.support.socket_lane import LanedUnit, Peer, assert_holds, closing_lane, data


@pytest.fixture
def laned(server: ShardServer) -> Iterator[LanedUnit]:
    with closing_lane(LanedUnit(server)) as made:
        yield made


@pytest.fixture
def big(server: ShardServer) -> Iterator[LanedUnit]:
    """More than a connection's buffers hold."""
    with closing_lane(LanedUnit(server, BIG)) as made:
        yield made


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


def test_a_deadline_may_be_years_away(laned: LanedUnit) -> None:
    version, flat = laned.gather(0, timeout_s=1e9)
    assert version == 0
    assert_holds(flat, 0.0)


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


@pytest.mark.parametrize("kind", ["socket", "grpc"])
def test_a_transfer_tells_when_little_of_it_is_left(big: LanedUnit, kind: str) -> None:
    lane: Lane = big.lane if kind == "socket" else big.server.client
    told: list[bool] = []
    ones = torch.ones(BIG.size_bytes // 4)
    lane.reduce_scatter(
        big.header(),
        [codec.memory_at(ones.data_ptr(), ones.nbytes)],
        timeout_s=20.0,
        retry_for_s=0.0,
        nearly=lambda: told.append(True),
    )
    assert told == [True]
    big.one.prepare(0)
    big.one.update(0)
    flat, told = torch.zeros(BIG.size_bytes // 4), []
    lane.gather(
        big.one.gather_request(1),
        codec.memory_at(flat.data_ptr(), flat.nbytes),
        timeout_s=20.0,
        retry_for_s=0.0,
        nearly=lambda: told.append(bool((flat[: -NEARLY_BYTES // 4] == -1.0).all())),
    )
    assert told and all(told)
    assert_holds(flat, -1.0)


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
            request = shard_pb2.OpenLaneRequest(run="nowhere", run_id="id", kind=common_pb2.LANE_KIND_SOCKET)
            with pytest.raises(NotFoundError):
                next(client.stream("OpenLane", request, timeout_s=20.0))
            client.call("ReserveUnit", reservation())
            lane = SocketLane(client, RunIdentity("r", "id-of-r"))
            shard.stop(20.0)
            assert shard.exit_code == 0
            gather = partial(
                lane.gather, shard_pb2.GatherRequest(run="r", run_id="id-of-r", unit="u"), memoryview(bytearray(64))
            )
            assert isinstance(error_of(lambda: gather(timeout_s=20.0, retry_for_s=1000.0)), UnavailableError)
        assert "Traceback" not in shard.log_path.read_text()
    finally:
        for each in processes:
            each.kill()


def reservation() -> shard_pb2.ReserveUnitRequest:
    context = common_pb2.RequestContext(run="r", run_id="id-of-r", epoch=1)
    return shard_pb2.ReserveUnitRequest(context=context, unit=PLAIN.to_proto(), stop_bytes=PLAIN.size_bytes, dp=1)
