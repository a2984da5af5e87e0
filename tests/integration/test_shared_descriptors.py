"""What a process may do with a shard server's shared memory: with its run's token, without it, and as another user."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from shardwell import LocalCluster
from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.transports import shm_buffers
from shardwell_wire.host.shared_memory import ANSWER, HEAD_BYTES, TOKEN_BYTES, opened, receive_descriptor, request
from tests.support.cluster import wait_until
from tests.support.processes import TrainerProcess
from tests.support.shard_server import ShardServer, assert_all, unit
from tests.support.shm_transport import ConnectedUnit

ATTACK = """
import os, sys
user, folder = int(sys.argv[1]), sys.argv[2]
os.setgroups([]), os.setgid(user), os.setuid(user)
def tried(action):
    try:
        action()
    except OSError as error:
        return error.strerror
    return "done"
print(tried(lambda: os.listdir(folder)))
for name in sys.argv[4:]:
    for flags in (os.O_RDONLY, os.O_RDWR):
        print(tried(lambda: os.open(f"{folder}/{name}", flags)))
for action in (
    lambda: open(f"{folder}/new", "w"),
    lambda: os.rename(folder, f"{folder}x"),
    lambda: os.listdir(f"/proc/{sys.argv[3]}/fd"),
):
    print(tried(action))
"""
"""Tries to use another user's shared memory by its paths, although it knows them."""


pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture
def connected(server: ShardServer) -> Iterator[ConnectedUnit]:
    with ConnectedUnit(unit(server)) as made:
        yield made


def shard_descriptor(connected: ConnectedUnit) -> int:
    size_bytes = HEAD_BYTES + connected.one.size
    return connected.transport.open_file(connected.locate().segment.file, size_bytes=size_bytes)


def test_weights_cannot_be_written(connected: ConnectedUnit) -> None:
    size_bytes = HEAD_BYTES + connected.one.size
    for name in (connected.locate().segment.file, connected.transport._offer.file):
        with opened(connected.transport._receive(name)) as descriptor:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(descriptor, b"!", 0)
            with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
                os.ftruncate(descriptor, 0)
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    assert connected.vector().shows(0)


def test_buffers_of_a_trainer_can_be_written_and_not_resized(connected: ConnectedUnit) -> None:
    """The server would get SIGBUS if it read beyond the new end."""
    made = connected.open_gradient_buffer()
    with opened(connected.transport.open_file(made.file, size_bytes=connected.one.size)) as descriptor:
        for size_bytes in (0, connected.one.size - 1, 2 * connected.one.size):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size_bytes)
        os.pwrite(descriptor, bytes(connected.one.size), 0)
    assert connected.reduce(made.gradient_buffer_id).adopted


def test_transport_of_another_run_gets_no_file(connected: ConnectedUnit) -> None:
    names = [connected.locate().segment.file, connected.open_gradient_buffer().file]
    with ConnectedUnit(unit(connected.server, run="other")) as other:
        offer = other.transport._offer
        for name in [*names, "lock", "owner.json", f"../{names[0]}", str(Path(offer.socket).parent / names[0]), ""]:
            with pytest.raises(FileNotFoundError, match="does not offer the file"):
                other.transport._receive(name)
    for token in (b"", bytes(TOKEN_BYTES), offer.token, connected.transport._offer.token[:-1]):
        for name in (names[0], "\0"):
            with pytest.raises(FileNotFoundError):
                receive_descriptor(offer.socket, offer.user_id, token, name)
    os.close(shard_descriptor(connected))


def test_closed_transport_gets_no_file(connected: ConnectedUnit) -> None:
    offer, name = connected.transport._offer, connected.locate().segment.file
    connected.transport.close()
    connected.server.until(lambda: not connected.server.shm._open, "the session is closed")
    with pytest.raises(FileNotFoundError):
        receive_descriptor(offer.socket, offer.user_id, offer.token, name)


def connect(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(20)
    made.connect(path)
    return made


def test_idle_and_malformed_connections_are_closed(connected: ConnectedUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    path = connected.transport._offer.socket
    monkeypatch.setattr(shm_buffers, "MAX_WAITING", 3)
    monkeypatch.setattr(shm_buffers, "REQUEST_LIMIT_S", 0.2)
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(path)) for _ in range(10)]
        for packet in (b"\xff" * 200, bytes(1000), b"x"):
            with connect(path) as malformed:
                malformed.send(packet)
                assert malformed.recv(10) == b""
        os.close(shard_descriptor(connected))
        assert [each.recv(10) for each in idle] == [b""] * 10
        wait_until(
            lambda: not connected.server.evaluate(lambda: connected.server.shm._socket._waiting), "all are closed"
        )


def test_answer_is_lost_without_a_trace(connected: ConnectedUnit) -> None:
    offer, name = connected.transport._offer, connected.locate().segment.file
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with connect(offer.socket) as lost:
            lost.send(request(offer.token, name))
    with connect(offer.socket) as late:
        late.send(request(offer.token, name))
        assert late.recv(10) == ANSWER  # without room for the descriptor
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left")


def test_server_without_a_socket_is_reached_over_the_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Path) -> socket.socket:
        raise OSError("no sockets here")

    monkeypatch.setattr(shm_buffers, "_listen", fail)
    with closing(SharedMemory()) as shared, ShardServer(shared=shared) as server:
        one = unit(server)
        connection = ServerConnection(server.client.address, one.identity, ConnectOptions(("shm", "socket"), 64 << 10))
        with closing(connection):
            assert connection.transport.name == "socket"
    assert "trainers on this host use the network: cannot make a socket in /dev/shm/shardwell-" in caplog.text


OTHER_USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a process as another user")


@needs_root
def test_another_user_opens_no_file_by_its_path(connected: ConnectedUnit) -> None:
    connected.open_gradient_buffer()
    folder = Path(connected.transport._offer.socket).parent
    names = sorted(path.name for path in folder.iterdir() if not path.is_socket())
    assert connected.locate().segment.file in names
    command = [sys.executable, "-c", ATTACK, str(OTHER_USER), str(folder), str(os.getpid()), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == 2 * len(names) + 4
    assert set(done.stdout.splitlines()) <= {"Permission denied", "Operation not permitted"}
    connected.one.push(connected.one.filled(1.0))
    connected.one.prepare(0)
    connected.one.update(0)
    assert_all(connected.one.gather(1)[1], -1.0)


@needs_root
@pytest.mark.parametrize("optimizer", ["on the servers", "on the trainers"])
def test_trainers_of_another_user_share_memory_and_give_the_same_bits(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: tuple[object, ...] = ("--dp", 2, "--steps", 3, "--transports", "shm")
    if optimizer == "on the trainers":
        options += ("--client-side", "flat_adam")
    results = []
    with LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        monkeypatch.setenv("SHARDWELL_TOKEN", cluster.token)
        for user in (os.geteuid(), OTHER_USER):
            started = [
                TrainerProcess(cluster.address, f"of {user}", *options, "--user", user, "--global-rank", rank)
                for rank in (0, 1)
            ]
            with started[0], started[1]:
                results += [trainer.finish() for trainer in started]
    assert [result["returncode"] for result in results] == [0] * 4, results
    assert len({result["sha256"] for result in results}) == 1
    assert all(result["stats"]["in_place_bytes"] for result in results)
