"""Call connections: unary rpcs beside gRPC, with the same tokens, errors and deadlines."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.transport import service_client
from shardwell.transport.service_client import CallConnection, CallConnections, CoordinatorClient
from shardwell_server.coordinator.servers.shard_client import CALL_TIMEOUT_S, CallLine, ShardCalls
from shardwell_server.serving import call_server
from shardwell_server.serving.authentication import check_caller
from shardwell_server.serving.authorization import CALLER
from shardwell_server.serving.call_server import CallServer
from shardwell_server.serving.limits import Rate
from shardwell_server.serving.rpc import RpcContext
from shardwell_server.shard.state.runs import CoordinatorTerm
from shardwell_wire.connection import call_frames
from shardwell_wire.connection.call_frames import CallConnectionError
from shardwell_wire.errors import (
    AccessError,
    ConflictError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from shardwell_wire.security.credentials import NO_CREDENTIALS, new_key
from shardwell_wire.security.tokens import ClusterKey, Role
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

Result = TypeVar("Result")
GRPC_PORT = 50051
ADDRESS = f"127.0.0.1:{GRPC_PORT}"
SERVICE = "/shardwell_wire.v1.CoordinatorService/"
SHARD_SERVICE = "/shardwell_wire.v1.ShardService/"
LIST_RUNS, ADMIN = SERVICE + "ListRuns", SERVICE + "ListServers"


class Served:
    """A call server in a thread, with rpcs of the test."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.calls: list[tuple[str, bytes, Any]] = []
        self.cancelled: list[bytes] = []
        self.go = asyncio.Event()
        self.server = CallServer("127.0.0.1")
        admit = (lambda path, token: None) if key is None else partial(check_caller, key)
        rpcs = dict.fromkeys((LIST_RUNS, ADMIN), self._echo) | {
            "/slow": self._slow,
            "/fail": self._fail,
            "/large": self._large,
            SERVICE + "DescribeRun": self._slow,
            SHARD_SERVICE + "DescribeStep": self._slow,
        }
        self.run(self.server.start(rpcs, admit, grpc_port=GRPC_PORT))
        offer = self.server.offer()
        assert offer is not None
        self.offer = offer

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20.0)

    async def _echo(self, data: bytes, context: RpcContext) -> bytes:
        self.calls.append((context.peer(), data, CALLER.get()))
        return data

    async def _slow(self, data: bytes, context: RpcContext) -> bytes:
        self.calls.append((context.peer(), data, None))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(data)
            raise
        return data

    async def _fail(self, data: bytes, context: RpcContext) -> bytes:
        if data:
            raise NotFoundError("no such run", run=data.decode())
        raise ValueError("a defect")

    async def _large(self, data: bytes, context: RpcContext) -> bytes:
        self.calls.append((context.peer(), data, None))
        return bytes(1 << 20)

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.go.set)

    def close(self) -> None:
        self.run(self.server.stop(0.0))
        self.run(asyncio.sleep(0.01))  # closed transports run callbacks
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def break_connections(self, after_s: float) -> None:
        """Closes all connections some time after the next rpc has begun. Called in any thread."""
        until(lambda: bool(self.calls))
        time.sleep(after_s)
        self.loop.call_soon_threadsafe(lambda: [each.close() for each in list(self.server._connections)])

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Blocks the server while the block runs."""
        go = threading.Event()
        self.loop.call_soon_threadsafe(go.wait, 20.0)
        try:
            yield
        finally:
            go.set()

    @property
    def connection_count(self) -> int:
        return len(self.server._connections)


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


def connect(server: Served) -> CallConnection:
    return CallConnection("127.0.0.1", server.offer, "the server")


def connections(server: Served) -> CallConnections:
    found = CallConnections(lambda: ADDRESS, "the server")
    found.connect(server.offer)
    return found


def call(found: CallConnections, path: str, body: bytes, token: str = "", timeout_s: float = 20.0) -> bytes | None:
    return found.call(path, token, lambda: body, timeout_s)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_closed(peer: socket.socket) -> bool:
    """Reads until the server closes the connection."""
    peer.settimeout(20.0)
    try:
        while peer.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# The trainer's end.


def test_rpcs_use_one_connection(served: Served) -> None:
    found = connections(served)
    bodies = [b"", b"x", bytes(300_000)]
    assert [call(found, LIST_RUNS, body) for body in bodies] == bodies
    assert len({peer for peer, *_ in served.calls}) == 1
    assert served.calls[0][0].startswith("ipv4:127.0.0.1:")
    found.close()
    assert call(found, LIST_RUNS, b"x") is None


def test_errors_of_the_server_keep_their_class_and_data(served: Served) -> None:
    found = connections(served)
    with pytest.raises(NotFoundError, match="no such run") as raised:
        call(found, "/fail", b"gpt")
    assert raised.value.data["run"] == "gpt"
    with pytest.raises(InternalError, match="internal error"):
        call(found, "/fail", b"")
    with pytest.raises(InvalidRequestError, match="no such unary rpc"):
        call(found, SERVICE + "WatchEvents", b"")
    assert call(found, LIST_RUNS, b"x") == b"x"
    assert served.connection_count == 1, "an error of an rpc must not end the connection"
    found.close()


def test_deadline_cancels_the_handler_and_replaces_the_connection(served: Served) -> None:
    found = connections(served)
    with pytest.raises(DeadlineError):
        call(found, "/slow", b"late", timeout_s=0.1)
    until(lambda: served.cancelled == [b"late"])
    until(lambda: call(found, LIST_RUNS, b"x") == b"x")
    found.close()


def test_only_one_thread_uses_the_connection(served: Served) -> None:
    found, answers = connections(served), list[bytes | None]()
    waiting = threading.Thread(target=lambda: answers.append(call(found, "/slow", b"first")))
    waiting.start()
    until(lambda: len(served.calls) == 1)
    assert call(found, LIST_RUNS, b"second") is None, "the caller repeats the rpc over gRPC"
    served.release()
    waiting.join()
    assert answers == [b"first"]
    assert call(found, LIST_RUNS, b"third") == b"third"
    found.close()


def test_lost_connection_is_replaced(served: Served) -> None:
    found = connections(served)
    served.loop.call_soon_threadsafe(lambda: [each.close() for each in list(served.server._connections)])
    until(lambda: not served.connection_count)
    assert call(found, LIST_RUNS, b"x") is None, "the caller repeats the rpc over gRPC"
    until(lambda: call(found, LIST_RUNS, b"x") == b"x")
    found.close()


def test_interrupt_replaces_the_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response of an interrupted rpc must not be taken for that of the next one."""
    found = connections(served)

    def interrupted(deadline: float) -> None:
        until(lambda: len(served.calls) == 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(found.idle, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(found, LIST_RUNS, b"old")
    until(lambda: call(found, LIST_RUNS, b"new") == b"new")
    assert len({peer for peer, *_ in served.calls}) == 2
    found.close()


def test_proxy_is_not_bypassed(served: Served) -> None:
    """Where gRPC reaches the server through another port, the announced port may belong to another process."""
    found = CallConnections(lambda: "127.0.0.1:1234", "the server")
    found.connect(served.offer)
    assert call(found, LIST_RUNS, b"x") is None
    assert served.connection_count == 0


def test_no_token_is_sent_to_a_process_that_does_not_know_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                received.append(peer.recv(4096))
                peer.sendall(bytes(call_frames.WELCOME_BYTES))
                received.append(peer.recv(4096))

        other = threading.Thread(target=answer)
        other.start()
        offer = common_pb2.CallPort(
            port=listener.getsockname()[1], grpc_port=GRPC_PORT, secret=b"s" * 32, client_id=bytes(16)
        )
        found = CallConnections(lambda: ADDRESS, "the server")
        with caplog.at_level("INFO"):
            found.connect(offer)
        other.join()
    assert len(received[0]) == call_frames.HELLO_BYTES
    assert received[1] == b""
    assert "another process than the server listens at port" in caplog.text


def test_reader_cannot_pass_as_the_server_to_another_caller(served: Served) -> None:
    key = new_key()
    roles = [(Role.TRAINER, False), (Role.READER, True), (Role.READER, True)]
    tokens = [key.mint(role, run="gpt", run_id="1", lifetime_s=at + 60) for at, (role, _) in enumerate(roles)]
    offers = [
        served.server.offer(key.verify(token), is_reader=is_reader)
        for token, (_, is_reader) in zip(tokens, roles, strict=True)
    ]
    assert len({offer.secret for offer in offers if offer is not None}) == 3
    _, known, _ = offers
    assert known is not None
    for offer in offers:
        assert offer is not None
        CallConnection("127.0.0.1", offer, "the server").close()
        if offer is not known:
            other = common_pb2.CallPort(port=offer.port, secret=known.secret, client_id=offer.client_id)
            with pytest.raises(CallConnectionError, match="another process than the server listens"):
                CallConnection("127.0.0.1", other, "the server")
    until(lambda: not served.connection_count)


def test_further_readers_use_grpc(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_server, "MAX_READERS", 1)
    offer = served.server.offer(is_reader=True)
    assert offer is not None
    first = CallConnection("127.0.0.1", offer, "the server")
    with pytest.raises(ConnectionError):
        CallConnection("127.0.0.1", offer, "the server")
    trainer = connections(served)
    assert call(trainer, LIST_RUNS, b"x") == b"x", "readers leave connections for trainers"
    trainer.close()
    first.close()
    until(lambda: not served.connection_count)
    CallConnection("127.0.0.1", offer, "the server").close()


def test_connection_that_another_thread_has_closed_goes_over_grpc(served: Served) -> None:
    connection = connect(served)
    connection.close()
    with pytest.raises(CallConnectionError):
        connection._exactly(1, time.monotonic() + 20.0)


def test_port_that_does_not_exist_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    offer = common_pb2.CallPort(port=70_000, grpc_port=GRPC_PORT, secret=b"s" * 32, client_id=bytes(16))
    found = CallConnections(lambda: ADDRESS, "the server")
    found.connect(offer)
    assert call(found, LIST_RUNS, b"x") is None
    calls = ShardCalls()
    asyncio.run(calls.use_calls(ADDRESS, offer))


def test_silent_server_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_frames, "SILENCE_S", 0.1)
    found, answers = connections(served), list[bytes | None]()
    waiting = threading.Thread(target=lambda: answers.append(call(found, "/slow", b"x")))
    waiting.start()
    until(lambda: len(served.calls) == 1)
    time.sleep(0.7)  # several pings, which the server answers
    assert waiting.is_alive()
    monkeypatch.setattr(call_frames, "PING_LIMIT_S", 0.1)
    with served.blocked():
        waiting.join(20.0)
    assert answers == [None], "the caller repeats the rpc over gRPC"
    until(lambda: call(found, LIST_RUNS, b"x") == b"x")
    found.close()


def test_repetition_has_the_rest_of_the_callers_time(served: Served) -> None:
    """An rpc that breaks its connection takes no longer than its deadline."""
    limits = list[float]()
    with closing(CoordinatorClient(ADDRESS, credentials=NO_CREDENTIALS)) as client:
        client._calls.connect(served.offer)
        rpc = client._open_unary("DescribeRun")
        client._unary["DescribeRun"] = replace(rpc, stub=lambda *_, timeout, **__: limits.append(timeout))
        breaking = threading.Thread(target=served.break_connections, args=(0.5,))
        breaking.start()
        client.call("DescribeRun", coordinator_pb2.DescribeRunRequest(), timeout_s=20.0)
        breaking.join()
    assert 0.0 < limits[0] <= 19.5


# The server's end.


def test_token_is_checked_before_the_body_is_read() -> None:
    key = new_key()
    server = Served(key)
    try:
        token = key.mint(Role.OPERATOR)
        found = connections(server)
        assert call(found, ADMIN, b"x", token) == b"x"
        assert server.calls[0][2].role is Role.OPERATOR
        for wrong, error in (("", UnauthenticatedError), (key.mint(Role.SERVER), AccessError)):
            connection = connect(server)
            header = call_frames.encode_request(1, ADMIN, wrong, bytes(1 << 20), 5.0)
            connection._socket.sendall(header[: -(1 << 20)])  # without the body
            head = call_frames.decode_response(
                connection._exactly(call_frames.RESPONSE_HEADER_BYTES, time.monotonic() + 20.0)
            )
            assert head.failed
            with pytest.raises(error):
                raise service_client.from_status_details(
                    connection._exactly(head.body_bytes, time.monotonic() + 20.0), "s"
                )
            assert is_closed(connection._socket)
            connection.close()
        assert len(server.calls) == 1
        found.close()
    finally:
        server.close()


def test_client_without_the_secret_is_closed(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.offer.port)) as peer:
        peer.sendall(call_frames.MAGIC + bytes(call_frames.HELLO_BYTES + call_frames.PROOF_BYTES))
        assert is_closed(peer)
    with socket.create_connection(("127.0.0.1", served.offer.port)) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n")
        assert is_closed(peer)
    assert not served.calls


