"""A copy of a shard is dropped only when another one is confirmed: see Note: [Life of a copy]."""

from __future__ import annotations

from typing import Any

import pytest

from shardwell_server.coordinator.leases.server_leases import ServerState
from shardwell_server.coordinator.relocation.relocator import Relocator
from shardwell_server.coordinator.storage.records import BackupState
from shardwell_wire.errors import ConflictError, StaleEpochError, UnavailableError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2, shard_pb2
from tests.support.coordinator import Harness, config, unit
from tests.support.fake_shards import fail_times
from tests.support.relocation import (
    confirmed,
    held,
    histories,
    in_sync,
    kill,
    kinds,
    owners,
    register,
    register_all,
    run_of,
    started,
    take_step,
    trained,
    with_checkpoint,
)

FOR_EVER = 10**6


pytestmark = pytest.mark.usefixtures("without_pauses")


async def restart(
    cluster: Harness, name: str, incarnation: str, *, version: int, can_update: bool = False
) -> list[coordinator_pb2.HeldShard]:
    """Starts the next process of a server, which takes up what lies there. Returns what it keeps."""
    reported = held(cluster, name, version=version, can_update=can_update)
    answer = await register(cluster, name, incarnation, held=reported)
    roles = {(shard.unit_index, shard.start_bytes): shard.role for shard in answer.adopted}
    shards = cluster.shards[name].runs["r"].shards
    for key in list(shards):
        if key not in roles:
            del shards[key]
        else:
            shards[key].backup = roles[key] == shard_pb2.SHARD_ROLE_BACKUP
    return list(answer.adopted)


def former(cluster: Harness) -> set[tuple[str, BackupState]]:
    """Returns the servers and states of all copies that are no backups."""
    return {(at.server_id, at.state) for each in run_of(cluster).units for at in each.backups if not at.is_wanted}


async def retired(cluster: Harness, name: str) -> list[Any]:
    """Returns the copies that a heartbeat names."""
    epoch = cluster.state.cluster.servers[name].epoch
    return list((await cluster.call("HeartbeatServer", server_id=name, epoch=epoch)).retired_shards)


@pytest.mark.parametrize("returns", [False, True])
async def test_drained_server_keeps_its_copies_until_the_target_has_confirmed(cluster: Harness, returns: bool) -> None:
    await register_all(cluster)
    trainers = await trained(cluster, backups=0)
    cluster.shards["s1"].fail = fail_times("PromoteShards", FOR_EVER, UnavailableError("busy"))
    await cluster.call("DrainServer", server_id="s0")
    step = 1
    while "s0" in owners(cluster):
        await take_step(trainers, step)
        step += 1
    assert not await retired(cluster, "s0"), "the target may never have got the shards"
    assert former(cluster) == {("s0", BackupState.FORMER)}
    await cluster.call("DrainServer", server_id="s0", cancel=True)
    kill(cluster, "s1")
    await cluster.until(lambda: "s0" in owners(cluster), "the promotion of the former primary")
    cluster.shards["s1"].fail = lambda rpc_name, request: None
    moved = {(at.unit_index, at.start_bytes) for at in held(cluster, "s1", version=step)}
    if returns:
        await restart(cluster, "s1", "2", version=step - 1, can_update=True)
        await take_step(trainers, step)
        await cluster.settle()
        assert histories(cluster) == [list(range(step + 1))] * 4
    else:  # the shards that s1 had from the start are only there
        primaries = {(each.index, at.start_bytes): at for each in run_of(cluster).units for at in each.shards}
        assert any(primaries[key].server_id == "s0" for key in moved)


async def test_copies_of_any_role_are_taken_up_after_all_servers_ended(cluster: Harness) -> None:
    """s1 gets the backups of s0 when s0 is noticed as gone, and never returns."""
    await register_all(cluster)
    trainers = await trained(cluster)
    cluster.shards["s1"].incarnation = None  # dead, but not noticed yet
    kill(cluster, "s0")
    await cluster.until(lambda: owners(cluster) == {"s1"}, "the promotion on a dead server")
    kill(cluster, "s1")
    await cluster.until(lambda: former(cluster) == {("s0", BackupState.FORMER)}, "the former copies")
    with pytest.raises(UnavailableError, match="when server 's0' or 's1' is started again on its host"):
        await trainers[0].finish(1)
    kept = await restart(cluster, "s0", "2", version=1)
    assert {shard.role for shard in kept} == {shard_pb2.SHARD_ROLE_BACKUP}
    await cluster.until(lambda: owners(cluster) == {"s0"}, "the promotion of the copies that lie there")
    await take_step(trainers, 1)
    await cluster.settle()
    assert histories(cluster) == [[0, 1]] * 4
    assert not await restart(cluster, "s1", "2", version=1), "a step was committed without these copies"
    await in_sync(cluster, 1)
    await take_step(trainers, 2)


