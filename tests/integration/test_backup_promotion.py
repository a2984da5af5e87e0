"""Backups that become primaries, and planned moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.state import taking_up
from shardwell_wire.errors import NotFoundError, StaleEpochError
from shardwell_wire.host.server_folders import FolderOwner
from shardwell_wire.v1 import shard_pb2
from tests.support.backup_pair import BACKUP, Pair, adam, gradients, hash_of, shard_on, straight
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, error_of


@pytest.fixture
def servers() -> Iterator[tuple[ShardServer, ShardServer]]:
    with ShardServer() as first, ShardServer() as second:
        yield first, second


@pytest.mark.parametrize("pending", [False, True])
def test_promoted_backup_continues_with_the_same_bits(servers: Any, pending: bool) -> None:
    pair = Pair(servers, dp=2)
    pair.copy()
    pair.train(0)
    pair.train(1)
    if pending:  # the commit record of step 2 exists, and the primary is lost before its update
        pair.push(2)
        pair.primary.prepare(2, optimizer=adam(pair.primary, 2).optimizer)
        pair.promote(3)
        pair.promote(3)
        pair.backup.server.call("Update", adam(pair.backup, 2))
    else:  # step 2 is prepared, without a commit record: its work items get new attempts
        pair.push(2, scale=3.0)
        pair.primary.prepare(2)
        pair.promote(2, fences=[(0, 1, 1), (1, 1, 1)])
        assert isinstance(error_of(lambda: pair.backup.push(pair.backup.filled(1.0), step=2)), StaleEpochError)
        for rank in range(2):
            pair.backup.push(gradients(pair.backup, 2, rank), step=2, rank=rank, attempt=1)
        pair.backup.prepare(2, (0, 1, 1), (1, 1, 1))
        pair.backup.server.call("Update", adam(pair.backup, 2))
    assert hash_of(pair.backup).role == shard_pb2.SHARD_ROLE_PRIMARY
    assert list(hash_of(pair.backup).tensors) == list(straight(PLAIN, 2, 3))
    assert pair.backup.gather(3)[0] == 3
    # The former primary is told nothing, and cannot change the new one.
    answer = pair.primary.prepare(2) if not pending else None
    pair.primary.server.call("Update", adam(pair.primary, 2))
    pair.push(3)
    failed = pair.primary.prepare(3).failed_backups
    assert [status.server_id for status in failed] == ["backup"] and "it is primary here" in failed[0].error
    assert answer is None or answer.failed_backups


@pytest.mark.parametrize("pending", [False, True])
def test_a_process_can_take_up_a_promoted_shard_with_the_step_that_is_due(tmp_path: Path, pending: bool) -> None:
    owner = FolderOwner(server_id="s", coordinator="here:1")
    with closing(SharedMemory(tmp_path, owner)) as shared, ShardServer() as first, ShardServer(shared=shared) as second:
        pair = Pair((first, second), dp=2)
        pair.copy()
        pair.train(0)
        pair.push(1)
        pair.primary.prepare(1, optimizer=adam(pair.primary, 1).optimizer)
        pair.promote(2 if pending else 1)
        (record, _), *others = [taking_up.read(shared, data) for data in shared.records().values()]
        assert not others
        assert record.version == 1
        assert (record.prepared is not None) == pending


def test_planned_move_keeps_another_backup_in_sync(servers: Any) -> None:
    with ShardServer() as third:
        pair = Pair(servers, dp=2)
        pair.copy()
        other = Pair.__new__(Pair)
        other.primary, other.backup, other.reservation = pair.primary, OneUnit(third, PLAIN, dp=2), 0
        other.backup.reserve(role=BACKUP, placement=1)
        request = shard_pb2.CopyShardRequest(
            context=pair.primary.context(),
            shard=pair.reference,
            placement=1,
            target_server_id="third",
            target_address=third.address,
        )
        pair.primary.server.call("CopyShard", request)
        pair.push(0)
        pair.primary.prepare(0)
        for one in (*pair.both, other.backup):
            one.server.call("Update", adam(one, 0))
        promote = shard_pb2.PromoteShardsRequest(
            context=pair.backup.context(1),
            placement=5,
            shards=[pair.reference],
            backups=[
                shard_pb2.PromotedBackup(shard=pair.reference, server_id="third", address=third.address, placement=1)
            ],
        )
        pair.backup.server.call("PromoteShards", promote)
        release = shard_pb2.ReleaseShardsRequest(context=pair.primary.context(1), placement=10, shards=[pair.reference])
        pair.primary.server.call("ReleaseShards", release)
        pair.primary.server.call("ReleaseShards", release)
        assert isinstance(error_of(lambda: pair.primary.gather(1)), NotFoundError)
        assert pair.primary.server.evaluate(lambda: pair.primary.server.store.memory.reserved_bytes) == 0
        for rank in range(2):
            pair.backup.push(gradients(pair.backup, 1, rank), step=1, rank=rank)
        answer = pair.backup.prepare(1)
        assert [status.server_id for status in answer.confirmed_backups] == ["third"]
        for one in (pair.backup, other.backup):
            one.server.call("Update", adam(one, 1))
        assert list(hash_of(pair.backup).tensors) == list(hash_of(other.backup).tensors)
        assert list(hash_of(other.backup).tensors) == list(straight(PLAIN, 2, 2))


def test_a_building_backup_cannot_be_promoted(servers: Any) -> None:
    pair = Pair(servers)
    pair.backup.reserve(role=BACKUP, placement=1)
    assert "no values yet" in str(error_of(lambda: pair.promote(0)))
    assert pair.backup.server.call("Update", adam(pair.backup, 0)).version == 1


def test_a_later_primary_excludes_an_earlier_one(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    pair.primary.server.call(
        "PromoteShards",
        shard_pb2.PromoteShardsRequest(
            context=pair.primary.context(0),
            placement=3,
            shards=[pair.reference],
            backups=[
                shard_pb2.PromotedBackup(
                    shard=pair.reference, server_id="backup", address=pair.backup.server.address, placement=1
                )
            ],
        ),
    )
    pair.train(0)
    pair.assert_equal(1)
    shard = shard_on(pair.primary)
    pair.primary.server.evaluate(lambda: setattr(shard.backups, "placement", 2))
    pair.push(1)
    assert "relocation 3" in pair.primary.prepare(1).failed_backups[0].error
