"""Gathers in a lossy dtype: shared encodings, their versions and their memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from shardwell.transport.base import into
from shardwell.transport.grpc_transport import GrpcTransport
from shardwell.transport.shm_transport import ShmTransport
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.unit.encoded_versions import EncodedVersions
from shardwell_server.shard.unit.values import Values
from shardwell_wire.encoding import wire_dtypes
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.streams import InVector, StreamPlan
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import BIG, MIXED, PLAIN, OneUnit, ShardServer, error_of, in_background, train, unit

BFLOAT16, INT8 = common_pb2.WIRE_DTYPE_BFLOAT16, common_pb2.WIRE_DTYPE_INT8


class Encodings:
    """Counts how often the server encodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, real = 0, EncodedVersions.compute_encode

        def counted(*arguments: object) -> None:
            self.count += 1
            real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(EncodedVersions, "compute_encode", counted)


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Encodings:
    return Encodings(monkeypatch)


@pytest.fixture(params=["private", "shared"])
def server(request: pytest.FixtureRequest) -> Iterator[ShardServer]:
    """A server with its parameters in ordinary memory or in shared memory."""
    if request.param == "private":
        with ShardServer() as running:
            yield running
    else:
        with closing(SharedMemory()) as shared, ShardServer(shared=shared) as running:
            yield running


def encoded_size(one: OneUnit, wire_dtype: int) -> int:
    return wire_dtypes.stream_size(one.layout, one.segments, wire_dtype)


def gather(one: OneUnit, wire_dtype: int = BFLOAT16, version: int | None = None) -> tuple[int, torch.Tensor]:
    """Returns the version and the encoded bytes."""
    encoded = torch.empty(encoded_size(one, wire_dtype), dtype=torch.uint8)
    got = GrpcTransport(one.server.client).fetch_stream(
        one.gather_request(version, wire_dtype=wire_dtype),
        into(memory_at(encoded.data_ptr(), encoded.numel(), encoded)),
        timeout_s=20.0,
    )
    return got, encoded


def encode(one: OneUnit, flat: torch.Tensor, wire_dtype: int) -> torch.Tensor:
    """Returns the expected encoding of a shard's bytes."""
    encoded = torch.empty(encoded_size(one, wire_dtype), dtype=torch.uint8)
    values = InVector(memory_at(flat.data_ptr(), flat.numel(), flat), one.start)
    out = memory_at(encoded.data_ptr(), encoded.numel(), encoded)
    StreamPlan(one.layout, one.segments, wire_dtype).encode(values, out)
    return encoded


def values(one: OneUnit) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in one.zeros()]


@pytest.mark.parametrize("layout", [MIXED, PLAIN], ids=["mixed", "plain"])
def test_version_is_encoded_once_for_all_readers(server: ShardServer, layout: UnitLayout, encodings: Encodings) -> None:
    one = OneUnit(server, layout)
    one.begin(values(one))
    for wire_dtype in (BFLOAT16, INT8):
        expected = encode(one, one.flat(values(one)), wire_dtype)
        for _ in range(3):
            version, encoded = gather(one, wire_dtype)
            assert version == 0
            assert torch.equal(encoded, expected)
    assert encodings.count == 2
    server.until(
        lambda: server.store.memory.unreserved.used_bytes == kept(one, BFLOAT16, INT8), "both encodings are kept"
    )


def kept(one: OneUnit, *dtypes: int) -> int:
    return sum(encoded_size(one, dtype) for dtype in dtypes)


def test_concurrent_readers_share_one_encoding(server: ShardServer, encodings: Encodings) -> None:
    one = OneUnit(server, BIG)
    one.begin(values(one))
    asking = [in_background(partial(gather, one)) for _ in range(4)]
    results = [next(each)[1] for each in asking]
    assert all(torch.equal(result, results[0]) for result in results)
    assert encodings.count == 1


def test_update_discards_the_encoding(server: ShardServer, encodings: Encodings) -> None:
    one = unit(server)
    before = gather(one)
    train(one, 0)
    assert server.unreserved_bytes() == 0
    after = gather(one)
    assert (before[0], after[0], encodings.count) == (0, 1, 2)
    assert torch.equal(after[1], encode(one, one.flat(one.filled(-1.0)), BFLOAT16))
    assert isinstance(error_of(lambda: gather(one, version=0)), VersionGoneError)


def test_encoding_without_readers_is_evicted(server: ShardServer, encodings: Encodings) -> None:
    one = unit(server)
    first = gather(one)[1]
    server.evaluate(server.store.memory.unreserved.evict)
    assert server.unreserved_bytes() == 0
    assert torch.equal(gather(one)[1], first)
    assert encodings.count == 2


