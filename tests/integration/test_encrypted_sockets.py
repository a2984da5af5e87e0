"""Which connections of the socket transport are encrypted, and what the two ends refuse."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from shardwell.transport import service_client
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.socket_transport import SocketTransport
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import EncryptedStream, PlainStream
from shardwell_wire.errors import AccessError, UnavailableError
from shardwell_wire.security import tls
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.security.tls import Encryption, Tls, must_encrypt
from tests.support.certificates import TestAuthority
from tests.support.shard_server import BIG, ShardServer, error_of, unit
from tests.support.socket_transport import ConnectedUnit, Peer, assert_holds, closing_transport

CHOICES = ("never", "off-host", "always")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("certs")).make()


@pytest.fixture
def encrypted(authority: TestAuthority) -> Iterator[ConnectedUnit]:
    options = authority.server(encrypt="always")
    with ShardServer(tls=options) as server, closing_transport(ConnectedUnit(server, BIG)) as made:
        yield made


def stream_of(transport: SocketTransport) -> object:
    (connection,) = transport._idle
    return connection.stream


def close_idle(transport: SocketTransport) -> None:
    """Makes the next request open a connection."""
    while transport._idle:
        transport._discard(transport._idle.pop())


@pytest.mark.parametrize("server_choice", CHOICES)
@pytest.mark.parametrize("client_choice", CHOICES)
@pytest.mark.parametrize("is_off_host", [False, True])
def test_stricter_choice_counts(
    authority: TestAuthority,
    monkeypatch: pytest.MonkeyPatch,
    server_choice: str,
    client_choice: str,
    is_off_host: bool,
) -> None:
    strictest = max(CHOICES.index(server_choice), CHOICES.index(client_choice))
    if is_off_host:  # a connection with two addresses, as between two hosts
        connect = socket.create_connection
        monkeypatch.setattr(
            service_client.socket,
            "create_connection",
            lambda address, timeout: connect(address, timeout, ("127.0.0.2", 0)),
        )
    with ShardServer(tls=authority.server(encrypt=server_choice)) as server:
        one, credentials = unit(server), Credentials(tls=Tls(authority.trusting(encrypt=client_choice)))
        with (
            closing(ShardClient(server.address, credentials=credentials)) as client,
            closing(SocketTransport(client, one.identity)) as transport,
        ):
            is_encrypted = strictest == CHOICES.index("always") or (is_off_host and strictest > 0)
            assert isinstance(stream_of(transport), EncryptedStream if is_encrypted else PlainStream)


def test_addresses_of_a_dual_stack_listener_are_compared() -> None:
    class Connected:
        def __init__(self, own: str, peer: str) -> None:
            self.getsockname, self.getpeername = (lambda: (own, 1)), (lambda: (peer, 2, 0, 0))

    def off_host(own: str, peer: str) -> bool:
        connected: Any = Connected(own, peer)
        return must_encrypt(Encryption.OFF_HOST, connected)

    assert not off_host("::ffff:10.0.0.1", "10.0.0.1")
    assert not off_host("::1", "::1")
    assert off_host("10.0.0.1", "10.0.0.2")
    assert off_host("::ffff:10.0.0.1", "::ffff:10.0.0.2")


def test_many_pushes_and_gathers_over_encrypted_connections(encrypted: ConnectedUnit) -> None:
    assert isinstance(stream_of(encrypted.transport), EncryptedStream)
    encrypted.push(encrypted.one.filled(3.0))
    shard = encrypted.one.shard
    (contribution,) = encrypted.server.evaluate(shard.gradient.contributions.by_rank.values)
    assert all(bool((view == 3.0).all()) for view in contribution.views)
    for _ in range(3):
        version, flat = encrypted.gather(0)
        assert version == 0
        assert_holds(flat, 0.0)


def test_bytes_on_the_network_are_encrypted(encrypted: ConnectedUnit) -> None:
    offer = encrypted.transport._offer
    with recording_proxy(offer.port) as (port, recorded):
        close_idle(encrypted.transport)
        offer.port = port
        encrypted.push([torch.full((each.numel(),), 3.0) for each in encrypted.one.filled(3.0)])
    sent = bytes(recorded)
    assert len(sent) > BIG.size_bytes
    assert offer.token not in sent
    assert torch.full((4,), 3.0).numpy().tobytes() not in sent
    assert sent.startswith(b"\x16\x03")


class recording_proxy:
    """Forwards one connection to a port, and records what the client sends."""

    def __init__(self, port: int) -> None:
        self._target, self._recorded = port, bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> tuple[int, bytearray]:
        self._thread.start()
        return self._listener.getsockname()[1], self._recorded

    def __exit__(self, *_: object) -> None:
        self._near.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._listener.close()

    def _run(self) -> None:
        self._near, _ = self._listener.accept()
        with self._near, socket.create_connection(("127.0.0.1", self._target)) as far:
            back = threading.Thread(target=forward, args=(far, self._near, bytearray()))
            back.start()
            forward(self._near, far, self._recorded)
            back.join(20)


def forward(source: socket.socket, target: socket.socket, recorded: bytearray) -> None:
    try:
        while received := source.recv(1 << 20):
            recorded += received
            target.sendall(received)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def test_unencrypted_connection_is_refused(encrypted: ConnectedUnit) -> None:
    with Peer(encrypted, hello=socket_frames.hello(encrypted.transport._offer.token)) as peer:
        error = peer.error()
        assert isinstance(error, AccessError)
        assert "this server encrypts connections (encrypt=always), and the connection does not use TLS" in str(error)
        assert peer.is_closed()


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x00\x05hello", b"\x16"], ids=["no handshake", "half a handshake"])
def test_broken_handshake_leaves_no_trace(encrypted: ConnectedUnit, first: bytes) -> None:
    before = encrypted.connections()
    with Peer(encrypted, hello=first) as peer:
        peer.socket.shutdown(socket.SHUT_WR)
        while peer.read(1):
            pass
    encrypted.server.until(lambda: len(encrypted.server.sockets._connections) == before, "the connection is closed")
    assert_holds(encrypted.gather(0)[1], 0.0)


def test_certificate_of_the_port_is_verified(encrypted: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls.Tls, "server_name", lambda self, address: "elsewhere")
    close_idle(encrypted.transport)
    error = error_of(lambda: encrypted.gather(0))
    assert isinstance(error, UnavailableError)
    assert "certificate is not valid for 'elsewhere'" in str(error)


def test_worn_out_connection_is_replaced(encrypted: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    former = stream_of(encrypted.transport)
    encrypted.gather(0)
    assert stream_of(encrypted.transport) is former
    monkeypatch.setattr("shardwell_wire.connection.socket_frames._MOST_RECORDS", 10)
    encrypted.gather(0)
    assert stream_of(encrypted.transport) is not former


def encrypted_pair(authority: TestAuthority) -> tuple[EncryptedStream, EncryptedStream, Callable[[], None]]:
    """Returns both ends of a connection, and a function that closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    certificates = Tls(authority.server()).current
    assert certificates.server_context is not None
    client, server = (
        EncryptedStream(near, certificates.client_context, "localhost"),
        EncryptedStream(far, certificates.server_context),
    )
    for end in (near, far):
        end.setblocking(False)
    pending = [client, server]
    while pending:
        for end in list(pending):
            try:
                end.handshake()
                pending.remove(end)
            except BlockingIOError:
                pass

    def close() -> None:
        near.close()
        far.close()

    return client, server, close


def test_bytes_count_as_sent_when_the_socket_took_them(authority: TestAuthority) -> None:
    sender, receiver, close = encrypted_pair(authority)
    data, received = bytes(range(256)) * (1 << 16), bytearray()
    target, sent = memoryview(bytearray(300_000)), 0
    blocked = 0
    while len(received) < len(data):
        try:
            while sent < len(data):
                sent += sender.send([memoryview(data)[sent:]])
        except BlockingIOError:
            blocked += 1
        try:
            while count := receiver.receive([target[:7], target[7:]]):
                received += target[:count]
        except BlockingIOError:
            pass
    close()
    assert blocked > 0, "the socket's buffers were full"
    assert received == data
    assert receiver.buffered_bytes == 0


def test_end_of_the_connection_is_seen(authority: TestAuthority) -> None:
    sender, receiver, close = encrypted_pair(authority)
    assert sender.send([b"abc", b"", b"def"]) == 6
    sender._socket.shutdown(socket.SHUT_WR)
    target = memoryview(bytearray(10))
    assert receiver.receive([target[:3], target[3:]]) == 6
    assert bytes(target[:6]) == b"abcdef"
    assert receiver.receive([target]) == 0
    close()
