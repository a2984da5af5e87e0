"""Declaration, placement and publication of units."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.signals import Signal
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import Harness, unit, until_lost
from tests.support.fake_shards import COST, fail_times


async def test_first_declaration_places_the_unit_for_all_trainers(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    declared = await asyncio.gather(*(trainer.declare(unit("u", (64, 64))) for trainer in (b, a, a)))
    assert declared[0].shards == declared[1].shards == declared[2].shards
    assert [(at.start_bytes, at.stop_bytes) for at in declared[0].shards] == [(0, 8192), (8192, 16384)]
    assert {at.address for at in declared[0].shards} == {"s0:1", "s1:1"}
    assert [at.initialize for at in declared] == [False, True, True], "the trainer of the lowest rank sends the values"
    assert not declared[0].HasField("version")
    assert all(shard.calls["ReserveUnit"] == 1 for shard in cluster.shards.values())
    second = await a.declare(unit("v", (1,)))
    assert second.unit_index == 1
    assert len(second.shards) == 1
    published = await a.publish("u", declared[1].epoch)
    assert published.version == 0
    assert (await b.declare(unit("u", (64, 64)))).version == 0
    listed = (await cluster.call("ListUnits", run="r")).units
    assert [(at.unit, at.published, at.element_count, at.size_bytes) for at in listed] == [
        ("u", True, 4096, 16384),
        ("v", False, 1, 64),
    ]


async def test_small_units_spread_over_the_servers(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    declared = await asyncio.gather(*(a.declare(unit(f"u{index}", (32, 32))) for index in range(6)))
    owners = [at.shards[0].server_id for at in declared]
    assert sorted(owners) == ["s0"] * 3 + ["s1"] * 3
    reserved = [server.reserved_bytes for server in (await cluster.call("ListServers")).servers]
    assert reserved == [COST * 3 * 4096] * 2, "as the servers reported"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (unit("u", (64, 65)), r"parameter 'u.0' was declared with shape \(64, 64\), now with \(64, 65\)"),
        (unit("u", (64, 64), dtype=common_pb2.DTYPE_FLOAT16), "with dtype 'float32', now with 'float16'"),
        (unit("u", (64, 64), (3,)), "with 1 parameters, now with 2: only one declaration contains 'u.1'"),
        (unit("u"), "with 1 parameters, now with 0: only one declaration contains 'u.0'"),
    ],
)
async def test_declaration_with_another_layout_is_rejected_by_its_first_difference(
    cluster: Harness, other: common_pb2.UnitSpec, message: str
) -> None:
    a, b = await cluster.team("a", "b")
    await a.declare(unit("u", (64, 64)))
    with pytest.raises(UnitMismatchError, match=message):
        await b.declare(other)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (unit(""), InvalidRequestError, "the unit has no name"),
        (unit("v", (4,), dtype=common_pb2.DTYPE_UNSPECIFIED), InvalidRequestError, "has dtype unspecified"),
        (unit("v", (1 << 50,)), InvalidRequestError, "more than the limit"),
        (
            common_pb2.UnitSpec(name="v", parameters=unit("u", (64, 64)).parameters),
            ConflictError,
            "parameter 'u.0' of unit 'v' already belongs to unit 'u'",
        ),
    ],
)
async def test_invalid_unit_is_rejected_without_a_trace(
    cluster: Harness, spec: common_pb2.UnitSpec, error: type[ShardwellError], message: str
) -> None:
    a, _ = await cluster.team("a", "b")
    await a.declare(unit("u", (64, 64)))
    with pytest.raises(error, match=message):
        await a.declare(spec)
    assert len((await cluster.call("ListUnits", run="r")).units) == 1


def reserved(cluster: Harness) -> dict[str, list[tuple[int, int]]]:
    """Returns the ranges that each server has reserved."""
    return {
        name: [(at.start_bytes, at.stop_bytes) for run in shard.runs.values() for at in run.units.values()]
        for name, shard in cluster.shards.items()
    }


async def test_refused_unit_leaves_no_trace(cluster: Harness) -> None:
    cluster.shards["s1"].budget_bytes = 10_000
    a, b = await cluster.team("a", "b")
    with pytest.raises(CapacityError, match=r"server 's1': ReserveUnit: .* do not fit"):
        await a.declare(unit("big", (128, 64)))
    assert reserved(cluster) == {"s0": [], "s1": []}
    assert not (await cluster.call("ListUnits", run="r")).units
    servers = (await cluster.call("ListServers")).servers
    assert [server.reserved_bytes for server in servers] == [0, server_difference(cluster, "s1")]
    await cluster.restart()
    assert not cluster.state.runs["r"].units
    await cluster.publish_unit([a, b], "small", (8, 8))
    smaller = await a.declare(unit("big", (8, 8)))
    assert smaller.unit_index == 1
    await a.publish("big", smaller.epoch)
    await asyncio.gather(a.finish(0), b.finish(0))
    assert (await a.commit(0, wait_s=5)).committed


def server_difference(cluster: Harness, name: str) -> int:
    """Returns the reserved bytes that the coordinator derives for a server with less memory than it registered."""
    return (1 << 30) - cluster.shards[name].budget_bytes


@pytest.mark.harness(num_shards=3)
async def test_refused_unit_is_placed_when_more_servers_register(cluster: Harness) -> None:
    for shard in cluster.shards.values():
        shard.budget_bytes = 60_000
    cluster.shards["s2"].available = False
    a, _ = await cluster.team("a", "b")
    del cluster.state.cluster.servers["s2"]
    with pytest.raises(CapacityError):
        await a.declare(unit("u", (128, 256)))
    cluster.shards["s2"].available = True
    cluster.shards["s2"].budget_bytes = 1 << 30
    await cluster.register("s2")
    declared = await a.declare(unit("u", (128, 256)))
    assert reserved(cluster)["s2"] == [
        (at.start_bytes, at.stop_bytes) for at in declared.shards if at.server_id == "s2"
    ]


@pytest.mark.harness(lease_s=0.3)
async def test_failed_release_of_a_reservation_is_retried(cluster: Harness) -> None:
    cluster.shards["s1"].budget_bytes = 10_000
    cluster.shards["s0"].fail = fail_times("ReleaseUnit", 2, UnavailableError("not now"))
    a, _ = await cluster.team("a", "b")
    with pytest.raises(CapacityError):
        await a.declare(unit("big", (128, 64)))
    assert reserved(cluster)["s0"]
    await cluster.until(lambda: reserved(cluster)["s0"] == [], "the release of the reservation")


async def test_unpublished_unit_is_placed_again_when_an_owner_leaves(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    first = await a.declare(unit("u", (64, 64)))
    assert {at.server_id for at in first.shards} == {"s0", "s1"}
    cluster.shards["s1"].incarnation = None
    cluster.state.cluster.deregister(cluster.state.cluster.servers["s1"])
    again = await b.declare(unit("u", (64, 64)))
    assert {at.server_id for at in again.shards} == {"s0"}
    assert again.unit_index == first.unit_index
    await cluster.restart()
    (placed,) = cluster.state.runs["r"].units
    assert {at.server_id for at in placed.shards} == {"s0"}


@pytest.mark.harness(num_shards=3)
async def test_a_live_server_releases_the_former_placement_of_a_unit_that_is_placed_elsewhere(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    first = await a.declare(unit("u", (64, 32)))
    stays, ends = (at.server_id for at in first.shards)
    (other,) = {"s0", "s1", "s2"} - {stays, ends}
    cluster.shards[ends].incarnation = None
    cluster.state.cluster.deregister(cluster.state.cluster.servers[ends])
    await cluster.call("DrainServer", server_id=stays)
    again = await b.declare(unit("u", (64, 32)))
    assert [at.server_id for at in again.shards] == [other]
    # A primary that the run does not know would miss every step, also those of backups on this server.
    assert reserved(cluster)[stays] == []


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.harness(num_shards=3)
async def test_restarted_coordinator_releases_reservations_that_the_former_one_left(
    cluster: Harness, published: bool
) -> None:
    def refuse(rpc_name: str, request: Any) -> None:
        if rpc_name == "ReleaseUnit":
            raise UnavailableError("fake: no answer")

    a, b = await cluster.team("a", "b")
    declared = await b.declare(unit("u", (64, 64)))
    assert [at.server_id for at in declared.shards] == ["s0", "s1", "s2"]
    cluster.shards["s0"].fail = refuse
    cluster.shards["s2"].incarnation = None
    cluster.state.cluster.deregister(cluster.state.cluster.servers["s2"])
    await cluster.call("DrainServer", server_id="s0")
    again = await b.declare(unit("u", (64, 64)))
    assert [at.server_id for at in again.shards] == ["s1"]
    if published:
        await a.publish("u", (await a.declare(unit("u", (64, 64)))).epoch)
    assert reserved(cluster)["s0"], "the release has failed"
    await cluster.restart()
    cluster.shards["s0"].fail = lambda rpc_name, request: None
    await cluster.register("s0")
    await cluster.until(lambda: not reserved(cluster)["s0"], "the release")
    assert reserved(cluster)["s1"], "the shard of the new placement stays"


async def test_reservation_that_was_never_recorded_is_released(cluster: Harness) -> None:
    _, b = await cluster.team("a", "b")
    run = cluster.state.runs["r"]
    layout = UnitLayout.from_proto(unit("u", (64, 64)))
    await cluster.coordinator.placer.reserve(run, 0, layout, run.changes.next_epoch(), {"s0": "1", "s1": "1"})
    await cluster.state.save(run)
    assert all(reserved(cluster).values())
    await cluster.restart()
    await cluster.register("s0")
    await cluster.register("s1")
    await cluster.call("DrainServer", server_id="s0")
    again = await b.declare(unit("u", (64, 64)))
    assert [at.server_id for at in again.shards] == ["s1"]
    await cluster.until(lambda: not reserved(cluster)["s0"], "the release")


@pytest.mark.harness(min_servers=3)
async def test_declaration_waits_for_servers(cluster: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = await cluster.team("a", "b")
    changed, looking = cluster.state.cluster.changed, asyncio.Event()

    def next_change() -> asyncio.Event:
        looking.set()
        return Signal.next_change(changed)

    # Reports when the declaration starts to wait.
    monkeypatch.setattr(changed, "next_change", next_change)
    waiting = asyncio.create_task(a.declare(unit("u", (64,))))
    await looking.wait()
    await cluster.add_server("s2")
    assert (await waiting).shards
    await cluster.call("DeleteRun", run="r", force=True)
    for shard in cluster.shards.values():
        shard.available = False
    cluster.clock.now += 11
    await until_lost(cluster, "s0", "s1", "s2")
    a, _ = await cluster.team("a", "b")
    cluster.limit_s = 0.05
    with pytest.raises(UnavailableError, match="0 of 3 are live; start more"):
        await a.declare(unit("u", (64,)))


async def test_new_unit_after_the_first_commit_is_rejected(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0))
    assert (await a.commit(0, wait_s=5)).committed
    assert (await a.declare(unit("u", (64, 64)))).version == 1
    with pytest.raises(StepStateError, match="unit 'late' is new, but run 'r' has committed 1 steps"):
        await a.declare(unit("late", (1,)))


async def test_one_trainer_sends_initial_values_until_it_is_gone(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    first = await a.declare(unit("u", (64, 64)))
    with pytest.raises(StaleEpochError, match="they are expected from trainer 'a'"):
        await b.publish("u", first.epoch)
    with pytest.raises(StaleEpochError):
        await a.publish("u", first.epoch - 1)
    with pytest.raises(NotFoundError, match="has no unit 'w'"):
        await a.publish("w", first.epoch)
    await a.leave()
    stand_in = await b.declare(unit("u", (64, 64)))
    assert stand_in.initialize
    assert stand_in.epoch > first.epoch
    reborn = await cluster.join("a", wait_s=1)
    assert not (await reborn.declare(unit("u", (64, 64)))).initialize
    with pytest.raises(StaleEpochError):
        await reborn.publish("u", first.epoch)
    await cluster.restart()
    await b.publish("u", stand_in.epoch)
    assert (await reborn.publish("u", first.epoch)).version == 0, "the unit is already published"


async def test_failed_publication_is_retried(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    declared = await a.declare(unit("u", (64, 64)))
    cluster.shards["s1"].fail = fail_times("PublishUnit", 1, StepStateError("values are not complete"))
    with pytest.raises(StepStateError, match="server 's1': PublishUnit: values are not complete"):
        await a.publish("u", declared.epoch)
    assert (await a.publish("u", declared.epoch)).version == 0


async def test_publication_does_not_fail_with_that_of_a_lost_trainer(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    first = await a.declare(unit("u", (64, 64)))
    has_values_of_b = False

    def fail(rpc_name: str, request: Any) -> None:
        if rpc_name == "PublishUnit" and request.context.epoch == first.epoch:
            if has_values_of_b:
                raise StepStateError("the values of this epoch are not complete")
            raise UnavailableError("fake: temporary failure")

    cluster.shards["s1"].fail = fail
    publishing = asyncio.create_task(a.publish("u", first.epoch))
    await cluster.until(lambda: bool(cluster.shards["s1"].calls["PublishUnit"]), "publication on s1")
    await a.leave()
    again = await b.declare(unit("u", (64, 64)))
    assert again.initialize and again.epoch > first.epoch
    other = asyncio.create_task(b.publish("u", again.epoch))
    await asyncio.sleep(0)
    has_values_of_b = True
    assert (await other).version == 0
    with pytest.raises(StepStateError, match="not complete"):
        await publishing


async def test_unit_that_is_placed_again_while_it_is_published_needs_its_values_again(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    declared = await a.declare(unit("u", (64, 64)))
    assert declared.initialize
    unavailable = True

    def fail(rpc_name: str, request: Any) -> None:
        if rpc_name == "PublishUnit" and unavailable:
            raise UnavailableError("fake: temporary failure")

    cluster.shards["s0"].fail = fail
    publishing = asyncio.create_task(a.publish("u", declared.epoch))
    await cluster.until(lambda: bool(cluster.shards["s1"].calls["PublishUnit"]), "publication on s1")
    cluster.shards["s1"].restart("2")
    await cluster.register("s1", incarnation="2")
    again = await b.declare(unit("u", (64, 64)))
    assert sorted(at.incarnation for at in again.shards) == ["1", "2"]
    unavailable = False
    with pytest.raises(StaleEpochError, match="declare the unit again"):
        await publishing
    declared = await a.declare(unit("u", (64, 64)))
    assert declared.initialize and not declared.HasField("version")
    await a.publish("u", declared.epoch)


async def test_values_sent_to_a_former_placement_on_the_same_servers_are_not_published(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    declared = await a.declare(unit("u", (64, 64)))

    unavailable = True

    def fail(rpc_name: str, request: Any) -> None:
        if rpc_name == "PublishUnit" and unavailable:
            raise UnavailableError("fake: temporary failure")

    cluster.shards["s1"].fail = fail
    publishing = asyncio.create_task(a.publish("u", declared.epoch))
    await cluster.until(lambda: bool(cluster.shards["s1"].calls["PublishUnit"]), "publication on s1")
    cluster.state.runs["r"].units.require("u").reserved = False
    again = await b.declare(unit("u", (64, 64)))
    assert again.shards == declared.shards
    unavailable = False
    with pytest.raises(StaleEpochError, match="declare the unit again"):
        await publishing
    assert not (await b.declare(unit("u", (64, 64)))).HasField("version")


async def test_restarted_coordinator_does_not_rely_on_reservations_of_units_without_values(cluster: Harness) -> None:
    a, _ = await cluster.team("a", "b")
    declared = await a.declare(unit("u", (64, 64)))
    # The former coordinator was killed after it had released a reservation, before it stored the new placement.
    cluster.shards["s1"].runs["r"].shards.clear()
    await cluster.restart()
    await cluster.register("s0")
    await cluster.register("s1")
    again = await a.declare(unit("u", (64, 64)))
    assert all(reserved(cluster).values())
    assert again.initialize and again.epoch > declared.epoch, "the trainer sends its values again"
    with pytest.raises(StaleEpochError, match="declare the unit again"):
        await a.publish("u", declared.epoch)
    assert (await a.publish("u", again.epoch)).version == 0


@pytest.mark.parametrize("published", [False, True])
async def test_servers_release_a_unit_that_was_placed_on_others(cluster: Harness, published: bool) -> None:
    (a,) = await cluster.team("a")
    declared = await a.declare(unit("u", (64, 64)))
    assert {shard.server_id for shard in declared.shards} == {"s0", "s1"}
    if published:  # s1 ends before it publishes, too
        cluster.shards["s1"].fail = fail_times("PublishUnit", 1, StepStateError("its values are incomplete"))
        with pytest.raises(StepStateError):
            await a.publish("u", declared.epoch)
    cluster.shards["s0"].budget_bytes = 0
    cluster.state.cluster.note_free("s0", 0)  # gets no shard any more
    cluster.shards["s1"].restart("2")
    await cluster.register("s1", "2")
    declared = await a.declare(unit("u", (64, 64)))
    assert {shard.server_id for shard in declared.shards} == {"s1"}
    await cluster.until(lambda: not cluster.shards["s0"].runs["r"].shards, "the release on s0")
    await a.publish("u", declared.epoch)
    assert (await a.finish(0, wait_s=5)).all_finished


async def test_names_in_the_model_are_part_of_the_run(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")

    async def declare(name: str, *names: str) -> None:
        request = {"context": b.context(0), "trainer": b.name, "unit": unit("u", (64, 64))}
        await cluster.call(
            "DeclareUnit", **request, names_in_model=[coordinator_pb2.NamesInModel(name=name, model_names=names)]
        )

    async def described() -> list[str]:
        (weights,) = (await cluster.call("DescribeWeights", run="r")).units
        return list(weights.spec.parameters[0].model_names)

    await declare("u.0", "blocks.0.weight", "head.weight")
    assert await described() == ["blocks.0.weight", "head.weight"]
    await a.declare(unit("u", (64, 64)))
    await declare("x", "y")
    assert await described() == ["blocks.0.weight", "head.weight"], "of others nothing changes"
    with pytest.raises(InvalidRequestError, match="model_names is 'a\\\\n'"):
        await declare("u.0", "a\n")
    await cluster.restart()
    assert await described() == ["blocks.0.weight", "head.weight"]
    units = cluster.state.runs["r"].units
    units.load([Unit(0, UnitLayout.from_proto(unit("u", (64, 64))), next(iter(units)).shards, published=True)])
    assert await described() == ["blocks.0.weight", "head.weight"], "an earlier checkpoint does not know them"
    await declare("u.0")
    assert await described() == []
