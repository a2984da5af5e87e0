"""Items whose gradients were added on the trainers: they are finished together, and computed again together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardwell_server.coordinator.steps.step import WorkState
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer


async def finish_summed(
    trainer: Trainer, summed: Sequence[int], *, wait_s: float = 0.0
) -> coordinator_pb2.FinishWorkResponse:
    """Reports a trainer's items as finished, with sums of some data ranks."""
    items = trainer.finished()
    for item in items:
        item.summed_dp_ranks[:] = summed
    return await trainer.finish(0, items, wait_s=wait_s)


def attempts(cluster: Harness) -> list[int]:
    step = cluster.state.runs["r"].work.steps[0]
    assert step is not None
    return [item.attempt for _, item in sorted(step.items.items())]


def states(cluster: Harness) -> list[WorkState]:
    step = cluster.state.runs["r"].work.steps[0]
    assert step is not None
    return [item.state for _, item in sorted(step.items.items())]


def fences(cluster: Harness) -> list[object]:
    """Records the ranks and attempts of all fences from now on."""
    seen: list[object] = []
    for shard in cluster.shards.values():
        shard.fail = lambda name, request: (
            seen.extend((at.dp_rank, at.attempt) for at in request.ranks) if name == "Fence" else None
        )
    return seen


async def test_step_with_sums_is_committed(cluster: Harness) -> None:
    trainers = await cluster.team_with_unit("a", "b", "c", "d")
    for trainer, summed in zip(trainers, ([0, 1], [0, 1], [2, 3], [2, 3]), strict=True):
        answer = await finish_summed(trainer, summed, wait_s=1.0 if trainer is trainers[-1] else 0.0)
    assert answer.all_finished
    assert attempts(cluster) == [0] * 4
    committed = [await trainer.commit(0, wait_s=5) for trainer in trainers]
    assert all(response.committed for response in committed)


async def test_reset_of_one_item_restarts_finished_items_of_its_sums(cluster: Harness) -> None:
    a, b, c, _ = await cluster.team_with_unit("a", "b", "c", "d")
    await finish_summed(b, [0, 1])
    await finish_summed(c, [2, 3])
    seen = fences(cluster)
    await a.reset(0, 0)
    assert attempts(cluster) == [1, 1, 0, 0]
    answer = await finish_summed(b, [0, 1], wait_s=5)
    assert [(item.global_rank, item.attempt) for item in answer.work.items] == [(1, 1)]
    assert {(0, 1), (1, 1)} <= set(seen)
    assert (2, 1) not in seen
    # The second attempts push their own gradients, so a further reset of one does not concern the other.
    await b.finish(0)
    await a.reset(0, 0)
    assert attempts(cluster) == [2, 1, 0, 0]
    assert states(cluster) == [WorkState.LEASED, WorkState.FINISHED, WorkState.FINISHED, WorkState.LEASED]


async def test_sum_with_an_attempt_that_is_over_is_not_finished(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await a.reset(0, 0)
    seen = fences(cluster)
    answer = await finish_summed(b, [0, 1], wait_s=5)
    assert not answer.all_finished
    assert [(item.global_rank, item.attempt) for item in answer.work.items] == [(1, 1)]
    assert (1, 1) in seen
    await a.finish(0)
    assert (await b.finish(0, wait_s=5)).all_finished
    assert attempts(cluster) == [1, 1]


async def test_lost_trainer_restarts_finished_items_of_its_sums(cluster: Harness) -> None:
    a, b, c = await cluster.team_with_unit("a", "b", "c")
    await finish_summed(a, [0, 1])
    await c.finish(0)
    await b.leave()
    await cluster.settle()
    assert attempts(cluster) == [1, 1, 0]
    own = await finish_summed(a, [0, 1], wait_s=5)
    assert [(item.global_rank, item.attempt) for item in own.work.items] == [(0, 1)]
    taken = await c.finish(0, wait_s=5)
    assert [(item.global_rank, item.attempt) for item in taken.work.items] == [(1, 1)]


async def test_finished_item_of_a_lost_trainer_becomes_vacant_with_its_sums(cluster: Harness) -> None:
    a, b, c = await cluster.team_with_unit("a", "b", "c")
    await finish_summed(a, [0, 1])
    await c.finish(0)
    await a.leave()
    assert attempts(cluster) == [0, 0, 0], "what a has pushed still counts"
    await b.reset(0, 1)
    await cluster.settle()
    assert attempts(cluster) == [1, 1, 0]
    taken = await c.finish(0, wait_s=5)
    assert [(item.global_rank, item.attempt) for item in taken.work.items] == [(0, 1)]


async def test_restarted_coordinator_learns_the_sums_from_reports(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await finish_summed(a, [0, 1])
    assert (await finish_summed(b, [0, 1], wait_s=5)).all_finished
    await cluster.restart()
    assert states(cluster) == [WorkState.LEASED] * 2
    await a.reset(0, 0)
    assert attempts(cluster) == [1, 0]
    assert not (await finish_summed(b, [0, 1])).all_finished
    assert attempts(cluster) == [1, 1]


async def test_unknown_ranks_are_refused(cluster: Harness) -> None:
    a, _ = await cluster.team_with_unit("a", "b")
    with pytest.raises(InvalidRequestError, match=r"reports sums with the data ranks \[2\]: the run"):
        await finish_summed(a, [0, 2])
    assert states(cluster) == [WorkState.LEASED] * 2
