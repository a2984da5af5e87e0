"""Versions that stay pinned during training."""

from __future__ import annotations

import weakref
from contextlib import closing

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_wire.errors import DeadlineError, NotFoundError, VersionGoneError
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import (
    BIG,
    PLAIN,
    ShardServer,
    assert_all,
    error_of,
    in_background,
    pinned,
    train,
    unit,
)


def test_pinned_version_is_readable_until_unpinned(server: ShardServer) -> None:
    one = unit(server, PLAIN)
    with pinned(one, 0) as answer:
        assert (answer.version, answer.shard_count) == (0, 1)
        train(one, 0)
        with pinned(one, 1):
            for step in (1, 2):
                train(one, step)
            for version, value in ((0, 0.0), (1, -1.0), (3, -3.0)):
                got, values = one.gather(version)
                assert got == version
                assert_all(values, value)
            assert isinstance(error_of(lambda: one.gather(2)), VersionGoneError)
            assert server.unreserved_bytes() == 2 * one.size
    server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "nothing is pinned")
    for version in (0, 1):
        error = error_of(lambda version=version: one.gather(version))
        assert isinstance(error, VersionGoneError) and error.data["newest"] == "3"


def test_pin_waits_for_a_future_version(server: ShardServer) -> None:
    one = unit(server, PLAIN)
    holding = in_background(lambda: pinned(one, 1).__enter__())
    server.until(lambda: len(one.shard.values._waiting) == 1, "a reader waits")
    train(one, 0)
    assert next(holding).version == 1


def test_deleted_run_ends_its_pins() -> None:
    with closing(SharedMemory()) as shared, ShardServer(shared=shared) as server:
        one = unit(server, PLAIN)
        values = weakref.ref(one.shard.values.current)
        with pinned(one, 0):
            one.drop()
            server.until(lambda: values() is None, "the memory is released while the caller is still connected")


def test_error_names_a_version_that_cannot_be_pinned(server: ShardServer) -> None:
    one = unit(server, PLAIN)
    train(one, 0)
    requests = {
        VersionGoneError: shard_pb2.PinVersionRequest(run="r", version=0),
        DeadlineError: shard_pb2.PinVersionRequest(run="r", version=2, wait_s=0.1),
        NotFoundError: shard_pb2.PinVersionRequest(run="nowhere"),
    }
    for kind, request in requests.items():
        assert isinstance(
            error_of(lambda request=request: server.client.open("PinVersion", request, timeout_s=20)), kind
        )


def test_pinned_version_is_evicted_by_training_but_not_by_readers() -> None:
    with ShardServer(budget_bytes=BIG.size_bytes * 5) as server:
        one = unit(server, BIG)
        with pinned(one, 0):
            train(one, 0)
            reader = iter(one.open_gather())
            next(reader)
            train(one, 1)
            assert isinstance(error_of(lambda: list(reader)), VersionGoneError)
            assert_all(one.gather(0)[1], 0.0)
            server.evaluate(server.store.memory.unreserved.evict)
            assert isinstance(error_of(lambda: one.gather(0)), VersionGoneError)
