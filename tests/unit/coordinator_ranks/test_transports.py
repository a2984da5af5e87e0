"""Transport reports of trainers, and their display in inspection."""

from __future__ import annotations

import pytest

from shardwell_server.coordinator.ranks.members import MAX_TRANSPORTS
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import Harness

SHM, SOCKET = common_pb2.TRANSPORT_KIND_SHM, common_pb2.TRANSPORT_KIND_SOCKET


def transport(**fields: object) -> coordinator_pb2.TransportReport:
    return coordinator_pb2.TransportReport(**{"address": "a:1", "kind": SOCKET, "bytes_per_s": 1.5e9, **fields})


async def test_last_transport_report_is_shown_with_server_ids(cluster: Harness) -> None:
    a = await cluster.join("a")
    server_id, server = next(iter(cluster.state.cluster.servers.items()))
    for reported in (
        [transport(address=server.address, kind=SHM, bytes_per_s=2.0), transport(bytes_per_s=0.0)],
        [transport(address=server.address, bytes_per_s=1e9 / 3)],
        [],
    ):
        await cluster.call("Heartbeat", run="r", run_id=a.run_id, trainer="a", epoch=a.epoch, transports=reported)
        (shown,) = (await cluster.call("DescribeRun", run="r")).trainers
        assert [(at.address, at.kind, at.bytes_per_s) for at in shown.transports] == [
            (at.address, at.kind, round(at.bytes_per_s)) for at in reported
        ]
        names = [server_id if at.address == server.address else "" for at in reported]
        assert [at.server_id for at in shown.transports] == names


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ([transport(address="")], "expected a printable host:port"),
        ([transport(address="a" * 1000)], "expected a printable host:port"),
        ([transport(kind=0)], "kind=0"),
        ([transport(kind=99)], "kind=99"),
        ([transport(bytes_per_s=-1.0)], "bytes_per_s=-1.0"),
        ([transport(bytes_per_s=float("nan"))], "bytes_per_s=nan"),
        ([transport()] * (MAX_TRANSPORTS + 1), "expected at most"),
    ],
)
async def test_invalid_transport_report_is_rejected(
    cluster: Harness, reported: list[coordinator_pb2.TransportReport], message: str
) -> None:
    a = await cluster.join("a")
    with pytest.raises(InvalidRequestError, match=message):
        await cluster.call("Heartbeat", run="r", run_id=a.run_id, trainer="a", epoch=a.epoch, transports=reported)
    assert not cluster.state.runs["r"].members.by_name["a"].transports


async def test_damaged_transfers_are_an_event_when_their_number_rises(cluster: Harness) -> None:
    a = await cluster.join("a")
    server_id, server = next(iter(cluster.state.cluster.servers.items()))
    for count in (0, 2, 2, 3):
        reported = [transport(address=server.address, corrupt_count=count)]
        await cluster.call("Heartbeat", run="r", run_id=a.run_id, trainer="a", epoch=a.epoch, transports=reported)
    messages = [message for kind, message in cluster.events() if kind == "transfers_corrupt"]
    for count, message in zip((2, 3), messages, strict=True):
        assert f"and server {server_id!r} at {server.address}: {count} transfers since" in message
