"""Backups of shards: copies, every step before its commit record, promotion, and failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_server.shard.requests import backups, received_steps
from shardwell_server.shard.state.shard_spec import Role
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import DeadlineError, NotFoundError, StaleEpochError, StepStateError, UnavailableError
from shardwell_wire.layout import BLOCK_BYTES
from shardwell_wire.optimizers import KEPT_GROUP
from shardwell_wire.partitions import TRAINER_PREFIX
from shardwell_wire.server_folders import FolderOwner
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.integration.test_buffer_shards import FIRST, LAYOUT
from tests.integration.test_partitions import descend, read, stage
from tests.support.shard_server import ADAM, MIXED, PLAIN, OneUnit, ShardServer, error_of, layout_of

BACKUP = shard_pb2.SHARD_ROLE_BACKUP
TRAINERS = common_pb2.OptimizerStep(algorithm=f"{TRAINER_PREFIX}SGD")


@pytest.fixture
def servers() -> Iterator[tuple[ShardServer, ShardServer]]:
    with ShardServer() as first, ShardServer() as second:
        yield first, second


class Pair:
    """A shard with its primary on one server and its backup on another."""

    def __init__(
        self, servers: Sequence[ShardServer], layout: Any = PLAIN, *, initial: Any = None, **options: Any
    ) -> None:
        self.primary = OneUnit(servers[0], layout, **options).begin(initial)
        self.backup = OneUnit(servers[1], layout, **options)
        self.reservation = 0

    @property
    def both(self) -> tuple[OneUnit, OneUnit]:
        return self.primary, self.backup

    @property
    def reference(self) -> shard_pb2.ShardReference:
        one = self.primary
        return shard_pb2.ShardReference(unit=one.layout.unit, start_bytes=one.start, stop_bytes=one.stop)

    def copy(self) -> Any:
        self.reservation += 1
        self.backup.reserve(role=BACKUP, placement=self.reservation)
        request = shard_pb2.CopyShardRequest(
            context=self.primary.context(),
            shard=self.reference,
            placement=self.reservation,
            target_server_id="backup",
            target_address=self.backup.server.address,
        )
        return self.primary.server.call("CopyShard", request)

    def push(self, step: int, *, attempt: int = 0, scale: float = 1.0) -> None:
        for rank in range(self.primary.dp):
            self.primary.push(gradients(self.primary, step, rank, scale), step=step, rank=rank, attempt=attempt)

    def update(self, step: int, request: shard_pb2.UpdateRequest | None = None) -> list[Any]:
        request = request or adam(self.primary, step)
        return [one.server.call("Update", request) for one in self.both]

    def train(self, step: int, **options: Any) -> Any:
        self.push(step)
        answer = self.primary.prepare(step, **options)
        self.update(step)
        return answer

    def promote(self, step: int, *, placement: int = 1, fences: Sequence[tuple[int, int, int]] = ()) -> None:
        ranks = [shard_pb2.RankFence(dp_rank=rank, epoch=epoch, attempt=attempt) for rank, epoch, attempt in fences]
        request = shard_pb2.PromoteShardsRequest(
            context=self.backup.context(step), placement=placement, shards=[self.reference], fences=ranks
        )
        self.backup.server.call("PromoteShards", request)

    def hashes(self) -> list[Any]:
        return [hash_of(one) for one in self.both]

    def assert_equal(self, version: int) -> None:
        first, second = self.hashes()
        assert (first.role, second.role) == (shard_pb2.SHARD_ROLE_PRIMARY, BACKUP)
        assert first.version == second.version == version
        assert list(first.tensors) == list(second.tensors)


def hash_of(one: OneUnit) -> Any:
    answer = one.server.call("HashShards", shard_pb2.HashShardsRequest(context=one.context()))
    return next(shard for shard in answer.shards if (shard.unit, shard.start_bytes) == (one.layout.unit, one.start))


def gradients(one: OneUnit, step: int, rank: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(torch.randn(value.numel(), generator=generator) * scale).to(value.dtype) for value in one.zeros()]


def adam(one: OneUnit, step: int, *, groups: Sequence[int] | None = None, **fields: Any) -> shard_pb2.UpdateRequest:
    optimizer = common_pb2.OptimizerStep(
        algorithm="adamw",
        groups=[common_pb2.ParameterGroup(hyperparameters=ADAM)],
        units=[common_pb2.UnitGroups(unit_index=one.index, group_indices=groups or [0] * len(one.layout.parameters))],
        **fields,
    )
    return shard_pb2.UpdateRequest(context=one.context(step), optimizer=optimizer, clip_coefficient=0.5)


def shard_on(one: OneUnit) -> UnitShard:
    return one.server.evaluate(lambda: one.shard)


def straight(layout: Any, dp: int, steps: int, **options: Any) -> Any:
    """Hashes of a shard that was trained without a backup."""
    with ShardServer() as server:
        one = OneUnit(server, layout, dp=dp, **options).begin()
        for step in range(steps):
            for rank in range(dp):
                one.push(gradients(one, step, rank), step=step, rank=rank)
            one.prepare(step)
            server.call("Update", adam(one, step))
        return hash_of(one).tensors


@pytest.mark.parametrize("layout", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("begun", [0, 2])
def test_backup_follows_every_step(servers: Any, layout: Any, dp: int, begun: int) -> None:
    pair = Pair(servers, layout, dp=dp)
    for step in range(begun):
        pair.push(step)
        pair.primary.prepare(step)
        pair.primary.server.call("Update", adam(pair.primary, step))
    copied = pair.copy()
    assert copied.version == begun and copied.copied_bytes > 0
    pair.assert_equal(begun)
    for step in range(begun, begun + 3):
        answer = pair.train(step)
        assert [(status.server_id, status.error) for status in answer.confirmed_backups] == [("backup", "")]
        assert not answer.failed_backups
        pair.assert_equal(step + 1)
    assert list(hash_of(pair.backup).tensors) == list(straight(layout, dp, begun + 3))
    assert pair.primary.server.call("DescribeServer", shard_pb2.DescribeServerRequest()).replicated_bytes > 0


def test_backup_has_the_optimizer_memory_before_the_commit(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    pair.push(0)
    pair.primary.prepare(0, optimizer=adam(pair.primary, 0).optimizer)
    shard = shard_on(pair.backup)
    assert shard.optimizer is not None and shard.optimizer.size_bytes >= 2 * PLAIN.size_bytes
    assert shard.has_prepared(0)
    pair.update(0)
    pair.assert_equal(1)


def test_other_optimizer_than_expected_is_prepared_on_the_backup(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    pair.push(0)
    pair.primary.prepare(0, optimizer=pair.primary.update_request(0).optimizer)
    answer = pair.primary.prepare_update(0, algorithm="adamw")
    assert [status.server_id for status in answer.confirmed_backups] == ["backup"]
    pair.update(0, pair.primary.update_request(0, algorithm="adamw"))
    pair.assert_equal(1)


def test_averages_absent_gradients_and_skipped_steps_reach_the_backup(servers: Any) -> None:
    pair = Pair(servers, dp=2)
    pair.copy()
    for step in range(4):
        for rank in range(2):
            values: list[torch.Tensor | None] = list(gradients(pair.primary, step, rank))
            if step == 0:
                values[1] = None
            pair.primary.push(values, step=step, rank=rank)
        pair.primary.prepare(step, skip=step == 2)
        pair.update(step, adam(pair.primary, step, ema_decay=0.9) if step else adam(pair.primary, step))
        pair.assert_equal(step + 1)
    names = {(tensor.parameter, tensor.name) for tensor in hash_of(pair.backup).tensors}
    assert ("u.b", "ema") in names and ("u.b", "exp_avg") in names


def test_kept_gradients_reach_the_backup(servers: Any) -> None:
    pair = Pair(servers, dp=2)
    pair.copy()
    for step in range(4):
        pair.push(step)
        request = adam(pair.primary, step, groups=[[0, KEPT_GROUP], [KEPT_GROUP, 0]][step % 2])
        pair.primary.prepare(step, optimizer=request.optimizer)
        pair.update(step, request)
        pair.assert_equal(step + 1)
    assert any(tensor.name.startswith("kept_gradient.") for tensor in hash_of(pair.backup).tensors)


def test_buffers_reach_the_backup(servers: Any) -> None:
    pair = Pair(servers, LAYOUT, dp=2, initial=FIRST)
    pair.copy()
    pair.assert_equal(0)
    pair.primary.push([torch.tensor([2.0, 5.0, 7.0]), torch.tensor([7]), None, None], rank=0)
    pair.primary.prepare(0, (0, 0, 1), (1, 0, 0))
    pair.update(0)
    pair.assert_equal(1)
    pair.primary.prepare(1, (0, 0, 0), (1, 0, 0))
    pair.update(1)
    pair.assert_equal(2)


def test_partitions_that_trainers_update_reach_the_backup(servers: Any) -> None:
    pair = Pair(servers, dp=2)
    pair.copy()
    for step in range(3):
        pair.push(step)
        pair.primary.prepare(step, optimizer=TRAINERS)
        for rank in range(2):
            part = descend(read(pair.primary, rank, step=step))
            part.state = {index: {"m": 2 * value, "k": step} for index, value in part.values.items()}
            stage(pair.primary, part, rank, step=step)
        request = shard_pb2.ConfirmPartitionsRequest(context=pair.primary.context(step), optimizer=TRAINERS)
        answer = pair.primary.server.call("ConfirmPartitions", request)
        assert [status.server_id for status in answer.confirmed_backups] == ["backup"]
        pair.update(
            step,
            shard_pb2.UpdateRequest(context=pair.primary.context(step), optimizer=TRAINERS, clip_coefficient=1.0),
        )
        pair.assert_equal(step + 1)
        if step == 1:
            pair.copy()
    assert any(tensor.name == "trainer.m" for tensor in hash_of(pair.backup).tensors)


def test_a_copy_during_a_prepared_step_includes_the_step(servers: Any) -> None:
    pair = Pair(servers, dp=2)
    pair.push(0)
    pair.primary.prepare(0, optimizer=adam(pair.primary, 0).optimizer)
    pair.copy()
    assert shard_on(pair.backup).has_prepared(0)
    pair.update(0)
    pair.assert_equal(1)


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("dp", [1, 2])
def test_gradient_travels_through_shared_memory(tmp_path: Path, dp: int, readable: bool) -> None:
    owners = [FolderOwner(server_id=f"s{number}", coordinator="here:1") for number in range(2)]
    with ExitStack() as stack:
        memory = [stack.enter_context(closing(SharedMemory(tmp_path, owner))) for owner in owners]
        servers = [stack.enter_context(ShardServer(shared=shared)) for shared in memory]
        pair = Pair(servers, dp=dp)
        pair.copy()
        received: list[str] = []
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        read_file = received_steps._read_file

        def note(path: str, *arguments: Any) -> None:
            received.append(path)
            read_file(path if readable else f"{path}0", *arguments)

        patch.setattr(received_steps, "_read_file", note)
        for step in range(3):
            pair.train(step)
            pair.assert_equal(step + 1)
        assert len(received) == (3 if readable else 1), "after a failure, gradients are streamed"
        assert list(hash_of(pair.backup).tensors) == list(straight(PLAIN, dp, 3))
        pair.promote(3)
        assert pair.backup.gather(3)[0] == 3


def test_a_new_attempt_replaces_the_gradient_on_the_backup(servers: Any) -> None:
    pair = Pair(servers, dp=2)
    pair.copy()
    pair.push(0, scale=7.0)
    pair.primary.prepare(0)
    for one in pair.both:
        one.fence(0, (1, 1, 1))
    assert not shard_on(pair.backup).has_prepared(0)
    pair.primary.push(gradients(pair.primary, 0, 1), rank=1, attempt=1)
    pair.primary.prepare(0, (0, 0, 1), (1, 1, 1))
    pair.update(0)
    pair.assert_equal(1)


def test_gradient_is_replicated_before_the_step_is_prepared(servers: Any) -> None:
    pair = Pair(servers, dp=2)
    pair.copy()
    pair.push(0)
    shard = shard_on(pair.backup)
    pair.backup.server.until(
        lambda: shard.replica is not None and bool(shard.replica.contents), "the gradient is there"
    )
    assert not shard.has_prepared(0)
    pair.primary.prepare(0)
    assert shard.has_prepared(0)


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


def test_backup_without_state_has_no_hash(servers: Any) -> None:
    pair = Pair(servers)
    pair.backup.reserve(role=BACKUP, placement=1)
    request = shard_pb2.HashShardsRequest(context=pair.backup.context(), version=0)
    assert not pair.backup.server.call("HashShards", request).shards
    pair.copy()
    pair.assert_equal(0)


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
    pair.backup.server.evaluate(shard.drop_replica)
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


def test_an_update_that_arrives_late_leaves_a_backup_in_sync(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    pair.train(0)
    pair.train(1)
    pair.push(2)
    assert not pair.primary.prepare(2).failed_backups
    assert not pair.backup.server.call("Update", adam(pair.backup, 0)).stale_backups
    assert not any(answer.stale_backups for answer in pair.update(2))
    pair.assert_equal(3)


def test_a_building_backup_cannot_be_promoted(servers: Any) -> None:
    pair = Pair(servers)
    pair.backup.reserve(role=BACKUP, placement=1)
    assert "no values yet" in str(error_of(lambda: pair.promote(0)))
    assert pair.backup.server.call("Update", adam(pair.backup, 0)).version == 1


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


def test_silent_backup_is_left_out_of_the_step_and_a_slow_one_is_not(
    servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(servers, dp=2)
    pair.copy()
    primary, backup = servers
    silent = False

    def silenced(function: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(store: Any, *arguments: Any) -> Any:
            if silent and store is backup.store:
                await asyncio.Event().wait()
            return await function(store, *arguments)

        return answer

    monkeypatch.setattr(backups, "confirm", silenced(backups.confirm))
    monkeypatch.setattr(received_steps, "receive_step", silenced(received_steps.receive_step))
    primary.evaluate(lambda: setattr(primary.store.lease, "length_s", 6.0))
    pair.push(0)
    assert pair.primary.prepare(0).confirmed_backups
    primary.call("Update", adam(pair.primary, 0))
    pair.push(1)
    # The backup waits for its update of step 0, and is asked meanwhile whether it lives.
    late = threading.Timer(2.5, lambda: backup.call("Update", adam(pair.primary, 0)))
    late.start()
    answer = pair.primary.prepare(1)
    late.join()
    assert [status.server_id for status in answer.confirmed_backups] == ["backup"] and not answer.failed_backups
    pair.update(1)
    pair.assert_equal(2)
    silent = True
    pair.push(2)
    answer = pair.primary.prepare(2)
    (failed,) = answer.failed_backups
    assert failed.server_id == "backup" and "silent" in failed.error and not answer.confirmed_backups
    primary.call("Update", adam(pair.primary, 2))
    assert isinstance(error_of(pair.copy), DeadlineError)
    pair.push(3)
    assert pair.primary.prepare(3).failed_backups, "reported until it is built again"
    primary.call("Update", adam(pair.primary, 3))
    silent = False
    pair.copy()
    assert not pair.train(4).failed_backups
    pair.assert_equal(5)
