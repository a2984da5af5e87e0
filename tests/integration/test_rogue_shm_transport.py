"""Tests of a rogue shard server or a rogue process of this host: the trainer maps only what it expects."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.transport.base import ignore
from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell_server.shard.memory.mapped_memory import SharedBuffer
from shardwell_wire.errors import UnavailableError
from shardwell_wire.host.shared_memory import UntrustedFileError
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, error_of, unit
from tests.support.shm_transport import ConnectedUnit
from tests.support.transports import part_header

pytestmark = pytest.mark.usefixtures("shared")


def push(connection: ServerConnection, one: OneUnit) -> None:
    shard = RemoteShard(one.identity, PLAIN, connection, one.start, one.stop, Wire(wait_limit_s=20.0))
    header = part_header(context=one.context(0, 1, "push"))
    flats = {at.parameter_index: torch.ones_like(each) for at, each in zip(one.segments, one.zeros(), strict=True)}
    shard.prepare_push(header, flats)(ignore)


def _device(_: Path) -> int:
    return os.open("/dev/zero", os.O_RDWR)


def _pipe(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDWR)


def _folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY)


def _short_file(folder: Path) -> int:
    """Reading a mapping of it beyond its end would kill the trainer."""
    (folder / "short").write_bytes(bytes(PLAIN.size_bytes - 1))
    return os.open(folder / "short", os.O_RDWR)


@pytest.fixture(params=[_device, _pipe, _folder, _short_file], ids=lambda make: make.__name__.strip("_"))
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[SharedBuffer], int]:
    """Returns a descriptor of something that is not the file."""
    return lambda _: request.param(tmp_path)


def test_gradient_buffer_of_another_kind_is_not_mapped(
    server: ShardServer, wrong: Callable[[SharedBuffer], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = unit(server)
    connection = ServerConnection(server.client.address, one.identity, ConnectOptions(("shm", "socket"), 64 << 10))
    with closing(connection), monkeypatch.context() as patched:
        patched.setattr(SharedBuffer, "open_for_trainer", wrong)
        push(connection, one)
        assert not connection.copies_gradients, "the gradient was streamed"
    one.prepare(0, (0, 0, 1))


def test_shard_of_another_kind_is_not_mapped(
    server: ShardServer, wrong: Callable[[SharedBuffer], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConnectedUnit(unit(server)) as connected, monkeypatch.context() as patched:
        patched.setattr(SharedBuffer, "open_for_trainer", wrong)
        with pytest.raises(UntrustedFileError):
            connected.vector()


def test_file_of_another_user_is_not_mapped(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with ConnectedUnit(unit(server)) as connected:
        connected.transport._offer.user_id += 1
        with pytest.raises(UntrustedFileError, match="expected a folder that only user"):
            connected.vector()


@pytest.mark.parametrize("mode", [0o770, 0o703, 0o1777])
def test_socket_in_a_folder_that_others_can_write_to_is_not_used(server: ShardServer, mode: int) -> None:
    """Such as one that another user made where the server is on another host: it would get the token."""
    one = unit(server)
    assert server._shared is not None
    server._shared.folder.chmod(mode)
    error = error_of(partial(ConnectedUnit, one))
    assert isinstance(error, UnavailableError)
    assert f"found one of user {os.geteuid()} with mode {mode:04o}" in str(error)


def test_proof_file_with_other_bytes_is_rejected(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one, token_bytes = unit(server), bytes(32)
    with monkeypatch.context() as patched:
        patched.setattr("shardwell_server.shard.transports.shm_transport.PROOF_BYTES", len(token_bytes) - 1)
        error = error_of(partial(ConnectedUnit, one))
    assert isinstance(error, UnavailableError)
    assert "on this host is not its socket" in str(error)
