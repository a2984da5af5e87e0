"""Processes of the next version work with this coordinator, as long as both speak one version."""

from __future__ import annotations

import re

import pytest

from shardwell_wire.connection import protocol_versions
from shardwell_wire.errors import ConflictError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, config

NEXT = protocol_versions.NEWEST + 1


def versions(oldest: int, newest: int) -> coordinator_pb2.ProtocolVersions:
    return coordinator_pb2.ProtocolVersions(oldest=oldest, newest=newest)


@pytest.mark.harness(num_shards=1)
async def test_server_and_trainer_of_the_next_version_speak_the_version_of_the_coordinator(cluster: Harness) -> None:
    both = versions(protocol_versions.NEWEST, NEXT)
    answer = await cluster.call(
        "RegisterServer",
        server_id="s0",
        address="s0:1",
        budget_bytes=1 << 30,
        incarnation="1",
        protocol=both,
    )
    assert answer.protocol_version == protocol_versions.NEWEST
    joined = await cluster.try_join("a", config=config(World(dp=1)), protocol=both)
    assert (joined.started, joined.protocol_version) == (True, protocol_versions.NEWEST)


@pytest.mark.harness(num_shards=1)
async def test_process_without_a_common_version_is_rejected_and_told_what_to_update(cluster: Harness) -> None:
    only_next = versions(NEXT, NEXT)
    expected = f"speaks protocol versions {NEXT} to {NEXT}, but this coordinator speaks 1 to 1: update the older"
    with pytest.raises(ConflictError, match=re.escape("shard server 's9' " + expected)):
        await cluster.call(
            "RegisterServer",
            server_id="s9",
            address="s9:1",
            budget_bytes=1 << 30,
            incarnation="1",
            protocol=only_next,
        )
    assert "s9" not in cluster.state.cluster.servers
    with pytest.raises(ConflictError, match=re.escape("trainer 'a' " + expected)):
        await cluster.try_join("a", config=config(World(dp=1)), protocol=only_next)
    assert not cluster.state.runs


@pytest.mark.harness(num_shards=1)
async def test_coordinator_that_has_restarted_with_other_versions_rejects_members_at_their_heartbeat(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(cluster.state.cluster.servers))
    server = {"server_id": name, "epoch": cluster.state.cluster.servers[name].epoch, "shardwell_version": "1.2"}
    joined = await cluster.try_join("a", config=config(World(dp=1)))
    trainer = {"run": "r", "run_id": joined.run_id, "trainer": "a", "epoch": joined.epoch}
    await cluster.call("HeartbeatServer", **server)  # an older process, which does not send its versions
    await cluster.call("Heartbeat", **trainer, protocol=protocol_versions.own_versions())
    listed = await cluster.call("ListServers")
    assert [each.shardwell_version for each in listed.servers] == ["1.2"]
    for name in ("OLDEST", "NEWEST"):
        monkeypatch.setattr(protocol_versions, name, NEXT)
    for rpc, member, request in (
        ("HeartbeatServer", f"shard server {server['server_id']!r}", server),
        ("Heartbeat", "trainer 'a'", trainer),
    ):
        with pytest.raises(ConflictError, match=f"{member} speaks protocol versions 1 to 1, but this coordinator"):
            await cluster.call(rpc, **request, protocol=versions(1, 1))


def test_version_of_a_coordinator_that_does_not_negotiate_is_the_first() -> None:
    protocol_versions.check_chosen(0, "c:1")
    with pytest.raises(ConflictError, match=f"the coordinator at c:1 chose protocol version {NEXT}"):
        protocol_versions.check_chosen(NEXT, "c:1")
