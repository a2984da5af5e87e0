"""Joining, heartbeats, lease expiry and return of trainers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator import placement, state
from shardwell_server.coordinator.ranks import members
from shardwell_server.coordinator.ranks.members import MAX_GONE_MEMBERS
from shardwell_wire.errors import (
    CapacityError,
    DuplicateError,
    InvalidRequestError,
    NotFoundError,
    RunMismatchError,
    ShardwellError,
    StaleEpochError,
    WorldError,
)
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import Harness, config, harness, unit


async def test_run_starts_when_enough_trainers_have_joined(cluster: Harness) -> None:
    first = await cluster.try_join("a", incarnation="1")
    assert not first.started
    assert first.trainer == "a"
    assert first.waiting_for[0] == "1 of 2 trainers have joined: 1 more must join"
    joined = await cluster.try_join("b")
    assert joined.started
    again = await cluster.try_join("a", incarnation="1")
    assert again.epoch == first.epoch
    assert [rank_assignment.coordinates.global_rank for rank_assignment in again.rank_assignments] == [0]
    assert [rank_assignment.coordinates.global_rank for rank_assignment in joined.rank_assignments] == [1]
    assert [(group.axis, list(group.global_ranks)) for group in again.rank_assignments[0].groups] == [
        (common_pb2.AXIS_DATA, [0, 1]),
        (common_pb2.AXIS_TENSOR, [0]),
        (common_pb2.AXIS_PIPELINE, [0]),
    ]
    assert again.work.step == again.committed_step == 0
    assert [(item.global_rank, item.attempt) for item in again.work.items] == [(0, 0)]
    assert not again.HasField("state")
    assert again.config == config(World(dp=2), min_trainers=2)


async def test_waiting_join_returns_when_the_last_trainer_joins(cluster: Harness) -> None:
    waiting = asyncio.create_task(cluster.try_join("a", wait_s=5))
    await asyncio.sleep(0)
    assert (await cluster.try_join("b")).started
    assert (await waiting).started


async def test_rank_assignments_are_independent_of_join_order(cluster: Harness) -> None:
    for run, order in (("forward", "abc"), ("backward", "cba")):
        for name in order:
            await cluster.try_join(name, run=run, incarnation=name, config=config(World(dp=3)))
        rank_assignments = (await cluster.call("DescribeWorld", run=run)).rank_assignments
        assert [rank_assignment.trainer for rank_assignment in rank_assignments] == ["a", "b", "c"]


async def test_few_trainers_play_several_ranks_and_a_late_trainer_takes_its_share(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b", dp=5)
    assert (a.ranks, b.ranks) == ([0, 1, 2], [3, 4])
    late = await cluster.join("c", config=config(World(dp=5), min_trainers=2))
    assert late.ranks == [2]
    assert not late.items, "items of the step in flight stay with their trainers"
    former_epoch = a.items[2].epoch
    for trainer in (a, b, late):
        await trainer.finish(0, parts={})
    for trainer in (a, late):
        assert (await trainer.commit(0, wait_s=5, optimizer=common_pb2.OptimizerStep(algorithm="sgd"))).committed
    assert sorted(a.items) == [0, 1]
    assert sorted(late.items) == [2]
    assert late.items[2].epoch > former_epoch, "a reassigned lease gets a new epoch"


async def test_trainers_beyond_the_world_are_spares(cluster: Harness) -> None:
    await cluster.team("a", "b")
    spare = await cluster.join("c")
    assert spare.ranks == []
    assert not spare.items


async def test_trainers_of_one_host_get_a_tensor_group_of_the_grid(cluster: Harness) -> None:
    world, hosts = World(dp=2, tp=2, pp=2), ("m", "n") * 4
    for number, host in enumerate(hosts):
        joined = await cluster.try_join(f"t{number}", config=config(world, num_layers=4), host=host)
    assert joined.started
    assert (
        joined.rank_assignments[0].HasField("previous_stage"),
        joined.rank_assignments[0].HasField("next_stage"),
    ) == (True, False)
    rank_assignments = (await cluster.call("DescribeWorld", run="r")).rank_assignments
    for rank_assignment in rank_assignments:
        (tensor_group,) = (
            group for group in rank_assignment.rank_assignment.groups if group.axis == common_pb2.AXIS_TENSOR
        )
        assert len({rank_assignments[rank].host for rank in tensor_group.global_ranks}) == 1
    last = await cluster.call("DescribeRun", run="r")
    assert len(last.work) == 8


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"config": coordinator_pb2.RunConfig()}, WorldError, r"World\(dp=0\)"),
        ({"config": config(World(dp=2), min_trainers=3)}, WorldError, "min_trainers=3: expected 1 to 2"),
        (
            {"config": config(World(dp=2, tp=2), min_trainers=3)},
            WorldError,
            "needs a multiple of 2 trainers",
        ),
        ({"config": config(World(dp=1 << 16), min_trainers=1)}, WorldError, "raise min_trainers"),
        ({"config": config(World(dp=2), num_layers=(1 << 32) - 1)}, WorldError, "expected at most 65536"),
        ({"world_size": 3}, WorldError, "the launcher started 3 processes"),
        ({"config": config(World(pp=3), num_layers=4)}, WorldError, "4 layers cannot be split"),
        ({"global_rank": 2}, WorldError, "rank 2 is not in"),
        ({"run": ""}, InvalidRequestError, "run is ''"),
        ({"run": "r" * 201}, InvalidRequestError, "run is"),
        ({"trainer": "a\n"}, InvalidRequestError, "trainer is"),
        ({"incarnation": "\0"}, InvalidRequestError, "incarnation is"),
        ({"wait_s": float("nan")}, InvalidRequestError, "wait_s is nan"),
        ({"wait_s": -1.0}, InvalidRequestError, "wait_s is -1"),
    ],
)
async def test_invalid_join_is_rejected_without_a_trace(
    cluster: Harness, fields: dict[str, Any], error: type[ShardwellError], message: str
) -> None:
    with pytest.raises(error, match=message):
        await cluster.try_join(**({"trainer": "a"} | fields))
    assert not cluster.state.runs


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (config(World(dp=3)), r"world=World\(dp=2, tp=1, pp=1\), but this trainer asks for world=World\(dp=3"),
        (config(World(dp=2), seed=1), "has seed=0, but this trainer asks for seed=1"),
        (config(World(dp=2), min_trainers=1), "has min_trainers=2, but this trainer asks for min_trainers=1"),
        (config(World(dp=2), num_layers=6), "has num_layers=4, but this trainer asks for num_layers=6"),
    ],
)
async def test_join_with_another_config_is_rejected_with_both_values(
    cluster: Harness, other: coordinator_pb2.RunConfig, message: str
) -> None:
    await cluster.try_join("a", config=config(World(dp=2), num_layers=4))
    with pytest.raises(RunMismatchError, match=message):
        await cluster.try_join("b", config=other)
    assert (await cluster.try_join("b", config=config(World(dp=2)))).started, (
        "an unknown number of layers matches any number"
    )


async def test_name_of_a_live_trainer_is_rejected(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    with pytest.raises(DuplicateError, match="has a live trainer 'a' on host h"):
        await cluster.try_join("a")
    assert (await a.heartbeat()).committed_step == 0


@pytest.mark.harness(lease_s=1.0)
async def test_second_process_is_rejected_when_the_first_sends_a_request(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    second = asyncio.create_task(cluster.try_join("a", wait_s=5))
    await asyncio.sleep(0)
    cluster.clock.now += 0.1
    await a.heartbeat()
    with pytest.raises(DuplicateError):
        await second


@pytest.mark.harness(lease_s=1.0)
async def test_restarted_trainer_gets_its_rank_when_its_former_lease_expires(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    pending = await cluster.try_join("b", wait_s=0.01)
    assert not pending.started
    assert "another process of trainer 'b' may be alive" in pending.waiting_for[0]
    again = asyncio.create_task(cluster.join("b", wait_s=5))
    await asyncio.sleep(0)
    await cluster.pass_time(1.1, a)
    reborn = await again
    assert reborn.ranks == [1]
    assert reborn.items[1].epoch > reborn.epoch > b.items[1].epoch
    fences = [shard.runs["r"].epochs[1] for shard in cluster.shards.values() if "r" in shard.runs]
    assert all(b.items[1].epoch < fence <= reborn.items[1].epoch for fence in fences)
    with pytest.raises(StaleEpochError, match="join again"):
        await b.heartbeat()


@pytest.mark.parametrize("rpc", ["Heartbeat", "Leave", "DeclareUnit", "FinishWork", "PrepareGradients", "CommitStep"])
async def test_request_of_a_stale_membership_is_rejected(cluster: Harness, rpc: str) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await cluster.pass_time(11, a)
    reborn = await cluster.join("b", wait_s=1)
    before = await cluster.call("DescribeRun", run="r")
    calls = {
        "Heartbeat": b.heartbeat,
        "Leave": b.leave,
        "DeclareUnit": lambda: b.declare(common_pb2.UnitSpec(name="v")),
        "FinishWork": lambda: b.finish(0),
        "PrepareGradients": lambda: b.prepare(0),
        "CommitStep": lambda: b.commit(0),
    }
    with pytest.raises(StaleEpochError):
        await calls[rpc]()
    assert await cluster.call("DescribeRun", run="r") == before
    await reborn.heartbeat()


async def test_lease_expires_only_without_requests(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    for _ in range(5):
        await cluster.pass_time(9, a, b)
    waiting = asyncio.create_task(b.finish(0, parts={}, wait_s=5))
    await asyncio.sleep(0)
    await cluster.pass_time(100, a)
    assert (await cluster.call("DescribeRun", run="r")).trainers[1].live, "a poll in progress is a sign of life"
    await a.leave()
    response = await waiting
    assert response.work.items[0].global_rank == 0
    await cluster.pass_time(11)
    assert (
        "lease_expired",
        "trainer 'b' on host h sent no request for 11.0 s; vacant ranks: 1",
    ) in cluster.events()


@pytest.mark.harness(lease_s=0.2)
async def test_suspended_coordinator_expires_no_lease(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    cluster.clock.now += 60
    await cluster.until(
        lambda: cluster.state.runs["r"].members.by_name["a"].last_seen_s >= cluster.clock.now,
        "leases are renewed",
    )
    await a.heartbeat()
    assert not [kind for kind, _ in cluster.events() if kind in ("lease_expired", "server_lost")]


async def test_leave_releases_ranks_at_once_and_can_be_repeated(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    await b.leave()
    await b.leave()
    await cluster.settle()
    response = await a.finish(0, parts={})
    assert [item.global_rank for item in response.work.items] == [1]
    await cluster.call("Leave", run="r", run_id=a.run_id, trainer="never there", epoch=1)


async def test_trainer_that_leaves_before_the_start_is_forgotten(cluster: Harness) -> None:
    joined = await cluster.join("a", global_rank=1)
    with pytest.raises(DuplicateError, match="another trainer of run 'r' already requested rank 1"):
        await cluster.try_join("b", global_rank=1)
    await joined.leave()
    assert (await cluster.try_join("b", global_rank=1)).trainer == "b"
    assert len((await cluster.call("DescribeRun", run="r")).trainers) == 1


async def test_run_that_never_started_accepts_another_config_after_all_left(cluster: Harness) -> None:
    mistaken = await cluster.join("a", config=config(World(dp=4)))
    await mistaken.leave()
    await cluster.team("a", "b")
    await cluster.restart()
    assert cluster.state.runs["r"].settings.world == World(dp=2)


async def test_new_trainers_get_one_rank_each_after_all_died(cluster: Harness) -> None:
    await cluster.team("a", "b", "c")
    await cluster.pass_time(11)
    await cluster.settle()
    reborn = [await cluster.join("", wait_s=1, config=config(World(dp=3))) for _ in range(4)]
    assert [trainer.ranks for trainer in reborn] == [[0], [1], [2], []]
    assert [sorted(trainer.items) for trainer in reborn] == [[0], [1], [2], []]


async def test_number_of_kept_gone_trainers_is_limited(cluster: Harness) -> None:
    await cluster.team("a", "b")
    for _ in range(MAX_GONE_MEMBERS + 10):
        await (await cluster.join("")).leave()
    names = [trainer.trainer for trainer in (await cluster.call("DescribeRun", run="r")).trainers]
    assert len(names) <= MAX_GONE_MEMBERS + 3
    assert {"a", "b"} <= set(names)


async def test_unnamed_trainer_gets_a_name_and_its_retry_gets_the_same_name(cluster: Harness) -> None:
    names = [(await cluster.try_join("", incarnation=each)).trainer for each in ("x", "y", "x")]
    assert names == ["trainer-0", "trainer-1", "trainer-0"]


async def test_unknown_runs_and_trainers_are_not_found(cluster: Harness) -> None:
    with pytest.raises(NotFoundError, match="run 'other' does not exist; existing runs: none"):
        await cluster.call("DescribeRun", run="other")
    a, _ = await cluster.team("a", "b")
    with pytest.raises(NotFoundError, match="has no trainer 'c': join first"):
        await cluster.call("Heartbeat", run="r", run_id=a.run_id, trainer="c", epoch=1)


async def test_addresses_are_exchanged_and_survive_a_restart(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    ask = {"context": b.context(0), "trainer": "b", "name": "rendezvous"}
    assert not (await cluster.call("ExchangeAddress", **ask)).HasField("address")
    waiting = asyncio.create_task(cluster.call("ExchangeAddress", wait_s=5, **ask))
    await asyncio.sleep(0)
    tell = {"context": a.context(0), "trainer": "a", "name": "rendezvous", "address": "h:1"}
    assert (await cluster.call("ExchangeAddress", **tell)).address == "h:1"
    assert (await waiting).address == "h:1"
    await cluster.restart()
    assert (await cluster.call("ExchangeAddress", **ask)).address == "h:1"


async def test_request_id_of_another_request_is_rejected(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")

    async def ask(name: str, wait_s: float) -> None:
        context = a.context(0, request_id="id")
        await cluster.call("ExchangeAddress", context=context, trainer="a", name=name, wait_s=wait_s)

    await ask("x", 0.0)
    await ask("x", 0.01)
    with pytest.raises(DuplicateError, match="request id 'id' was used for another request"):
        await ask("y", 0.0)
    with pytest.raises(InvalidRequestError, match="at most 128"):
        await cluster.call("ExchangeAddress", context=a.context(0, request_id="i" * 129), trainer="a", name="x")


async def test_late_trainer_delays_nobody_until_it_asks_for_work(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    for trainer in (a, b):
        await trainer.finish(0)
    await a.commit(0, wait_s=5)
    await b.leave()
    await cluster.settle()
    b = await cluster.join("b", config=config(World(dp=2)))
    assert b.ranks == [1]
    assert not b.items, "b builds its model"
    for step in (1, 2):
        await a.finish(step)
        assert (await a.finish(step, wait_s=5)).all_finished, "a computes the work of b"
        assert (await a.commit(step, wait_s=5)).committed
        assert sorted(a.items) == [0, 1]
    await b.finish(3, [])
    await a.finish(3)
    await a.commit(3, wait_s=5)
    assert (await b.commit(3)).committed
    assert (sorted(a.items), sorted(b.items)) == ([0], [1])


async def test_late_trainer_gets_its_work_at_once_if_nobody_else_computes_it(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await a.finish(0, accept_work=False)  # a plain loop
    await b.leave()
    await cluster.settle()
    b = await cluster.join("b", config=config(World(dp=2)))
    assert sorted(b.items) == [1]


async def test_runs_trainers_and_units_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_RUNS", 2)
    monkeypatch.setattr(members, "MAX_SPARES", 1)
    monkeypatch.setattr(placement, "MAX_UNITS", 1)
    async with harness(tmp_path) as cluster:
        first, _ = [await cluster.join(name) for name in "ab"]
        await cluster.join("spare")
        with pytest.raises(CapacityError, match="run 'r' has 3 live trainers, expected at most 3: 2 with a"):
            await cluster.try_join("one more")
        await cluster.try_join("a", run="second")
        with pytest.raises(CapacityError, match="run 'third' cannot be created: 2 runs exist, expected at most 2"):
            await cluster.try_join("a", run="third")
        await first.declare(unit("u", (3,)))
        with pytest.raises(CapacityError, match="run 'r' has 1 units, expected at most 1"):
            await first.declare(unit("v", (3,)))
        await first.declare(unit("u", (3,)))
