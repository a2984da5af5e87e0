"""Backups replace lost primaries; shards move with a commit; a restarted coordinator continues either."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.checkpoints import restoring
from shardwell_server.coordinator.checkpoints.manifests import manifest_of
from shardwell_server.coordinator.relocation import keeper
from shardwell_server.coordinator.runs.relocations import Relocations
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Promotion
from shardwell_server.coordinator.storage.records import BackupState, CheckpointRecord
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    StepRestartedError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2, shard_pb2
from tests.support.coordinator import Harness, Trainer, config, harness, run_async
from tests.support.fake_shards import fail_times


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_TICK_S", 0.002)
    monkeypatch.setattr(keeper, "_PAUSE_S", 0.002)


async def started(cluster: Harness, *names: str, backups: int = 1, units: int = 2) -> list[Trainer]:
    """Trainers of a run whose units are published, with all backups in sync."""
    names = names or ("a", "b")
    settings = config(World(dp=len(names)), min_trainers=len(names))
    settings.backups = backups
    trainers = await asyncio.gather(*(cluster.join(name, wait_s=5, config=settings) for name in names))
    for index in range(units):
        await cluster.publish_unit(trainers, f"u{index}", (64, 64))
    await in_sync(cluster, backups)
    return list(trainers)


def run_of(cluster: Harness) -> Run:
    return cluster.state.runs["r"]


async def in_sync(cluster: Harness, backups: int) -> None:
    """Waits until every shard has so many backups in sync and no other copies."""

    def reached() -> bool:
        return all(
            [each.state for each in unit.backups_of(shard)] == [BackupState.IN_SYNC] * backups
            for unit in run_of(cluster).units
            for shard in unit.shards
        )

    await cluster.until(reached, f"{backups} backups in sync")


def kill(cluster: Harness, name: str) -> None:
    """Ends a shard server's process, and lets the coordinator notice."""
    cluster.shards[name].incarnation = None
    cluster.state.cluster.servers[name].mark_ended()
    cluster.state.cluster.changed.notify()


async def take_step(trainers: list[Trainer], step: int) -> None:
    """Completes a step, and computes restarted items again."""

    async def work(trainer: Trainer) -> None:
        while True:
            answer = await trainer.finish(step, wait_s=5)
            trainer.items |= {item.global_rank: item for item in answer.work.items}
            if answer.all_finished:
                with suppress(StepRestartedError):
                    if (await trainer.commit(step, wait_s=5)).committed:
                        return

    async with asyncio.timeout(20):
        await asyncio.gather(*map(work, trainers))


def owners(cluster: Harness) -> set[str]:
    return {shard.server_id for unit in run_of(cluster).units for shard in unit.shards}


def confirmed(cluster: Harness) -> bool:
    return not run_of(cluster).relocations.unconfirmed


def histories(cluster: Harness) -> list[list[int]]:
    """The updates of every primary's values."""
    return [
        cluster.shards[shard.server_id].runs["r"].shards[unit.index, shard.start_bytes].history
        for unit in run_of(cluster).units
        for shard in unit.shards
    ]


def kinds(cluster: Harness) -> list[str]:
    return [kind for kind, _ in cluster.events()]


def test_backups_are_on_other_servers_and_follow_every_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
            trainers = await started(cluster)
            for step in range(3):
                await take_step(trainers, step)
            await cluster.settle()
            for unit in run_of(cluster).units:
                for shard in unit.shards:
                    (backup,) = unit.backups_of(shard)
                    assert backup.server_id != shard.server_id
                    copy = cluster.shards[backup.server_id].runs["r"].shards[unit.index, shard.start_bytes]
                    assert (copy.version, copy.history, copy.backup) == (3, [0, 1, 2], True)
            assert kinds(cluster).count("backups_in_sync") == 1
            listed = await cluster.call("ListUnits", run="r")
            assert {backup.state for unit in listed.units for backup in unit.backups} == {
                coordinator_pb2.BACKUP_STATE_IN_SYNC
            }

    run_async(scenario())


