"""Gathers with ``since``: changes that a server computes once for all readers, and requests that it rejects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
import torch

from shardwell_server.shard.unit import version_changes
from shardwell_server.shard.unit.encoded_versions import EncodedVersions
from shardwell_server.shard.unit.values import Values, VersionBytes
from shardwell_wire.encoding import shard_changes
from shardwell_wire.encoding.shard_changes import ShardChanges, spans_of
from shardwell_wire.encoding.wire_dtypes import AS_STORED
from shardwell_wire.errors import (
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    VersionGoneError,
    from_rpc_error,
)
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import OneUnit, ShardServer, error_of, in_background, layout_of, pinned, train

LAYOUT = layout_of(a=((40_003,), "float32"), b=((3, 7), "bfloat16"))
BFLOAT16 = common_pb2.WIRE_DTYPE_BFLOAT16


def gather(one: OneUnit, version: int, **fields: Any) -> tuple[shard_pb2.GatherHeader, bytes]:
    request = one.gather_request(version, **fields)
    messages = one.server.client.byte_response_stub("Gather")(request, timeout=20.0)
    responses = [shard_pb2.GatherResponse.FromString(message) for message in messages]
    return responses[0].header, b"".join(response.chunk.payload for response in responses)


def begun(server: ShardServer) -> OneUnit:
    """Returns a unit with random values."""
    made, generator = OneUnit(server, LAYOUT), torch.Generator().manual_seed(2)
    made.begin([torch.randn(each.shape, generator=generator).to(each.dtype) for each in made.zeros()])
    return made


@pytest.fixture
def one() -> Iterator[OneUnit]:
    """A unit of which versions 0, 1 and 2 are pinned."""
    with ShardServer() as server, ExitStack() as stack:
        made = begun(server)
        for step in range(2):
            stack.enter_context(pinned(made, step))
            train(made, step, gradient=1e-4)
        stack.enter_context(pinned(made, 2))
        yield made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the changes that the server has computed."""
    sizes, real = list[int](), shard_changes.encode

    def counted(*arguments: Any) -> list[bytes] | None:
        pieces = real(*arguments)
        sizes.append(sum(map(len, pieces or [])))
        return pieces

    monkeypatch.setattr(shard_changes, "encode", counted)
    return sizes


