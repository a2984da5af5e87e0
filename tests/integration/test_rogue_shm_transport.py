"""Tests of a rogue shard server that names files of the trainer's user: the trainer does not map them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwell.data_plane.remote_shard import RemoteShard, Wire
from shardwell.transport.base import ignore
from shardwell.transport.server_connection import ServerConnection
from shardwell_server.shard.memory.shared_memory import ShardFile, SharedBuffer, SharedMemory
from shardwell_server.shard.transports.shm_buffers import SharedGradientBuffer
from shardwell_wire.errors import UnavailableError
from shardwell_wire.shared_files import UntrustedFileError
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, error_of, unit
from tests.support.shm_transport import ConnectedUnit
from tests.support.transports import part_header


@pytest.fixture
def server() -> Iterator[ShardServer]:
    with closing(SharedMemory()) as shared, ShardServer(shared=shared) as running:
        yield running


@pytest.fixture(params=["elsewhere", "a folder with a server's name", "linked"])
def victim(request: pytest.FixtureRequest, tmp_path: Path, server: ShardServer) -> tuple[Path, str]:
    """Returns a file of this user with the expected size, and the path under which a rogue server names it."""
    folder = tmp_path / ("shardwell-a" if request.param == "a folder with a server's name" else "work")
    folder.mkdir(mode=0o700)
    path = folder / "thesis"
    path.write_bytes(b"precious".ljust(PLAIN.size_bytes, b"!"))
    if request.param != "linked":
        return path, str(path)
    assert server._shared is not None
    link = Path(server._shared.create(1, "a file").path).with_name("link")
    link.symlink_to(path)
    return path, str(link)


def push(connection: ServerConnection, one: OneUnit) -> None:
    shard = RemoteShard(one.identity, PLAIN, connection, one.start, one.stop, Wire(wait_limit_s=20.0))
    header = part_header(context=one.context(0, 1, "push"))
    flats = {at.parameter_index: torch.ones_like(each) for at, each in zip(one.segments, one.zeros(), strict=True)}
    shard.prepare_push(header, flats)(ignore)


def test_gradient_buffer_outside_the_servers_folder_is_not_mapped(
    server: ShardServer, victim: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, named = victim
    before, one = path.read_bytes(), unit(server)
    connection = ServerConnection(
        server.client.address, one.identity, transports=("shm", "socket"), chunk_bytes=64 << 10
    )
    with closing(connection), monkeypatch.context() as patched:
        patched.setattr(SharedGradientBuffer, "path", property(lambda _: named))
        push(connection, one)
        assert not connection.copies_gradients, "the gradient was streamed"
    one.prepare(0, (0, 0, 1))
    assert path.read_bytes() == before


def test_shard_outside_the_servers_folder_is_not_mapped(
    server: ShardServer, victim: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConnectedUnit(unit(server)) as connected, monkeypatch.context() as patched:
        patched.setattr(ShardFile, "path", property(lambda _: victim[1]))
        with pytest.raises(UntrustedFileError):
            connected.vector()


def test_proof_outside_the_servers_folder_is_rejected(
    server: ShardServer, victim: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rogue may know the start of the file, so matching bytes alone prove nothing."""
    path, named = victim
    if path.parent.name.startswith("shardwell-"):
        path.parent.chmod(0o755)
    one, make = unit(server), server.shm._shared.create

    def make_elsewhere(size_bytes: int, what: str) -> SharedBuffer:
        return SharedBuffer(named, make(size_bytes, what).tensor)

    with monkeypatch.context() as patched:
        patched.setattr(server.shm._shared, "create", make_elsewhere)
        patched.setattr("secrets.token_bytes", lambda count: path.read_bytes()[:count])
        error = error_of(partial(ConnectedUnit, one))
    assert isinstance(error, UnavailableError)
    assert "offers shared memory at" in str(error)
