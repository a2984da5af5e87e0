"""Tests of the socket transport on a real server: streams, rejections and connections."""

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

from shardwell.processes.local_cluster import ServerProcess
from shardwell.transport.base import into
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.service_client import Endpoint
from shardwell.transport.socket_transport import SocketConnection, SocketTransport
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import Kind
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
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import NO_CREDENTIALS
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
from tests.support.socket_transport import ConnectedUnit, Peer, assert_holds, closing_transport, data

LOCAL = Endpoint("127.0.0.1:1", NO_CREDENTIALS)
"""Connects to ports of this host."""


@pytest.fixture
def connected(server: ShardServer) -> Iterator[ConnectedUnit]:
    with closing_transport(ConnectedUnit(server)) as made:
        yield made


@pytest.fixture
def big(server: ShardServer) -> Iterator[ConnectedUnit]:
    """A unit larger than the buffers of a connection."""
    with closing_transport(ConnectedUnit(server, BIG)) as made:
        yield made


# Transfers.


@pytest.mark.parametrize("layout", [MIXED, PLAIN, layout_of(a=((0,), "float32"))], ids=["mixed", "plain", "empty"])
def test_contributions_have_the_bits_and_checksums_of_grpc(server: ShardServer, layout: UnitLayout) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(like: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in like]

    with closing_transport(ConnectedUnit(server, layout, dp=2)) as connected:
        one = connected.one
        gradients = random(one.zeros())
        for part, ways in enumerate([(one.push, connected.push), (connected.push, one.push)]):
            for rank, push in enumerate(ways):
                assert not push(gradients, rank=rank, part=part).duplicate
        over_grpc, over_socket = (
            server.evaluate(lambda r=r: one.shard.gradient.contributions.by_rank[r]) for r in range(2)
        )
        assert over_grpc.checksums == over_socket.checksums
        assert all(map(torch.equal, over_grpc.views, over_socket.views))
        one.prepare(0, (0, 0, 2), (1, 0, 2))
        one.update(0)
        version, flat = connected.gather()
        expected_version, expected = one.gather()
        assert (version, expected_version) == (1, 1)
        assert all(map(torch.equal, one.split(flat), expected))


