"""Slow readers of encodings and averages, and the eviction of their snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shardwell_wire.errors import NotFoundError, VersionGoneError
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import BIG, OneUnit, ShardServer, error_of, in_background, unit

READINGS: list[dict[str, Any]] = [{"wire_dtype": common_pb2.WIRE_DTYPE_BFLOAT16}, {"ema": True}]


@pytest.fixture
def server() -> Iterator[ShardServer]:
    """A server with memory for one buffer beyond the reservation of a unit with one rank."""
    with ShardServer(budget_bytes=BIG.size_bytes * 5) as running:
        yield running


@pytest.fixture(params=READINGS, ids=["encoded", "averages"])
def reading(request: pytest.FixtureRequest) -> dict[str, Any]:
    fields: dict[str, Any] = request.param
    return fields


def train(one: OneUnit, step: int) -> None:
    one.push(one.filled(1.0), step=step)
    one.prepare(step)
    averaged = one.update_request(step)
    averaged.optimizer.ema_decay = 0.5
    one.server.call("Update", averaged)


class SlowReader:
    """A reader that has received the first message of its stream."""

    def __init__(self, one: OneUnit, fields: dict[str, Any]) -> None:
        request = one.gather_request(chunk_bytes=1 << 20, **fields)
        self._messages = iter(one.server.client.byte_response_stub("Gather")(request, timeout=20.0))
        self._first = next(self._messages)

    def received_bytes(self) -> int:
        """Reads the rest of the stream."""
        messages = [self._first, *self._messages]
        return sum(len(shard_pb2.GatherResponse.FromString(message).chunk.payload) for message in messages)


def test_memory_pressure_evicts_snapshots_of_older_versions_only(server: ShardServer, reading: dict[str, Any]) -> None:
    one = unit(server, BIG)
    train(one, 0)
    reader = SlowReader(one, reading)
    before = server.unreserved_bytes()
    server.evaluate(server.store.memory.unreserved.evict)
    assert server.unreserved_bytes() == before > 0, "the snapshot has the newest version"
    train(one, 1)
    assert server.unreserved_bytes() == before, "no request waits for the memory"
    for part in range(2):
        one.push(one.filled(1.0), step=2, part=part)  # the second part needs the memory
    assert isinstance(error_of(reader.received_bytes), VersionGoneError)
    assert (server.unreserved_bytes(), server.taken_bytes()) == (0, 2 * one.size), "values and a contribution"


def test_slow_reader_finishes_an_older_version_without_memory_pressure(
    server: ShardServer, reading: dict[str, Any]
) -> None:
    one = unit(server, BIG)
    train(one, 0)
    reader = SlowReader(one, reading)
    before = server.unreserved_bytes()
    train(one, 1)
    assert reader.received_bytes() == before
    server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "the memory is released")


def test_update_evicts_snapshots_for_a_waiting_push(server: ShardServer, reading: dict[str, Any]) -> None:
    one = unit(server, BIG)
    train(one, 0)
    one.push(one.filled(1.0), step=1)
    reader = SlowReader(one, reading)
    late = in_background(lambda: one.push(one.filled(1.0), step=1, part=1))
    server.until(lambda: server.store.memory.unreserved.has_waiters, "the push waits for memory")
    one.prepare(1)
    one.update(1)
    error = error_of(lambda: next(late))
    assert isinstance(error, VersionGoneError)
    assert "step 1 of unit 'u' of run 'r': the step is committed" in str(error), "the push got its memory, but too late"
    assert isinstance(error_of(reader.received_bytes), VersionGoneError)


def test_deleted_run_ends_slow_reads(server: ShardServer, reading: dict[str, Any]) -> None:
    one = unit(server, BIG)
    train(one, 0)
    reader = SlowReader(one, reading)
    one.drop()
    error = error_of(reader.received_bytes)
    assert isinstance(error, NotFoundError)
    assert "run 'r' was deleted" in str(error)
    assert (server.unreserved_bytes(), server.taken_bytes()) == (0, 0)
