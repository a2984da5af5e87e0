"""Connections of a reader: each belongs to one process of a shard server, not to its address."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shardwell.transport.base import ByteCounter
from shardwell.transport.shared_vector import SegmentLocation
from shardwell.weights import pinned_version
from shardwell.weights.pinned_version import RunConnections
from shardwell_wire.errors import NotFoundError, UnavailableError, VersionGoneError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import NO_CREDENTIALS
from shardwell_wire.v1.common_pb2 import ShardRange

LAYOUT = UnitLayout("u", (Parameter("w", (4,), "float32"),))


class _Connection:
    """A connection to a server process, and the shard that it maps. ``opened`` are all of them."""

    opened: list[_Connection]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.closed, self.counter = False, ByteCounter()
        self.opened.append(self)

    def close(self) -> None:
        self.closed = True


class _Shard:
    """A shard in mapped memory: reads tell over which connection it was located."""

    is_mapped = False

    def __init__(self, run: object, layout: object, server: _Connection, *_: Any) -> None:
        self._server = server

    def locate(self) -> None:
        return None

    def forget(self) -> None:
        pass

    def fetch(self, version: int, target: memoryview) -> None:
        target[0] = _Connection.opened.index(self._server)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> RunConnections:
    monkeypatch.setattr(_Connection, "opened", [], raising=False)
    monkeypatch.setattr(pinned_version, "ServerConnection", _Connection)
    monkeypatch.setattr(pinned_version, "RemoteShard", _Shard)
    return RunConnections(RunIdentity("run", "id"), NO_CREDENTIALS)


def shard(incarnation: str, address: str = "host:1") -> ShardRange:
    return ShardRange(server_id="s", address=address, incarnation=incarnation, start_bytes=0, stop_bytes=16)


def used_connection(connections: RunConnections, owner: ShardRange) -> int:
    """Returns the number of the connection over which a shard is read."""
    target = bytearray(16)
    connections.read(LAYOUT, owner, memoryview(target), version=0, timeout_s=1.0)
    return target[0]


def test_shard_of_a_restarted_server_at_the_same_address_is_not_read_from_former_memory(
    connections: RunConnections,
) -> None:
    assert used_connection(connections, shard("1")) == used_connection(connections, shard("1")) == 0
    assert used_connection(connections, shard("1", "host:2")) == 1
    assert used_connection(connections, shard("2")) == 2
    assert [each.closed for each in _Connection.opened] == [True, False, False]


def test_connection_is_opened_again_after_an_error(connections: RunConnections) -> None:
    used_connection(connections, shard("1"))
    with pytest.raises(VersionGoneError), connections.reaching(shard("1")):
        raise VersionGoneError("gone")
    assert used_connection(connections, shard("1")) == 0
    with pytest.raises(UnavailableError, match="s at host:1 cannot be reached"), connections.reaching(shard("1")):
        raise UnavailableError("refused")
    assert used_connection(connections, shard("1")) == 1
    # ``Reader`` asks the coordinator again after an UnavailableError only.
    with pytest.raises(UnavailableError, match="s at host:1 was restarted"), connections.reaching(shard("1")):
        raise NotFoundError("this server does not hold the run")
    assert used_connection(connections, shard("1")) == 2


def test_shard_whose_file_vanishes_before_it_is_mapped_is_read_over_another_connection(
    connections: RunConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(_: _Shard, location: SegmentLocation) -> None:
        raise FileNotFoundError(2, "No such file or directory", location.file)

    monkeypatch.setattr(pinned_version, "CAN_MAP", True)
    with monkeypatch.context() as patch:
        patch.setattr(_Shard, "locate", lambda _: SegmentLocation("/folder/file", 0, 16))
        patch.setattr(_Shard, "map", vanished, raising=False)
        with pytest.raises(UnavailableError, match=r"s at host:1 .*it has removed the file /folder/file"):
            used_connection(connections, shard("1"))
    assert used_connection(connections, shard("1")) == 1


def test_concurrent_first_reads_of_a_shard_keep_one_stream(
    connections: RunConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of another one would never be released."""
    both, used = threading.Barrier(2, timeout=20.0), set[_Shard]()

    def locate(_: _Shard) -> None:
        both.wait()

    def fetch(fetched: _Shard, version: int, target: memoryview) -> None:
        used.add(fetched)

    monkeypatch.setattr(_Shard, "locate", locate)
    monkeypatch.setattr(_Shard, "fetch", fetch)
    monkeypatch.setattr(pinned_version, "CAN_MAP", True)
    connections.server(shard("1"))
    reads = [threading.Thread(target=used_connection, args=(connections, shard("1"))) for _ in range(2)]
    for read in reads:
        read.start()
    for read in reads:
        read.join(20.0)
    assert len(used) == 1
