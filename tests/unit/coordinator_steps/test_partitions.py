"""Steps whose optimizer runs on the trainers: assignment of optimizer partitions, and the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from shardwell_server.coordinator.steps.step import WorkState
from shardwell_wire.errors import HyperparameterMismatchError, IncompleteStepError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import Harness, Trainer, config, finished_item
from tests.support.fake_shards import fail_times
from tests.unit.coordinator_steps.test_grid import grid, step_of


def on_trainers(lr: float = 0.1) -> common_pb2.OptimizerStep:
    return common_pb2.OptimizerStep(
        algorithm="trainer/Rprop", groups=[common_pb2.ParameterGroup(hyperparameters={"lr": lr, "etas.0": 0.5})]
    )


async def commit(
    trainer: Trainer, staged: Sequence[coordinator_pb2.PartitionWork] = (), *, step: int = 0, **changes: Any
) -> coordinator_pb2.CommitStepResponse:
    return await trainer.commit(step, **({"optimizer": on_trainers(), "staged_partitions": staged} | changes))


async def finished_team(cluster: Harness) -> tuple[Trainer, Trainer]:
    a, b = await cluster.team_with_unit("a", "b")
    for trainer in (a, b):
        await trainer.finish(0)
    return a, b


def ranks(response: coordinator_pb2.CommitStepResponse) -> list[int]:
    return [work.global_rank for work in response.partitions]


async def test_step_is_committed_when_every_trainer_staged_its_partitions(cluster: Harness) -> None:
    a, b = await finished_team(cluster)
    assert not (await commit(b)).partitions, "rank 0 leads and has not proposed"
    first, second = await commit(a, wait_s=5), await commit(b, wait_s=5)
    assert (ranks(first), ranks(second)) == ([0], [1])
    assert ranks(await commit(a)) == [0], "returned again until reported as staged"
    waiting = await commit(a, first.partitions)
    assert not waiting.committed
    assert list(waiting.waiting_for) == ["optimizer partitions of rank 1: trainer 'b' is updating them"]
    assert all(shard.calls["ConfirmPartitions"] == 0 for shard in cluster.shards.values())
    both = await asyncio.gather(commit(a, first.partitions, wait_s=5), commit(b, second.partitions, wait_s=5))
    assert [response.committed for response in both] == [True, True]
    await cluster.settle()
    for shard in cluster.shards.values():
        assert shard.calls["ConfirmPartitions"] == 1
        assert len(shard.runs["r"].updates) == 1


async def test_partitions_of_a_lost_trainer_go_to_a_waiting_one(cluster: Harness) -> None:
    a, b = await finished_team(cluster)
    own, lost = await commit(a, wait_s=5), await commit(b, wait_s=5)
    await cluster.pass_time(20, a)
    await cluster.settle()
    response = await commit(a, own.partitions, wait_s=5)
    assert ranks(response) == [1]
    assert response.partitions[0].epoch > lost.partitions[0].epoch
    for shard in cluster.shards.values():
        assert shard.runs["r"].epochs[1] > lost.partitions[0].epoch
    stale = await commit(a, [*own.partitions, *lost.partitions])
    assert ranks(stale) == [1], "reports of the lost trainer are ignored"
    assert (await commit(a, [*own.partitions, *response.partitions], wait_s=5)).committed


async def test_partitions_are_reassigned_again_when_the_substitute_is_lost(cluster: Harness) -> None:
    a, b = await finished_team(cluster)
    own = await commit(a, wait_s=5)
    await b.leave()
    await cluster.settle()
    first = await commit(a, own.partitions, wait_s=5)
    assert ranks(first) == [1]
    spare = await cluster.join("c", config=common_config())
    await cluster.pass_time(20, spare)
    await cluster.settle()
    second = await commit(spare, wait_s=5)
    # The first trainer's own partition stays staged. The partition that it had not staged is assigned again.
    assert ranks(second) == [1]
    assert second.partitions[0].epoch > first.partitions[0].epoch
    assert (await commit(spare, second.partitions, wait_s=5)).committed


def common_config() -> coordinator_pb2.RunConfig:
    return coordinator_pb2.RunConfig(world=common_pb2.World(dp=2, tp=1, pp=1), min_trainers=2)


async def test_reset_invalidates_staged_partitions(cluster: Harness) -> None:
    a, b = await finished_team(cluster)
    first = await commit(a, wait_s=5)
    await commit(a, first.partitions)
    item = await b.reset(0, 1)
    assert not (await commit(a, first.partitions)).partitions, "the reset rank has not pushed its gradient"
    await b.finish(0, [finished_item(item)])
    again = await commit(a, first.partitions, wait_s=5)
    assert ranks(again) == [0]
    assert again.partitions[0].attempts == first.partitions[0].attempts + 1


async def test_restarted_coordinator_learns_staged_partitions_from_requests(cluster: Harness) -> None:
    a, b = await finished_team(cluster)
    first, second = await commit(a, wait_s=5), await commit(b, wait_s=5)
    await cluster.restart_all()
    await asyncio.gather(a.finish(0, wait_s=5), b.finish(0, wait_s=5))
    assert ranks(await commit(a, wait_s=5)) == [0]
    responses = await asyncio.gather(commit(a, first.partitions, wait_s=5), commit(b, second.partitions, wait_s=5))
    assert all(response.committed for response in responses)


async def test_step_is_not_committed_while_a_server_lacks_a_partition(cluster: Harness) -> None:
    a, b = await finished_team(cluster)
    first, second = await commit(a, wait_s=5), await commit(b, wait_s=5)
    cluster.shards["s0"].fail = fail_times("ConfirmPartitions", 1, IncompleteStepError("rank 1 is not staged"))
    await commit(a, first.partitions)
    with pytest.raises(IncompleteStepError, match=r"'s0'.*rank 1 is not staged"):
        await commit(b, second.partitions, wait_s=5)
    assert not any(shard.runs["r"].updates for shard in cluster.shards.values())
    assert (await commit(b, second.partitions, wait_s=5)).committed


async def test_partitions_are_assigned_only_after_the_proposals_agree(cluster: Harness) -> None:
    a, b = await finished_team(cluster)
    await commit(a, wait_s=5)
    with pytest.raises(HyperparameterMismatchError, match=r"lr of parameter group 0 is 0.1 .* but 0.2"):
        await commit(b, optimizer=on_trainers(0.2), wait_s=5)


async def finished_grid(cluster: Harness) -> list[Trainer]:
    """Returns the trainers of a grid of 2 x 2 x 1 in the order of their ranks. All items are finished."""
    trainers = sorted(await grid(cluster), key=lambda trainer: trainer.ranks)
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    return trainers


async def propose(trainers: Sequence[Trainer]) -> list[coordinator_pb2.CommitStepResponse]:
    """Returns the partitions that the coordinator assigns to trainers, after all of them have proposed."""
    await asyncio.gather(*(commit(trainer) for trainer in trainers))
    return [await commit(trainer, wait_s=5) for trainer in trainers]


async def commit_all(cluster: Harness, trainers: Sequence[Trainer], answers: Sequence[Any]) -> None:
    pairs = zip(trainers, answers, strict=True)
    ended = await asyncio.gather(*(commit(trainer, answer.partitions, wait_s=5) for trainer, answer in pairs))
    assert [response.committed for response in ended] == [True] * len(trainers)
    await cluster.settle()
    for shard in cluster.shards.values():
        assert shard.calls["ConfirmPartitions"] == 1
        assert [update.context.step for update in shard.runs["r"].updates] == [0]


async def test_each_rank_of_a_grid_updates_partitions(cluster: Harness) -> None:
    trainers = await finished_grid(cluster)
    answers = await propose(trainers)
    assert [ranks(answer) for answer in answers] == [[0], [1], [2], [3]]
    for trainer, answer in zip(trainers, answers, strict=True):
        assert answer.partitions[0].epoch == trainer.items[answer.partitions[0].global_rank].epoch
    for trainer, answer in zip(trainers[:3], answers, strict=False):
        assert not (await commit(trainer, answer.partitions)).committed
    waiting = await commit(trainers[0], answers[0].partitions)
    assert list(waiting.waiting_for) == [
        f"optimizer partitions of rank 3: trainer {trainers[3].name!r} is updating them"
    ]
    await commit_all(cluster, trainers, answers)


async def test_partitions_of_a_replica_that_lost_a_trainer_go_to_trainers_of_the_same_coordinates(
    cluster: Harness,
) -> None:
    a, b, c, d = await finished_grid(cluster)
    own = await propose([a, b, c, d])
    await commit(c, own[2].partitions)
    await d.leave()
    await cluster.settle()
    # The replica's epoch is fenced. What the survivor staged before the loss stays staged.
    late = await commit(a, own[0].partitions)
    assert list(late.waiting_for) == [
        f"optimizer partitions of rank 1: trainer {b.name!r} is updating them",
        f"optimizer partitions of rank 3: trainer {d.name!r} is gone",
    ]
    assert not ranks(await commit(c, own[2].partitions)), "rank 3 has another tp rank"
    # The lost trainer is back, but the step does not wait until it has built its model.
    await cluster.try_join(d.name, config=config(World(dp=2, tp=2), min_trainers=4))
    taken = await commit(b, own[1].partitions, wait_s=5)
    assert ranks(taken) == [3]
    assert taken.partitions[0].epoch > own[3].partitions[0].epoch
    for shard in cluster.shards.values():
        assert shard.runs["r"].epochs[1] > own[3].partitions[0].epoch
    own[1].partitions.extend(taken.partitions)
    await commit_all(cluster, [a, b, c], own[:3])


async def test_survivor_that_leaves_ends_no_lease_of_those_who_update_partitions_of_its_replica(
    cluster: Harness,
) -> None:
    a, b, c, d = await finished_grid(cluster)
    own = await propose([a, b, c, d])
    await d.leave()
    await cluster.settle()
    taken = await commit(b, own[1].partitions, wait_s=5)
    assert ranks(taken) == [3]
    await c.leave()
    await cluster.settle()
    for shard in cluster.shards.values():
        assert shard.runs["r"].epochs[1] < taken.partitions[0].epoch, "the servers would reject what b stages"
    rest = await commit(a, own[0].partitions, wait_s=5)
    assert ranks(rest) == [2]
    own[0].partitions.extend(rest.partitions)
    own[1].partitions.extend(taken.partitions)
    await commit_all(cluster, [a, b], own[:2])


async def test_survivor_of_a_replica_updates_its_partitions_under_a_new_lease(cluster: Harness) -> None:
    a, b, c, d = await finished_grid(cluster)
    own = await propose([a, b, c, d])
    await d.leave()
    await cluster.settle()
    again = await commit(c, own[2].partitions, wait_s=5)
    assert ranks(again) == [2], "its report has an epoch that the servers reject"
    assert again.partitions[0].epoch > own[2].partitions[0].epoch
    taken = await commit(b, own[1].partitions, wait_s=5)
    assert ranks(taken) == [3]
    own[1].partitions.extend(taken.partitions)
    # Both leases are valid: one does not end the other.
    assert not ranks(await commit(c, again.partitions))
    await commit_all(cluster, [a, b, c], [own[0], own[1], again])


@pytest.mark.parametrize("name", ["b", "spare"])
async def test_trainer_in_the_place_of_a_lost_one_updates_its_partitions(cluster: Harness, name: str) -> None:
    trainers = sorted(await grid(cluster, World(dp=1, tp=2)), key=lambda trainer: trainer.ranks)
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    a, b = trainers
    own = await propose([a, b])
    await commit(a, own[0].partitions)
    await b.leave()
    await cluster.settle()
    assert step_of(cluster).items[0].state is WorkState.ORPHANED
    assert not ranks(await commit(a, own[0].partitions)), "nobody else has tp rank 1"
    settings = config(World(dp=1, tp=2), min_trainers=2)
    other = await cluster.join(name, config=settings, wait_s=5)
    answer = await commit(other, wait_s=5)
    assert ranks(answer) == [1]
    await commit_all(cluster, [a, other], [own[0], answer])