def test_gather_of_a_range_returns_part_of_a_shard(server: ShardServer) -> None:
    with closing_transport(ConnectedUnit(server, BIG)) as connected:
        connected.push([torch.arange(BIG.size_bytes // 4, dtype=torch.float32)])
        connected.one.prepare(0)
        connected.one.update(0)
        _, whole = connected.gather(1)
        _, part = connected.gather(1, start_bytes=4096, stop_bytes=(3 << 20) + 4)
        assert torch.equal(part, whole[4096 : (3 << 20) + 4])


def test_duplicate_push_over_another_transport_is_detected(connected: ConnectedUnit) -> None:
    ones = connected.one.filled(1.0)
    connected.one.push(ones)
    assert connected.push(ones).duplicate
    assert connected.push(connected.one.filled(2.0)).duplicate
    assert connected.one.push(ones).duplicate
    step = connected.server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="r"))
    assert (step.duplicate_count, step.differing_duplicate_count) == (3, 1)


def test_reused_request_id_over_another_transport_is_detected(connected: ConnectedUnit) -> None:
    ones = connected.one.filled(1.0)
    connected.one.push(ones, request_id="one")
    assert connected.push(ones, context=connected.one.context(request_id="one")).duplicate
    error = error_of(lambda: connected.push(ones, part=1, context=connected.one.context(request_id="one")))
    assert "request id 'one' was used for another request" in str(error)


def test_deadline_error_names_the_missing_version(connected: ConnectedUnit) -> None:
    error = error_of(lambda: connected.gather(3, timeout_s=0.3))
    assert isinstance(error, DeadlineError)
    assert "version 3 of unit 'u' of run 'r'; the newest is 0" in str(error)
    assert connected.gather()[0] == 0
    assert connected.connections() == 1


def test_deadline_of_years_is_accepted(connected: ConnectedUnit) -> None:
    version, flat = connected.gather(0, timeout_s=1e9)
    assert version == 0
    assert_holds(flat, 0.0)


def test_server_stops_waiting_when_the_connection_closes(connected: ConnectedUnit) -> None:
    with Peer(connected) as peer:
        peer.request(Kind.GATHER, connected.one.gather_request(1))
        connected.server.until(lambda: len(connected.one.shard.values._waiting) == 1, "a request waits")
    connected.server.until(lambda: len(connected.one.shard.values._waiting) == 0, "no request waits")


def test_concurrent_gathers_use_separate_connections(big: ConnectedUnit) -> None:
    gathers = [in_background(big.gather) for _ in range(2)]
    for version, flat in map(next, gathers):
        assert version == 0
        assert_holds(flat, 0.0)
    assert big.connections() <= 2


def test_concurrent_readers_never_see_a_mixture(server: ShardServer) -> None:
    with closing_transport(ConnectedUnit(server, layout_of(a=((1 << 19,), "float32")))) as connected:

        def read(until: int) -> None:
            version = -1
            while version < until:
                version, flat = connected.gather()
                assert_holds(flat, -float(version))

        readers = [in_background(partial(read, 15)) for _ in range(2)]
        for step in range(15):
            train(connected.one, step)
        for reader in readers:
            next(reader)
        server.until(lambda: server.store.memory.pool.taken_bytes == connected.one.size, "every copy is released")


# Rejections.


def test_gather_of_a_replaced_version_keeps_the_connection(connected: ConnectedUnit) -> None:
    train(connected.one, 0)
    assert isinstance(error_of(lambda: connected.gather(0)), VersionGoneError)
    assert connected.gather(1)[0] == 1
    assert connected.connections() == 1


def test_slow_reader_of_a_replaced_version_gets_version_gone(big: ConnectedUnit) -> None:
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
    server.until(lambda: server.store.memory.pool.taken_bytes == one.size, "the old version is released")


def test_parameters_moved_during_a_gather_raise_version_gone(big: ConnectedUnit) -> None:
    with Peer(big) as peer:
        peer.request(Kind.GATHER, big.one.gather_request())
        assert peer.frame()[0] is Kind.GATHERING

        def move() -> None:
            parameters = big.one.shard.values.current
            assert parameters is not None
            parameters.buffer = parameters.buffer.clone()

        big.server.evaluate(move)
        assert isinstance(peer.error(), VersionGoneError)


def test_stale_push_is_rejected_before_it_is_received(big: ConnectedUnit) -> None:
    big.one.fence(0, (0, 5, 0))
    assert isinstance(error_of(lambda: big.push(big.one.filled(1.0), epoch=4)), StaleEpochError)
    big.assert_no_push_is_kept()
    assert not big.push(big.one.filled(1.0), epoch=5).duplicate


def test_client_stops_sending_a_rejected_push() -> None:
    refusal = socket_frames.encode(Kind.ERROR, to_status_details(StaleEpochError("too late", newest=7)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = shard_pb2.SocketOffer(port=listener.getsockname()[1], token=bytes(32))
        connecting = in_background(partial(SocketConnection, LOCAL, offer, peer="socket transport", timeout_s=20.0))
        peer, _ = listener.accept()
        with peer:
            peer.sendall(socket_frames.encode(Kind.WELCOME) + refusal)  # sent before the peer reads anything
            with closing(next(connecting)) as connection:
                much = memoryview(bytearray(64 << 20))

                def push() -> None:
                    with connection.request("a push", 20.0):
                        connection.send_stream(shard_pb2.ReduceScatterHeader(), [much])
                        connection.receive(Kind.REDUCE_SCATTERED)

                error = error_of(push)
    assert (type(error), error.data) == (StaleEpochError, {"newest": "7"})


def test_newer_push_cancels_an_older_stream(big: ConnectedUnit) -> None:
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
        ({"stop_bytes": 64}, NotFoundError),
        ({"wire_dtype": 99}, InvalidRequestError),
    ],
)
def test_malformed_push_is_rejected(
    connected: ConnectedUnit, changes: dict[str, Any], error: type[ShardwellError]
) -> None:
    assert type(error_of(lambda: connected.push(connected.one.filled(1.0), **changes))) is error
    connected.assert_no_push_is_kept()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"run": "other"}, AccessError),
        ({"unit": "other"}, NotFoundError),
        ({"start_bytes": 64, "stop_bytes": 1 << 40}, NotFoundError),
        ({"wire_dtype": 99}, InvalidRequestError),
    ],
)
def test_malformed_gather_is_rejected(
    connected: ConnectedUnit, fields: dict[str, Any], error: type[ShardwellError]
) -> None:
    request = connected.one.gather_request()
    request.MergeFrom(shard_pb2.GatherRequest(**fields))
    nowhere = into(memoryview(bytearray(64)))
    assert type(error_of(lambda: connected.transport.fetch_stream(request, nowhere, timeout_s=20.0))) is error
    assert connected.connections() == 1


