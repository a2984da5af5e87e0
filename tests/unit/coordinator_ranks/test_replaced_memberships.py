"""Trainers that join again while they are members: the new membership replaces the former one, in the same place."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_wire.errors import DuplicateError, StaleEpochError
from shardwell_wire.model.topology import World
from tests.support.coordinator import Harness, Trainer, config

WORLD = World(dp=1, pp=2)
CONFIG = config(WORLD, min_trainers=2)


async def team(cluster: Harness) -> tuple[Trainer, Trainer]:
    """Returns the two trainers of a replica."""
    waiting = asyncio.create_task(cluster.join("a", incarnation="a1", config=CONFIG, wait_s=5))
    b = await cluster.join("b", incarnation="b1", config=CONFIG, wait_s=5)
    return await waiting, b


async def replace(cluster: Harness, trainer: Trainer, incarnation: str) -> Trainer:
    return await cluster.join(
        trainer.name,
        incarnation=incarnation,
        config=CONFIG,
        wait_s=5,
        run_id=trainer.run_id,
        replaced_epoch=trainer.epoch,
    )


async def test_trainer_keeps_its_place_although_a_spare_waits(cluster: Harness) -> None:
    a, _ = await team(cluster)
    spare = asyncio.create_task(cluster.try_join("spare", config=CONFIG, wait_s=5))
    await cluster.until(lambda: len(cluster.state.runs["r"].members.live) == 3, "the spare")
    again = await replace(cluster, a, "a2")
    assert (again.ranks, again.epoch > a.epoch) == (a.ranks, True)
    with pytest.raises(StaleEpochError):
        await a.heartbeat()
    await again.leave()
    assert [at.coordinates.global_rank for at in (await spare).rank_assignments] == a.ranks, "a place is free"


async def test_replica_and_its_item_start_anew_and_its_other_trainers_learn_the_attempt_by_a_repeated_join(
    cluster: Harness,
) -> None:
    a, b = await team(cluster)
    again = await replace(cluster, a, "a2")
    ((before,), (after,)) = a.items.values(), again.items.values()
    assert (before.attempt, after.attempt) == (0, 1) and after.epoch > before.epoch
    assert again.joined.replica_epoch > a.joined.replica_epoch
    repeated = await cluster.join("b", incarnation="b1", config=CONFIG)
    (item,) = repeated.items.values()
    assert repeated.epoch == b.epoch, "the same membership"
    assert (item.epoch, item.attempt) == (after.epoch, after.attempt)
    assert repeated.joined.replica_epoch == again.joined.replica_epoch


async def test_other_process_of_the_name_does_not_replace_a_live_trainer(cluster: Harness) -> None:
    a, _ = await team(cluster)
    with pytest.raises(DuplicateError, match="live trainer 'a'"):
        await cluster.join("a", config=CONFIG, replaced_epoch=a.epoch + 1000)
    await a.heartbeat()
