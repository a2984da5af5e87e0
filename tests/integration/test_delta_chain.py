"""Gathers that name a base: deltas instead of streams, whole streams where the server cannot, and bounded memory."""

from __future__ import annotations

import pytest
import torch
import xxhash

from shardwell_server.shard.unit import encoded_versions
from shardwell_server.shard.unit.encoded_versions import EncodedStream
from shardwell_server.shard.unit.values import VersionBytes
from shardwell_wire.encoding import value_deltas, wire_dtypes
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import MIXED, OneUnit, ShardServer, layout_of, train

LARGE = layout_of(a=((400_003,), "float32"), b=((3, 7), "bfloat16"))
BFLOAT16, FLOAT16 = common_pb2.WIRE_DTYPE_BFLOAT16, common_pb2.WIRE_DTYPE_FLOAT16


class Client:
    """Gathers one shard and keeps the stream as the base of the next gather."""

    def __init__(self, one: OneUnit, wire_dtype: int = BFLOAT16) -> None:
        self.one, self.wire_dtype = one, wire_dtype
        self.base = shard_pb2.StreamBase()
        self.stream = bytearray(wire_dtypes.stream_size(one.layout, one.segments, wire_dtype))
        self.deltas = shard_pb2.StreamDeltas()
        """Of the last response."""

    def gather(self, version: int | None = None) -> int:
        """Gathers a version; returns the number of bytes that travelled."""
        request = self.one.gather_request(version, wire_dtype=self.wire_dtype, base=self.base)
        messages = self.one.server.client.byte_response_stub("Gather")(request, timeout=20.0)
        responses = [shard_pb2.GatherResponse.FromString(message) for message in messages]
        header, data = responses[0].header, b"".join(response.chunk.payload for response in responses)
        self.deltas = header.deltas
        if self.deltas.sizes_bytes:
            assert len(data) == sum(self.deltas.sizes_bytes)
            position = 0
            for size in self.deltas.sizes_bytes:
                value_deltas.apply(data[position : position + size], memoryview(self.stream), "the stream")
                position += size
        else:
            self.stream[:] = data
        if header.HasField("deltas"):
            assert xxhash.xxh3_64_intdigest(self.stream) == header.deltas.checksum
            self.base = shard_pb2.StreamBase(version=header.version, checksum=header.deltas.checksum)
        return len(data)

    def expected(self) -> bytes:
        """Returns the whole stream of the newest version, without deltas."""
        request = self.one.gather_request(wire_dtype=self.wire_dtype)
        messages = self.one.server.client.byte_response_stub("Gather")(request, timeout=20.0)
        return b"".join(shard_pb2.GatherResponse.FromString(message).chunk.payload for message in messages)


def started(server: ShardServer, layout: object = LARGE) -> OneUnit:
    one = OneUnit(server, layout)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    one.begin([torch.randn(each.shape, generator=generator).to(each.dtype) for each in one.zeros()])
    return one


def step(one: OneUnit, number: int, lr: float = 1e-4) -> None:
    """Commits a step that changes every value by the learning rate."""
    train(one, number, gradient=lr)


