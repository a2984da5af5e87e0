"""Backups replace lost primaries, and a restarted coordinator continues this. Copies are compared by hash."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.run_checkpoints import Restore
from shardwell_server.coordinator.storage.records import BackupState
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    IncompleteStepError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.v1 import coordinator_pb2, shard_pb2
from tests.support.coordinator import Harness, harness, run_async
from tests.support.fake_shards import DirectCalls, fail_times
from tests.support.relocation import (
    confirmed,
    histories,
    in_sync,
    kill,
    kinds,
    owners,
    run_of,
    started,
    take_step,
    trained,
)

pytestmark = pytest.mark.usefixtures("without_pauses")


@pytest.mark.harness(num_shards=3)
async def test_backups_are_on_other_servers_and_follow_every_step(cluster: Harness) -> None:
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
    assert {backup.state for unit in listed.units for backup in unit.backups} == {coordinator_pb2.BACKUP_STATE_IN_SYNC}


@pytest.mark.parametrize("when", ["working", "one finished", "all finished", "prepared", "committed"])
@pytest.mark.harness(num_shards=3)
async def test_lost_primary_is_replaced_in_any_phase_of_a_step(cluster: Harness, when: str) -> None:
    a, b = trainers = await trained(cluster)
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


async def test_server_that_does_not_confirm_its_shards_is_named(cluster: Harness) -> None:
    trainers = await started(cluster)
    cluster.shards["s1"].fail = fail_times("PromoteShards", 10**6, UnavailableError("busy"))
    kill(cluster, "s0")
    await cluster.until(lambda: owners(cluster) == {"s1"}, "the promotion")
    lines = (await cluster.call("ExplainStall", run="r")).waiting_for
    assert "server 's1': PromoteShards of placement 1 not acknowledged" in lines
    cluster.shards["s1"].fail = lambda rpc_name, request: None
    await take_step(trainers, 0)


async def test_contributions_of_former_attempts_are_fenced_on_the_new_primary(cluster: Harness) -> None:
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


@pytest.mark.parametrize("crash", ["before it is stored", "before servers know", "before the update"])
async def test_restarted_coordinator_continues_a_relocation(cluster: Harness, crash: str) -> None:
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


async def test_backup_that_misses_a_step_is_out_of_sync_before_the_commit_and_is_built_again(cluster: Harness) -> None:
    trainers = await started(cluster)
    for copy in cluster.shards["s1"].runs["r"].shards.values():
        copy.in_sync = copy.in_sync and not copy.backup  # its server rejects what the primary sends
    cluster.shards["s1"].fail = fail_times("ReserveUnit", 10**6, UnavailableError("not now"))
    await take_step(trainers, 0)
    stored = (await cluster.state.storage.load()).runs[0].units
    on_s1 = [backup for unit in stored for backup in unit.backups if backup.server_id == "s1"]
    assert not any(backup.in_sync for backup in on_s1)
    assert "backups_lost" in kinds(cluster)
    cluster.shards["s1"].fail = lambda rpc_name, request: None
    await in_sync(cluster, 1)
    kill(cluster, "s0")
    await take_step(trainers, 1)
    await cluster.settle()
    assert histories(cluster) == [[0, 1]] * len(histories(cluster))


async def test_loss_of_primary_and_backup_is_reported(cluster: Harness) -> None:
    a, _ = await started(cluster)
    kill(cluster, "s0")
    await cluster.until(lambda: confirmed(cluster) and owners(cluster) == {"s1"}, "the promotion")
    kill(cluster, "s1")
    with pytest.raises(ConflictError, match="server 's1' at s1:1 has ended, and its shards of units 'u0', 'u1'"):
        await a.heartbeat()


@pytest.mark.harness(num_shards=3)
async def test_backups_can_be_added_and_removed_while_a_run_trains(cluster: Harness) -> None:
    trainers = await started(cluster, backups=0)
    for step, backups in enumerate((1, 2, 0)):
        await cluster.call("SetBackups", run="r", backups=backups)
        await take_step(trainers, step)
        await in_sync(cluster, backups)
    held = sum(shard.reserved_bytes for shard in cluster.shards.values())
    assert held == 2 * 64 * 64 * 4 * 3, "the released copies take no memory"


async def test_unwanted_backup_stays_until_its_primary_has_answered(cluster: Harness) -> None:
    trainers = await trained(cluster)
    cluster.shards["s0"].incarnation = None  # it has ended, and the coordinator does not know this
    await cluster.call("SetBackups", run="r", backups=0)
    await cluster.until(
        lambda: {at.server_id for unit in run_of(cluster).units for at in unit.backups if at.in_sync} == {"s1"},
        "a round that releases the others",
    )
    kill(cluster, "s0")
    await cluster.until(lambda: owners(cluster) == {"s1"} and confirmed(cluster), "the promotion")
    await take_step(trainers, 1)
    await cluster.settle()
    assert histories(cluster) == [[0, 1]] * 4


async def test_unwanted_backup_that_replaces_a_lost_primary_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    call = DirectCalls.call
    async with harness(tmp_path, num_shards=2) as cluster:

        async def lose_first(self: DirectCalls, address: str, rpc_name: str, request: Any, **options: Any) -> Any:
            if rpc_name == "ReleaseShards":
                released.append(next(name for name, at in cluster.addresses.items() if at == address))
                if len(released) == 1:
                    kill(cluster, released[0])
                    await asyncio.Event().wait()  # until the server is gone
            return await call(self, address, rpc_name, request, **options)

        trainers = await trained(cluster)
        monkeypatch.setattr(DirectCalls, "call", lose_first)
        await cluster.call("SetBackups", run="r", backups=0)
        await cluster.until(lambda: bool(released) and owners(cluster).isdisjoint(released), "the promotion")
        await take_step(trainers, 1)
        await cluster.settle()
        assert histories(cluster) == [[0, 1]] * 4
        assert len(released) == 1


async def test_full_server_gets_no_backup_and_the_reason_is_reported(cluster: Harness) -> None:
    trainers = await started(cluster, backups=0)
    for shard in cluster.shards.values():
        shard.fail = fail_times("ReserveUnit", 10**6, CapacityError("no room"))
    await cluster.call("SetBackups", run="r", backups=1)
    await cluster.until(lambda: "backups_delayed" in kinds(cluster), "the event")
    await take_step(trainers, 0)
    assert not any(backup for unit in run_of(cluster).units for backup in unit.backups if backup.in_sync)


@pytest.mark.harness(num_shards=3, lease_s=0.2)
async def test_server_that_its_primary_cannot_reach_is_replaced_by_a_third_one(cluster: Harness) -> None:
    """The coordinator reaches all three servers, but the primary does not reach the server that was chosen."""
    await started(cluster, backups=0, units=1)
    (unit,) = run_of(cluster).units
    chosen = {
        shard.start_bytes: cluster.coordinator.backups._choose(run_of(cluster), unit, shard) for shard in unit.shards
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


async def test_stopped_coordinator_sends_no_more_requests(cluster: Harness) -> None:
    """Also if a server has not answered yet, in a process that goes on, such as that of ``in_process_cluster``."""
    await trained(cluster)
    shard = cluster.shards["s1"]
    shard.fail = fail_times("PromoteShards", 10**6, UnavailableError("busy"))
    kill(cluster, "s0")
    await cluster.until(lambda: shard.calls["PromoteShards"] > 3, "repeated requests")
    calls = run_of(cluster).calls
    await cluster.stop()
    await cluster.until(lambda: not calls.promoting.in_flight, "the end of the repeated requests")
    await cluster.start()


@pytest.mark.harness(num_shards=3)
async def test_other_backups_stay_in_sync_after_a_promotion(cluster: Harness) -> None:
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


async def test_primaries_and_backups_are_compared_by_hash(cluster: Harness) -> None:
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


async def test_the_comparison_is_repeated_if_shards_move_meanwhile(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
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


RESTORE = Restore(url="/c", checkpoint_id="c", step=0, reason="a test")


@pytest.mark.harness(num_shards=3)
async def test_copies_are_neither_built_nor_released_while_the_run_is_loaded(cluster: Harness) -> None:
    """Their numbers would be higher than that of the restore, so that they replace or release its shards."""
    await started(cluster)
    run, (unit, *_) = run_of(cluster), run_of(cluster).units
    backup = run.units.set_backup_state(unit, unit.backups[0], BackupState.RELEASING)
    server = cluster.state.cluster.servers[backup.server_id]
    run.checkpoints.begin_restore(RESTORE, 0.0)
    before = [shard.calls.copy() for shard in cluster.shards.values()]
    with pytest.raises(StepStateError, match="is being loaded"):
        await cluster.coordinator.backups._copy(run, unit, backup)
    await cluster.coordinator.promoter.release(run, backup.process)
    answer = await cluster.call("HeartbeatServer", server_id=server.server_id, epoch=server.epoch)
    assert not answer.retired_shards
    assert [shard.calls for shard in cluster.shards.values()] == before


@pytest.mark.harness(num_shards=3)
async def test_a_step_of_a_run_that_is_being_loaded_does_not_fail(cluster: Harness) -> None:
    """PrepareStep reaches servers that have dropped the shards for the restore."""
    a, b = await started(cluster)
    run = run_of(cluster)

    def fail(rpc_name: str, request: Any) -> None:
        if rpc_name == "PrepareStep":
            if run.checkpoints.restore is None:
                run.checkpoints.begin_restore(RESTORE, 0.0)
            raise IncompleteStepError("no shard")

    for shard in cluster.shards.values():
        shard.fail = fail
    await asyncio.gather(a.finish(0, wait_s=0), b.finish(0, wait_s=0))
    with pytest.raises(UnavailableError, match="is being loaded"):
        await a.prepare(0)
    await cluster.settle()
    assert "step_failed" not in kinds(cluster)
