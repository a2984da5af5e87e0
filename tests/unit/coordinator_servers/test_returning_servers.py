"""A shard server that counted as lost returns: it is told what it owns, gets missed updates, and is fenced."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_wire.errors import UnavailableError
from tests.support.coordinator import Harness
from tests.support.fake_shards import fail_times
from tests.support.relocation import (
    confirmed,
    held,
    histories,
    in_sync,
    owners,
    register,
    run_of,
    started,
    take_step,
    with_checkpoint,
)

pytestmark = pytest.mark.usefixtures("without_pauses")


async def test_server_that_returns_is_told_which_shards_it_no_longer_owns(cluster: Harness) -> None:
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
    await cluster.until(lambda: owners(cluster) == {"s1"} and confirmed(cluster), "the promotion")
    answer = await cluster.call("HeartbeatServer", server_id="s0", epoch=epoch)
    retired = {(shard.unit, shard.start_bytes) for shard in answer.retired_shards}
    assert retired == before, "former primaries and backups: none of them follows the run any more"
    cluster.shards["s0"].available = True
    await in_sync(cluster, 1)


async def test_server_that_returns_gets_the_update_that_it_missed(cluster: Harness) -> None:
    trainers = await started(cluster, backups=0)
    epoch = cluster.state.cluster.servers["s0"].epoch
    cluster.shards["s0"].fail = fail_times("Update", 10**6, UnavailableError("cut off"))
    await take_step(trainers, 0)
    cluster.shards["s0"].available = False
    cluster.clock.now += 10.6
    cluster.state.cluster.servers["s1"].renew_lease(cluster.clock.now)
    cluster.coordinator.expire()
    await cluster.until(lambda: not cluster.state.cluster.servers["s0"].may_be_alive, "the loss of s0")
    pending = run_of(cluster).commits.pending_updates["s0"]
    await cluster.until(lambda: "the server is lost" in pending.error, "an attempt to update the lost server")
    cluster.shards["s0"].available, cluster.shards["s0"].fail = True, lambda rpc_name, request: None
    await cluster.call("HeartbeatServer", server_id="s0", epoch=epoch)
    for trainer in trainers:
        await trainer.heartbeat()
    await take_step(trainers, 1)
    await cluster.settle()
    assert histories(cluster) == [[0, 1]] * 4


async def test_server_that_returns_is_fenced_before_its_step_is_computed_again(cluster: Harness) -> None:
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
    await cluster.until(lambda: cluster.shards["s0"].calls["Fence"] > 0, "an attempt to fence s0")
    cluster.shards["s0"].available = True
    await cluster.call("HeartbeatServer", server_id="s0", epoch=epoch)
    run = run_of(cluster)
    await cluster.until(lambda: run.started and not run.work.unfenced, "the fences")
    assert [shard.runs["r"].attempts for shard in cluster.shards.values()] == [{0: 1, 1: 1}] * 2
    await take_step(trainers, 0)


async def test_server_that_returns_after_a_rollback_is_told_that_it_owns_nothing(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = await started(cluster, backups=0)
    run = with_checkpoint(cluster, monkeypatch)
    await take_step(trainers, 0)
    await cluster.settle()
    former = {(unit.layout.unit, at.start_bytes) for unit in run.units for at in unit.shards if at.server_id == "s0"}
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
