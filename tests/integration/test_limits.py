"""Clients that send too slowly, too often or too much: the server refuses them, and serves the others."""

from __future__ import annotations

import asyncio
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import grpc
import pytest
import torch

import shardwell.testing
from shardwell.transport.service_client import CoordinatorClient
from shardwell_server.serving import limits
from shardwell_server.shard.requests import client_streams
from shardwell_server.shard.transports import socket_transport
from shardwell_server.shard.transports.socket_connection import Connection
from shardwell_wire.connection.channel import MAX_MESSAGE_BYTES, SERVER_OPTIONS, open_channel
from shardwell_wire.connection.socket_frames import Kind
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import AccessError, CapacityError, DeadlineError, InvalidRequestError, TooManyRequestsError
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.support.backup_pair import Pair
from tests.support.shard_server import PLAIN, HalfStream, OneUnit, ShardServer, assert_all, error_of, layout_of, unit
from tests.support.socket_transport import ConnectedUnit, Peer, closing_transport, data

LIST_RUNS = "/shardwell_wire.v1.CoordinatorService/ListRuns"


@pytest.fixture
def connected(server: ShardServer) -> Iterator[ConnectedUnit]:
    with closing_transport(ConnectedUnit(server)) as open_transport:
        yield open_transport


# Slow streams.


def drip(send: Callable[[int], bool]) -> None:
    """Sends a little, again and again, until ``send`` returns False."""
    deadline = time.monotonic() + 20.0
    for number in range(1_000_000):
        if not send(number):
            return
        assert time.monotonic() < deadline, "the slow stream is still served"
        time.sleep(0.005)


