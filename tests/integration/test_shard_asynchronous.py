"""Shards of an asynchronous run over gRPC: contributions of one rank at a time, and versions that others still read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwell_server.shard.memory.budget import shard_need_bytes
from shardwell_wire.errors import (
    CapacityError,
    IncompleteStepError,
    InvalidRequestError,
    StaleEpochError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, assert_all, error_of, pinned


def asynchronous_unit(server: ShardServer, *, dp: int = 2) -> OneUnit:
    one = OneUnit(server, PLAIN, dp=dp)
    one.reserve(asynchronous=True)
    one.initialize(one.zeros())
    one.publish()
    return one


def update(one: OneUnit, step: int, **versions: int) -> None:
    """Updates a prepared step. ``versions`` are the versions that ranks read afterwards, as ``r0=1``."""
    request = one.update_request(step)
    for name, version in versions.items():
        request.rank_versions.add(dp_rank=int(name[1:]), version=version)
    one.server.call("Update", request)


def prepare(one: OneUnit, step: int, rank: int, *, attempt: int = 0) -> shard_pb2.PrepareStepResponse:
    response: shard_pb2.PrepareStepResponse = one.prepare(step, (rank, attempt, 1), dp=1)
    return response


def fence(one: OneUnit, step: int, rank: int, *, epoch: int, attempt: int, version: int) -> None:
    fences = [shard_pb2.RankFence(dp_rank=rank, epoch=epoch, attempt=attempt, version=version)]
    one.server.call("Fence", shard_pb2.FenceRequest(context=one.context(step), ranks=fences))


def gone(one: OneUnit, version: int) -> bool:
    return isinstance(error_of(lambda: one.gather(version)), VersionGoneError)


def test_a_step_applies_the_gradient_of_one_rank_and_keeps_the_others(server: ShardServer) -> None:
    one = asynchronous_unit(server)
    one.push(one.filled(1.0))
    one.push(one.filled(10.0), rank=1)
    assert sum(prepare(one, 0, 0).units[0].square_partials) == 60_000 * 1.0, "the norm of rank 0's gradient alone"
    update(one, 0, r0=1, r1=0)
    assert_all(one.gather(1)[1], -1.0)
    assert sum(prepare(one, 1, 1).units[0].square_partials) == 60_000 * 100.0
    update(one, 1, r0=1, r1=2)
    assert_all(one.gather(2)[1], -11.0)


def test_versions_stay_readable_until_the_last_item_that_reads_them_is_committed(server: ShardServer) -> None:
    one = asynchronous_unit(server)
    one.push(one.filled(1.0), rank=1)
    for step in range(3):
        one.push(one.filled(1.0), step=step)
        prepare(one, step, 0)
        update(one, step, r0=step + 1, r1=0)
        assert_all(one.gather(0)[1], 0.0)
        assert_all(one.gather(step + 1)[1], -1.0 - step)
        assert step == 0 or gone(one, step), "no rank reads a version between the newest and that of rank 1"
    held = server.taken_bytes()
    prepare(one, 3, 1)
    update(one, 3, r0=3, r1=4)
    assert_all(one.gather(4)[1], -4.0)
    assert_all(one.gather(3)[1], -3.0)
    assert gone(one, 0)
    assert server.taken_bytes() <= held


def test_a_pinned_version_stays_readable_when_no_item_reads_it_any_more(server: ShardServer) -> None:
    one = asynchronous_unit(server)
    with pinned(one, 0):
        for step, rank in enumerate([0, 1, 0]):
            one.push(one.filled(1.0), step=[0, 0, 1][step], rank=rank)
            prepare(one, step, rank)
            update(one, step, r0=[1, 1, 3][step], r1=[0, 2, 2][step])
        assert_all(one.gather(0)[1], 0.0)
        assert_all(one.gather(2)[1], -2.0)
        assert gone(one, 1)
        assert server.unreserved_bytes() == one.size
    server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "nothing is pinned")
    assert gone(one, 0)


def test_a_prepared_step_can_be_replaced_by_that_of_another_rank(server: ShardServer) -> None:
    """A trainer that has asked for its norm may be stopped before it commits."""
    one = asynchronous_unit(server)
    one.push(one.filled(1.0))
    one.push(one.filled(2.0), rank=1)
    norm = prepare(one, 0, 0).units[0]
    prepare(one, 0, 1)
    update(one, 0, r0=0, r1=1)
    assert_all(one.gather(1)[1], -2.0)
    assert prepare(one, 1, 0).units[0] == norm
    update(one, 1, r0=2, r1=1)
    assert_all(one.gather(2)[1], -3.0)


def test_other_ranks_push_while_a_step_is_prepared(server: ShardServer) -> None:
    one = asynchronous_unit(server)
    one.push(one.filled(1.0))
    prepare(one, 0, 0)
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), part=1)), StepStateError)
    one.push(one.filled(4.0), rank=1)
    fence(one, 0, 1, epoch=2, attempt=1, version=0)
    update(one, 0, r0=1, r1=0)
    assert_all(one.gather(1)[1], -1.0)


def test_a_push_must_belong_to_the_version_that_the_rank_reads(server: ShardServer) -> None:
    one = asynchronous_unit(server)
    one.push(one.filled(1.0))
    prepare(one, 0, 0)
    update(one, 0, r0=1, r1=0)
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), step=0)), VersionGoneError)
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), step=1, rank=1)), StepStateError)
    one.push(one.filled(1.0), step=0, rank=1)
    one.push(one.filled(1.0), step=1)


def test_a_fenced_rank_starts_again_from_a_later_version(server: ShardServer) -> None:
    one = asynchronous_unit(server)
    one.push(one.filled(7.0), rank=1)
    one.push(one.filled(1.0))
    prepare(one, 0, 0)
    update(one, 0, r0=1, r1=0)
    fence(one, 1, 1, epoch=5, attempt=1, version=1)
    assert gone(one, 0), "no rank reads it any more"
    assert isinstance(error_of(lambda: prepare(one, 1, 1)), IncompleteStepError), "the old gradient was dropped"
    assert isinstance(error_of(lambda: one.push(one.filled(7.0), rank=1)), StaleEpochError)
    assert isinstance(error_of(lambda: one.push(one.filled(7.0), step=1, rank=1, epoch=5)), StaleEpochError)
    one.push(one.filled(2.0), step=1, rank=1, epoch=5, attempt=1)
    prepare(one, 1, 1, attempt=1)
    update(one, 1, r0=1, r1=2)
    assert_all(one.gather(2)[1], -3.0)


def test_a_repeated_update_changes_nothing(server: ShardServer) -> None:
    one = asynchronous_unit(server)
    one.push(one.filled(1.0))
    prepare(one, 0, 0)
    update(one, 0, r0=1, r1=0)
    one.push(one.filled(1.0), step=1)
    prepare(one, 1, 0)
    update(one, 0, r0=1, r1=0)
    update(one, 1, r0=2, r1=0)
    update(one, 1, r0=2, r1=0)
    assert_all(one.gather(2)[1], -2.0)
    assert_all(one.gather(0)[1], 0.0)


def test_the_reservation_covers_every_version_that_is_held() -> None:
    size, dp = PLAIN.size_bytes, 3
    need = shard_need_bytes(size, dp, held_versions=dp)
    assert need == shard_need_bytes(size, dp) + dp * size
    with ShardServer(budget_bytes=need + size - 1) as server:
        one = OneUnit(server, PLAIN, dp=dp)
        assert isinstance(error_of(lambda: one.reserve(asynchronous=True)), CapacityError)
    with ShardServer(budget_bytes=need + size) as server:
        one = asynchronous_unit(server, dp=dp)
        for rank in range(dp):
            one.push(one.filled(1.0), rank=rank)
        versions = dict.fromkeys(("r0", "r1", "r2"), 0)
        for step in range(2 * dp):
            rank = step % dp
            if step >= dp:
                one.push(one.filled(1.0), step=versions[f"r{rank}"], rank=rank)
            prepare(one, step, rank)
            versions[f"r{rank}"] = step + 1
            update(one, step, **versions)
            for version in versions.values():
                assert_all(one.gather(version)[1], -float(version))


@pytest.mark.parametrize(
    "action",
    [
        lambda one: one.prepare(0, (0, 0, 0), (1, 0, 0), dp=1),
        lambda one: one.prepare(0, (2, 0, 0), dp=1),
        lambda one: one.prepare(0, (0, 0, 0), dp=2),
    ],
)
def test_a_manifest_of_other_ranks_is_rejected(server: ShardServer, action: Callable[[OneUnit], object]) -> None:
    one = asynchronous_unit(server)
    assert isinstance(error_of(lambda: action(one)), InvalidRequestError)