def test_unfinished_handshakes_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_server, "MAX_UNPROVEN", 2)
    monkeypatch.setattr(call_frames, "HANDSHAKE_LIMIT_S", 0.2)
    found = connections(served)
    silent = [socket.create_connection(("127.0.0.1", served.offer.port)) for _ in range(4)]
    assert all(map(is_closed, silent))
    assert call(found, LIST_RUNS, b"x") == b"x", "a connection with a complete handshake stays, also if it is idle"
    for each in silent:
        each.close()
    found.close()


def test_unfinished_handshakes_that_come_at_once_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_server, "MAX_UNPROVEN", 8)
    monkeypatch.setattr(call_frames, "HANDSHAKE_LIMIT_S", 60.0)
    found = connections(served)
    served.loop.call_soon_threadsafe(lambda: time.sleep(0.5))
    silent = [socket.create_connection(("127.0.0.1", served.offer.port)) for _ in range(60)]
    until(lambda: sum(map(has_ended, silent)) == 52)
    assert len(served.server.unproven) == 8
    assert call(found, LIST_RUNS, b"x") == b"x"
    for each in silent:
        each.close()
    found.close()


def has_ended(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return not peer.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_peer_that_reads_no_responses_starts_no_more_requests(served: Served) -> None:
    connection, count = connect(served), 2000
    connection._socket.sendall(
        b"".join(call_frames.encode_request(n + 1, "/large", "", b"", 20.0) for n in range(count))
    )
    until(lambda: bool(served.calls))
    time.sleep(0.5)
    assert len(served.calls) <= 2 * call_server.MAX_REQUESTS_AT_ONCE
    read = threading.Thread(
        target=lambda: [connection._exactly((1 << 20) + 9, time.monotonic() + 60) for _ in range(count)]
    )
    read.start()
    read.join(60.0)
    assert len(served.calls) == count, "the requests go on when the responses are read"
    connection.close()


def test_path_cannot_forge_lines_of_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    connection = connect(served)
    with caplog.at_level("INFO"):
        connection._socket.sendall(call_frames.encode_request(1, "/x\n2026-01-01 ERROR forged", "", b"", 5.0))
        assert is_closed(connection._socket)
    assert "forged" not in caplog.text
    connection.close()


def test_closed_handshakes_do_not_fill_the_log(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_server, "_logged", Rate(0.001, 5))
    with caplog.at_level("INFO"):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", served.offer.port)) as peer:
                peer.sendall(b"GET / HTTP/1.1\r\n")
                assert is_closed(peer)
    assert caplog.text.count("is closed") == 5


@pytest.mark.parametrize("turns", range(5))
def test_connection_that_is_accepted_while_the_server_stops_is_closed(turns: int) -> None:
    async def stop() -> None:
        server = CallServer("127.0.0.1")
        await server.start({}, lambda path, token: None, grpc_port=GRPC_PORT)
        offer = server.offer()
        assert offer is not None
        with socket.create_connection(("127.0.0.1", offer.port)) as peer:
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop(0.0)
            await asyncio.sleep(0.05)
            assert has_ended(peer)

    asyncio.run(stop())


def test_server_that_cannot_listen_has_no_call_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str) -> socket.socket:
        raise SystemExit("cannot listen on [::]: no IPv6")

    async def start() -> common_pb2.CallPort | None:
        server = CallServer("[::]")
        await server.start({}, lambda path, token: None, grpc_port=GRPC_PORT)
        await server.stop(0.0)
        return server.offer()

    monkeypatch.setattr(call_server, "listen", fail)
    assert asyncio.run(start()) is None