@pytest.mark.parametrize("when", ["working", "one finished", "all finished", "prepared", "committed"])
def test_lost_primary_is_replaced_in_any_phase_of_a_step(tmp_path: Path, when: str) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
            a, b = trainers = await started(cluster)
            await take_step(trainers, 0)
            await cluster.settle()
            victim = run_of(cluster).units.require("u0").shards[0].server_id
            if when != "working":
                await a.finish(1)
            if when in ("all finished", "prepared", "committed"):
                await b.finish(1, wait_s=5)
            if when in ("prepared", "committed"):
                await b.prepare(1)
            if when == "committed":
                cluster.shards[victim].fail = fail_times("Update", 10**6, UnavailableError("stopped"))
                await asyncio.gather(a.commit(1, wait_s=5), b.commit(1, wait_s=5))
            kill(cluster, victim)
            await take_step(trainers, 2 if when == "committed" else 1)
            await cluster.settle()
            assert victim not in owners(cluster)
            assert (await a.heartbeat()).placement == run_of(cluster).relocations.count == 1
            steps = run_of(cluster).committed_step
            assert steps == (3 if when == "committed" else 2)
            assert histories(cluster) == [list(range(steps))] * len(histories(cluster))
            assert kinds(cluster).count("shards_promoted") == 1
            await in_sync(cluster, 1)  # the copies that were lost are built again on the other servers

    run_async(scenario())


def test_server_that_does_not_confirm_its_shards_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster)
            cluster.shards["s1"].fail = fail_times("PromoteShards", 10**6, UnavailableError("busy"))
            kill(cluster, "s0")
            await cluster.until(lambda: owners(cluster) == {"s1"}, "the promotion")
            lines = (await cluster.call("ExplainStall", run="r")).waiting_for
            assert "server 's1': PromoteShards of placement 1 not acknowledged" in lines
            cluster.shards["s1"].fail = lambda rpc_name, request: None
            await take_step(trainers, 0)

    run_async(scenario())


def test_contributions_of_former_attempts_are_fenced_on_the_new_primary(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            a, b = await started(cluster)
            await a.finish(0)
            kill(cluster, "s0")
            await cluster.until(lambda: run_of(cluster).relocations.announced == 1, "the relocation")
            answers = await asyncio.gather(a.finish(0, wait_s=5), b.finish(0, [], wait_s=5))
            assert [[item.attempt for item in answer.work.items] for answer in answers] == [[1], [1]]
            assert cluster.shards["s1"].runs["r"].attempts == {0: 1, 1: 1}
            assert [answer.placement for answer in answers] == [1, 1]
            a.items, b.items = ({item.global_rank: item for item in answer.work.items} for answer in answers)
            await take_step([a, b], 0)

    run_async(scenario())


@pytest.mark.parametrize("crash", ["before it is stored", "before servers know", "before the update"])
def test_restarted_coordinator_continues_a_relocation(tmp_path: Path, crash: str) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster)
            await take_step(trainers, 0)
            for trainer in trainers:
                await trainer.finish(1)
            if crash == "before the update":
                for shard in cluster.shards.values():
                    shard.fail = fail_times("Update", 10**6, UnavailableError("stopped"))
                await asyncio.gather(*(trainer.commit(1, wait_s=5) for trainer in trainers))
            elif crash == "before servers know":
                cluster.shards["s1"].fail = fail_times("PromoteShards", 10**6, UnavailableError("stopped"))
                kill(cluster, "s0")
                await cluster.until(lambda: run_of(cluster).relocations.announced == 1, "the stored relocation")
            cluster.shards["s0"].incarnation = None
            await cluster.restart()
            assert run_of(cluster).relocations.count == (crash == "before servers know")
            for shard in cluster.shards.values():
                shard.fail = lambda rpc_name, request: None
            kill(cluster, "s0")
            step = run_of(cluster).committed_step
            assert step == (2 if crash == "before the update" else 1)
            for trainer in trainers:
                await trainer.heartbeat()
            await take_step(trainers, step)
            await cluster.settle()
            assert histories(cluster) == [list(range(step + 1))] * len(histories(cluster))
            assert cluster.shards["s1"].runs["r"].placement == run_of(cluster).relocations.count

    run_async(scenario())