@pytest.mark.parametrize("wire_dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("layout", [MIXED, LARGE], ids=["mixed", "big"])
def test_a_client_with_the_former_version_gets_a_delta(server: ShardServer, layout: object, wire_dtype: int) -> None:
    one = started(server, layout)
    client = Client(one, wire_dtype)
    assert client.gather() == len(client.stream)
    for number in range(4):
        step(one, number)
        received = client.gather(number + 1)
        assert bytes(client.stream) == client.expected()
        assert len(client.deltas.sizes_bytes) == 1
        if layout is LARGE:
            assert received < (0.2 if wire_dtype == BFLOAT16 else 0.3) * len(client.stream)


def test_a_delta_is_computed_once_for_all_clients(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, real = [], value_deltas.encode
    monkeypatch.setattr(value_deltas, "encode", lambda *arguments: computed.append(1) or real(*arguments))
    one = started(server)
    clients = [Client(one) for _ in range(3)]
    for client in clients:
        client.gather()
    step(one, 0)
    assert len({client.gather() for client in clients}) == 1
    assert len({bytes(client.stream) for client in clients}) == 1
    assert len(computed) == 1


def test_a_client_that_missed_versions_gets_several_deltas(server: ShardServer) -> None:
    one = started(server)
    trainer, reader = Client(one), Client(one)
    trainer.gather()
    reader.gather()
    for number in range(3):
        step(one, number)
        trainer.gather()
    received = reader.gather()
    assert len(reader.deltas.sizes_bytes) == 3
    assert received < 0.5 * len(reader.stream)
    assert reader.stream == trainer.stream == reader.expected()


def test_a_lone_client_that_missed_versions_gets_one_delta(server: ShardServer) -> None:
    one = started(server)
    reader = Client(one)
    reader.gather()
    for number in range(3):
        step(one, number)
    reader.gather()
    assert len(reader.deltas.sizes_bytes) == 1
    assert bytes(reader.stream) == reader.expected()


@pytest.mark.parametrize("base", [shard_pb2.StreamBase(version=0, checksum=1), shard_pb2.StreamBase(version=7)])
def test_an_unknown_base_gets_the_whole_stream(server: ShardServer, base: shard_pb2.StreamBase) -> None:
    """Such as that of a run before a rollback: the same version with other values."""
    one = started(server)
    Client(one).gather()
    step(one, 0)
    client = Client(one)
    client.base = base
    assert client.gather() == len(client.stream)
    assert client.deltas.checksum
    assert bytes(client.stream) == client.expected()


def test_large_changes_are_sent_as_a_whole(server: ShardServer) -> None:
    one = started(server)
    client = Client(one)
    client.gather()
    step(one, 0, lr=300.0)
    assert client.gather() == len(client.stream)
    step(one, 1)
    assert client.gather() < len(client.stream), "the whole stream is the base of the next delta"


def test_an_empty_stream_is_sent_as_a_whole(server: ShardServer) -> None:
    """No delta is smaller than nothing."""
    one = started(server, layout_of(a=((0,), "float32")))
    client = Client(one)
    client.gather()
    step(one, 0)
    assert client.gather() == 0
    assert not client.deltas.sizes_bytes


@pytest.mark.parametrize("missed", [1, 2])
def test_slow_reader_of_the_newest_version_finishes_evicted_deltas(server: ShardServer, missed: int) -> None:
    """Otherwise a trainer would learn that the version of its step is gone, as if the step had been committed."""
    one = started(server)
    trainer, slow = Client(one), Client(one)
    trainer.gather()
    slow.gather()
    for number in range(missed):
        step(one, number)
        trainer.gather()

    async def read() -> tuple[VersionBytes, EncodedStream]:
        _, source = await one.shard.values.read(missed, 1.0)
        return source, await one.shard.encoded.read(BFLOAT16, source, wait_s=1.0, what="", base=slow.base)

    source, read_stream = server.evaluate_async(read)
    assert read_stream.deltas is not None and len(read_stream.deltas.sizes_bytes) == missed
    server.evaluate(server.store.memory.unreserved.evict)
    read_stream.source.check()
    assert server.unreserved_bytes() == read_stream.source.buffer.numel(), "nothing else is kept"
    train(one, missed)
    read_stream.source.check()
    server.evaluate(server.store.memory.unreserved.evict)
    with pytest.raises(VersionGoneError):
        read_stream.source.check()
    server.evaluate(lambda: (one.shard.encoded.release(read_stream.source), one.shard.values.release(source)))
    assert server.unreserved_bytes() == 0


def test_evicted_chain_starts_again(server: ShardServer) -> None:
    one = started(server)
    client = Client(one)
    client.gather()
    step(one, 0)
    server.evaluate(server.store.memory.unreserved.evict)
    assert server.unreserved_bytes() == 0
    assert client.gather() == len(client.stream)
    step(one, 1)
    assert client.gather() < 0.2 * len(client.stream)
    assert bytes(client.stream) == client.expected()


def test_the_memory_of_a_chain_is_bounded(server: ShardServer) -> None:
    one = started(server)
    client, oldest = Client(one), Client(one)
    client.gather()
    oldest.gather()
    for number in range(40):
        step(one, number)
        client.gather()
        limit = len(client.stream) + encoded_versions.largest_useful(len(client.stream))
        assert server.unreserved_bytes() <= limit
    assert oldest.gather() == len(client.stream), "the first deltas were dropped"


def test_unused_chain_is_dropped(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_versions, "_IDLE_UPDATES", 3)
    one = started(server)
    client = Client(one)
    client.gather()
    for number in range(3):
        step(one, number)
        assert server.unreserved_bytes() == len(client.stream)
    step(one, 3)
    assert server.unreserved_bytes() == 0


def test_deleted_run_releases_its_deltas(server: ShardServer) -> None:
    one = started(server)
    client = Client(one)
    client.gather()
    step(one, 0)
    client.gather()
    one.drop()
    assert (server.unreserved_bytes(), server.taken_bytes()) == (0, 0)


def test_requests_without_a_base_keep_nothing(server: ShardServer) -> None:
    one = started(server)
    Client(one).expected()
    step(one, 0)
    assert server.unreserved_bytes() == 0
