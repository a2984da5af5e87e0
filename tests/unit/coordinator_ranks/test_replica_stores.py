"""Key-value stores of replicas: their semantics, limits, and their end with the replica's epoch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_server.coordinator.rendezvous import REPLICA, KeyValueStore, StoreLimits, Stores
from shardwell_wire.errors import CapacityError, InvalidRequestError, StaleEpochError
from shardwell_wire.model.topology import World
from tests.support.coordinator import Clock, Harness, Trainer, config
from tests.unit.coordinator_ranks.test_connections import keep

WORLD = World(dp=2, pp=2)


async def store_call(trainer: Trainer, rpc_name: str, request_id: str = "", **fields: Any) -> Any:
    fields = {"replica_epoch": trainer.joined.replica_epoch} | fields
    return await trainer.rpcs.call(
        f"Store{rpc_name}", context=trainer.context(0, request_id=request_id), trainer=trainer.name, **fields
    )


async def replicas(cluster: Harness) -> list[Trainer]:
    return await cluster.team("a", "b", "c", "d", world=WORLD)


async def test_members_of_a_replica_share_a_store_and_other_replicas_have_their_own(cluster: Harness) -> None:
    a, b, c, _ = await replicas(cluster)
    waiting = asyncio.create_task(store_call(b, "Get", keys=["x", "y"], wait_s=5))
    await store_call(a, "Set", key="x", value=b"1")
    await store_call(c, "Set", key="y", value=b"other")
    await asyncio.sleep(0.01)
    assert not waiting.done(), "the replica of c has another store"
    await store_call(a, "Set", key="y", value=b"")
    assert list((await waiting).values) == [b"1", b""]
    answer = await store_call(b, "Get", keys=["x", "z"])
    assert (answer.found, list(answer.values), list(answer.missing)) == (False, [], ["z"])
    checked = await store_call(b, "Check", keys=["x", "z"])
    assert (list(checked.missing), checked.key_count) == (["z"], 2)


async def test_counter_is_added_to_once_per_request(cluster: Harness) -> None:
    a, b, *_ = await replicas(cluster)
    assert (await store_call(a, "Add", "first", key="n", amount=2)).value == 2
    assert (await store_call(a, "Add", "first", key="n", amount=2)).value == 2
    assert (await store_call(b, "Add", "second", key="n", amount=-5)).value == -3
    assert list((await store_call(a, "Get", keys=["n"])).values) == [b"-3"]
    await store_call(a, "Set", key="text", value=b"word")
    with pytest.raises(InvalidRequestError, match="its value is not a number"):
        await store_call(a, "Add", key="text", amount=1)
    assert (await store_call(a, "Delete", "gone", key="n")).deleted
    assert (await store_call(a, "Delete", "gone", key="n")).deleted, "a repeated request gets the same answer"
    assert not (await store_call(a, "Delete", key="n")).deleted


async def test_repeated_set_does_not_replace_a_newer_value(cluster: Harness) -> None:
    a, b, *_ = await replicas(cluster)
    await store_call(a, "Set", "first", key="x", value=b"1")
    await store_call(b, "Set", "second", key="x", value=b"2")
    await store_call(a, "Set", "first", key="x", value=b"1")
    assert list((await store_call(a, "Get", keys=["x"])).values) == [b"2"]
    exchange = {"key": "x", "expected": b"2", "value": b"3"}
    assert (await store_call(a, "Set", "third", **exchange)).value == b"3"
    await store_call(b, "Set", "fourth", key="x", value=b"2")
    assert (await store_call(a, "Set", "third", **exchange)).value == b"3", "the answer of the first request"
    assert list((await store_call(a, "Get", keys=["x"])).values) == [b"2"]


async def test_value_is_set_if_it_has_the_expected_value(cluster: Harness) -> None:
    a, *_ = await replicas(cluster)
    assert (await store_call(a, "Set", key="k", value=b"v", expected=b"other")).value == b"other"
    assert (await store_call(a, "Set", key="k", value=b"v", expected=b"")).value == b"v"
    assert (await store_call(a, "Set", key="k", value=b"w", expected=b"")).value == b"v"
    assert (await store_call(a, "Set", key="k", value=b"w", expected=b"v")).value == b"w"


async def test_store_ends_with_the_replicas_epoch_also_for_requests_that_wait(cluster: Harness) -> None:
    a, b, c, _ = await replicas(cluster)
    await store_call(a, "Set", key="x", value=b"1")
    await store_call(c, "Set", key="x", value=b"1")
    waiting = asyncio.create_task(store_call(a, "Get", keys=["never"], wait_s=5))
    await asyncio.sleep(0.01)
    await b.leave()
    with pytest.raises(StaleEpochError, match="a trainer of it was lost or replaced"):
        await waiting
    with pytest.raises(StaleEpochError):
        await store_call(a, "Set", key="x", value=b"1")
    now = cluster.state.runs["r"].owners.replica_epoch_of("a")
    assert not (await store_call(a, "Get", keys=["x"], replica_epoch=now)).found, "the next store is empty"
    assert (await store_call(c, "Get", keys=["x"])).found, "another replica's store goes on"


async def test_lost_store_gets_a_new_epoch_when_a_trainer_uses_it(cluster: Harness) -> None:
    a, b, c, _ = await replicas(cluster)
    await store_call(a, "Set", key="x", value=b"1")
    await store_call(c, "Set", key="x", value=b"1")
    await cluster.restart()
    run = cluster.state.runs["r"]
    assert run.owners.replica_epoch_of("a") == a.joined.replica_epoch, "a complete group is not disturbed"
    assert list((await store_call(c, "Check", keys=["x"])).missing) == ["x"]
    stream = await keep(cluster, a)
    leases = {rank: item.epoch for trainer in (a, b) for rank, item in trainer.items.items()}
    with pytest.raises(StaleEpochError, match="Form its process group again"):
        await store_call(b, "Get", keys=["x"], wait_s=5)
    with pytest.raises(StaleEpochError):
        await store_call(a, "Add", key="n", amount=1)
    now = run.owners.replica_epoch_of("a")
    assert now == run.owners.replica_epoch_of("b") > a.joined.replica_epoch
    await cluster.until(lambda: stream.received[-1].replica_epoch == now, "the new epoch")
    waiting = asyncio.create_task(store_call(b, "Get", keys=["x"], wait_s=5, replica_epoch=now))
    await store_call(a, "Set", key="x", value=b"2", replica_epoch=now)
    assert list((await waiting).values) == [b"2"]
    assert {rank: item.epoch for item in run.work.steps[0].items.values() for rank in item.members} | leases == {
        rank: item.epoch for item in run.work.steps[0].items.values() for rank in item.members
    }, "nothing is computed again"
    assert run.owners.replica_epoch_of("c") == run.owners.replica_epoch_of("d") == c.joined.replica_epoch
    await stream.break_()


async def test_described_replica_epoch_is_not_issued_again_after_a_restart(cluster: Harness) -> None:
    a, *_ = await replicas(cluster)
    run = cluster.state.runs["r"]
    run.revoke_lease(run.members.by_name["b"])  # not stored yet
    described = await cluster.call("DescribeWorld", run="r")
    seen = max(replica.replica_epoch for replica in described.replicas)
    assert seen > a.joined.replica_epoch
    await cluster.restart()
    assert cluster.state.runs["r"].changes.last_epoch >= seen


async def test_join_reveals_only_epochs_that_are_stored(cluster: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    _, b, *_ = await replicas(cluster)
    await b.leave()
    storage, stored = cluster.state.storage, []
    save_run = storage.save_run

    async def save(record: Any, units: Any = ()) -> None:
        await save_run(record, units)
        stored.append(record.last_epoch)
        run = cluster.state.runs["r"]
        run.owners.renew_replicas({"a"})  # while the record is written

    monkeypatch.setattr(storage, "save_run", save)
    again = await cluster.join("b", config=config(WORLD), wait_s=5)
    assert again.ranks and again.joined.replica_epoch <= stored[-1]


async def test_world_without_replicas_of_several_trainers_has_no_store(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    with pytest.raises(InvalidRequestError, match="has no replica store"):
        await store_call(a, "Set", key="x", value=b"1")


def test_full_store_rejects_values_and_has_room_after_a_delete() -> None:
    store = KeyValueStore(StoreLimits(max_keys=2, max_bytes=10))
    store.set("a", b"12345678")
    with pytest.raises(CapacityError):
        store.set("b", b"1")
    store.set("a", b"1")
    store.set("b", b"1234567")
    with pytest.raises(CapacityError):
        store.set("a", b"12")
    store.delete("b", "")
    store.set("b", b"")
    with pytest.raises(CapacityError, match="2 keys"):
        store.set("c", b"")
    with pytest.raises(InvalidRequestError, match="expected at most"):
        store.set("k" * 2000, b"")
    assert store.get(["a", "b"]) == [b"1", b""]


@pytest.mark.parametrize("amount", [1, -1])
def test_sum_that_no_response_can_hold_is_rejected(amount: int) -> None:
    store, largest = KeyValueStore(), (1 << 63) - 1
    most = largest if amount > 0 else -largest - 1
    assert store.add("count", most, "1") == most
    with pytest.raises(InvalidRequestError, match="is not a 64-bit number"):
        store.add("count", amount, "2")
    assert store.add("count", -amount, "3") == most - amount


def test_only_current_stores_are_kept() -> None:
    stores = Stores(REPLICA, Clock())
    stores.open(3).set("x", b"1")
    stores.lost.update([1, 2])
    stores.keep([2, 4])
    assert stores.open(3).get(["x"]) is None
    assert [epoch in stores.lost for epoch in (1, 2, 4)] == [False, True, False]