def test_changes_are_computed_once_and_are_exact(one: OneUnit, made: list[int]) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: gather(one, 2, since=0, wire_dtype=BFLOAT16), range(8)))
    assert len(made) == 1 and all(answer == answers[0] for answer in answers)
    for version, since in ((2, 1), (1, 0), (2, 0), (2, 2)):
        _, base = gather(one, since, wire_dtype=BFLOAT16)
        _, stream = gather(one, version, wire_dtype=BFLOAT16)
        header, data = gather(one, version, since=since, wire_dtype=BFLOAT16)
        assert list(header.deltas.sizes_bytes) == [len(data)] and header.version == version
        assert len(data) < 0.75 * len(stream)
        spans = spans_of(LAYOUT, one.segments, BFLOAT16, one.start)
        changes = ShardChanges.decode(spans, data, len(stream), "u")
        words = torch.frombuffer(bytearray(base), dtype=torch.int16)
        words[torch.from_numpy(changes.places)] = torch.from_numpy(changes.words.astype("<i2"))
        assert words.numpy().tobytes() == stream
        assert list(changes.checksums) == list(shard_changes.checksums_of(spans, stream))
        _, smaller = gather(one, version, since=since, wire_dtype=BFLOAT16, takes_differences=True)
        assert len(smaller) < 0.9 * len(data) or since == version
        found = ShardChanges.decode(spans, smaller, len(stream), "u", has_differences=True)
        former, assert_equal = torch.frombuffer(bytearray(base), dtype=torch.bfloat16), torch.testing.assert_close
        for span in spans:
            expected, resolved = changes.of(span), found.of(span)
            own = former[span.start // 2 : span.stop // 2][expected.elements]
            assert resolved.elements.equal(expected.elements)
            for _ in range(2):
                resolved.resolve(own)
                assert_equal(resolved.values, expected.values, rtol=0, atol=0)
    assert len(made) == 8
    one.server.evaluate(one.server.store.memory.unreserved.evict)
    assert not one.shard.changes._kept


def test_streams_are_sent_instead_of_larger_changes(one: OneUnit) -> None:
    for wire_dtype in (AS_STORED, common_pb2.WIRE_DTYPE_INT8):
        header, data = gather(one, 2, since=0, wire_dtype=wire_dtype)
        assert not header.HasField("deltas") and data == gather(one, 2, wire_dtype=wire_dtype)[1]


def test_few_pairs_are_kept(one: OneUnit, monkeypatch: pytest.MonkeyPatch, made: list[int]) -> None:
    monkeypatch.setattr("shardwell_server.shard.unit.version_changes._MAX_PAIRS", 2)
    before = one.server.unreserved_bytes()
    for since in (0, 1, 2, 1, 2, 0):
        gather(one, 2, since=since, wire_dtype=BFLOAT16)
    assert len(made) == 4 and len(one.shard.changes._kept) == 2
    one.server.evaluate(one.shard.changes.discard)
    one.server.evaluate(one.shard.encoded.discard)
    assert one.server.unreserved_bytes() <= before


def test_changes_that_nobody_reads_are_dropped(one: OneUnit) -> None:
    gather(one, 2, since=0, wire_dtype=BFLOAT16)
    train(one, 2)
    assert len(one.shard.changes._kept) == 1, "they were read since the update before"
    train(one, 3)
    assert not one.shard.changes._kept


def test_each_version_is_encoded_once_for_readers_that_follow(one: OneUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, real, memory = list[int](), EncodedVersions.compute_encode, one.server.store.memory.unreserved

    def counted(self: EncodedVersions, wire_dtype: int, values: torch.Tensor, stream: VersionBytes) -> None:
        encoded.append(stream.version)
        real(self, wire_dtype, values, stream)

    monkeypatch.setattr(EncodedVersions, "compute_encode", counted)
    with ExitStack() as stack:
        for version in (2, 3, 4):
            if version > 2:
                train(one, version - 1, gradient=1e-4)
                stack.enter_context(pinned(one, version))
            gather(one, version, since=version - 1, wire_dtype=BFLOAT16)
        assert encoded == [1, 2, 3, 4]
        one.server.evaluate(memory.evict)
        assert not one.shard.changes._newest, "it makes room for others"
        gather(one, 4, since=4, wire_dtype=BFLOAT16)
        for version in (5, 6):
            train(one, version - 1, gradient=1e-4)
        assert not one.shard.changes._newest, "nobody has read changes since the update before"


def test_a_lack_of_memory_is_not_kept(one: OneUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    real, changes = version_changes.copied, one.shard.changes

    async def copied(*arguments: Any) -> torch.Tensor | None:
        return None if changes._kept else await real(*arguments)

    monkeypatch.setattr(version_changes, "copied", copied)
    gather(one, 2, since=0, wire_dtype=BFLOAT16)
    assert not gather(one, 2, since=1, wire_dtype=BFLOAT16)[0].HasField("deltas")
    assert list(changes._kept) == [(BFLOAT16, 0, 2, False)]
    one.server.evaluate(changes.supersede)
    assert gather(one, 2, since=1, wire_dtype=BFLOAT16)[0].HasField("deltas")
    assert list(changes._kept) == [(BFLOAT16, 1, 2, False)], "the others made room"


def test_snapshots_of_pinned_versions_replace_changes(one: OneUnit) -> None:
    memory = one.server.store.memory.unreserved
    gather(one, 2, since=0, wire_dtype=BFLOAT16)
    one.server.evaluate(one.shard.encoded.discard)
    one.server.evaluate(lambda: memory.set_limit(memory.used_bytes + one.size - 1))
    train(one, 2)
    assert gather(one, 2)[0].version == 2 and not one.shard.changes._kept


def changes_are_readable(one: OneUnit, version: int, since: int) -> bool:
    """Reads changes; returns whether the former version can still be read."""
    try:
        gather(one, version, since=since, wire_dtype=BFLOAT16)
    except grpc.RpcError as error:
        assert isinstance(from_rpc_error(error, "server"), VersionGoneError)
        return False
    return True


def test_readers_that_are_behind_stay_within_the_budget() -> None:
    """16 readers with a version each: training goes on, with or without memory for their versions."""
    budget_bytes, limit = 10 * LAYOUT.size_bytes, LAYOUT.size_bytes * 3 // 4
    with ShardServer(budget_bytes=budget_bytes) as server:
        one, memory = begun(server), server.store.memory
        most = 0
        with ExitStack() as stack:
            for step in range(16):
                stack.enter_context(pinned(one, step))
                train(one, step, gradient=1e-4)
                found = [changes_are_readable(one, step + 1, since) for since in range(step + 1)]
                kept = [changes[0].buffer.numel() for changes in filter(None, one.shard.changes._kept.values())]
                assert sum(kept) <= limit
                most = max(most, len(kept))
                assert server.evaluate(lambda: max(memory.used_bytes, memory.reserved_bytes)) <= budget_bytes
            assert any(found) and not all(found) and most > 1, "there is memory for some versions, and for some changes"
        server.until(lambda: not one.shard.values._snapshots._snapshots, "the pins have ended")
        server.evaluate(memory.unreserved.evict)
        assert server.unreserved_bytes() == 0


def test_changes_of_a_dropped_shard_are_released(one: OneUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    real, shard = version_changes.copied, one.shard

    async def copied(*arguments: Any) -> torch.Tensor | None:
        buffer = await real(*arguments)
        shard.drop(NotFoundError("the shard is dropped"))
        return buffer

    monkeypatch.setattr(version_changes, "copied", copied)
    error = error_of(lambda: gather(one, 2, since=0, wire_dtype=BFLOAT16))
    assert isinstance(error, NotFoundError) and "the shard is dropped" in str(error)
    assert not shard.changes._kept and one.server.unreserved_bytes() == 0


def test_evicted_changes_of_a_readable_version_can_be_read_again(one: OneUnit) -> None:
    shard = one.shard

    async def read_and_evict() -> tuple[VersionBytes, VersionBytes]:
        former, newest = (shard.values.read_at_once(version)[1] for version in (1, 2))
        found = [await shard.changes.read(BFLOAT16, former, each, wait_s=9.0, what="") for each in (newest, former)]
        shard.evict()
        return found[0].source, found[1].source

    of_newest, of_evicted = one.server.evaluate_async(read_and_evict)
    with pytest.raises(UnavailableError, match=r"a copy of version 2 .* was evicted.* Try again"):
        of_newest.check()
    with pytest.raises(VersionGoneError, match=r"version 1 .* has been overwritten"):
        of_evicted.check()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"since": 3}, InvalidRequestError, "since is 3 for version 2: expected an older version"),
        ({"since": 1, "base": shard_pb2.StreamBase()}, InvalidRequestError, "with a base: expected"),
        ({"since": 1, "ema": True}, InvalidRequestError, "leave wire_dtype and since unset"),
        ({"since": 1, "stop_bytes": 4096}, NotFoundError, "for the whole shard only"),
    ],
)
def test_malformed_requests_are_rejected(
    one: OneUnit, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    found = error_of(lambda: gather(one, 2, **fields))
    assert isinstance(found, error) and message in str(found)


def test_a_version_that_is_gone() -> None:
    with ShardServer() as server:
        one = OneUnit(server, LAYOUT)
        one.begin(one.zeros())
        train(one, 0)
        found = error_of(lambda: gather(one, 1, since=0))
    assert isinstance(found, VersionGoneError) and "has been overwritten by version 1" in str(found)


@pytest.mark.parametrize("fields", [{}, {"since": 0}], ids=["encoding", "changes"])
def test_a_pinned_version_is_encoded_while_a_step_replaces_it(
    one: OneUnit, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Otherwise readers would be told that the version is gone, although the servers have it."""
    started, go_on, real, move = (
        threading.Event(),
        threading.Event(),
        EncodedVersions.compute_encode,
        Values._move_readers,
    )

    def slow(self: EncodedVersions, *arguments: Any) -> None:
        started.set()
        assert go_on.wait(20.0)
        real(self, *arguments)

    async def move_and_go_on(self: Values, **options: Any) -> None:
        await move(self, **options)
        go_on.set()

    monkeypatch.setattr(EncodedVersions, "compute_encode", slow)
    monkeypatch.setattr(Values, "_move_readers", move_and_go_on)
    answer = in_background(lambda: gather(one, 2, wire_dtype=BFLOAT16, **fields))
    assert started.wait(20.0)
    train(one, 2, gradient=1.0)
    _, data = next(answer)
    assert data == gather(one, 2, wire_dtype=BFLOAT16, **fields)[1] != gather(one, 3, wire_dtype=BFLOAT16)[1]