def test_dripping_push_over_grpc_is_cancelled(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = unit(server)
    monkeypatch.setattr(client_streams, "IDLE_LIMIT_S", 0.2)
    messages = iter(one.push_messages(one.filled(1.0), chunk_bytes=64))
    half: HalfStream = one.open_push()

    def send(_: int) -> bool:
        half.send(next(messages))
        return not half.future.done()

    drip(send)
    error = half.error()
    assert isinstance(error, DeadlineError)
    assert "bytes of the stream moved in 0.2 s, expected at least 1048576" in str(error)
    assert not str(error).startswith("0 bytes")
    server.until(lambda: server.store.memory.pool.taken_bytes == one.size, "the stream's buffer is released")


def test_dripping_push_over_a_socket_is_cancelled(connected: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_streams, "IDLE_LIMIT_S", 0.2)
    with Peer(connected) as peer:
        peer.push(connected)
        peer.socket.settimeout(0.001)

        def send(_: int) -> bool:
            peer.send(data(b"\0"))
            try:
                return not peer.socket.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                return True

        drip(send)
        peer.socket.settimeout(20.0)
        error = peer.error()
    assert isinstance(error, DeadlineError)
    assert "bytes of the stream moved in 0.2 s" in str(error)
    connected.assert_no_push_is_kept()


# Connections of the socket transport.


def test_connections_without_a_token_make_room_for_new_ones(
    connected: ConnectedUnit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_transport, "MAX_UNPROVEN", 3)
    with ExitStack() as stack:
        silent = [stack.enter_context(Peer(connected, hello=b"shrd")) for _ in range(5)]
        served = stack.enter_context(Peer(connected))  # makes the third silent one the oldest, and closes it
        served.push(connected)
        assert [peer.is_closed() for peer in silent[:3]] == [True] * 3
        for peer in silent[3:]:
            peer.socket.setblocking(False)
            with pytest.raises(BlockingIOError):
                peer.socket.recv(1)
    assert_all(connected.one.gather()[1], 0.0)


def test_a_session_has_few_connections(connected: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_transport, "MAX_SESSION_CONNECTIONS", 1 + connected.connections())
    hello = socket_transport.socket_frames.hello(connected.transport._offer.token)
    with Peer(connected), Peer(connected, hello=hello) as one_more:
        error = one_more.error()
    assert isinstance(error, TooManyRequestsError)
    assert "connections of this socket session are open" in str(error)
    assert connected.gather()[0] == 0


def test_wrong_tokens_are_refused_and_their_bytes_are_not_read(connected: ConnectedUnit) -> None:
    with Peer(connected, hello=socket_transport.socket_frames.hello(bytes(32))) as peer:
        assert type(peer.error()) is AccessError
        with pytest.raises(OSError):  # the server has stopped reading
            for _ in range(1000):
                peer.send(bytes(1 << 20))


def test_connections_are_accepted_at_a_limited_rate(connected: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []
    monkeypatch.setattr(connected.server.sockets._accepted, "count", lambda _: counted.append(0.0) or 0.2)
    start_s = time.monotonic()
    for _ in range(3):
        with Peer(connected):
            pass
    assert time.monotonic() - start_s > 0.4
    assert len(counted) == 3


def test_announced_bytes_take_no_memory_before_they_arrive() -> None:
    async def scenario(connection: Connection, peer: socket.socket) -> int:
        tracemalloc.start()
        try:
            receiving = asyncio.ensure_future(connection.exactly(4 << 20))
            await asyncio.sleep(0)
            peer.sendall(b"x" * 100)
            await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    async def run() -> int:
        mine, its = socket.socketpair(socket.AF_UNIX)
        with mine, its, socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname(), 20.0)
            accepted, _ = listener.accept()
            with peer, accepted:
                return await scenario(Connection(accepted), peer)

    assert asyncio.run(run()) < 1 << 20


def test_large_frames_arrive_whole(connected: ConnectedUnit) -> None:
    header = connected.header()
    header.parameter_indices.extend(range(200_000))
    with Peer(connected) as peer:
        peer.request(Kind.REDUCE_SCATTER, header)
        error = peer.error()
    assert isinstance(error, InvalidRequestError)
    assert "parameter_indices" in str(error)


# Connections of gRPC.


def with_option(name: str, value: int) -> list[tuple[str, int]]:
    """Returns the options of servers with another value of one that they have."""
    return [(each, value if each == name else before) for each, before in SERVER_OPTIONS]


@pytest.mark.parametrize("sent", [b"", b"PRI * HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_connection_without_a_handshake_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    options = with_option("grpc.server_handshake_timeout_ms", 200)
    monkeypatch.setattr("tests.support.shard_server.SERVER_OPTIONS", options)
    with ShardServer() as server, socket.create_connection(("127.0.0.1", port_of(server)), 20.0) as peer:
        peer.sendall(sent)
        while peer.recv(4096):
            pass


def test_connections_to_the_grpc_port_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    options = with_option("grpc.max_allowed_incoming_connections", 3)
    monkeypatch.setattr("tests.support.shard_server.SERVER_OPTIONS", options)
    with ShardServer() as server, ExitStack() as stack:
        one, address = unit(server), ("127.0.0.1", port_of(server))
        peers = [stack.enter_context(socket.create_connection(address, 20.0)) for _ in range(10)]
        closed = 0
        for peer in peers[3:]:
            with suppress(ConnectionResetError):
                assert peer.recv(1) == b""
            closed += 1
        assert closed == 7
        assert_all(one.gather()[1], 0.0)


def port_of(server: ShardServer) -> int:
    return int(server.address.rpartition(":")[2])


# Requests whose cost exceeds their size.


def test_contributors_are_limited_like_the_ranks_of_a_world(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN, dp=1 << 16)
    spec = common_pb2.UnitSpec(name="empty", parameters=[common_pb2.ParameterSpec(name="p", shape=[0], dtype=1)])
    spec.pp_ranks.extend(range(1000))
    error = error_of(lambda: one.reserve(unit=spec, start_bytes=0, stop_bytes=0))
    assert isinstance(error, InvalidRequestError)
    assert "1000 ranks of a replica in a run with dp=65536, which is 65536000 contributions" in str(error)
    spec.pp_ranks[1:] = []
    before = server.evaluate(lambda: len(server.store.runs))
    one.reserve(unit=spec, start_bytes=0, stop_bytes=0)
    assert server.evaluate(lambda: len(server.store.runs)) == before + 1


def test_shards_share_the_set_of_all_contributors(server: ShardServer) -> None:
    layouts = [layout_of(name, p=((0,), "float32")) for name in "ab"]
    ones = [OneUnit(server, layout, dp=60_000, index=index) for index, layout in enumerate(layouts)]
    for one in ones:
        one.reserve()
    assert server.evaluate(lambda: ones[0].shard.gradient.counted is ones[1].shard.gradient.counted)


def test_tiny_chunks_are_sent_as_larger_ones(server: ShardServer) -> None:
    one = unit(server)
    gathered = list(server.client.byte_response_stub("Gather")(one.gather_request(0, chunk_bytes=1), timeout=20))
    assert len(gathered) == -(-one.size // 4096)
    request = shard_pb2.MeasureTransportRequest(size_bytes=1 << 20, chunk_bytes=1)
    assert len(list(server.client.byte_response_stub("MeasureTransport")(request, timeout=20))) == 256


def test_address_of_a_backup_is_checked(server: ShardServer) -> None:
    one = unit(server)
    shard = shard_pb2.ShardReference(unit=one.layout.unit, start_bytes=one.start, stop_bytes=one.stop)
    backup = shard_pb2.CopyShardRequest(
        context=one.context(), shard=shard, placement=1, target_server_id="backup", target_address="nowhere"
    )
    error = error_of(lambda: server.call("CopyShard", backup))
    assert isinstance(error, InvalidRequestError)
    assert "'nowhere' is not an address" in str(error)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"dp_rank": 0, "shape": [1 << 34]}, CapacityError, "68718996736 beyond the reservation, but only"),
        ({"dp_rank": 0, "shape": [1 << 60]}, InvalidRequestError, "expected at most 1099511627776 bytes"),
        ({"dp_rank": 7, "shape": [1]}, InvalidRequestError, "partitions of ranks [7], expected strictly rising"),
    ],
)
def test_header_of_a_backup_allocates_nothing_that_does_not_fit(
    server: ShardServer, fields: dict[str, Any], kind: type[Exception], message: str
) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve(role=shard_pb2.SHARD_ROLE_BACKUP, placement=1)
    shard = shard_pb2.ShardReference(unit=one.layout.unit, start_bytes=one.start, stop_bytes=one.stop)
    header = shard_pb2.ReceiveShardStateHeader(
        context=one.context(), target=shard_pb2.BackupTarget(shard=shard, reservation=1)
    )
    header.parts.extend(shard_pb2.PartContent() for _ in one.segments)
    partition = header.partitions.add(dp_rank=fields["dp_rank"])
    partition.state.add(name="exp_avg", dtype=common_pb2.DTYPE_FLOAT32, shape=fields["shape"])
    taken_bytes = server.taken_bytes()
    stream = HalfStream(server.client.byte_request_stub("ReceiveShardState"))
    first = shard_pb2.ReceiveShardStateRequest(header=header)
    stream.send(*chunk_streams.encode_stream(first, [b"x"])).finish()
    error = stream.error()
    assert type(error) is kind
    assert message in str(error)
    assert server.taken_bytes() == taken_bytes


