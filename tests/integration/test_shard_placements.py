"""Reservations that the coordinator released or replaced, and reservations that arrive late."""

from __future__ import annotations

from shardwell_wire.errors import NotFoundError, StaleEpochError, StepStateError, UnitMismatchError
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, assert_all, error_of, layout_of, train, unit


def release(one: OneUnit, placement: int) -> int:
    request = shard_pb2.ReleaseUnitRequest(context=one.context(), unit=one.layout.unit, placement=placement)
    return int(one.server.call("ReleaseUnit", request).free_bytes)


def test_released_reservation_leaves_no_trace(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    free_bytes = server.evaluate(lambda: server.store.memory.free_bytes)
    one.reserve(placement=3)
    uploading = one.open_initialize().send(*one.initialize_messages(one.filled(1.0))[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "values are being received")
    assert release(one, 3) == free_bytes
    assert isinstance(uploading.error(), NotFoundError)
    assert release(one, 3) == free_bytes, "a release is idempotent"
    server.until(lambda: server.store.memory.used_bytes == 0, "all memory is released")
    assert isinstance(error_of(lambda: one.reserve(placement=3)), StaleEpochError)
    one.reserve(placement=4)
    assert release(one, 3) < free_bytes, "a later placement stays"


def test_later_placement_replaces_an_earlier_one(server: ShardServer) -> None:
    one, half = OneUnit(server, PLAIN), PLAIN.size_bytes // 2 // 4096 * 4096
    one.reserve(placement=1)
    one.initialize(one.filled(5.0))
    moved = OneUnit(server, PLAIN, part=(0, half))
    moved.reserve(placement=2)
    assert moved.reserve(placement=2).free_bytes > 0, "a reservation is idempotent"
    assert isinstance(error_of(lambda: one.reserve(placement=1)), UnitMismatchError)
    moved.initialize(moved.filled(1.0))
    moved.publish()
    assert_all(moved.gather()[1], 1.0)
    other = OneUnit(server, layout_of("other", a=((64,), "float32")))
    other.reserve(placement=3)
    assert list(server.evaluate(lambda: one.server.store.run("r").shards)) == [("other", 0)], (
        "the last placement has the index"
    )


def test_updated_unit_cannot_be_released(server: ShardServer) -> None:
    one = unit(server)
    train(one, 0)
    assert isinstance(error_of(lambda: one.reserve(placement=9)), UnitMismatchError)
    assert isinstance(error_of(lambda: release(one, 9)), StepStateError)
    assert_all(one.gather()[1], -1.0)


def test_step_commits_despite_an_unpublished_reservation(server: ShardServer) -> None:
    one = unit(server)
    OneUnit(server, layout_of("left over", a=((64,), "float32")), index=1).reserve(placement=1)
    for step in range(2):
        train(one, step)
    assert_all(one.gather()[1], -2.0)