def test_target_of_another_size_raises_chunk_error(connected: ConnectedUnit) -> None:
    for size in (connected.one.size - 64, connected.one.size + 64):
        target = memoryview(bytearray(size))
        error = error_of(
            partial(
                connected.transport.fetch_stream,
                connected.one.gather_request(),
                into(target),
                timeout_s=20.0,
            )
        )
        assert isinstance(error, ChunkError)
    assert connected.gather()[0] == 0


# The end of a session.


def test_close_ends_connections_and_requests_in_flight(server: ShardServer) -> None:
    with (
        closing_transport(ConnectedUnit(server)) as connected,
        closing_transport(ConnectedUnit(server)) as other,
        Peer(connected) as peer,
    ):
        waiting = in_background(partial(connected.gather, 1))
        server.until(lambda: len(connected.one.shard.values._waiting) == 1, "a request waits")
        connected.transport.close()
        assert isinstance(error_of(partial(next, waiting)), UnavailableError)
        assert peer.is_closed()
        error = error_of(connected.gather)
        assert isinstance(error, UnavailableError)
        assert f"socket transport to {server.client.address} is closed" in str(error)
        with Peer(connected, hello=socket_frames.hello(connected.transport._offer.token)) as late:
            assert isinstance(late.error(), AccessError)
        assert other.gather()[0] == 0


def test_transport_closed_by_the_server_fails_at_once() -> None:
    with ShardServer() as server:
        connected = ConnectedUnit(server)
        waiting = in_background(partial(connected.gather, 1))
        server.until(lambda: len(connected.one.shard.values._waiting) == 1, "a request waits")
    assert isinstance(error_of(partial(next, waiting)), UnavailableError)
    assert isinstance(error_of(connected.gather), UnavailableError)


def test_server_process_offers_the_transport_and_stops_cleanly(tmp_path: Path) -> None:
    deadline = time.monotonic() + 60.0
    coordinator = ServerProcess("coordinator", ["coordinator", "--listen", "127.0.0.1:0"], tmp_path / "coordinator")
    processes = [coordinator]
    try:
        coordinator.wait_ready(deadline)
        arguments = ["shard", "--coordinator", coordinator.address, "--listen", "127.0.0.1:0"]
        processes.append(shard := ServerProcess("shard", arguments, tmp_path / "shard"))
        shard.wait_ready(deadline)
        with closing(ShardClient(shard.address)) as client:
            request = shard_pb2.OpenTransportRequest(run="nowhere", run_id="id", kind=common_pb2.TRANSPORT_KIND_SOCKET)
            with pytest.raises(NotFoundError):
                next(client.stream("OpenTransport", request, timeout_s=20.0))
            client.call("ReserveUnit", reservation())
            transport = SocketTransport(client, RunIdentity("r", "id-of-r"))
            shard.stop(20.0)
            assert shard.exit_code == 0
            gather = partial(
                transport.fetch_stream,
                shard_pb2.GatherRequest(run="r", run_id="id-of-r", unit="u"),
                into(memoryview(bytearray(64))),
            )
            assert isinstance(error_of(lambda: gather(timeout_s=20.0)), UnavailableError)
        assert "Traceback" not in shard.log_path.read_text()
    finally:
        for each in processes:
            each.kill()


def reservation() -> shard_pb2.ReserveUnitRequest:
    context = common_pb2.RequestContext(run="r", run_id="id-of-r", epoch=1)
    return shard_pb2.ReserveUnitRequest(context=context, unit=PLAIN.to_proto(), stop_bytes=PLAIN.size_bytes, dp=1)