def test_backup_that_misses_a_step_is_out_of_sync_before_the_commit_and_is_built_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster)
            for copy in cluster.shards["s1"].runs["r"].shards.values():
                copy.in_sync = copy.in_sync and not copy.backup  # its server rejects what the primary sends
            cluster.shards["s1"].fail = fail_times("ReserveUnit", 10**6, UnavailableError("not now"))
            await take_step(trainers, 0)
            stored = (await cluster.state.storage.load()).runs[0].units
            on_s1 = [backup for unit in stored for backup in unit.backups if backup.server_id == "s1"]
            assert on_s1 and {backup.state for backup in on_s1} == {BackupState.BUILDING}
            assert "backups_lost" in kinds(cluster)
            cluster.shards["s1"].fail = lambda rpc_name, request: None
            await in_sync(cluster, 1)
            kill(cluster, "s0")
            await take_step(trainers, 1)
            await cluster.settle()
            assert histories(cluster) == [[0, 1]] * len(histories(cluster))

    run_async(scenario())


def test_loss_of_primary_and_backup_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            a, _ = await started(cluster)
            kill(cluster, "s0")
            await cluster.until(lambda: confirmed(cluster) and owners(cluster) == {"s1"}, "the promotion")
            kill(cluster, "s1")
            with pytest.raises(
                ConflictError, match="server 's1' at s1:1 has ended, and its shards of units 'u0', 'u1'"
            ):
                await a.heartbeat()

    run_async(scenario())


def test_backups_can_be_added_and_removed_while_a_run_trains(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
            trainers = await started(cluster, backups=0)
            for step, backups in enumerate((1, 2, 0)):
                await cluster.call("SetBackups", run="r", backups=backups)
                await take_step(trainers, step)
                await in_sync(cluster, backups)
            held = sum(shard.reserved_bytes for shard in cluster.shards.values())
            assert held == 2 * 64 * 64 * 4 * 3, "the released copies take no memory"

    run_async(scenario())


def test_full_server_gets_no_backup_and_the_reason_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster, backups=0)
            for shard in cluster.shards.values():
                shard.fail = fail_times("ReserveUnit", 10**6, CapacityError("no room"))
            await cluster.call("SetBackups", run="r", backups=1)
            await cluster.until(lambda: "backups_delayed" in kinds(cluster), "the event")
            await take_step(trainers, 0)
            assert not any(backup for unit in run_of(cluster).units for backup in unit.backups if backup.in_sync)

    run_async(scenario())


def test_server_that_its_primary_cannot_reach_is_replaced_by_a_third_one(tmp_path: Path) -> None:
    """The coordinator reaches all three servers, but the primary does not reach the server that was chosen."""

    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3, lease_s=0.2) as cluster:
            await started(cluster, backups=0, units=1)
            (unit,) = run_of(cluster).units
            chosen = {
                shard.start_bytes: cluster.coordinator.backups._choose(run_of(cluster), unit, shard)
                for shard in unit.shards
            }
            first = unit.shards[0]
            cut_off = chosen[first.start_bytes]
            assert cut_off is not None

            def refuse(rpc_name: str, request: Any) -> None:
                if rpc_name == "CopyShard" and request.target_server_id == cut_off.server_id:
                    raise UnavailableError(f"fake: {cut_off.server_id} cannot be reached")

            cluster.shards[first.server_id].fail = refuse
            await cluster.call("SetBackups", run="r", backups=1)
            await in_sync(cluster, 1)
            (backup,) = unit.backups_of(first)
            assert backup.server_id not in (first.server_id, cut_off.server_id)
            copies = cluster.shards[cut_off.server_id].runs["r"].shards
            assert (unit.index, first.start_bytes) not in copies, "the attempt there is released"

    run_async(scenario())


def test_refused_promotion_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            await started(cluster, units=1)
            victim, successor = cluster.shards
            cluster.shards[successor].fail = fail_times("PromoteShards", 10**6, StepStateError("fake: no version"))
            kill(cluster, victim)
            await cluster.until(lambda: cluster.shards[successor].calls["PromoteShards"] > 3, "repeated requests")

    with caplog.at_level("WARNING"):
        run_async(scenario())
    assert caplog.text.count("fake: no version") == 1


async def drained(cluster: Harness, trainers: list[Trainer], name: str, step: int) -> int:
    """Trains until a server has no shards. Returns the next step."""
    await cluster.call("DrainServer", server_id=name)
    for number in range(step, step + 40):
        await take_step(trainers, number)
        await cluster.settle()
        held = await cluster.call("DrainServer", server_id=name)
        if not held.shard_count:
            return number + 1
    raise AssertionError(f"{name} still has shards: {held}")