@pytest.mark.parametrize("lengths", [(1 << 30, 0, 0), (0, 1 << 15, 0), (0, 0, 1 << 15)], ids=["body", "path", "token"])
def test_oversized_request_ends_the_connection(served: Served, lengths: tuple[int, int, int]) -> None:
    body, path, token = lengths
    connection = connect(served)
    connection._socket.sendall(call_frames._REQUEST.pack(body, 1, 1000, path, token))
    assert is_closed(connection._socket)
    connection.close()


def test_closed_connection_cancels_its_handlers(served: Served) -> None:
    connection = connect(served)
    connection._socket.sendall(call_frames.encode_request(1, "/slow", "", b"x", 20.0))
    until(lambda: len(served.calls) == 1)
    connection.close()
    until(lambda: served.cancelled == [b"x"])


def test_stopping_server_finishes_its_requests(served: Served) -> None:
    found, answers = connections(served), list[bytes | None]()
    waiting = threading.Thread(target=lambda: answers.append(call(found, "/slow", b"x")))
    waiting.start()
    until(lambda: len(served.calls) == 1)
    stopping = asyncio.run_coroutine_threadsafe(served.server.stop(20.0), served.loop)
    until(lambda: served.server.offer() is None)
    served.release()
    stopping.result(20.0)
    waiting.join(20.0)
    assert answers == [b"x"]
    until(lambda: not served.connection_count)
    found.close()


