"""Declaration, placement and publication of units; registration, loss and restart of servers."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.servers.cluster import ServerState
from shardwell_server.coordinator.waiting import Signal
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    DuplicateError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import Harness, finished_item, harness, run_async, unit
from tests.support.fake_shards import COST, fail_times


def test_first_declaration_places_the_unit_for_all_trainers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            declared = await asyncio.gather(*(trainer.declare(unit("u", (64, 64))) for trainer in (b, a, a)))
            assert declared[0].shards == declared[1].shards == declared[2].shards
            assert [(at.start_bytes, at.stop_bytes) for at in declared[0].shards] == [(0, 8192), (8192, 16384)]
            assert {at.address for at in declared[0].shards} == {"s0:1", "s1:1"}
            assert [at.initialize for at in declared] == [False, True, True], (
                "the trainer of the lowest rank sends the values"
            )
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

    run_async(scenario())


def test_small_units_spread_over_the_servers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            declared = await asyncio.gather(*(a.declare(unit(f"u{index}", (32, 32))) for index in range(6)))
            owners = [at.shards[0].server_id for at in declared]
            assert sorted(owners) == ["s0"] * 3 + ["s1"] * 3
            reserved = [server.reserved_bytes for server in (await cluster.call("ListServers")).servers]
            assert reserved == [COST * 3 * 4096] * 2, "as the servers reported"

    run_async(scenario())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (unit("u", (64, 65)), r"parameter 'u.0' was declared with shape \(64, 64\), now with \(64, 65\)"),
        (unit("u", (64, 64), dtype=common_pb2.DTYPE_FLOAT16), "with dtype 'float32', now with 'float16'"),
        (unit("u", (64, 64), (3,)), "with 1 parameters, now with 2: only one declaration contains 'u.1'"),
        (unit("u"), "with 1 parameters, now with 0: only one declaration contains 'u.0'"),
    ],
)
def test_declaration_with_another_layout_is_rejected_by_its_first_difference(
    tmp_path: Path, other: common_pb2.UnitSpec, message: str
) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await a.declare(unit("u", (64, 64)))
            with pytest.raises(UnitMismatchError, match=message):
                await b.declare(other)

    run_async(scenario())


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (unit(""), InvalidRequestError, "the unit has no name"),
        (unit("v", (4,), dtype=common_pb2.DTYPE_INT64), InvalidRequestError, "has dtype int64"),
        (unit("v", (1 << 50,)), InvalidRequestError, "more than the limit"),
        (
            common_pb2.UnitSpec(name="v", parameters=unit("u", (64, 64)).parameters),
            ConflictError,
            "parameter 'u.0' of unit 'v' already belongs to unit 'u'",
        ),
    ],
)
def test_invalid_unit_is_rejected_without_a_trace(
    tmp_path: Path, spec: common_pb2.UnitSpec, error: type[ShardwellError], message: str
) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            await a.declare(unit("u", (64, 64)))
            with pytest.raises(error, match=message):
                await a.declare(spec)
            assert len((await cluster.call("ListUnits", run="r")).units) == 1

    run_async(scenario())


def reserved(cluster: Harness) -> dict[str, list[tuple[int, int]]]:
    """Returns the ranges that each server has reserved."""
    return {
        name: [(at.start_bytes, at.stop_bytes) for run in shard.runs.values() for at in run.units.values()]
        for name, shard in cluster.shards.items()
    }


def test_refused_unit_leaves_no_trace(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
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

    run_async(scenario())


def server_difference(cluster: Harness, name: str) -> int:
    """Returns the reserved bytes that the coordinator derives for a server with less memory than it registered."""
    return (1 << 30) - cluster.shards[name].budget_bytes


def test_refused_unit_is_placed_when_more_servers_register(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
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

    run_async(scenario())


def test_failed_release_of_a_reservation_is_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, lease_s=0.3) as cluster:
            cluster.shards["s1"].budget_bytes = 10_000
            cluster.shards["s0"].fail = fail_times("ReleaseUnit", 2, UnavailableError("not now"))
            a, _ = await cluster.team("a", "b")
            with pytest.raises(CapacityError):
                await a.declare(unit("big", (128, 64)))
            assert reserved(cluster)["s0"]
            await cluster.until(lambda: reserved(cluster)["s0"] == [], "the release of the reservation")

    run_async(scenario())


def test_unpublished_unit_is_placed_again_when_an_owner_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
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

    run_async(scenario())


def test_a_live_server_releases_the_former_placement_of_a_unit_that_is_placed_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=3) as cluster:
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

    run_async(scenario())


def test_declaration_waits_for_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, min_servers=3) as cluster:
            a, _ = await cluster.team("a", "b")
            changed, looking = cluster.state.cluster.changed, asyncio.Event()

            def next_change() -> asyncio.Event:
                looking.set()
                return Signal.next_change(changed)

            # Reports when the declaration starts to wait.
            monkeypatch.setattr(changed, "next_change", next_change)
            waiting = asyncio.create_task(a.declare(unit("u", (64,))))
            await looking.wait()
            await cluster.call("RegisterServer", server_id="s2", address="s0:1", incarnation="x", budget_bytes=1 << 30)
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

    run_async(scenario())


def test_new_unit_after_the_first_commit_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            await asyncio.gather(a.finish(0), b.finish(0))
            assert (await a.commit(0, wait_s=5)).committed
            assert (await a.declare(unit("u", (64, 64)))).version == 1
            with pytest.raises(StepStateError, match="unit 'late' is new, but run 'r' has committed 1 steps"):
                await a.declare(unit("late", (1,)))

    run_async(scenario())


def test_one_trainer_sends_initial_values_until_it_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
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

    run_async(scenario())


def test_failed_publication_is_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            declared = await a.declare(unit("u", (64, 64)))
            cluster.shards["s1"].fail = fail_times("PublishUnit", 1, StepStateError("values are not complete"))
            with pytest.raises(StepStateError, match="server 's1': PublishUnit: values are not complete"):
                await a.publish("u", declared.epoch)
            assert (await a.publish("u", declared.epoch)).version == 0

    run_async(scenario())


def test_publication_does_not_fail_with_that_of_a_lost_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
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

    run_async(scenario())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"server_id": ""}, "server_id is ''"),
        ({"incarnation": ""}, "incarnation is ''"),
        ({"address": "nowhere"}, "address is 'nowhere': expected host:port"),
        ({"address": "h:99999"}, "expected host:port"),
        ({"budget_bytes": 0}, "budget_bytes is 0"),
    ],
)
def test_invalid_registration_is_rejected(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=0) as cluster:
            good = {"server_id": "s", "incarnation": "1", "address": "h:1", "budget_bytes": 1}
            with pytest.raises(InvalidRequestError, match=message):
                await cluster.call("RegisterServer", **(good | fields))
            assert not (await cluster.call("ListServers")).servers

    run_async(scenario())


def test_heartbeat_renews_the_lease_and_retried_registration_keeps_the_epoch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=1) as cluster:
            epoch = await cluster.register("s0")
            assert epoch == await cluster.register("s0")

            async def heartbeat(epoch: int) -> None:
                fields = {"server_id": "s0", "reserved_bytes": 7, "used_bytes": 5}
                await cluster.call("HeartbeatServer", epoch=epoch, **fields)

            for _ in range(3):
                cluster.clock.now += 9
                await heartbeat(epoch)
                cluster.coordinator.expire()
            (server,) = (await cluster.call("ListServers")).servers
            assert (server.live, server.reserved_bytes, server.used_bytes) == (True, 7, 5)
            cluster.clock.now += 11
            cluster.shards["s0"].available = False
            await until_lost(cluster, "s0")
            (server,) = (await cluster.call("ListServers")).servers
            assert (server.live, server.state) == (False, coordinator_pb2.SERVER_STATE_LOST)
            await heartbeat(epoch)
            assert [kind for kind, _ in cluster.events()[-2:]] == ["server_lost", "server_returned"]
            cluster.shards["s0"].available = True
            cluster.shards["s0"].restart("2")
            assert await cluster.register("s0", incarnation="2") > epoch
            with pytest.raises(StaleEpochError, match="register again"):
                await heartbeat(epoch)
            with pytest.raises(DuplicateError, match="this process was lost and replaced by another process"):
                await cluster.register("s0", incarnation="1")
            with pytest.raises(StaleEpochError, match="is not registered: register again"):
                await cluster.call("HeartbeatServer", server_id="s9", epoch=1)

    run_async(scenario())


def test_server_id_of_a_live_process_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=1) as cluster:
            (first,) = cluster.state.cluster.servers.values()
            with pytest.raises(DuplicateError, match="another process at s0:1 has this id and is alive: give every"):
                await cluster.register("s0", incarnation="2")
            await cluster.restart()
            with pytest.raises(DuplicateError, match="has this id and is alive"):
                await cluster.register("s0", incarnation="2")
            assert await cluster.register("s0") == first.epoch, "the first process keeps its lease"
            cluster.shards["s0"].incarnation = None
            assert await cluster.register("s0", incarnation="2") > first.epoch, "the first process has ended"

    run_async(scenario())


def test_server_id_is_free_after_the_lease_of_a_silent_process_expired(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=1, lease_s=30) as cluster:
            cluster.shards["s0"].available = False
            with pytest.raises(UnavailableError, match=r"may be alive, although .* after 30 s without a heartbeat"):
                await cluster.register("s0", incarnation="2")
            assert cluster.state.cluster.servers["s0"].incarnation == "1"
            cluster.clock.now += 31
            await until_lost(cluster, "s0")
            await cluster.register("s0", incarnation="2")
            assert cluster.state.cluster.servers["s0"].incarnation == "2"

    run_async(scenario())


def test_one_of_two_concurrent_registrations_of_an_id_succeeds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=1) as cluster:
            cluster.shards["s0"].restart("2")
            both = (cluster.register("s0", incarnation=incarnation) for incarnation in ("2", "3"))
            outcomes = await asyncio.gather(*both, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [int, DuplicateError]
            assert cluster.state.cluster.servers["s0"].incarnation == "2"

    run_async(scenario())


def test_unit_that_is_placed_again_while_it_is_published_needs_its_values_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
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
            await publishing
            # The new process of s1 was asked to publish as well, which a real server refuses without values.
            assert cluster.shards["s1"].runs["r"].units[0].version == 0

    run_async(scenario())


def test_requests_that_need_a_lost_server_fail_until_it_returns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            waiting = asyncio.create_task(a.finish(0, wait_s=5))
            await asyncio.sleep(0)
            cluster.shards["s1"].available = False
            cluster.state.cluster.servers["s1"].last_seen_s -= 11
            await until_lost(cluster, "s1")
            for call in (waiting, b.finish(0), a.declare(unit("u", (64, 64)))):
                with pytest.raises(
                    UnavailableError,
                    match=r"server 's1' at s1:1 has sent no heartbeat for 11\.0 s \(the coordinator cannot",
                ):
                    await call
            assert "server 's1'" in (await cluster.call("ExplainStall", run="r")).waiting_for[0]
            cluster.shards["s1"].available = True
            await cluster.call("HeartbeatServer", server_id="s1", epoch=2)
            assert (await b.finish(0, wait_s=1)).all_finished
            assert (await a.commit(0, wait_s=5)).committed

    run_async(scenario())


async def until_lost(cluster: Harness, *names: str) -> None:
    cluster.coordinator.expire()
    states = cluster.state.cluster.servers
    await cluster.until(lambda: all(states[name].state is ServerState.LOST for name in names), f"the loss of {names}")


async def until_ended(cluster: Harness, name: str) -> None:
    async with asyncio.timeout(5):
        while not cluster.state.cluster.servers[name].ended:
            await cluster.state.cluster.changed.wait()


def test_requests_that_need_an_ended_server_fail_permanently(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            for name in ("u", "v", "w", "x", "y", "z"):
                await cluster.publish_unit([a, b], name, (64, 64))
            cluster.shards["s1"].incarnation = None
            cluster.state.cluster.servers["s1"].last_seen_s -= 11
            cluster.coordinator.expire()
            await until_ended(cluster, "s1")
            assert cluster.events()[-1] == ("server_ended", "server 's1' at s1:1 has ended: run 'r' lost shards")
            message = (
                "server 's1' at s1:1 has ended, and its shards of units 'u', 'v', 'w', 'x', 'y' and 1 "
                r"more of this run are lost: delete the run \(shardwell delete-run r\) and start it again"
            )
            for call in (a.heartbeat, partial(b.finish, 0), partial(b.declare, unit("late", (1,)))):
                with pytest.raises(ConflictError, match=message):
                    await call()
            await cluster.call("HeartbeatServer", server_id="s1", epoch=2)
            await a.heartbeat()

    run_async(scenario())


def test_lost_server_that_may_be_alive_does_not_fail_the_run_permanently(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, lease_s=0.1) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            shard, server = cluster.shards["s1"], cluster.state.cluster.servers["s1"]
            shard.available = False
            server.last_seen_s -= 11
            await until_lost(cluster, "s1")
            await a.heartbeat()
            with pytest.raises(
                UnavailableError, match=r"of unit 'u' of this run\. The run continues when the server"
            ) as caught:
                await a.finish(0)
            assert "delete" not in str(caught.value), "the server may be alive"
            shard.available, shard.incarnation = True, "another"
            await until_ended(cluster, "s1")
            with pytest.raises(ConflictError, match="has ended"):
                await a.finish(0)

    run_async(scenario())


def test_unit_is_placed_on_other_servers_when_one_ends_before_reserving(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, lease_s=0.1) as cluster:
            a, _ = await cluster.team("a", "b")
            cluster.shards["s1"].incarnation = None
            declaring = asyncio.create_task(a.declare(unit("u", (64, 64))))
            await asyncio.sleep(0)
            cluster.state.cluster.servers["s1"].last_seen_s -= 11
            cluster.coordinator.expire()
            assert {at.server_id for at in (await declaring).shards} == {"s0"}

    run_async(scenario())


def test_heartbeat_fails_when_shards_are_lost_permanently(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            declared = await a.declare(unit("u", (64, 64)))
            cluster.shards["s1"].restart("2")
            await cluster.register("s1", incarnation="2")
            await a.heartbeat()
            await a.declare(unit("u", (64, 64)))
            await a.publish("u", declared.epoch)
            cluster.shards["s1"].restart("3")
            await cluster.register("s1", incarnation="3")
            with pytest.raises(
                ConflictError, match="was restarted and has lost its shards of unit 'u' of this run: del"
            ):
                await a.heartbeat()

    run_async(scenario())


def test_restarted_server_has_lost_its_shards(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            cluster.shards["s1"].restart("2")
            await cluster.register("s1", incarnation="2")
            for call in (a.finish(0), a.declare(unit("u", (64, 64)))):
                with pytest.raises(
                    ConflictError, match="server 's1' was restarted and has lost its shards of unit 'u' of this run"
                ):
                    await call
            assert cluster.events()[-1][0] == "server_restarted"
            assert "run 'r' lost shards" in cluster.events()[-1][1]
            await cluster.call("DeleteRun", run="r", force=True)
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])

    run_async(scenario())


def test_permanently_lost_server_is_named_before_an_unreachable_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            cluster.shards["s1"].restart("2")
            await cluster.register("s1", incarnation="2")
            cluster.shards["s0"].available = False
            cluster.state.cluster.servers["s0"].last_seen_s -= 11
            await until_lost(cluster, "s0")
            with pytest.raises(ConflictError, match="server 's1' was restarted"):
                await a.finish(0)

    run_async(scenario())


def test_unpublished_unit_is_placed_again_on_a_restarted_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            await a.declare(unit("u", (64, 64)))
            cluster.shards["s1"].restart("2")
            await cluster.register("s1", incarnation="2")
            declared = await a.declare(unit("u", (64, 64)))
            assert cluster.shards["s1"].runs["r"].units
            await a.publish("u", declared.epoch)

    run_async(scenario())


def test_update_does_not_wait_for_a_restarted_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            cluster.shards["s1"].fail = fail_times("Update", 10**6, UnavailableError("dead"))
            await asyncio.gather(a.finish(0), b.finish(0))
            await a.commit(0, wait_s=5)
            cluster.shards["s1"].restart("2")
            await cluster.register("s1", incarnation="2")
            await cluster.settle()
            stall = await cluster.call("ExplainStall", run="r")
            assert "was restarted and has lost its shards" in stall.waiting_for[0]
            assert stall.phase == "working"

    run_async(scenario())


def test_deleting_a_run_frees_its_memory_and_fences_its_trainers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            with pytest.raises(ConflictError, match=r"run 'r' has live trainers \('a', 'b'\)"):
                await cluster.call("DeleteRun", run="r")
            waiting = asyncio.create_task(a.finish(0, wait_s=5))
            await asyncio.sleep(0)
            deleted = await cluster.call("DeleteRun", run="r", force=True, request_id="x")
            assert deleted.freed_bytes == COST * 16384
            with pytest.raises(NotFoundError, match="run 'r' was deleted"):
                await waiting
            with pytest.raises(NotFoundError):
                await b.heartbeat()
            assert all(not shard.runs for shard in cluster.shards.values())
            assert (await cluster.call("DeleteRun", run="r", force=True, request_id="x")).freed_bytes == 0
            with pytest.raises(NotFoundError):
                await cluster.call("DeleteRun", run="r", force=True, request_id="y")
            await cluster.restart()
            assert not (await cluster.call("ListRuns")).runs

    run_async(scenario())


def test_leftovers_of_a_deleted_run_are_not_used_by_the_next_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            await cluster.publish_unit([a, b])
            await asyncio.gather(a.finish(0), b.finish(0))
            await a.commit(0, wait_s=5)
            await cluster.settle()
            cluster.shards["s1"].fail = fail_times("DropRun", 1, StepStateError("not now"))
            await cluster.call("DeleteRun", run="r", force=True)
            assert cluster.shards["s1"].runs["r"].units[0].version == 1
            a, b = await cluster.team("a", "b")
            await asyncio.gather(*(a.declare(unit(name, (64, 64))) for name in ("u", "v", "w")))
            units = cluster.shards["s1"].runs["r"].units
            assert {index: at.version for index, at in units.items()} == {0: None, 1: None, 2: None}

    run_async(scenario())


def test_server_of_a_later_term_rejects_the_coordinator_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await cluster.team("a", "b")
            cluster.shards["s0"].term = 7
            with pytest.raises(ConflictError, match="the server follows a coordinator with a later term than 1"):
                await a.declare(unit("u", (64, 64)))

    run_async(scenario())


def test_runs_are_independent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            teams = []
            for run in ("one", "two"):
                await cluster.try_join("a", run=run, incarnation="a")
                b = await cluster.join("b", run=run)
                teams.append((await cluster.join("a", run=run, incarnation="a"), b))
            for a, b in teams:
                await cluster.publish_unit([a, b])
            (a, b), _ = teams
            await asyncio.gather(a.finish(0), b.finish(0))
            assert (await a.commit(0, wait_s=5)).committed
            steps = {run.run: run.committed_step for run in (await cluster.call("ListRuns")).runs}
            assert steps == {"one": 1, "two": 0}
            with pytest.raises(StaleEpochError):
                await cluster.call("FinishWork", context=teams[1][0].context(0, epoch=9), trainer="a")
            assert finished_item(teams[1][0].items[0])

    run_async(scenario())


@pytest.mark.parametrize("published", [False, True])
def test_servers_release_a_unit_that_was_placed_on_others(tmp_path: Path, published: bool) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=2) as cluster:
            (a,) = await cluster.team("a")
            declared = await a.declare(unit("u", (64, 64)))
            assert {shard.server_id for shard in declared.shards} == {"s0", "s1"}
            if published:  # s1 ends before it publishes, too
                cluster.shards["s1"].fail = fail_times("PublishUnit", 1, StepStateError("its values are incomplete"))
                with pytest.raises(StepStateError):
                    await a.publish("u", declared.epoch)
            cluster.shards["s0"].budget_bytes = 0
            cluster.state.cluster.servers["s0"].note_free(0)  # gets no shard any more
            cluster.shards["s1"].restart("2")
            await cluster.register("s1", "2")
            declared = await a.declare(unit("u", (64, 64)))
            assert {shard.server_id for shard in declared.shards} == {"s1"}
            await cluster.until(lambda: not cluster.shards["s0"].runs["r"].shards, "the release on s0")
            await a.publish("u", declared.epoch)
            assert (await a.finish(0, wait_s=5)).all_finished

    run_async(scenario())
