"""A run that is deleted and created again is a new run, even if its name and epochs are equal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shardwell_server.coordinator.run import Run
from shardwell_wire.errors import AccessError, InvalidRequestError, RunDeletedError, StepStateError
from tests.support.coordinator import Harness, Trainer, optimizer, unit
from tests.support.fake_shards import fail_times


async def replaced(cluster: Harness) -> tuple[Trainer, Trainer]:
    """Returns the trainers of a deleted run and of the next run of its name, with equal epochs."""
    (old,) = await cluster.team("a")
    await cluster.publish_unit([old])
    await cluster.call("DeleteRun", run="r", force=True)
    (new,) = await cluster.team("a")
    await cluster.publish_unit([new])
    old.epoch, old.items = new.epoch, dict(new.items)
    return old, new


REQUESTS: dict[str, Callable[[Trainer], Awaitable[Any]]] = {
    "Heartbeat": lambda old: old.heartbeat(),
    "Leave": lambda old: old.leave(),
    "DeclareUnit": lambda old: old.declare(unit("u", (64, 64))),
    "PublishInitialUnit": lambda old: old.publish("u", 1),
    "FinishWork": lambda old: old.finish(0),
    "ResetWork": lambda old: old.reset(0, 0),
    "PrepareGradients": lambda old: old.prepare(0),
    "CommitStep": lambda old: old.commit(0, optimizer=optimizer(lr=9.0)),
    "ExchangeAddress": lambda old: old.rpcs.call(
        "ExchangeAddress", context=old.context(0), trainer=old.name, name="x", address="h:1"
    ),
}


@pytest.mark.parametrize("rpc_name", REQUESTS)
@pytest.mark.harness(num_shards=1)
async def test_trainer_of_a_deleted_run_cannot_change_the_next_run_of_its_name(cluster: Harness, rpc_name: str) -> None:
    old, new = await replaced(cluster)
    expected = f"run 'r' was deleted .its id was {old.run_id}.*with id {new.run_id}, exists"
    with pytest.raises(RunDeletedError, match=expected):
        await REQUESTS[rpc_name](old)
    await new.heartbeat()
    assert (await new.finish(0, wait_s=1)).all_finished
    assert (await new.commit(0, wait_s=5)).committed
    await cluster.settle()
    (update,) = cluster.shards["s0"].runs["r"].updates
    assert update.optimizer == optimizer()
    assert update.context.run_id == new.run_id


@pytest.mark.harness(num_shards=1)
async def test_request_without_run_id_is_rejected(cluster: Harness) -> None:
    (trainer,) = await cluster.team("a")
    trainer.run_id = ""
    for rpc_name, ask in REQUESTS.items():
        with pytest.raises(InvalidRequestError, match="run_id is empty: send the id of run 'r'"):
            await ask(trainer)
        assert rpc_name


@pytest.mark.harness(num_shards=1)
async def test_epochs_rise_across_deletions_and_restarts(cluster: Harness) -> None:
    highest, ids = 0, set()
    for _ in range(3):
        (trainer,) = await cluster.team("a")
        assert trainer.epoch > highest
        highest = cluster.state.runs["r"].changes.last_epoch
        ids.add(trainer.run_id)
        await cluster.call("DeleteRun", run="r", force=True)
        await cluster.restart()
    assert len(ids) == 3
    assert all(len(each) == 16 for each in ids)


@pytest.mark.harness(num_shards=1)
async def test_run_id_survives_a_restart_and_is_reported(cluster: Harness) -> None:
    (trainer,) = await cluster.team("a")
    await cluster.publish_unit([trainer])
    await cluster.restart()
    await trainer.heartbeat()
    (listed,) = (await cluster.call("ListRuns")).runs
    described = (await cluster.call("DescribeRun", run="r")).summary
    weights = await cluster.call("DescribeWeights", run="r")
    assert {listed.run_id, described.run_id, weights.run_id} == {trainer.run_id}


@pytest.mark.harness(num_shards=1)
async def test_repeated_deletion_spares_the_next_run_of_the_name(cluster: Harness) -> None:
    (old,) = await cluster.team("a")
    deletion = {"run": "r", "run_id": old.run_id, "force": True, "request_id": "x"}
    await cluster.call("DeleteRun", **deletion)
    (new,) = await cluster.team("a")
    await cluster.call("DeleteRun", **deletion)
    await new.heartbeat()
    with pytest.raises(RunDeletedError):
        await cluster.call("DeleteRun", **(deletion | {"request_id": "y"}))


@pytest.mark.harness(num_shards=1)
async def test_heartbeat_reports_a_missed_deletion_to_the_server(cluster: Harness) -> None:
    (old,) = await cluster.team("a")
    await cluster.publish_unit([old])
    cluster.shards["s0"].fail = fail_times("DropRun", 1, StepStateError("not now"))
    await cluster.call("DeleteRun", run="r", force=True)
    (new,) = await cluster.team("a")
    await cluster.publish_unit([new])
    assert {run.name for run in cluster.shards["s0"].runs_by_id.values()} == {"r"}
    assert list(cluster.shards["s0"].runs_by_id) == [old.run_id, new.run_id], "the server keeps the runs apart by id"
    await cluster.restart()
    epoch = await cluster.register("s0")
    answer = await cluster.call(
        "HeartbeatServer", server_id="s0", epoch=epoch, run_ids=list(cluster.shards["s0"].runs_by_id)
    )
    assert answer.deleted_run_ids == [old.run_id]


@pytest.mark.harness(num_shards=1)
async def test_deleted_run_is_not_stored_by_a_concurrent_save(cluster: Harness) -> None:
    await cluster.team("a")
    run: Run = cluster.state.runs["r"]
    run.changes.touch()
    outcomes = await asyncio.gather(
        cluster.state.save(run),
        cluster.call("DeleteRun", run="r", force=True),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], RunDeletedError)
    await cluster.restart()
    assert not (await cluster.call("ListRuns")).runs


@pytest.mark.harness(num_shards=1)
async def test_run_gets_the_id_of_its_first_trainers_token_once(cluster: Harness) -> None:
    (trainer,) = await cluster.team("a")
    settings, trainers = cluster.state.runs["r"].settings, cluster.coordinator.trainers
    with pytest.raises(AccessError, match=f"with id ffff, but this run has id {trainer.run_id}"):
        trainers.find_or_create_run("r", settings, "ffff")
    assert trainers.find_or_create_run("r", settings, trainer.run_id) is cluster.state.runs["r"]
    await cluster.call("DeleteRun", run="r", force=True)
    for _ in range(2):
        with pytest.raises(RunDeletedError, match="the token is for this run only"):
            cluster.coordinator.trainers.find_or_create_run("r", settings, trainer.run_id)
        assert not cluster.state.runs
        await cluster.restart()
    run = cluster.coordinator.trainers.find_or_create_run("r", settings, "ffff")
    assert run.identity.run_id == "ffff"
