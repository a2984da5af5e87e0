"""Copies of late work items on a shard server: two trainers push the same rank's gradient, and one of them counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwell_server.shard.memory.budget import shard_need_bytes
from shardwell_wire.errors import CapacityError, StaleEpochError, StepStateError, VersionGoneError
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, assert_all, error_of, train, unit


def push_copy(one: OneUnit, value: float, *, part: int = 0, attempt: int = 1, epoch: int = 2, step: int = 0) -> None:
    one.push(one.filled(value), copy=True, attempt=attempt, epoch=epoch, part=part, step=step)


@pytest.mark.parametrize("copy_wins", [False, True])
def test_parts_of_two_trainers_are_kept_apart_and_one_counts(server: ShardServer, copy_wins: bool) -> None:
    one = unit(server)
    before = server.taken_bytes()
    one.push(one.filled(1.0))
    push_copy(one, 16.0)
    one.push(one.filled(2.0), part=1)
    push_copy(one, 32.0, part=1)
    assert server.taken_bytes() - before == 2 * one.size
    one.prepare(0, (0, 1, 2) if copy_wins else (0, 0, 2))
    assert server.taken_bytes() - before == one.size, "the other contribution is dropped"
    error = error_of(lambda: one.push(one.filled(4.0), part=2) if copy_wins else push_copy(one, 64.0, part=2))
    assert isinstance(error, StaleEpochError)
    error = error_of(lambda: push_copy(one, 64.0, part=2) if copy_wins else one.push(one.filled(4.0), part=2))
    assert isinstance(error, StepStateError)
    one.update(0)
    assert_all(one.gather(1)[1], -48.0 if copy_wins else -3.0)
    assert isinstance(error_of(lambda: push_copy(one, 1.0)), VersionGoneError)
    assert (server.taken_bytes(), server.unreserved_bytes()) == (before, 0)


def test_mean_that_was_computed_ahead_is_replaced_by_the_copy(server: ShardServer) -> None:
    one = unit(server, dp=2)
    train(one, 0)
    for rank in range(2):
        one.push(one.filled(2.0), rank=rank, step=1)  # the server reduces these ahead
    push_copy(one, 6.0, step=1)
    one.prepare(1, (0, 1, 1), (1, 0, 1))
    one.update(1)
    assert_all(one.gather(2)[1], -1.0 - 4.0)


def test_copy_alone_counts_and_fences_keep_or_drop_it(server: ShardServer) -> None:
    one = unit(server)
    push_copy(one, 1.0)
    one.fence(0, (0, 2, 1))  # the trainer of the item is lost, and the copy becomes the item
    assert isinstance(error_of(lambda: one.push(one.filled(4.0))), StaleEpochError)
    push_copy(one, 2.0, part=1)
    one.fence(0, (0, 3, 2))  # the item is restarted
    assert isinstance(error_of(lambda: push_copy(one, 4.0, part=2)), StaleEpochError)
    one.push(one.filled(8.0), attempt=2, epoch=3)
    one.prepare(0, (0, 2, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -8.0)


def test_newer_copy_replaces_an_older_one(server: ShardServer) -> None:
    one = unit(server)
    push_copy(one, 1.0)
    push_copy(one, 2.0, attempt=2, epoch=3)
    assert isinstance(error_of(lambda: push_copy(one, 4.0, part=1)), StaleEpochError)
    one.prepare(0, (0, 2, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)


def test_copy_takes_no_memory_that_other_contributions_may_need(small_server: ShardServer) -> None:
    one = unit(small_server)
    error = error_of(lambda: push_copy(one, 1.0))
    assert isinstance(error, CapacityError)
    for part in range(2):  # a second part needs the unreserved memory
        one.push(one.filled(1.0), part=part)
    one.prepare(0, (0, 0, 2))
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)


@pytest.fixture
def small_server() -> Iterator[ShardServer]:
    size = PLAIN.size_bytes
    with ShardServer(budget_bytes=shard_need_bytes(size, 1) + size) as server:
        yield server
