"""Units that move to other owners of their shards."""

from __future__ import annotations

from typing import Any

from shardwell.data_plane.kept_streams import DeltaCache
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.store.run_units import MovableUnits, UnitMoves
from shardwell.transport.resending import ReachedServer
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2

LAYOUT = UnitLayout("layer", (Parameter("weight", (1024,), "float32"),))


class Servers:
    """Connects shards to one server."""

    def __init__(self) -> None:
        self.server: Any = ReachedServer("s:1")

    def shard(self, wire: Wire, layout: UnitLayout, owner: common_pb2.ShardRange) -> RemoteShard:
        return RemoteShard(RunIdentity("run", "id"), layout, self.server, owner.start_bytes, owner.stop_bytes, wire)

    def retire(self, connections: object) -> None:
        pass


def test_a_unit_that_is_cut_anew_releases_its_kept_streams() -> None:
    """Also if the trainer learns of the rollback later, when it joins again."""
    cache, servers = DeltaCache(1 << 20), Servers()
    wire = Wire(common_pb2.WIRE_DTYPE_BFLOAT16, deltas=cache)
    former = servers.shard(wire, LAYOUT, common_pb2.ShardRange(stop_bytes=4096))
    target = former._range_target(wire.gather_dtype, memoryview(bytearray(4096)))
    with target.incoming() as incoming:
        incoming.place(0, None)[:] = bytes(2048)
        incoming.finish()
    assert cache.held_bytes == 2048
    units = {0: RemoteUnit(0, LAYOUT, (former,))}
    moves: Any = UnitMoves(servers, [MovableUnits(units, lambda: wire, lambda unit, *_: unit)])  # type: ignore[arg-type]
    halves = [common_pb2.ShardRange(start_bytes=start, stop_bytes=start + 2048) for start in (0, 2048)]
    moves.connect(coordinator_pb2.ListUnitsResponse(units=[{"unit_index": 0, "shards": halves}]), False)
    assert len(units[0].shards) == 2
    assert cache.held_bytes == 0
