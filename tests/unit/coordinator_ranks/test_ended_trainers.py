"""Trainers of a replica that end: with an error of their own, which the others learn, or because the run has ended."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, config
from tests.unit.coordinator_ranks.test_connections import keep
from tests.unit.coordinator_steps.test_grid import WORLD, grid

ERROR = "trainer 'b' (logical rank 1) has left with ValueError: bad batch"


async def replicas(cluster: Harness) -> list[coordinator_pb2.ReplicaSummary]:
    return list((await cluster.call("DescribeWorld", run="r")).replicas)


async def test_others_learn_with_which_error_a_trainer_has_left(cluster: Harness) -> None:
    a, b, c, _ = await grid(cluster)
    streams = {trainer.name: await keep(cluster, trainer) for trainer in (a, c)}
    await b.leave(error="ValueError: bad\tbatch" + 1000 * "!")
    await cluster.until(lambda: len(streams["a"].received) == 2, "the new epoch")
    assert streams["a"].received[0].replica_error == ""
    assert streams["a"].received[1].replica_error.startswith(ERROR + "!!!")
    assert len(streams["a"].received[1].replica_error) < 400
    assert [list(replica.errors) for replica in await replicas(cluster)] == [
        [streams["a"].received[1].replica_error],
        [],
    ]
    assert any(kind == "trainer_left" and message.startswith(ERROR) for kind, message in cluster.events())
    assert len(streams["c"].received) == 1, "its replica is unchanged"
    for stream in streams.values():
        await stream.break_()
    waiting = await cluster.try_join("a", config=config(WORLD), replaced_epoch=a.epoch)
    assert not waiting.started and f"it waits for {ERROR}!" in waiting.waiting_for[0]


async def test_trainer_that_leaves_without_an_error_is_not_to_blame(cluster: Harness) -> None:
    a, b, *_ = await grid(cluster)
    stream = await keep(cluster, a)
    await b.leave()
    await cluster.until(lambda: len(stream.received) == 2, "the new epoch")
    assert stream.received[1].replica_error == ""
    assert [list(replica.errors) for replica in await replicas(cluster)] == [[], []]
    await stream.break_()


@pytest.mark.parametrize("has_spare", [True, False])
async def test_error_is_told_until_the_place_is_taken(cluster: Harness, has_spare: bool) -> None:
    a, b, *_ = await grid(cluster)
    stream = await keep(cluster, a)
    if has_spare:
        await cluster.try_join("spare", config=config(WORLD))
    await b.leave(error="ValueError: bad batch")
    if not has_spare:
        await cluster.until(lambda: len(stream.received) == 2, "the new epoch")
        await cluster.try_join("b", config=config(WORLD))
    await cluster.until(lambda: not (stream.received[-1].replica_epoch <= a.joined.replica_epoch), "a new epoch")
    assert stream.received[1].replica_error == ERROR, "also if a spare has taken the place at once"
    assert [list(replica.errors) for replica in await replicas(cluster)] == [[], []]
    await stream.break_()


async def test_trainer_joins_an_ended_run_without_the_others(cluster: Harness) -> None:
    a, b = await grid(cluster, World(tp=2))
    request = {"config": config(World(tp=2))}
    await b.leave()
    await a.heartbeat(ended_step=1)
    again = await cluster.join("a", replaced_epoch=a.epoch, **request)
    assert not again.joined.started, "the run is at step 0"
    assert not (await cluster.call("DescribeWorld", run="r")).ended
    await again.heartbeat(ended_step=0)
    assert (await cluster.call("DescribeWorld", run="r")).ended
    again = await cluster.join("a", replaced_epoch=again.epoch, **request)
    assert again.joined.started and list(again.ranks) == [0]
    assert not again.items, "the replica is incomplete"


async def test_run_that_commits_more_has_not_ended(cluster: Harness) -> None:
    trainers = await grid(cluster, World(tp=2))
    await trainers[0].heartbeat(ended_step=0)
    assert (await cluster.call("DescribeWorld", run="r")).ended
    await asyncio.gather(*(each.finish(0, wait_s=5, parts={place: 1}) for place, each in enumerate(trainers)))
    await asyncio.gather(*(each.commit(0, wait_s=5) for each in trainers))
    assert not (await cluster.call("DescribeWorld", run="r")).ended
    await trainers[1].heartbeat(ended_step=1)
    assert (await cluster.call("DescribeWorld", run="r")).ended


def device(number: int, *, shared: bool = False) -> coordinator_pb2.TrainerDevice:
    return coordinator_pb2.TrainerDevice(name=f"cuda:{number}", id=f"GPU-{number}", shared=shared)


async def test_two_trainers_do_not_use_one_device(cluster: Harness) -> None:
    a, b, c, d = await grid(cluster)
    assert (await a.heartbeat(device=device(0))).device_user == ""
    assert (await a.heartbeat(device=device(0))).device_user == ""
    for shared in (False, True):
        assert (await b.heartbeat(device=device(0, shared=shared))).device_user == "a"
    assert (await b.heartbeat(device=device(1))).device_user == ""
    assert (await a.heartbeat()).device_user == "", "it uses none any more"
    assert (await c.heartbeat(device=device(0, shared=True))).device_user == ""
    assert (await d.heartbeat(device=device(0, shared=True))).device_user == "", "both know it"
    assert (await a.heartbeat(device=device(0))).device_user == "c"
    described = await cluster.call("DescribeWorld", run="r")
    assert [each.device.name for each in described.rank_assignments] == ["", "cuda:1", "cuda:0", "cuda:0"]
    await b.leave()
    assert (await a.heartbeat(device=device(1))).device_user == "", "a trainer that is gone uses no device"


@pytest.mark.parametrize("fields", [{"name": ""}, {"id": ""}, {"id": 400 * "x"}, {"name": "a\nb"}])
async def test_device_is_checked(cluster: Harness, fields: dict[str, str]) -> None:
    a, *_ = await grid(cluster)
    with pytest.raises(InvalidRequestError, match=r"device\.(name|id)=.*: expected 1 to 300 printable"):
        await a.heartbeat(device=coordinator_pb2.TrainerDevice(**{"name": "cuda:0", "id": "GPU-0", **fields}))