async def test_server_that_is_started_again_drops_copies_whose_primary_is_confirmed(cluster: Harness) -> None:
    await register_all(cluster)
    await trained(cluster)
    kill(cluster, "s0")
    await cluster.until(lambda: owners(cluster) == {"s1"} and confirmed(cluster), "the promotion")
    assert former(cluster) == {("s0", BackupState.FORMER)}, "s1 may be lost before s0 is started again"
    assert not await restart(cluster, "s0", "2", version=1)
    await cluster.until(lambda: not former(cluster), "the end of their records")
    await in_sync(cluster, 1)


async def test_server_that_is_started_again_keeps_copies_whose_primary_does_not_answer(cluster: Harness) -> None:
    """s1 and its memory are lost, which the coordinator has not noticed. The backups on s0 are all that is left."""
    await register_all(cluster)
    trainers = await trained(cluster)
    cluster.shards["s1"].incarnation = None
    cluster.shards["s1"].refuses = True
    kept = await restart(cluster, "s0", "2", version=1)
    roles = sorted(shard.role for shard in kept)
    assert roles == [shard_pb2.SHARD_ROLE_PRIMARY] * 2 + [shard_pb2.SHARD_ROLE_BACKUP] * 2
    await cluster.until(lambda: owners(cluster) == {"s0"} and confirmed(cluster), "the promotion of the copies")
    await take_step(trainers, 1)
    await cluster.settle()
    assert histories(cluster) == [[0, 1]] * 4


async def test_commit_ends_former_copies(cluster: Harness) -> None:
    await register_all(cluster)
    trainers = await started(cluster)
    kill(cluster, "s0")
    await cluster.until(lambda: owners(cluster) == {"s1"} and confirmed(cluster), "the promotion")
    await take_step(trainers, 0)
    assert not former(cluster)
    await cluster.restart()
    assert not former(cluster), "stored with the commit record"


async def test_runs_wait_for_a_server_that_may_be_started_again(cluster: Harness) -> None:
    await register_all(cluster)
    trainers = await trained(cluster, backups=0)
    kill(cluster, "s0")
    cluster.clock.now += 3600
    cluster.state.cluster.servers["s1"].renew_lease(cluster.clock.now)
    cluster.coordinator.expire()
    with pytest.raises(UnavailableError, match="when server 's0' is started again on its host, under its id"):
        await trainers[0].finish(1)
    assert len(await restart(cluster, "s0", "2", version=1)) == 2
    await take_step(trainers, 1)
    kill(cluster, "s0")
    await register(cluster, "s0", "3")  # another host, or the host was booted
    with pytest.raises(ConflictError, match=r"was restarted and has lost its shards.*delete-run"):
        await trainers[0].heartbeat()