# The coordinator's end.


def test_many_rpcs_share_a_connection(served: Served) -> None:
    count = 3 * call_server.MAX_REQUESTS_AT_ONCE

    async def ask() -> list[bytes]:
        line = await CallLine.connect("127.0.0.1", served.offer, "the server")
        slow = [asyncio.ensure_future(line.call("/slow", "", bytes([n % 256]), 20.0)) for n in range(count)]
        while len(served.calls) < call_server.MAX_REQUESTS_AT_ONCE:
            await asyncio.sleep(0.005)
        served.go.set()
        answers = await asyncio.gather(*slow)
        line.close()
        return answers

    assert served.run(ask()) == [bytes([n % 256]) for n in range(count)]


def test_errors_and_deadlines_of_a_shared_connection(served: Served) -> None:
    async def ask() -> None:
        line = await CallLine.connect("127.0.0.1", served.offer, "the server")
        with pytest.raises(NotFoundError):
            await line.call("/fail", "", b"gpt", 20.0)
        with pytest.raises(DeadlineError):
            await line.call("/slow", "", b"x", 0.1)
        assert await line.call(LIST_RUNS, "", b"x", 20.0) == b"x"
        waiting = asyncio.ensure_future(line.call("/slow", "", b"y", 20.0))
        await asyncio.sleep(0)
        line.close()
        with pytest.raises(CallConnectionError):
            await waiting
        assert not line.is_open
        with pytest.raises(CallConnectionError):
            await line.call(LIST_RUNS, "", b"x", 20.0)

    served.run(ask())


