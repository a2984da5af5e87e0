"""Contributions of a step, and fences of leases and attempts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardwell_server.shard.state.runs import Fences
from shardwell_server.shard.unit.contributions import Contribution, Contributions
from shardwell_wire.errors import StaleEpochError
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import OneUnit, ShardServer, layout_of


def contribution(
    attempt: int = 0, parts: int = 1, give_back: Callable[[], None] = lambda: None, epoch: int = 1
) -> Contribution:
    buffer = torch.zeros(16, dtype=torch.uint8)
    return Contribution(epoch, attempt, buffer, buffer.view(torch.float32).split(2), give_back, {0}, list(range(parts)))


def test_parts_are_added_to_present_gradients_and_copied_to_absent_ones() -> None:
    target = contribution()
    target.views[0].fill_(1.0)
    target.views[1].fill_(float("nan"))  # a reused buffer with undefined bytes
    target.compute_add([torch.full((2,), 2.0), torch.full((2,), 5.0)], [0, 1])
    assert [target.views[number].tolist() for number in (0, 1)] == [[3.0, 3.0], [5.0, 5.0]]
    assert target.gradient(1) is target.views[1]


def test_segment_without_gradient_returns_none() -> None:
    assert contribution().gradient(1) is None


def test_only_older_attempts_are_dropped() -> None:
    contributions, released = Contributions(), list[int]()
    contributions.by_rank = {
        0: contribution(attempt=2, give_back=lambda: released.append(0)),
        1: contribution(give_back=lambda: released.append(1)),
    }
    assert not contributions.drop_older(0, 2)
    assert contributions.drop_older(0, 3)
    assert (
        list(contributions.by_rank),
        contributions.attempt(0),
        contributions.part_count(1, 1, 0),
        contributions.part_count(1, 1, 1),
    ) == ([1], 0, 1, 0)
    assert contributions.part_count(1, 2, 0) == 0, "another lease pushed it"
    assert contributions.size_bytes == 16
    contributions.clear()
    assert (contributions.size_bytes, released) == (0, [0, 1])


def test_completeness_expects_the_parts_of_the_last_step() -> None:
    contributions = Contributions()
    assert not contributions.seem_complete(2)
    contributions.by_rank = {0: contribution()}
    assert not contributions.seem_complete(2)
    contributions.by_rank = {0: contribution(parts=3), 1: contribution()}
    assert contributions.seem_complete(2)
    contributions.end_step({0, 1})
    contributions.by_rank = {0: contribution(parts=2), 1: contribution()}
    assert not contributions.seem_complete(2), "rank 0 pushed three parts"
    contributions.by_rank = {0: contribution(parts=3), 1: contribution()}
    assert contributions.seem_complete(2)


def test_differences_name_every_deviation_from_a_manifest() -> None:
    contributions, ranks = Contributions(), set(range(6))
    contributions.by_rank = {0: contribution(), 1: contribution(attempt=1), 2: contribution(parts=2), 5: contribution()}
    assert contributions.differences({0: (0, 1), 1: (1, 1), 2: (0, 2), 5: (0, 1)}, ranks) == []
    assert contributions.differences({0: (0, 1), 1: (2, 1), 2: (0, 1), 3: (0, 1)}, ranks) == [
        "rank 1: expected 1 parts of attempt 2, have 1 of attempt 1",
        "rank 2: expected 1 parts of attempt 0, have 2 of attempt 0",
        "rank 3: expected 1 parts of attempt 0, have none",
        "rank 5: expected 0 parts of attempt 0, have 1 of attempt 0",
    ]
    assert contributions.differences({0: (0, 1)}, {0}) == [], "other ranks do not take part"


def rank(dp_rank: int, epoch: int, attempt: int) -> shard_pb2.RankFence:
    return shard_pb2.RankFence(dp_rank=dp_rank, epoch=epoch, attempt=attempt)


def test_epochs_only_rise() -> None:
    fences = Fences()
    fences.raise_all(0, [rank(0, 5, 0)])
    fences.raise_all(0, [rank(0, 3, 0)])
    fences.check_epoch(0, 5)
    fences.check_epoch(1, 0)
    with pytest.raises(StaleEpochError, match="the lease on rank 0 with epoch 4 is over: its lease now has epoch 5"):
        fences.check_epoch(0, 4)


def test_attempts_restart_in_every_step() -> None:
    fences = Fences()
    assert fences.raise_all(3, [rank(0, 1, 2), rank(1, 1, 0)]) == [(0, 2)]
    assert fences.raise_all(3, [rank(0, 1, 2)]) == []
    assert (fences.attempt(0, 3), fences.attempt(0, 4), fences.attempt(1, 3)) == (2, 0, 0)
    assert fences.raise_all(4, [rank(1, 1, 1)]) == [(1, 1)]
    assert fences.attempt(0, 4) == 0


def test_fence_of_an_earlier_step_keeps_attempts() -> None:
    fences = Fences()
    fences.raise_all(4, [rank(0, 1, 2)])
    assert fences.raise_all(3, [rank(0, 9, 7)]) == []
    assert (fences.attempt(0, 4), fences.epoch(0)) == (2, 9)


def test_delayed_fence_from_before_a_rollback_names_no_attempt_of_repeated_steps() -> None:
    fences = Fences()
    fences.restart(5)
    assert fences.raise_all(2, [rank(0, 4, 1)]) == []
    assert (fences.attempt(0, 2), fences.epoch(0)) == (0, 5)
    assert fences.raise_all(2, [rank(0, 5, 1)]) == [(0, 1)]


def test_server_that_missed_a_rollback_knows_no_attempts_of_the_steps_that_are_repeated() -> None:
    layout = layout_of(weight=((17, 5), "float32"))
    with ShardServer() as server:
        one = OneUnit(server, layout).begin()
        one.fence(0, (0, 5, 3))
        fences = server.store.runs[one.identity.run_id].fences
        assert fences.attempt(0, 0) == 3
        reference = shard_pb2.ShardReference(unit=layout.unit, start_bytes=0, stop_bytes=layout.size_bytes)
        release = shard_pb2.ReleaseShardsRequest(context=one.context(), placement=1, shards=[reference])
        server.call("ReleaseShards", release)  # when it returns
        one.reserve(placement=2, role=shard_pb2.SHARD_ROLE_BACKUP)
        fences = server.store.runs[one.identity.run_id].fences
        assert (fences.attempt(0, 0), fences.epoch(0)) == (0, 5)