@pytest.mark.parametrize("backups", [0, 1])
def test_drained_server_hands_over_its_shards_without_a_repeated_step(tmp_path: Path, backups: int) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
            trainers = await started(cluster, backups=backups)
            step = await drained(cluster, trainers, "s0", 0)
            assert "s0" not in owners(cluster)
            await in_sync(cluster, backups)
            assert not cluster.shards["s0"].runs["r"].shards
            assert not cluster.shards["s0"].reserved_bytes
            await take_step(trainers, step)
            await cluster.settle()
            assert histories(cluster) == [list(range(step + 1))] * len(histories(cluster))
            assert {item.attempt for trainer in trainers for item in trainer.items.values()} == {0}
            await cluster.until(lambda: "server_drained" in kinds(cluster), "the event")
            assert "server_drained" in kinds(cluster)

    run_async(scenario())


def test_server_without_successor_cannot_be_drained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=1) as cluster:
            trainers = await started(cluster, backups=0)
            answer = await cluster.call("DrainServer", server_id="s0")
            await take_step(trainers, 0)
            assert (answer.shard_count, list(answer.waiting_for)) == (
                2,
                ["no other live server can take the shards of run 'r': start more servers"],
            )
            await cluster.call("DrainServer", server_id="s0", cancel=True)
            assert not cluster.state.cluster.servers["s0"].draining

    run_async(scenario())


def test_idle_run_is_moved_without_a_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster, backups=0)
            await take_step(trainers, 0)
            for trainer in trainers:
                await trainer.leave()
            await cluster.call("DrainServer", server_id="s0")
            await cluster.until(lambda: owners(cluster) == {"s1"} and confirmed(cluster), "the move")
            assert histories(cluster) == [[0]] * 4

    run_async(scenario())


def test_rebalanced_run_uses_new_servers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
            for name in ("s1", "s2"):
                await cluster.call("DrainServer", server_id=name)
            trainers = await started(cluster, backups=0, units=6)
            assert owners(cluster) == {"s0"}
            for name in ("s1", "s2"):
                await cluster.call("DrainServer", server_id=name, cancel=True)
            await cluster.call("RebalanceRun", run="r")
            step = 0
            while (await cluster.call("RebalanceRun", run="r", report_only=True)).rebalancing:
                await take_step(trainers, step)
                step += 1
                assert step < 40
            counts = sorted(
                sum(shard.server_id == name for unit in run_of(cluster).units for shard in unit.shards)
                for name in cluster.shards
            )
            assert counts == [2, 2, 2]
            await take_step(trainers, step)
            await cluster.settle()
            assert histories(cluster) == [list(range(step + 1))] * 6

    run_async(scenario())


