"""Backups of shards: copies, and every step before its commit record."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.requests import backups
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.errors import DeadlineError
from shardwell_wire.host.server_folders import FolderOwner
from shardwell_wire.model.optimizers import KEPT_GROUP
from shardwell_wire.model.topology import TRAINER_PREFIX
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.integration.test_buffer_shards import FIRST, LAYOUT
from tests.integration.test_partitions import descend, read, stage
from tests.support.backup_pair import BACKUP, Pair, adam, gradients, hash_of, shard_on, straight
from tests.support.shard_server import MIXED, PLAIN, HalfStream, ShardServer, error_of, in_background

TRAINERS = common_pb2.OptimizerStep(algorithm=f"{TRAINER_PREFIX}SGD")


@pytest.fixture
def servers() -> Iterator[tuple[ShardServer, ShardServer]]:
    with ShardServer() as first, ShardServer() as second:
        yield first, second


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


def test_new_optimizer_state_reaches_the_backup(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    for step in range(4):
        pair.push(step)
        request = adam(pair.primary, step, new_state=step == 2)
        pair.primary.prepare(step, optimizer=request.optimizer)
        pair.update(step, request)
        pair.assert_equal(step + 1)
    for one in pair.both:
        optimizer = shard_on(one).optimizer
        assert optimizer is not None and optimizer.steps_of(0) == 2


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
        read_file = backups._read_file

        def note(path: str, *arguments: Any) -> None:
            received.append(path)
            read_file(path if readable else f"{path}0", *arguments)

        patch.setattr(backups, "_read_file", note)
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
        lambda: shard.received_step is not None and bool(shard.received_step.contents), "the gradient is there"
    )
    assert not shard.has_prepared(0)
    pair.primary.prepare(0)
    assert shard.has_prepared(0)


def test_backup_without_state_has_no_hash(servers: Any) -> None:
    pair = Pair(servers)
    pair.backup.reserve(role=BACKUP, placement=1)
    request = shard_pb2.HashShardsRequest(context=pair.backup.context(), version=0)
    assert not pair.backup.server.call("HashShards", request).shards
    pair.copy()
    pair.assert_equal(0)


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


def test_a_repeated_copy_leaves_a_backup_in_sync_as_it_is(servers: Any) -> None:
    """The coordinator repeats CopyShard if it gets no answer, and one of the requests may arrive late."""
    pair = Pair(servers)
    pair.copy()
    pair.push(0)
    pair.primary.prepare(0)
    pair.reservation -= 1
    assert pair.copy().copied_bytes == 0
    assert shard_on(pair.backup).has_prepared(0)
    pair.update(0)
    pair.reservation -= 1
    assert (pair.copy().version, shard_on(pair.backup).version) == (1, 1)
    pair.train(1)
    pair.assert_equal(2)


def test_a_late_copy_under_a_former_reservation_does_not_affect_the_backup(servers: Any) -> None:
    pair = Pair(servers)
    pair.copy()
    pair.copy()
    late = shard_pb2.CopyShardRequest(
        context=pair.primary.context(),
        shard=pair.reference,
        placement=1,
        target_server_id="backup",
        target_address=pair.backup.server.address,
    )
    assert "it has reservation 2" in str(error_of(lambda: pair.primary.server.call("CopyShard", late)))
    assert not pair.train(0).failed_backups
    pair.assert_equal(1)


def test_a_late_state_does_not_replace_the_backup(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary lost the connection while it sent the state, and the coordinator repeated CopyShard."""
    pair, sent = Pair(servers), list[bytes]()
    peers = servers[0].peers
    real = peers.stream

    async def record(address: str, rpc_name: str, messages: Any, *, timeout_s: float) -> Any:
        found = list(messages)
        if rpc_name == "ReceiveShardState":
            sent.extend(found)
        return await real(address, rpc_name, iter(found), timeout_s=timeout_s)

    monkeypatch.setattr(peers, "stream", record)
    pair.copy()
    pair.train(0)
    late = HalfStream(servers[1].client.byte_request_stub("ReceiveShardState")).send(*sent).finish()
    assert "has version 1 under reservation 1 already" in str(late.error())
    pair.train(1)
    pair.assert_equal(2)


def test_a_backup_is_not_replaced_while_an_update_uses_its_memory(
    servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(servers)
    pair.copy()
    pair.push(0)
    pair.primary.prepare(0)
    waits, go_on, real = threading.Event(), threading.Event(), UnitShard.compute_update

    def slow(shard: UnitShard, *arguments: Any) -> None:
        waits.set()
        assert go_on.wait(20.0)
        assert shard.values.live is not None, "nobody has released the memory"
        real(shard, *arguments)

    monkeypatch.setattr(UnitShard, "compute_update", slow)
    updated = in_background(lambda: servers[1].call("Update", adam(pair.primary, 0)))
    assert waits.wait(20.0)
    error = error_of(lambda: pair.backup.reserve(role=BACKUP, placement=2))
    go_on.set()
    next(updated)
    assert "is being updated" in str(error)
    pair.backup.reserve(role=BACKUP, placement=2)
    assert shard_on(pair.backup).version is None


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
    monkeypatch.setattr(backups, "receive_step", silenced(backups.receive_step))
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
