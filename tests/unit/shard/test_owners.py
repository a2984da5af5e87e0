"""Transfers of a relay to owners of shards that move."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shardwell_server.shard.requests.peers import Owners
from shardwell_wire.errors import NotFoundError
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

RUN = RunIdentity("r", "id")


class _Peers:
    """Servers of which one has the shard."""

    def __init__(self, owner: str) -> None:
        self.owner, self.called = owner, list[str]()

    def _require_owner(self, address: str) -> None:
        self.called.append(address)
        if address != self.owner:
            raise NotFoundError(f"no shard on the server at {address}")

    async def receive(self, address: str, *_: Any, **__: Any) -> AsyncIterator[bytes]:
        self._require_owner(address)
        yield b""

    async def stream(self, address: str, *_: Any, **__: Any) -> shard_pb2.ReduceScatterResponse:
        self._require_owner(address)
        return shard_pb2.ReduceScatterResponse(version=3)


async def test_transfers_follow_a_shard_that_has_moved() -> None:
    peers: Any = _Peers("a:1")
    listed = "a:1"

    async def list_units(run: str) -> coordinator_pb2.ListUnitsResponse:
        shard = common_pb2.ShardRange(start_bytes=0, stop_bytes=16, address=listed)
        return coordinator_pb2.ListUnitsResponse(units=[coordinator_pb2.UnitSummary(unit="u", shards=[shard])])

    owners = Owners(list_units, peers)
    header = shard_pb2.ReduceScatterHeader(unit="u", start_bytes=0, stop_bytes=16)
    assert (await owners.push(RUN, header, [])).version == 3
    peers.owner = listed = "b:1"  # the relay has not heard of it
    assert (await owners.push(RUN, header, [])).version == 3
    assert peers.called == ["a:1", "a:1", "b:1"]
    peers.owner = "c:1"  # the coordinator does not know that
    with pytest.raises(NotFoundError, match="at b:1"):
        await owners.push(RUN, header, [])
    with pytest.raises(NotFoundError, match="at b:1"):
        await owners.gather(RUN, shard_pb2.GatherRequest(unit="u", stop_bytes=16), lambda _: memoryview(b""))
    assert peers.called[3:] == ["b:1", "b:1"], "the coordinator was asked, and named the same owner"