def test_slow_reader_finishes_a_discarded_encoding(server: ShardServer) -> None:
    one = OneUnit(server, BIG)
    one.begin(values(one))
    expected = encode(one, one.flat(values(one)), BFLOAT16)
    request = one.gather_request(wire_dtype=BFLOAT16, chunk_bytes=1 << 20)
    messages = iter(server.client.byte_response_stub("Gather")(request, timeout=20.0))
    received = [next(messages)]
    server.evaluate(server.store.memory.unreserved.evict)
    train(one, 0)
    assert server.unreserved_bytes() >= encoded_size(one, BFLOAT16), "the encoding still has a reader"
    received.extend(messages)
    data = b"".join(shard_pb2.GatherResponse.FromString(message).chunk.payload for message in received)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.uint8), expected)
    server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "all memory is released")


def test_deleted_run_releases_its_encodings(server: ShardServer) -> None:
    one = unit(server)
    for wire_dtype in (BFLOAT16, INT8):
        gather(one, wire_dtype)
    one.drop()
    assert (server.unreserved_bytes(), server.taken_bytes()) == (0, 0)


def test_gradient_buffer_evicts_an_encoding_without_readers() -> None:
    budget = 5 * PLAIN.size_bytes  # the unit's reservation and one more buffer
    with closing(SharedMemory()) as shared, ShardServer(budget, shared) as server:
        one = unit(server)
        gather(one, BFLOAT16)
        with closing(ShmTransport(server.client, one.identity, None, timeout_s=20.0)) as transport:
            for _ in range(2):
                request = shard_pb2.OpenGradientBufferRequest(
                    run=one.run, run_id=one.identity.run_id, unit=one.layout.unit, transport_id=transport.session_id
                )
                server.call("OpenGradientBuffer", request)
            assert server.unreserved_bytes() == one.size


@pytest.mark.parametrize("base", [None, shard_pb2.StreamBase()], ids=["plain", "with-deltas"])
def test_encoding_that_ends_while_others_wait_for_memory_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, base: shard_pb2.StreamBase | None
) -> None:
    """Otherwise a push that waits for this memory would wait until the next update, which needs the push."""
    started, go_on, real = threading.Event(), threading.Event(), EncodedVersions.compute_encode

    def slow(*arguments: object) -> None:
        started.set()
        assert go_on.wait(20.0)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(EncodedVersions, "compute_encode", slow)
    with ShardServer(5 * PLAIN.size_bytes) as server:
        one = unit(server)
        request, unreserved = one.gather_request(wire_dtype=BFLOAT16, base=base), server.store.memory.unreserved
        gathered = in_background(lambda: list(server.client.byte_response_stub("Gather")(request, timeout=20.0)))
        assert started.wait(20.0)
        waited = in_background(
            lambda: server.evaluate_async(lambda: unreserved.acquire(unreserved._limit_bytes, 10.0, "a push"))
        )
        server.until(lambda: unreserved.has_waiters, "the push waits")
        go_on.set()
        assert next(gathered)
        next(waited)
        server.evaluate(lambda: unreserved.release(unreserved._limit_bytes))
        assert server.unreserved_bytes() == 0


@pytest.mark.parametrize("base", [None, shard_pb2.StreamBase()], ids=["plain", "with-deltas"])
def test_encoding_of_a_version_that_is_being_replaced_is_not_kept(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, base: shard_pb2.StreamBase | None
) -> None:
    """Otherwise readers of the next version would get the former version's bytes."""
    started, go_on = threading.Event(), threading.Event()
    real, move_readers, encoding = EncodedVersions.compute_encode, Values._move_readers, list[EncodedVersions]()

    def slow(self: EncodedVersions, *arguments: Any) -> None:
        encoding.append(self)
        started.set()
        assert go_on.wait(20.0)
        real(self, *arguments)

    async def move_afterwards(self: Values, *arguments: Any, **options: Any) -> None:
        """Two readers began to read the version: one is encoding, and one waits for it and encodes after it."""
        go_on.set()
        readers = self.current.readers if self.current is not None else 0
        assert readers == 2
        while len(encoding) < readers or encoding[0]._lock.locked():
            await asyncio.sleep(0.001)
        await move_readers(self, *arguments, **options)

    monkeypatch.setattr(EncodedVersions, "compute_encode", slow)
    one = unit(server)
    request = one.gather_request(wire_dtype=BFLOAT16, base=base)
    gathered = [
        in_background(lambda: list(server.client.byte_response_stub("Gather")(request, timeout=20.0))) for _ in range(2)
    ]
    assert started.wait(20.0)
    current = server.store.run(one.run, one.identity.run_id).primary(one.layout.unit).values.current
    assert current is not None
    server.until(lambda: current.readers == 2, "both wait")
    monkeypatch.setattr(Values, "_move_readers", move_afterwards)
    train(one, 0)
    assert all(next(each) for each in gathered)
    version, encoded = gather(one)
    assert version == 1
    assert torch.equal(encoded, encode(one, one.flat(one.filled(-1.0)), BFLOAT16))
