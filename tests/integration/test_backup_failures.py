"""Backups that are lost or miss a step, and requests that wait for a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwell_server.shard.shard_spec import Role
from shardwell_wire.errors import StepStateError, UnavailableError
from shardwell_wire.model.layout import BLOCK_BYTES
from shardwell_wire.v1 import shard_pb2
from tests.integration.test_partitions import read
from tests.support.backup_pair import BACKUP, Pair, adam, gradients, shard_on
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, error_of, layout_of


@pytest.fixture
def servers() -> Iterator[tuple[ShardServer, ShardServer]]:
    with ShardServer() as first, ShardServer() as second:
        yield first, second


def test_a_lost_backup_does_not_stop_the_run(servers: Any) -> None:
    pair = Pair(servers, dp=2)
    with ShardServer() as lost:
        pair.backup = OneUnit(lost, PLAIN, dp=2)
        pair.copy()
        pair.train(0)
    pair.push(1)
    answer = pair.primary.prepare(1)
    assert [status.server_id for status in answer.failed_backups] == ["backup"] and answer.failed_backups[0].error
    assert not answer.confirmed_backups
    pair.primary.server.call("Update", adam(pair.primary, 1))
    pair.push(2)
    assert pair.primary.prepare(2).failed_backups, "reported until it is built again"
    pair.primary.server.call("Update", adam(pair.primary, 2))
    pair.backup = OneUnit(servers[1], PLAIN, dp=2)
    pair.copy()
    assert not pair.train(3).failed_backups
    pair.assert_equal(4)


def test_a_backup_that_missed_a_step_is_out_of_sync(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    shard = shard_on(pair.backup)
    pair.push(0)
    pair.primary.prepare(0)
    pair.backup.server.evaluate(shard.drop_step)
    answers = pair.update(0)
    assert not answers[0].stale_backups
    (status,) = answers[1].stale_backups
    assert (status.unit_index, status.start_bytes, status.server_id) == (0, 0, "here") and status.error
    assert pair.update(0)[1].stale_backups
    assert isinstance(error_of(lambda: pair.promote(1)), StepStateError)
    assert shard_on(pair.backup).role is Role.BACKUP
    pair.push(1)
    assert "out of sync" in pair.primary.prepare(1).failed_backups[0].error
    pair.update(1)
    listed = pair.backup.server.call("ListShards", shard_pb2.ListShardsRequest(run="r")).shards
    assert listed[0].role == BACKUP and listed[0].out_of_sync
    pair.copy()
    pair.assert_equal(2)
    pair.train(2)
    pair.assert_equal(3)


def test_trainers_cannot_use_a_backup(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    one = pair.backup
    actions: list[Callable[[], object]] = [
        lambda: one.push(one.filled(1.0)),
        lambda: one.gather(0),
        lambda: one.initialize(one.zeros()),
        lambda: read(one),
    ]
    for action in actions:
        error = error_of(action)
        assert isinstance(error, UnavailableError) and "has a backup" in str(error)


def test_two_servers_prepare_each_others_backups(servers: Any) -> None:
    first, second = servers
    low = Pair((first, second), dp=2, part=(0, 10 * BLOCK_BYTES))
    high = Pair((second, first), dp=2, part=(10 * BLOCK_BYTES, PLAIN.size_bytes))
    for pair in (low, high):
        pair.copy()
    for step in range(3):
        for pair in (low, high):
            pair.push(step)
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda pair=pair: answers.append(pair.primary.prepare(step)))  # noqa: B023
            for pair in (low, high)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [len(answer.confirmed_backups) for answer in answers] == [1, 1]
        assert [[norm.unit_index for norm in answer.units] for answer in answers] == [[0], [0]], "no norm of a backup"
        for server in servers:
            server.call("Update", adam(low.primary, step))
        for pair in (low, high):
            pair.assert_equal(step + 1)


def test_a_copy_waits_for_no_push_and_an_update_waits_for_the_copy(servers: Any) -> None:
    pair = Pair(servers, layout_of(a=((2 << 20,), "float32")), dp=2)
    pair.push(0)
    pair.primary.prepare(0)
    shard = shard_on(pair.primary)
    pair.primary.server.evaluate_async(shard.unchanging.acquire)
    updated = threading.Event()

    def update() -> None:
        pair.primary.server.call("Update", adam(pair.primary, 0))
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert pair.primary.push(gradients(pair.primary, 0, 0), rank=0).duplicate
    assert not updated.is_set()
    pair.primary.server.evaluate(shard.unchanging.release)
    thread.join(20)
    assert updated.is_set()


def test_a_server_without_a_lease_refuses_trainers(servers: Any) -> None:
    pair = Pair(servers)
    server = servers[0]
    server.evaluate(lambda: server.store.lease.renew(-100.0, 1.0))
    actions: list[Callable[[], object]] = [
        lambda: pair.primary.push(pair.primary.filled(1.0)),
        pair.primary.gather,
        lambda: pair.primary.initialize(pair.primary.zeros()),
    ]
    for action in actions:
        error = error_of(action)
        assert isinstance(error, UnavailableError) and "lease" in str(error)
    assert pair.primary.gather(0)[0] == 0, "an explicit version has the same bytes everywhere"
    server.evaluate(lambda: server.store.lease.renew(server._loop.time(), 60.0))
    pair.primary.push(pair.primary.filled(1.0))
