"""A coordinator that ends at any point of a step and starts again loses nothing that was told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shardwell_wire.channel import RECONNECT_S
from shardwell_wire.errors import StaleEpochError, StepStateError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer, harness, run_async, unit
from tests.support.fake_shards import fail_times


async def started(cluster: Harness) -> list[Trainer]:
    trainers = await cluster.team("a", "b")
    await cluster.publish_unit(trainers)
    return trainers


def assert_updated_once(cluster: Harness, steps: int) -> None:
    for shard in cluster.shards.values():
        assert [update.context.step for update in shard.runs["r"].updates] == list(range(steps))
        assert {unit.version for unit in shard.runs["r"].units.values()} == {steps}


@pytest.mark.parametrize("phase", ["joined", "one finished", "all finished", "prepared", "committed", "handed in"])
def test_a_restart_in_every_phase_of_a_step(tmp_path: Path, phase: str) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await started(cluster)
            epochs = [at.items[rank].epoch for rank, at in enumerate((a, b))]
            phases = ["joined", "one finished", "all finished", "prepared", "handed in", "committed"]
            for current in phases[: phases.index(phase) + 1]:
                if current == "one finished":
                    await a.finish(0)
                elif current == "all finished":
                    assert (await b.finish(0, wait_s=1)).all_finished
                elif current == "prepared":
                    await b.prepare(0)
                elif current == "handed in":
                    await b.commit(0)
                elif current == "committed":
                    assert (await a.commit(0, wait_s=5)).committed
            await cluster.restart()
            assert cluster.state.term == 2
            await asyncio.gather(a.heartbeat(), b.heartbeat())
            if phase in ("joined", "one finished"):
                # Polls repeat everything.
                await asyncio.gather(a.finish(0), b.finish(0, wait_s=5))
            if phase != "committed":
                await a.commit(0, wait_s=5)
            assert (await b.commit(0, wait_s=5)).committed
            await a.commit(0)
            assert [at.items[rank].epoch for rank, at in enumerate((a, b))] == epochs, "leases go on"
            await cluster.settle()
            assert_updated_once(cluster, 1)
            await asyncio.gather(a.finish(1), b.finish(1))
            assert (await a.commit(1, wait_s=5)).committed
            await cluster.settle()
            assert_updated_once(cluster, 2)

    run_async(scenario())


def test_an_update_that_was_cut_short_is_redone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await started(cluster)
            cluster.shards["s1"].fail = fail_times("Update", 10**6, UnavailableError("away"))
            await asyncio.gather(a.finish(0), b.finish(0))
            assert (await a.commit(0, wait_s=5)).committed
            assert cluster.state.runs["r"].commits.pending_updates
            await cluster.restart()
            assert (await cluster.call("ExplainStall", run="r")).phase == "updating"
            cluster.shards["s1"].fail = lambda rpc_name, request: None
            await b.commit(0)
            await asyncio.gather(a.finish(1), b.finish(1))
            assert (await a.commit(1, wait_s=5)).committed
            await cluster.settle()
            assert_updated_once(cluster, 2)
            assert cluster.shards["s0"].calls["Update"] >= 3, "and repeated where it had been done"

    run_async(scenario())


def test_who_is_not_heard_of_after_a_restart_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await started(cluster)
            await cluster.pass_time(9, a, b)
            await cluster.restart()
            await cluster.pass_time(9, a)
            assert (await b.heartbeat()).committed_step == 0, "a restart begins every lease anew"
            await cluster.pass_time(11, a)
            response = await a.finish(0, wait_s=5)
            assert response.work.items[0].global_rank == 1
            with pytest.raises(StaleEpochError):
                await b.finish(0)

    run_async(scenario())


def test_a_lease_does_not_run_out_while_connections_to_a_restarted_coordinator_are_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, lease_s=1.0) as cluster:
            a, b = await started(cluster)
            await cluster.restart()
            await cluster.pass_time(1.0 + 0.9 * RECONNECT_S)
            assert not (await a.finish(0)).HasField("work"), "the first to connect takes nobody's work"
            assert (await b.finish(0, wait_s=5)).all_finished
            await cluster.pass_time(1.1, a)
            assert "lease_expired" in [kind for kind, _ in cluster.events()]

    run_async(scenario())


def test_work_that_was_vacant_is_fenced_and_offered_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await started(cluster)
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

    run_async(scenario())


def test_attempts_survive(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await started(cluster)
            await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
            assert (await b.reset(0, 1)).attempt == 1
            await cluster.restart()
            assert not (await a.finish(0)).all_finished, "the rank began anew"
            assert (await b.reset(0, 1)).attempt == 2
            assert (await b.finish(0, wait_s=1)).all_finished
            assert (await a.commit(0, wait_s=5)).committed
            assert (await b.commit(0, wait_s=5)).next_work.items[0].attempt == 0

    run_async(scenario())


def test_work_that_was_finished_again_is_recorded_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await started(cluster)
            await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
            await b.reset(0, 1)
            assert (await b.finish(0, wait_s=1, parts={0: 3})).all_finished
            await cluster.restart()
            assert (await a.commit(0, wait_s=5)).committed

    run_async(scenario())


def test_a_step_begun_before_the_restart_is_given_out_as_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await started(cluster)
            await b.leave()
            await a.finish(0, wait_s=5)
            assert (await a.finish(0, wait_s=5)).all_finished
            reborn = await cluster.join("b")
            assert not reborn.items
            save, cluster.state.storage.save_run = cluster.state.storage.save_run, None
            with pytest.raises(TypeError):
                await a.commit(0, wait_s=5)
            cluster.state.storage.save_run = save
            await cluster.restart()
            await a.commit(0)
            await reborn.commit(0, wait_s=5)
            assert (sorted(a.items), sorted(reborn.items)) == ([0], [1])

    run_async(scenario())


def test_what_changes_while_the_state_is_written_is_written_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            await started(cluster)
            run = cluster.state.runs["r"]
            run.touch()
            first = asyncio.create_task(cluster.state.save(run))
            while not run.unsaved.saving.in_flight:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            run.addresses["late"] = "h:1"
            run.touch()
            await cluster.state.save(run)
            await first
            await cluster.restart()
            assert cluster.state.runs["r"].addresses == {"late": "h:1"}

    run_async(scenario())


def test_who_sends_the_initial_values_survives(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            declared = await a.declare(unit("u", (64, 64)))
            await cluster.restart()
            assert (await a.publish("u", declared.epoch)).version == 0
            assert (await a.declare(unit("u", (64, 64)))).version == 0

    run_async(scenario())


def test_trainers_that_wait_for_the_start_go_on_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            first = await cluster.try_join("a", incarnation="a")
            await cluster.restart()
            again = await cluster.try_join("a", incarnation="a")
            assert (again.epoch, again.started) == (first.epoch, False)
            assert (await cluster.try_join("b")).started
            assert (await cluster.try_join("a", incarnation="a")).started

    run_async(scenario())


def test_epochs_are_never_given_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
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

    run_async(scenario())


def test_units_that_were_declared_at_once_keep_their_indices(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            cluster.shards["s0"].fail = fail_times("ReserveUnit", 1, StepStateError("not now"))
            small = [unit(f"u{index}", (8, 8)) for index in range(4)]
            declared = await asyncio.gather(*(a.declare(each) for each in small), return_exceptions=True)
            assert isinstance(declared[0], StepStateError)
            indices = [each.unit_index for each in declared[1:]]
            assert indices == [0, 1, 2], "the refused one leaves no gap"
            await cluster.restart()
            assert [(await a.declare(each)).unit_index for each in small] == [3, *indices]

    run_async(scenario())


def test_servers_are_known_and_units_are_where_they_were(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await started(cluster)
            await a.declare(unit("v", (1,)))
            before = await cluster.call("ListUnits", run="r")
            await cluster.restart()
            assert await cluster.call("ListUnits", run="r") == before
            assert {server.state for server in (await cluster.call("ListServers")).servers} == {
                coordinator_pb2.SERVER_STATE_UNCONFIRMED
            }
            servers = cluster.state.cluster
            await cluster.until(lambda: len(servers.live) == 2, "answers of the servers, which the coordinator asks")
            declared = await a.declare(unit("u", (64, 64)))
            assert declared.shards == before.units[0].shards
            drops = [shard.calls["DropRun"] for shard in cluster.shards.values()]
            await a.declare(unit("v", (1,)))
            assert [shard.calls["DropRun"] for shard in cluster.shards.values()] == drops

    run_async(scenario())