@pytest.mark.harness(restart_wait_s=20.0)
async def test_run_with_a_checkpoint_waits_while_no_server_could_load_it(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register_all(cluster)
    trainers = await started(cluster, backups=0)
    run = with_checkpoint(cluster, monkeypatch)
    await take_step(trainers, 0)
    await cluster.settle()
    for name in cluster.shards:
        kill(cluster, name)
    cluster.clock.now += 100
    cluster.coordinator.expire()
    await restart(cluster, "s0", "2", version=1)
    cluster.coordinator.expire()
    assert run.checkpoints.restore is None, "s1 is probably being started, too"
    cluster.clock.now += 19
    await retired(cluster, "s0")
    cluster.coordinator.expire()
    assert run.checkpoints.restore is None
    cluster.clock.now += 2
    await retired(cluster, "s0")
    cluster.coordinator.expire()
    await cluster.until(lambda: run.checkpoints.rollback_count == 1, "the rollback")


@pytest.mark.parametrize("keeps_copies", [False, True])
async def test_stopped_server_that_keeps_its_copies_is_waited_for(cluster: Harness, keeps_copies: bool) -> None:
    await register_all(cluster)
    trainers = await started(cluster, backups=0)
    server = cluster.state.cluster.servers["s0"]
    for _ in range(2):
        await cluster.call("DeregisterServer", server_id="s0", epoch=server.epoch, keeps_copies=keeps_copies)
    cluster.shards["s0"].incarnation = None
    with pytest.raises(StaleEpochError, match="has left"):
        await retired(cluster, "s0")
    assert server.state is (ServerState.ENDED if keeps_copies else ServerState.LEFT)
    expected = UnavailableError if keeps_copies else ConflictError
    with pytest.raises(expected, match="'s0'"):
        await trainers[0].finish(0)
    if keeps_copies:
        assert len(await restart(cluster, "s0", "2", version=0)) == 2
        await take_step(trainers, 0)


async def test_backups_replace_a_stopped_server_that_keeps_its_copies(cluster: Harness) -> None:
    await register_all(cluster)
    trainers = await started(cluster)
    epoch = cluster.state.cluster.servers["s0"].epoch
    await cluster.call("DeregisterServer", server_id="s0", epoch=epoch, keeps_copies=True)
    cluster.shards["s0"].incarnation = None
    await cluster.until(lambda: owners(cluster) == {"s1"}, "the promotion")
    await take_step(trainers, 0)


async def test_coordinator_that_ends_between_a_registration_and_its_adoption(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Relocator, *arguments: Any) -> Any:
        raise UnavailableError("the coordinator ends here")

    await register_all(cluster)
    await trained(cluster, backups=0)
    kill(cluster, "s0")
    with monkeypatch.context() as patched, pytest.raises(UnavailableError, match="ends here"):
        patched.setattr(Relocator, "adopt", fail)
        await restart(cluster, "s0", "2", version=1)
    await cluster.restart()
    a, b = [await cluster.join(name, wait_s=5) for name in ("a", "b")]
    with pytest.raises(UnavailableError, match="when server 's0' is started again"):
        await a.finish(1)
    assert len(await restart(cluster, "s0", "2", version=1)) == 2
    await take_step([a, b], 1)
    assert "shards_adopted" in kinds(cluster)


@pytest.mark.harness(num_shards=3)
async def test_restore_places_shards_only_on_servers_that_it_has_emptied(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that returns meanwhile has former copies of the same shards, which it is told to release later."""
    trainers = await started(cluster, backups=0)
    run = with_checkpoint(cluster, monkeypatch)
    await take_step(trainers, 0)
    await cluster.settle()
    lost, other = sorted(owners(cluster))[:2]
    epoch = cluster.state.cluster.servers[lost].epoch

    def returns(rpc_name: str, request: Any) -> None:
        if rpc_name == "BeginRestore":
            cluster.state.cluster.servers[lost].renew_lease(cluster.clock.now)

    cluster.shards[other].fail = returns
    cluster.shards[lost].available = False
    cluster.clock.now += 10.6
    for name in set(cluster.shards) - {lost}:
        cluster.state.cluster.servers[name].renew_lease(cluster.clock.now)
    cluster.coordinator.expire()
    await cluster.until(lambda: run.checkpoints.rollback_count == 1, "the rollback")
    assert lost not in owners(cluster)
    cluster.shards[lost].available = True
    answer = await cluster.call("HeartbeatServer", server_id=lost, epoch=epoch)
    assert answer.retired_shards
    await cluster.until(lambda: not cluster.shards[lost].runs["r"].shards, "the release of its shards")


@pytest.mark.parametrize("how", ["ends", "stops"])
async def test_unit_whose_owner_ends_while_it_is_published_is_placed_again(cluster: Harness, how: str) -> None:
    await register_all(cluster)
    a = await cluster.join("a", wait_s=5, config=config(World(dp=1), min_trainers=1))
    declared = await a.declare(unit("u", (64, 64)))

    def interfere(rpc_name: str, request: Any) -> None:
        server = cluster.state.cluster.servers["s0"]
        if rpc_name == "PublishUnit" and how == "ends":
            server.state = ServerState.ENDED
        elif rpc_name == "PublishUnit":
            server.leaving = True

    cluster.shards["s1"].fail = interfere
    with pytest.raises(StaleEpochError, match="declare the unit again"):
        await a.publish("u", declared.epoch)
    cluster.shards["s1"].fail = lambda rpc_name, request: None
    again = await a.declare(unit("u", (64, 64)))
    assert {shard.server_id for shard in again.shards} == {"s1"}
    await a.publish("u", again.epoch)
    await a.heartbeat()