def test_coordinator_gives_a_silent_server_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_frames, "SILENCE_S", 0.1)

    async def ask() -> None:
        line = await CallLine.connect("127.0.0.1", served.offer, "the server")
        waiting = asyncio.ensure_future(line.call("/slow", "", b"x", 20.0))
        await asyncio.sleep(0.7)
        assert not waiting.done(), "the server answers pings"
        monkeypatch.setattr(call_frames, "PING_LIMIT_S", 0.1)
        with served.blocked(), pytest.raises(CallConnectionError):
            await waiting

    asyncio.run(ask())


def test_coordinator_does_not_trust_another_process(served: Served) -> None:
    wrong = common_pb2.CallPort(port=served.offer.port, grpc_port=GRPC_PORT, secret=b"w" * 32)
    with pytest.raises(OSError):
        served.run(CallLine.connect("127.0.0.1", wrong, "the server"))


def test_request_that_is_too_large_goes_over_grpc(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_frames, "MAX_BODY_BYTES", 1000)
    small, large = shard_pb2.DescribeServerRequest(), shard_pb2.ListShardsRequest(run="r" * 1000)

    async def ask() -> None:
        calls = ShardCalls()
        await calls.use_calls(ADDRESS, served.offer)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="this server has no such unary rpc"):
                await calls.call(ADDRESS, "DescribeServer", small, retry_for_s=0.0)
            with pytest.raises(UnavailableError):  # nothing serves gRPC
                await calls.call(ADDRESS, "ListShards", large, retry_for_s=0.0)
        await calls.close()

    served.run(ask())