@pytest.mark.parametrize("how", ["drain", "rebalance"])
def test_planned_move_takes_no_backup_away(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promote, moved = Relocations.promote, []

    def checked(self: Relocations, promotions: Iterable[Promotion]) -> None:
        promotions = list(promotions)
        promote(self, promotions)
        for promotion in promotions:
            unit, start_bytes = promotion.unit, promotion.backup.start_bytes
            copies = unit.backups_of(unit.shard_at(start_bytes))
            moved.append([copy.server_id for copy in copies if copy.in_sync])

    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
            if how == "rebalance":
                await cluster.call("DrainServer", server_id="s2")
            trainers = await started(cluster, backups=1, units=6)
            monkeypatch.setattr(Relocations, "promote", checked)
            if how == "drain":
                await drained(cluster, trainers, "s0", 0)
            else:
                await cluster.call("DrainServer", server_id="s2", cancel=True)
                await cluster.call("RebalanceRun", run="r")
                step = 0
                while (await cluster.call("RebalanceRun", run="r", report_only=True)).rebalancing:
                    await take_step(trainers, step)
                    step += 1
                    assert step < 40
            await in_sync(cluster, 1)
            assert moved and all(moved), "each shard has a backup in sync when it moves"
            assert "backups_lost" not in kinds(cluster)

    run_async(scenario())


def test_primaries_and_backups_are_compared_by_hash(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster)
            await take_step(trainers, 0)
            report: Any = await cluster.call("VerifyRun", run="r")
            assert (report.version, report.compared_shards, list(report.differences)) == (1, 4, [])
            copy = next(copy for copy in cluster.shards["s1"].runs["r"].shards.values() if copy.backup)
            copy.history.append(7)
            report = await cluster.call("VerifyRun", run="r")
            (difference,) = report.differences
            assert difference.startswith("unit 'u")
            assert "backup on server 's1' differs from the primary on 's0' in p values" in difference

    run_async(scenario())


def test_the_comparison_is_repeated_if_shards_move_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            await take_step(await started(cluster), 0)
            server, calls = cluster.shards["s0"], []
            hash_shards = server.HashShards

            def move_meanwhile(request: shard_pb2.HashShardsRequest) -> shard_pb2.HashShardsResponse:
                calls.append(request)
                if len(calls) == 1:
                    run_of(cluster).relocations.raise_count()
                    raise StepStateError("unit 'u' is at version 0, expected 1")
                return hash_shards(request)

            monkeypatch.setattr(server, "HashShards", move_meanwhile)
            report: Any = await cluster.call("VerifyRun", run="r")
            assert (report.compared_shards, list(report.differences), len(calls)) == (4, [], 2)

    run_async(scenario())


def held(cluster: Harness, name: str, *, version: int, can_update: bool = False) -> list[coordinator_pb2.HeldShard]:
    """What a restarted process reports to have taken up."""
    run = cluster.shards[name].runs_by_id[run_of(cluster).identity.run_id]
    names = {index: unit for unit, index in run.names.items()}
    return [
        coordinator_pb2.HeldShard(
            run="r",
            run_id=run_of(cluster).identity.run_id,
            unit=names[shard.index],
            unit_index=shard.index,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
            version=version,
            can_update=can_update,
            backup=shard.backup,
        )
        for shard in run.shards.values()
    ]


async def register(cluster: Harness, name: str, incarnation: str, **fields: Any) -> Any:
    cluster.shards[name].incarnation = incarnation
    return await cluster.call(
        "RegisterServer",
        server_id=name,
        address=cluster.addresses[name],
        budget_bytes=1 << 30,
        incarnation=incarnation,
        restartable=True,
        **fields,
    )


@pytest.mark.parametrize("interrupted", [False, True])
def test_restarted_process_keeps_its_shards_and_the_step_is_repeated(tmp_path: Path, interrupted: bool) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            for name in cluster.shards:
                await register(cluster, name, "1")
            a, b = trainers = await started(cluster, backups=0)
            await take_step(trainers, 0)
            await cluster.settle()
            if interrupted:
                cluster.shards["s0"].fail = fail_times("Update", 10**6, UnavailableError("stopped"))
                await take_step(trainers, 1)
            await a.finish(2 if interrupted else 1)
            kill(cluster, "s0")
            with pytest.raises(
                UnavailableError, match="its shards of units 'u0', 'u1' of this run are in shared memory"
            ):
                await a.finish(2 if interrupted else 1)
            await a.heartbeat()
            cluster.shards["s0"].fail = lambda rpc_name, request: None
            reported = held(cluster, "s0", version=1, can_update=interrupted)
            for _ in range(2):
                answer = await register(cluster, "s0", "2", held=reported)
                assert list(answer.adopted) == reported, "a retry of the registration gets the same answer"
            assert run_of(cluster).relocations.count == 1
            await take_step([a, b], run_of(cluster).committed_step)
            await cluster.settle()
            assert histories(cluster) == [list(range(3 if interrupted else 2))] * 4
            assert a.items[0].attempt == 0
            assert "shards_adopted" in kinds(cluster)

    run_async(scenario())


def test_restarted_process_without_the_committed_version_keeps_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            for name in cluster.shards:
                await register(cluster, name, "1")
            trainers = await started(cluster, backups=0)
            await take_step(trainers, 0)
            kill(cluster, "s0")
            answer = await register(cluster, "s0", "2", held=held(cluster, "s0", version=0))
            assert not answer.adopted
            with pytest.raises(ConflictError, match="server 's0' was restarted and has lost its shards"):
                await trainers[0].heartbeat()

    run_async(scenario())


def test_registration_is_repeated_after_the_step_was_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            for name in cluster.shards:
                await register(cluster, name, "1")
            trainers = await started(cluster, backups=0)
            reported = held(cluster, "s0", version=0)
            assert list((await register(cluster, "s0", "2", held=reported)).adopted) == reported
            cluster.shards["s0"].fail = fail_times("Update", 10**6, UnavailableError("busy"))
            await take_step(trainers, 0)
            again = await register(cluster, "s0", "2", held=reported)  # the first answer was lost
            assert list(again.adopted) == reported, "the process owns these shards, and their update is due"

    run_async(scenario())


def test_process_that_cannot_apply_the_step_keeps_nothing_while_it_is_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            for name in cluster.shards:
                await register(cluster, name, "1")
            await started(cluster, backups=0)
            with run_of(cluster).commits.writing_record():
                adopted = (await register(cluster, "s0", "2", held=held(cluster, "s0", version=0))).adopted
                assert not adopted
                prepared = held(cluster, "s1", version=0, can_update=True)
                assert list((await register(cluster, "s1", "2", held=prepared)).adopted) == prepared

    run_async(scenario())


def test_restarted_process_has_the_backups_of_its_predecessor(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            for name in cluster.shards:
                await register(cluster, name, "1")
            trainers = await started(cluster)
            await take_step(trainers, 0)
            await cluster.settle()
            for server in cluster.shards.values():
                server.fail = fail_times("ReserveUnit", 10**6, UnavailableError("no new copies"))
            reported = [shard for shard in held(cluster, "s0", version=1) if not shard.backup]
            shards = cluster.shards["s0"].runs["r"].shards
            for key, shard in list(shards.items()):
                if shard.backup:
                    del shards[key]  # only primaries are taken up
                shard.replicas.clear()
            assert list((await register(cluster, "s0", "2", held=reported)).adopted) == reported
            await take_step(trainers, 1)
            kill(cluster, "s0")
            await take_step(trainers, 2)
            await cluster.settle()
            assert histories(cluster) == [[0, 1, 2]] * 4

    run_async(scenario())


def test_restarted_process_does_not_keep_shards_that_a_backup_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            for name in cluster.shards:
                await register(cluster, name, "1")
            trainers = await started(cluster)
            reported = held(cluster, "s0", version=0)
            kill(cluster, "s0")
            await cluster.until(lambda: owners(cluster) == {"s1"}, "the promotion")
            assert not (await register(cluster, "s0", "2", held=reported)).adopted
            cluster.shards["s0"].restart("2")
            await take_step(trainers, 0)
            await in_sync(cluster, 1)

    run_async(scenario())


def test_server_that_returns_is_told_which_shards_it_no_longer_owns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            a, _ = await started(cluster)
            epoch = cluster.state.cluster.servers["s0"].epoch
            cluster.shards["s0"].available = False  # stopped: it answers nothing, and its shards are where they were
            before = {(unit.layout.unit, at.start_bytes) for unit in run_of(cluster).units for at in unit.shards}
            cluster.clock.now += 9
            await a.heartbeat()
            cluster.clock.now += 1.4
            s1 = cluster.state.cluster.servers["s1"]
            s1.renew_lease(cluster.clock.now)
            cluster.coordinator.expire()
            await cluster.until(lambda: not cluster.state.cluster.servers["s0"].may_be_alive, "the loss of s0")
            assert owners(cluster) == {"s0", "s1"}, "s0 may still serve: its lease has just ended"
            cluster.clock.now += 0.2
            s1.renew_lease(cluster.clock.now)
            cluster.coordinator.expire()
            await cluster.until(lambda: owners(cluster) == {"s1"}, "the promotion")
            answer = await cluster.call("HeartbeatServer", server_id="s0", epoch=epoch)
            retired = {(shard.unit, shard.start_bytes) for shard in answer.retired_shards}
            assert retired == before, "former primaries and backups: none of them follows the run any more"
            cluster.shards["s0"].available = True
            await in_sync(cluster, 1)

    run_async(scenario())


def test_server_that_returns_gets_the_update_that_it_missed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster, backups=0)
            epoch = cluster.state.cluster.servers["s0"].epoch
            cluster.shards["s0"].fail = fail_times("Update", 10**6, UnavailableError("cut off"))
            await take_step(trainers, 0)
            cluster.shards["s0"].available = False
            cluster.clock.now += 10.6
            cluster.state.cluster.servers["s1"].renew_lease(cluster.clock.now)
            cluster.coordinator.expire()
            await cluster.until(lambda: not cluster.state.cluster.servers["s0"].may_be_alive, "the loss of s0")
            await asyncio.sleep(0.2)  # longer than any pause between two attempts to update it
            cluster.shards["s0"].available, cluster.shards["s0"].fail = True, lambda rpc_name, request: None
            await cluster.call("HeartbeatServer", server_id="s0", epoch=epoch)
            for trainer in trainers:
                await trainer.heartbeat()
            await take_step(trainers, 1)
            await cluster.settle()
            assert histories(cluster) == [[0, 1]] * 4

    run_async(scenario())


def test_server_that_returns_is_fenced_before_its_step_is_computed_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            await register(cluster, "s1", "1")
            trainers = await started(cluster, backups=0)
            await asyncio.gather(*(trainer.finish(0, wait_s=5) for trainer in trainers))
            epoch = cluster.state.cluster.servers["s0"].epoch
            cluster.shards["s0"].available = False  # it has prepared the step
            cluster.clock.now += 10.6
            cluster.state.cluster.servers["s1"].renew_lease(cluster.clock.now)
            for trainer in trainers:
                await trainer.heartbeat()
            cluster.coordinator.expire()
            await cluster.until(lambda: not cluster.state.cluster.servers["s0"].may_be_alive, "the loss of s0")
            await register(cluster, "s1", "2", held=held(cluster, "s1", version=0))
            await cluster.until(lambda: bool(cluster.shards["s1"].runs["r"].attempts), "the fence on s1")
            await asyncio.sleep(0.05)
            cluster.shards["s0"].available = True
            await cluster.call("HeartbeatServer", server_id="s0", epoch=epoch)
            run = run_of(cluster)
            await cluster.until(lambda: run.step is not None and not run.step.unfenced, "the fences")
            assert [shard.runs["r"].attempts for shard in cluster.shards.values()] == [{0: 1, 1: 1}] * 2
            await take_step(trainers, 0)

    run_async(scenario())


def test_server_that_returns_after_a_rollback_is_told_that_it_owns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            trainers = await started(cluster, backups=0)
            run = run_of(cluster)
            manifest = manifest_of(run, "c0", 0.0)
            monkeypatch.setattr(restoring, "open_manifest", lambda url: manifest)
            run.checkpoints.add_saved(CheckpointRecord("c0", 0, "somewhere", 1, 0.0, True))
            await take_step(trainers, 0)
            await cluster.settle()
            former = {
                (unit.layout.unit, at.start_bytes) for unit in run.units for at in unit.shards if at.server_id == "s0"
            }
            epoch = cluster.state.cluster.servers["s0"].epoch
            cluster.shards["s0"].available = False  # cut off: its shards are where they were
            cluster.clock.now += 10.6
            cluster.state.cluster.servers["s1"].renew_lease(cluster.clock.now)
            cluster.coordinator.expire()
            await cluster.until(lambda: run.checkpoints.rollback_count == 1, "the rollback")
            assert owners(cluster) == {"s1"}
            await cluster.restart()
            answer = await cluster.call("HeartbeatServer", server_id="s0", epoch=epoch)
            assert {(shard.unit, shard.start_bytes) for shard in answer.retired_shards} == former
            cluster.shards["s0"].available = True
            await cluster.until(lambda: not cluster.shards["s0"].runs["r"].shards, "the release of its shards")
            await cluster.until(lambda: not any(unit.backups for unit in run_of(cluster).units), "their records")

    run_async(scenario())


def test_other_backups_stay_in_sync_after_a_promotion(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
            trainers = await started(cluster, backups=2)
            for shard in cluster.shards.values():
                shard.fail = fail_times("ReserveUnit", 10**6, UnavailableError("no new copies"))
            kill(cluster, "s0")
            for step in range(3):
                await take_step(trainers, step)
            await cluster.settle()
            await in_sync(cluster, 1)
            for unit in run_of(cluster).units:
                for backup in unit.backups:
                    copy = cluster.shards[backup.server_id].runs["r"].shards[unit.index, backup.start_bytes]
                    assert (copy.in_sync, copy.history) == (True, [0, 1, 2])
            kill(cluster, "s1")
            await take_step(trainers, 3)
            await cluster.settle()
            assert histories(cluster) == [[0, 1, 2, 3]] * len(histories(cluster))

    run_async(scenario())
