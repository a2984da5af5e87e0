"""Registration of shard servers, and their heartbeats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_wire.errors import (
    DuplicateError,
    InvalidRequestError,
    StaleEpochError,
    UnavailableError,
)
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, until_lost


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"server_id": ""}, "server_id is ''"),
        ({"incarnation": ""}, "incarnation is ''"),
        ({"address": "nowhere"}, "address is 'nowhere': expected host:port"),
        ({"address": "h:99999"}, "expected host:port"),
        ({"address": "127.0.0.1:1:2"}, "expected host:port"),
        ({"address": "::1:50052"}, "expected host:port"),
        ({"address": "http://h:1"}, "expected host:port"),
        ({"budget_bytes": 0}, "budget_bytes is 0"),
    ],
)
@pytest.mark.harness(num_shards=0)
async def test_invalid_registration_is_rejected(cluster: Harness, fields: dict[str, Any], message: str) -> None:
    good = {"server_id": "s", "incarnation": "1", "address": "h:1", "budget_bytes": 1}
    with pytest.raises(InvalidRequestError, match=message):
        await cluster.call("RegisterServer", **(good | fields))
    assert not (await cluster.call("ListServers")).servers


@pytest.mark.harness(num_shards=1)
async def test_heartbeat_renews_the_lease_and_retried_registration_keeps_the_epoch(cluster: Harness) -> None:
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


@pytest.mark.harness(num_shards=1)
async def test_server_id_of_a_live_process_is_rejected(cluster: Harness) -> None:
    (first,) = cluster.state.cluster.servers.values()
    with pytest.raises(DuplicateError, match="another process at s0:1 has this id and is alive: give every"):
        await cluster.register("s0", incarnation="2")
    await cluster.restart()
    with pytest.raises(DuplicateError, match="has this id and is alive"):
        await cluster.register("s0", incarnation="2")
    assert await cluster.register("s0") == first.epoch, "the first process keeps its lease"
    cluster.shards["s0"].incarnation = None
    assert await cluster.register("s0", incarnation="2") > first.epoch, "the first process has ended"


@pytest.mark.harness(num_shards=1, lease_s=30)
async def test_server_id_is_free_after_the_lease_of_a_silent_process_expired(cluster: Harness) -> None:
    cluster.shards["s0"].available = False
    with pytest.raises(UnavailableError, match=r"may be alive, although .* after 30 s without a heartbeat"):
        await cluster.register("s0", incarnation="2")
    assert cluster.state.cluster.servers["s0"].incarnation == "1"
    cluster.clock.now += 31
    await until_lost(cluster, "s0")
    await cluster.register("s0", incarnation="2")
    assert cluster.state.cluster.servers["s0"].incarnation == "2"


@pytest.mark.harness(num_shards=1)
async def test_one_of_two_concurrent_registrations_of_an_id_succeeds(cluster: Harness) -> None:
    cluster.shards["s0"].restart("2")
    both = (cluster.register("s0", incarnation=incarnation) for incarnation in ("2", "3"))
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [int, DuplicateError]
    assert cluster.state.cluster.servers["s0"].incarnation == "2"