def test_repetition_has_the_rest_of_the_coordinators_time(served: Served) -> None:
    limits, breaking = list[float](), threading.Thread(target=served.break_connections, args=(0.5,))

    async def answer(request: Any, *, timeout: float, metadata: Any) -> None:
        limits.append(timeout)

    async def ask() -> None:
        calls = ShardCalls()
        await calls.use_calls(ADDRESS, served.offer)
        calls._stubs[ADDRESS, "DescribeStep"] = answer
        breaking.start()
        await calls.call(ADDRESS, "DescribeStep", shard_pb2.DescribeStepRequest(), retry_for_s=0.0)
        await calls.close()

    asyncio.run(ask())
    breaking.join()
    assert 0.0 < limits[0] <= CALL_TIMEOUT_S - 0.5


# Trainers.


@pytest.mark.parametrize("way", ["calls", "grpc"])
def test_coordinator_that_was_replaced_commits_nothing(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The shard servers follow a later coordinator. Trainers of the former one learn it, whatever way their rpcs go."""
    servers, start, terms, learn = list[CallServer](), CallServer.start, set[CoordinatorTerm](), CoordinatorTerm.learn

    async def observed(self: CallServer, *arguments: Any, **options: Any) -> None:
        servers.append(self)
        if way == "calls":
            await start(self, *arguments, **options)

    def observed_learn(self: CoordinatorTerm, term: int) -> None:
        terms.add(self)
        learn(self, term)

    monkeypatch.setattr(CallServer, "start", observed)
    monkeypatch.setattr(CoordinatorTerm, "learn", observed_learn)
    with (
        shardwell.testing.in_process_cluster(2) as address,
        shardwell.join(address, run="replaced", world=shardwell.World(dp=1)) as session,
    ):
        model = nn.Linear(8, 8)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        until(lambda: way == "grpc" or all(server._connections for server in servers))
        with pytest.raises(ConflictError, match="the server follows a coordinator with a later term"):
            for step in session.steps(2):
                for batch in step.batches(lambda *_: torch.ones(4, 8)):
                    loss = model(batch).square().mean()
                    for each in terms if step.number == 1 else ():  # the servers have updated, and prepare later
                        learn(each, 1000)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert session.step == 1
        assert any(server._connections for server in servers) == (way == "calls")


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_steps_go_over_call_connections(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    """Without them, and while they break, the same rpcs go over gRPC."""
    paths, servers, start = list[str](), list[CallServer](), CallServer.start

    async def counting(self: CallServer, rpcs: Any, admit: Any, *, grpc_port: int) -> None:
        def count(path: str, token: str) -> Any:
            paths.append(path.rpartition("/")[2])
            return admit(path, token)

        servers.append(self)
        await start(self, rpcs, count, grpc_port=grpc_port)

    monkeypatch.setattr(CallServer, "start", counting)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    reference = nn.Linear(8, 8)
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    with (
        shardwell.testing.in_process_cluster(2) as address,
        shardwell.join(address, run="calls", world=shardwell.World(dp=1)) as session,
        ExitStack() as stack,
    ):
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        until(lambda: all(server._connections for server in servers))
        reader = stack.enter_context(shardwell.attach(address, run="calls"))
        until(lambda: reader._coordinator._calls.idle is not None)
        assert [each.is_reader for server in servers for each in server._connections].count(True) == 1
        assert reader._calls.secret != servers[0].offer().secret  # type: ignore[union-attr]
        for step in session.steps(20):
            assert reader.version == step.number
            if breaks and step.number % 3 == 1:
                for server in servers:
                    for connection in list(server._connections):
                        connection._loop.call_soon_threadsafe(connection.close)
            for batch in step.batches(lambda *_: torch.ones(4, 8)):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reference(torch.ones(4, 8)).square().mean().backward()
            plain.step()
            plain.zero_grad()
        final = shardwell.full_state_dict(model)
    assert all(torch.equal(value, final[name]) for name, value in reference.state_dict().items())
    expected = {"FinishWork", "CommitStep", "DescribeWeights"} | (set() if breaks else {"PrepareStep", "Update"})
    assert expected <= set(paths)
    if not breaks:
        assert paths.count("CommitStep") == 20
        assert paths.count("Update") == 20
        assert paths.count("DescribeWeights") >= 20
