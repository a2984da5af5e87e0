"""Restarts of the coordinator at any point of a step lose nothing that it acknowledged."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_server.coordinator.servers.cluster import Server
from shardwell_wire.connection.channel import RECONNECT_S
from shardwell_wire.errors import StaleEpochError, StepRestartedError, StepStateError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, unit
from tests.support.fake_shards import DirectCalls, fail_times


def assert_updated_once(cluster: Harness, steps: int) -> None:
    for shard in cluster.shards.values():
        assert [update.context.step for update in shard.runs["r"].updates] == list(range(steps))
        assert {unit.version for unit in shard.runs["r"].units.values()} == {steps}


@pytest.mark.parametrize("phase", ["joined", "one finished", "all finished", "prepared", "committed", "proposed"])
async def test_restart_in_any_phase_of_a_step_loses_nothing(cluster: Harness, phase: str) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    epochs = [at.items[rank].epoch for rank, at in enumerate((a, b))]
    phases = ["joined", "one finished", "all finished", "prepared", "proposed", "committed"]
    for current in phases[: phases.index(phase) + 1]:
        if current == "one finished":
            await a.finish(0)
        elif current == "all finished":
            assert (await b.finish(0, wait_s=1)).all_finished
        elif current == "prepared":
            await b.prepare(0)
        elif current == "proposed":
            await b.commit(0)
        elif current == "committed":
            assert (await a.commit(0, wait_s=5)).committed
    await cluster.restart()
    assert cluster.state.term == 2
    await asyncio.gather(a.heartbeat(), b.heartbeat())
    if phase != "committed":
        await asyncio.gather(a.finish(0), b.finish(0, wait_s=5))  # trainers repeat their reports
        await a.commit(0, wait_s=5)
    assert (await b.commit(0, wait_s=5)).committed
    await a.commit(0)
    assert [at.items[rank].epoch for rank, at in enumerate((a, b))] == epochs, "leases keep their epochs"
    await cluster.settle()
    assert_updated_once(cluster, 1)
    await asyncio.gather(a.finish(1), b.finish(1))
    assert (await a.commit(1, wait_s=5)).committed
    await cluster.settle()
    assert_updated_once(cluster, 2)


async def test_interrupted_update_is_repeated(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    cluster.shards["s1"].fail = fail_times("Update", 10**6, UnavailableError("away"))
    await asyncio.gather(a.finish(0), b.finish(0))
    assert (await a.commit(0, wait_s=5)).committed
    assert cluster.state.runs["r"].commits.pending_updates
    await cluster.until(lambda: cluster.shards["s0"].calls["Update"] == 1, "the update of s0")
    await cluster.restart()
    assert (await cluster.call("ExplainStall", run="r")).phase == "updating"
    cluster.shards["s1"].fail = lambda rpc_name, request: None
    await b.commit(0)
    await asyncio.gather(a.finish(1), b.finish(1))
    assert (await a.commit(1, wait_s=5)).committed
    await cluster.settle()
    assert_updated_once(cluster, 2)
    assert cluster.shards["s0"].calls["Update"] >= 3, "the update is repeated on servers that had applied it"


@pytest.mark.parametrize("alive", [True, False])
async def test_first_unit_after_a_restart_waits_until_all_servers_are_probed(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    (a,) = await cluster.team("a")
    probe, answered = DirectCalls.is_running, asyncio.Event()

    async def slow_probe(calls: DirectCalls, server: Server) -> bool:
        if server.server_id == "s1":
            await answered.wait()
        return await probe(calls, server)

    monkeypatch.setattr(DirectCalls, "is_running", slow_probe)
    await cluster.restart()
    cluster.shards["s1"].available = alive
    declaring = asyncio.create_task(a.declare(unit("u", (64, 64))))
    await cluster.until(lambda: len(cluster.state.cluster.staying) == 1, "the probe of s0")
    stall = await cluster.call("ExplainStall", run="r")
    assert any("has restarted, has probed the shard servers 's1'" in line for line in stall.waiting_for)
    assert not declaring.done()
    answered.set()
    await declaring
    assert set(cluster.state.runs["r"].units.servers) == ({"s0", "s1"} if alive else {"s0"})


async def test_trainer_that_is_silent_after_a_restart_is_lost(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await cluster.pass_time(9, a, b)
    await cluster.restart()
    await cluster.pass_time(9, a)
    assert (await b.heartbeat()).committed_step == 0, "a restart renews every lease"
    await cluster.pass_time(11, a)
    response = await a.finish(0, wait_s=5)
    assert response.work.items[0].global_rank == 1
    with pytest.raises(StaleEpochError):
        await b.finish(0)


@pytest.mark.harness(lease_s=1.0)
async def test_lease_does_not_expire_while_trainers_reconnect(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await cluster.restart()
    await cluster.pass_time(1.0 + 0.9 * RECONNECT_S)
    assert not (await a.finish(0)).HasField("work"), "the first trainer to reconnect gets no other work"
    assert (await b.finish(0, wait_s=5)).all_finished
    await cluster.pass_time(1.1, a)
    assert "lease_expired" in [kind for kind, _ in cluster.events()]


async def test_vacant_work_is_fenced_and_leased_after_a_restart(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    cluster.shards["s0"].fail = fail_times("Fence", 10**6, UnavailableError("away"))
    cluster.shards["s1"].fail = fail_times("Fence", 10**6, UnavailableError("away"))
    await b.leave()
    assert "being fenced" in (await cluster.call("ExplainStall", run="r")).waiting_for[1]
    await cluster.restart()
    assert not (await a.finish(0)).HasField("work")
    for shard in cluster.shards.values():
        shard.fail = lambda rpc_name, request: None
    response = await a.finish(0, wait_s=5)
    assert response.work.items[0].epoch > b.items[1].epoch
    await cluster.restart()
    assert (await a.finish(0, wait_s=5)).all_finished


async def test_attempts_survive_a_restart(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
    assert (await b.reset(0, 1)).attempt == 1
    await cluster.restart()
    assert not (await a.finish(0)).all_finished, "the rank was reset"
    assert (await b.reset(0, 1)).attempt == 2
    assert (await b.finish(0, wait_s=1)).all_finished
    assert (await a.commit(0, wait_s=5)).committed
    assert (await b.commit(0, wait_s=5)).next_work.items[0].attempt == 0


async def test_a_proposal_without_a_report_is_refused_after_a_restart(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
    await cluster.restart()
    for call in (a.commit(0, wait_s=5), a.prepare(0)):
        with pytest.raises(StepRestartedError, match="has not finished the work of rank 0") as caught:
            await call
        assert "ranks" in caught.value.data, "trainers repeat their reports"


@pytest.mark.parametrize("joins", ["b", "c"])
async def test_items_stay_with_their_trainer_while_another_one_builds_its_model(cluster: Harness, joins: str) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0))
    await b.leave()
    other = await cluster.join(joins)
    for step in range(2):
        await a.finish(step)
        response = await a.commit(step, wait_s=5)
        a.items = {item.global_rank: item for item in response.next_work.items}
        assert set(a.items) == {0, 1}
    await cluster.settle()
    assert (await a.finish(2, wait_s=1)).all_finished
    await cluster.restart_all()
    await cluster.settle()
    assert (await a.finish(2, wait_s=1)).all_finished
    await other.finish(2, [])  # it has built its model
    assert (await a.commit(2, wait_s=5)).committed
    assert [item.first_trainer for item in cluster.state.runs["r"].work.items] == ["a", joins]


async def test_how_long_work_took_is_not_measured_from_the_restart(cluster: Harness) -> None:
    """Otherwise items would seem late for many steps, and idle trainers would compute copies of them."""
    a, b = await cluster.team_with_unit("a", "b")
    for step in range(3):
        if step < 2:
            await cluster.restart()
        await a.finish(step)
        cluster.clock.now += 1.0
        answer = await b.finish(step, wait_s=1)
        assert answer.all_finished
        assert answer.HasField("last_finished") == (step == 2)
        await asyncio.gather(*(trainer.commit(step, wait_s=5) for trainer in (a, b)))
        await cluster.settle()
    assert list(cluster.state.runs["r"].work.times._seconds) == [0.0, 1.0]


@pytest.mark.parametrize("returns", [False, True])
async def test_work_of_a_lost_trainer_is_computed_again_after_a_restart(cluster: Harness, returns: bool) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
    await b.leave()
    await cluster.settle()
    if returns:
        await cluster.join("b")
    await cluster.restart_all()
    await cluster.settle()
    answer = await a.finish(0, wait_s=5)
    assert [(item.global_rank, item.attempt) for item in answer.work.items] == [(1, 1)]
    assert (await a.finish(0, wait_s=5)).all_finished
    assert (await a.commit(0, wait_s=5)).committed
    assert [(rank.dp_rank, rank.attempt) for rank in cluster.shards["s0"].manifests[-1].ranks] == [
        (0, 0),
        (1, 1),
    ]


async def test_restart_leases_the_step_in_flight_as_before(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await b.leave()
    await a.finish(0, wait_s=5)
    assert (await a.finish(0, wait_s=5)).all_finished
    reborn = await cluster.join("b")
    assert not (await reborn.finish(0, [])).HasField("work")
    save, cluster.state.storage.save_run = cluster.state.storage.save_run, None
    with pytest.raises(TypeError):
        await a.commit(0, wait_s=5)
    cluster.state.storage.save_run = save
    await cluster.restart()
    await a.commit(0)
    await reborn.commit(0, wait_s=5)
    assert (sorted(a.items), sorted(reborn.items)) == ([0], [1])


async def test_change_during_a_save_is_stored_by_the_next_save(cluster: Harness) -> None:
    await cluster.team_with_unit("a", "b")
    run = cluster.state.runs["r"]
    run.changes.touch()
    first = asyncio.create_task(cluster.state.save(run))
    while not run.changes.saving.in_flight:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    run.addresses["late"] = "h:1"
    run.changes.touch()
    await cluster.state.save(run)
    await first
    await cluster.restart()
    assert cluster.state.runs["r"].addresses == {"late": "h:1"}


async def test_initializer_survives_a_restart(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    declared = await a.declare(unit("u", (64, 64)))
    await cluster.restart()
    assert (await a.publish("u", declared.epoch)).version == 0
    assert (await a.declare(unit("u", (64, 64)))).version == 0


async def test_trainers_keep_waiting_for_the_start_after_a_restart(cluster: Harness) -> None:
    first = await cluster.try_join("a", incarnation="a")
    await cluster.restart()
    again = await cluster.try_join("a", incarnation="a")
    assert (again.epoch, again.started) == (first.epoch, False)
    assert (await cluster.try_join("b")).started
    assert (await cluster.try_join("a", incarnation="a")).started


async def test_epochs_are_never_reused(cluster: Harness) -> None:
    seen: set[int] = set()
    await cluster.team("a", "b")
    for _ in range(4):
        await cluster.pass_time(12)
        joined = await cluster.join("a", wait_s=1)
        epochs = {joined.epoch, *(item.epoch for item in joined.items.values())}
        assert not seen & epochs
        assert min(epochs) > max(seen, default=0)
        seen |= epochs
        await cluster.restart()


async def test_units_that_were_declared_at_once_keep_their_indices(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    cluster.shards["s0"].fail = fail_times("ReserveUnit", 1, StepStateError("not now"))
    small = [unit(f"u{index}", (8, 8)) for index in range(4)]
    declared = await asyncio.gather(*(a.declare(each) for each in small), return_exceptions=True)
    assert isinstance(declared[0], StepStateError)
    indices = [each.unit_index for each in declared[1:]]
    assert indices == [0, 1, 2], "the refused unit leaves no gap in the indices"
    await cluster.restart()
    assert [(await a.declare(each)).unit_index for each in small] == [3, *indices]


async def test_servers_and_units_survive_a_restart(cluster: Harness) -> None:
    a, _ = await cluster.team_with_unit("a", "b")
    await a.declare(unit("v", (1,)))
    before = await cluster.call("ListUnits", run="r")
    await cluster.restart()
    assert await cluster.call("ListUnits", run="r") == before
    assert {server.state for server in (await cluster.call("ListServers")).servers} == {
        coordinator_pb2.SERVER_STATE_UNCONFIRMED
    }
    servers = cluster.state.cluster
    await cluster.until(lambda: len(servers.live) == 2, "answers of the servers to the coordinator's probes")
    declared = await a.declare(unit("u", (64, 64)))
    assert declared.shards == before.units[0].shards
    drops = [shard.calls["DropRun"] for shard in cluster.shards.values()]
    await a.declare(unit("v", (1,)))
    assert [shard.calls["DropRun"] for shard in cluster.shards.values()] == drops
