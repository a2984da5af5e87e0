"""A restarted process of a shard server takes up the shards of its predecessor, or gets none of them."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest

from shardwell_wire.errors import ConflictError, UnavailableError
from shardwell_wire.v1 import shard_pb2
from tests.support.coordinator import Harness
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
)

pytestmark = pytest.mark.usefixtures("without_pauses")


@pytest.mark.parametrize("interrupted", [False, True])
async def test_restarted_process_keeps_its_shards_and_the_step_is_repeated(cluster: Harness, interrupted: bool) -> None:
    await register_all(cluster)
    a, b = trainers = await trained(cluster, backups=0)
    if interrupted:
        cluster.shards["s0"].fail = fail_times("Update", 10**6, UnavailableError("stopped"))
        await take_step(trainers, 1)
    await a.finish(2 if interrupted else 1)
    kill(cluster, "s0")
    with pytest.raises(UnavailableError, match="its shards of units 'u0', 'u1' of this run on its host"):
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


async def test_restarted_process_without_the_committed_version_keeps_nothing(cluster: Harness) -> None:
    await register_all(cluster)
    trainers = await started(cluster, backups=0)
    await take_step(trainers, 0)
    kill(cluster, "s0")
    answer = await register(cluster, "s0", "2", held=held(cluster, "s0", version=0))
    assert not answer.adopted
    why = (
        r"server 's0' was restarted and has lost its shards .* About the new process: it does not continue 2 shards, "
        r"such as 'u0' from byte 0 at version 0, complete, which cannot be updated; the committed version is 1$"
    )
    with pytest.raises(ConflictError, match=why):
        await trainers[0].heartbeat()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_registration_that_ends_before_the_adoption_is_stored_is_repeated(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    await register_all(cluster)
    trainers = await trained(cluster, backups=0)
    await trainers[0].finish(1)
    kill(cluster, "s0")
    reported = held(cluster, "s0", version=1)
    error = asyncio.CancelledError() if cancelled else UnavailableError("the disk is full")
    with monkeypatch.context() as patched:
        patched.setattr(cluster.coordinator.relocator._state, "save", AsyncMock(side_effect=error))
        with pytest.raises(type(error)):  # the deadline of the call is over, or the coordinator cannot store the run
            await register(cluster, "s0", "2", held=reported)
    assert list((await register(cluster, "s0", "2", held=reported)).adopted) == reported
    await take_step(trainers, 1)
    await cluster.settle()
    assert histories(cluster) == [[0, 1]] * 4
    assert kinds(cluster).count("shards_adopted") == 1


async def test_registration_is_repeated_after_the_step_was_committed(cluster: Harness) -> None:
    await register_all(cluster)
    trainers = await started(cluster, backups=0)
    reported = held(cluster, "s0", version=0)
    assert list((await register(cluster, "s0", "2", held=reported)).adopted) == reported
    cluster.shards["s0"].fail = fail_times("Update", 10**6, UnavailableError("busy"))
    await take_step(trainers, 0)
    again = await register(cluster, "s0", "2", held=reported)  # the first answer was lost
    assert list(again.adopted) == reported, "the process owns these shards, and their update is due"


async def test_process_that_cannot_apply_the_step_keeps_nothing_while_it_is_committed(cluster: Harness) -> None:
    await register_all(cluster)
    await started(cluster, backups=0)
    with run_of(cluster).commits.writing_record():
        adopted = (await register(cluster, "s0", "2", held=held(cluster, "s0", version=0))).adopted
        assert not adopted
        prepared = held(cluster, "s1", version=0, can_update=True)
        assert list((await register(cluster, "s1", "2", held=prepared)).adopted) == prepared


async def test_restarted_process_has_the_backups_of_its_predecessor(cluster: Harness) -> None:
    await register_all(cluster)
    trainers = await trained(cluster)
    for server in cluster.shards.values():
        server.fail = fail_times("ReserveUnit", 10**6, UnavailableError("no new copies"))
    reported = [at for at in held(cluster, "s0", version=1) if at.role == shard_pb2.SHARD_ROLE_PRIMARY]
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


async def test_restarted_process_does_not_keep_shards_that_a_backup_replaced(cluster: Harness) -> None:
    await register_all(cluster)
    trainers = await started(cluster)
    reported = held(cluster, "s0", version=0)
    kill(cluster, "s0")
    await cluster.until(lambda: owners(cluster) == {"s1"} and confirmed(cluster), "the promotion")
    assert not (await register(cluster, "s0", "2", held=reported)).adopted
    cluster.shards["s0"].restart("2")
    await take_step(trainers, 0)
    await in_sync(cluster, 1)