def test_unknown_content_of_a_step_is_named_in_the_answer(server: ShardServer) -> None:
    with ShardServer() as other:
        pair = Pair([server, other])
        pair.copy()
        target = shard_pb2.BackupTarget(shard=pair.reference, reservation=pair.reservation)
        item = shard_pb2.BackupToConfirm(target=target)
        item.contents.append(99)  # type: ignore[arg-type]
        request = shard_pb2.ConfirmBackupsRequest(context=pair.primary.context(0), backups=[item])
        assert "lacks content 99 of step 0" in str(other.call("ConfirmBackups", request))


# Rpcs.


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster whose limits are small."""
    monkeypatch.setattr(limits, "REFUSALS_PER_S", 0.01)
    monkeypatch.setattr(limits, "REFUSAL_BURST", 5)
    monkeypatch.setattr(limits, "OPEN_CALLS_PER_S", 0.01)
    monkeypatch.setattr(limits, "OPEN_CALL_BURST", 5)
    with shardwell.testing.in_process_cluster() as coordinator:
        yield coordinator


def statuses(address: str, path: str, count: int) -> list[str]:
    """Calls an rpc without a token on one connection; returns the statuses."""
    found = []
    with open_channel(address) as channel:
        call = channel.unary_unary(path)
        for _ in range(count):
            try:
                call(b"", timeout=20)
                found.append("OK")
            except grpc.RpcError as error:
                found.append(error.code().name)
    return found


@pytest.mark.parametrize(("path", "status"), [(LIST_RUNS, "UNAUTHENTICATED"), ("/grpc.health.v1.Health/Check", "OK")])
def test_connections_of_callers_without_a_token_are_closed(address: str, path: str, status: str) -> None:
    with closing(CoordinatorClient(address)) as client:
        assert client.call("ListRuns", coordinator_pb2.ListRunsRequest()).runs == []
        found = statuses(address, path, 2000)
        assert found[:6] == [status] * 6
        assert "UNAVAILABLE" in found, "the connection was closed"
        assert client.call("ListRuns", coordinator_pb2.ListRunsRequest()).runs == []


def test_client_repeats_a_request_that_was_refused_because_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other trainers of the run may be the cause, and they finish."""
    refusals = 0
    with ShardServer() as server:
        admitted = limits.RequestLimits.begin

        def refuse_twice(*arguments: Any) -> float:
            nonlocal refusals
            if refusals < 2:
                refusals += 1
                raise TooManyRequestsError("run 'gpt' has 32768 unfinished requests")
            return admitted(*arguments)

        monkeypatch.setattr(limits.RequestLimits, "begin", refuse_twice)
        request = shard_pb2.DescribeServerRequest()
        with pytest.raises(TooManyRequestsError):
            server.client.call("DescribeServer", request)
        server.client.call("DescribeServer", request, retry_for_s=20.0)
        assert refusals == 2


