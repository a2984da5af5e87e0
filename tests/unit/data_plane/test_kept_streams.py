"""Kept streams: deltas are applied to the stream that the server names, and to no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from shardwell.data_plane.kept_streams import DecodedStream, DeltaCache, DeltaIncoming, KeptStream, receiving
from shardwell.memory.buffers import BufferPool
from shardwell.store.run_store import RunStore
from shardwell.transport.base import Incoming
from shardwell_wire.encoding import value_deltas
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

NUMEL = 5000
SIZE = 2 * NUMEL


def stream_of(version: int) -> bytes:
    """Returns the stream of a version. Each version changes a few values."""
    values = np.random.default_rng(0).integers(0, 1 << 16, NUMEL, dtype=np.uint16)
    for each in range(version):
        values[each::17] += 1
    return values.tobytes()


class Server:
    """Answers gathers as a shard server does."""

    def __init__(self) -> None:
        self.salt = 0

    def stream(self, version: int) -> bytes:
        return bytes(byte ^ self.salt for byte in stream_of(version))

    def deltas(self, base: shard_pb2.StreamBase | None, version: int) -> tuple[bytes, shard_pb2.StreamDeltas | None]:
        """Returns what the server sends to a client with this base."""
        if base is None:
            return self.stream(version), None
        deltas = shard_pb2.StreamDeltas(checksum=xxhash.xxh3_64_intdigest(self.stream(version)))
        if not base.HasField("version") or base.checksum != xxhash.xxh3_64_intdigest(self.stream(base.version)):
            return self.stream(version), deltas
        sent = b""
        for number in range(base.version, version):
            delta = b"".join(value_deltas.encode(self.stream(number), self.stream(number + 1), SIZE) or [])
            deltas.sizes_bytes.append(len(delta))
            sent += delta
        return sent, deltas


class Client:
    """Fetches versions of one stream."""

    def __init__(self, server: Server, budget_bytes: int = SIZE) -> None:
        self.server, self.cache, self.buffers = server, DeltaCache(budget_bytes), BufferPool(1 << 20)
        self.kept = KeptStream(self.cache, "unit 'layer'")
        self.used: list[bytes] = []

    def use(self, stream: memoryview) -> None:
        self.used.append(bytes(stream))

    def fetch(self, version: int) -> int:
        """Fetches a version; returns the number of received bytes."""
        with receiving(SIZE, self.use, self.buffers, self.kept) as incoming:
            sent, deltas = self.server.deltas(incoming.base, version)
            incoming.place(version, deltas)[:] = sent
            incoming.finish()
            assert self.used[-1] == self.server.stream(version)
            return incoming.received_bytes


@pytest.fixture
def client() -> Client:
    return Client(Server())


def test_later_versions_arrive_as_deltas(client: Client) -> None:
    assert client.fetch(0) == SIZE
    received = [client.fetch(version) for version in (1, 2, 5)]
    assert received[0] < 0.15 * SIZE
    assert received[2] > received[1], "three deltas"
    stats = client.cache.stats()
    assert stats["delta_cache_bytes"] == SIZE
    assert (stats["delta_stream_bytes"], stats["delta_received_bytes"]) == (4 * SIZE, SIZE + sum(received))
    assert stats["delta_ratio"] == stats["delta_received_bytes"] / stats["delta_stream_bytes"]


def test_the_kept_version_is_read_without_a_transfer(client: Client) -> None:
    client.fetch(3)
    assert client.kept.read(3, client.use) and client.used[-1] == stream_of(3)
    assert not client.kept.read(4, client.use)
    assert not client.kept.read(None, client.use), "the newest version is not known"
    assert client.cache.stats()["delta_reused_bytes"] == SIZE


def test_other_values_of_the_same_version_are_no_base(client: Client) -> None:
    """After a rollback, the server makes the version again, with other values."""
    client.fetch(1)
    client.server.salt = 5
    assert client.fetch(2) == SIZE
    assert client.fetch(3) < SIZE


def test_a_forgotten_stream_is_neither_read_nor_a_base(client: Client) -> None:
    client.fetch(1)
    client.kept.forget()
    assert not client.kept.shows(1) and not client.kept.read(1, client.use)
    assert client.cache.stats()["delta_cache_bytes"] == 0
    assert client.fetch(2) == SIZE


def test_a_stream_that_is_forgotten_during_its_transfer_is_not_used_afterwards(client: Client) -> None:
    with receiving(SIZE, client.use, client.buffers, client.kept) as incoming:
        sent, deltas = client.server.deltas(incoming.base, 1)
        incoming.place(1, deltas)[:] = sent
        client.kept.forget()
        incoming.finish()
    assert client.cache.stats()["delta_cache_bytes"] == 0, "also if no transfer follows"
    assert not client.kept.read(1, client.use)
    assert client.fetch(2) == SIZE


def test_a_second_transfer_meanwhile_gets_the_whole_stream(client: Client) -> None:
    client.fetch(0)
    with receiving(SIZE, client.use, client.buffers, client.kept) as first:
        assert client.fetch(7) == SIZE
        sent, deltas = client.server.deltas(first.base, 1)
        first.place(1, deltas)[:] = sent
        first.finish()
    assert client.used[-1] == stream_of(1)
    assert client.fetch(2) < SIZE


def test_streams_beyond_the_budget_are_not_kept() -> None:
    client = Client(Server(), SIZE - 1)
    assert [client.fetch(version) for version in (0, 1)] == [SIZE, SIZE]
    assert client.cache.stats()["delta_cache_bytes"] == 0


def test_a_broken_whole_stream_is_no_base(client: Client) -> None:
    client.fetch(0)
    client.server.salt = 9
    with receiving(SIZE, client.use, client.buffers, client.kept) as incoming:
        place = incoming.place(1, client.server.deltas(incoming.base, 1)[1])
        place[:100] = bytes(100)
        assert incoming.base is not None and not incoming.base.HasField("version"), "nor of a repeated request"
    assert not client.kept.shows(0) and not client.kept.shows(1)
    assert client.fetch(1) == SIZE


def test_a_broken_delta_leaves_the_base(client: Client) -> None:
    client.fetch(0)
    with receiving(SIZE, client.use, client.buffers, client.kept) as incoming:
        incoming.place(1, client.server.deltas(incoming.base, 1)[1])
    assert client.kept.shows(0)
    assert client.fetch(1) < SIZE


def test_a_failed_request_leaves_the_base(client: Client) -> None:
    client.fetch(0)
    with receiving(SIZE, client.use, client.buffers, client.kept):
        pass
    assert client.kept.shows(0)


def test_a_delta_with_another_result_than_announced_is_refused(client: Client) -> None:
    client.fetch(0)
    with receiving(SIZE, client.use, client.buffers, client.kept) as incoming:
        sent, deltas = client.server.deltas(incoming.base, 1)
        assert deltas is not None
        deltas.checksum ^= 1
        incoming.place(1, deltas)[:] = sent
        with pytest.raises(
            CorruptDataError, match=r"unit 'layer': the deltas give a stream with checksum 0x.*expected"
        ):
            incoming.finish()
    assert len(client.used) == 1, "the values are not used"
    assert not client.kept.shows(1)
    assert client.fetch(1) == SIZE


@pytest.mark.parametrize(("sizes", "known"), [([10], "no base"), ([SIZE], "a base"), ([SIZE // 2, SIZE], "a base")])
def test_unexpected_deltas_are_refused(client: Client, sizes: list[int], known: str) -> None:
    if known == "a base":
        client.fetch(0)
    announced = shard_pb2.StreamDeltas(sizes_bytes=sizes)
    problem = f"deltas of {sum(sizes)} bytes for a stream of {SIZE} .* {known}"
    with (
        receiving(SIZE, client.use, client.buffers, client.kept) as incoming,
        pytest.raises(CorruptDataError, match=problem),
    ):
        incoming.place(1, announced)


def test_a_server_without_deltas_is_no_problem(client: Client) -> None:
    """It ignores the base, and announces no checksum."""
    for version in (0, 1):
        with receiving(SIZE, client.use, client.buffers, client.kept) as incoming:
            incoming.place(version, None)[:] = stream_of(version)
            incoming.finish()
        assert client.kept.read(version, client.use)


def test_decoded_values_are_a_base(client: Client) -> None:
    values = bytearray(stream_of(2))

    def encode(stream: memoryview) -> None:
        stream[:] = values

    decoded = DecodedStream(client.cache, "unit 'layer'", 2, encode)
    with receiving(SIZE, client.use, client.buffers, decoded) as incoming:
        assert isinstance(incoming, DeltaIncoming)
        sent, deltas = client.server.deltas(incoming.base, 3)
        incoming.place(3, deltas)[:] = sent
        incoming.finish()
        assert incoming.received_bytes < SIZE
    assert client.used == [stream_of(3)]
    assert client.cache.stats()["delta_cache_bytes"] == 0


def test_without_a_kept_stream_nothing_is_requested(client: Client) -> None:
    with receiving(SIZE, client.use, client.buffers) as incoming:
        assert type(incoming) is Incoming and incoming.base is None


def test_a_stream_that_a_former_owner_sends_during_a_rollback_is_forgotten(client: Client) -> None:
    """The former owner may be cut off from the coordinator, and still have the versions that do not count."""
    store: Any = RunStore.__new__(RunStore)
    shard = SimpleNamespace(forget=client.kept.forget)
    store._units, store._rollback_count = {0: SimpleNamespace(shards=[shard])}, 0
    store._node = None
    store._mappings = SimpleNamespace(start_over=lambda _: None)
    store._relocations = SimpleNamespace(refresh=lambda: None, settle=lambda: client.fetch(1))
    store.gradients = SimpleNamespace(rejoin=lambda **_: None)
    store._partition_updates = SimpleNamespace(drop_cache=lambda: None)
    store.rejoin(coordinator_pb2.JoinResponse(rollback_count=1), moved=False)
    assert not client.kept.shows(1)
    store.rejoin(coordinator_pb2.JoinResponse(rollback_count=1), moved=False)
    assert client.kept.shows(1), "without a rollback, nothing is forgotten"