def test_host_without_a_token_keeps_few_calls_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_CALLS_AT_ONCE", 5)
    with shardwell.testing.in_process_cluster() as address, ExitStack() as stack:
        watches = []
        for _ in range(8):
            channel = stack.enter_context(open_channel(address))
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            watches.append(watch(b"", timeout=60))
            with suppress(grpc.RpcError):
                next(watches[-1])
        for watch in watches[5:]:
            with pytest.raises(grpc.RpcError) as raised:
                next(watch)
            assert raised.value.code().name == "UNAVAILABLE"
        assert all(watch.is_active() for watch in watches[:5])
        for watch in watches[:5]:
            watch.cancel()
        deadline = time.monotonic() + 20.0
        while statuses(address, "/grpc.health.v1.Health/Check", 20)[-1] != "OK":
            assert time.monotonic() < deadline, "watches that have ended still count"


def test_too_large_messages_and_metadata_are_refused(address: str) -> None:
    with open_channel(address) as channel:
        call = channel.unary_unary(LIST_RUNS)
        for message, metadata in ((bytes(MAX_MESSAGE_BYTES + 1), ()), (b"", (("x-large", "y" * 64_000),))):
            with pytest.raises(grpc.RpcError) as raised:
                call(message, metadata=metadata, timeout=20)
            assert raised.value.code().name in ("RESOURCE_EXHAUSTED", "UNAUTHENTICATED")


def test_weights_are_those_of_an_undisturbed_run_despite_refusals(address: str) -> None:
    with shardwell.join(run="r") as session:
        model = torch.nn.Linear(3, 2)
        shardwell.fully_shard(model, session)
        statuses(address, LIST_RUNS, 500)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert session.step == 1
