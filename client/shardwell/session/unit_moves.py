"""Moves the shards of a trainer's units to the servers that own them now. ``relocation.py`` says when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwell.data_plane.remote_shard import Wire
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.session.servers import ShardServers
from shardwell.transport.server_connection import ServerConnection
from shardwell_wire.v1 import common_pb2, coordinator_pb2

_REOPEN_TIMEOUT_S = 10.0
"""Deadline for opening a transport to another owner of a shard. A silent server is soon replaced."""


@dataclass(frozen=True, slots=True, eq=False)
class MovableUnits:
    """Units of one kind, which move in the same way."""

    units: dict[int, RemoteUnit]
    """The units by their index in the run. A moved unit replaces its entry."""
    wire: Callable[[], Wire]
    """Returns the dtypes in which the units travel."""
    remap: Callable[[RemoteUnit, Sequence[int], bool], RemoteUnit]
    """``(unit, moved, wait)``: maps the moved shards again, by number; ``wait``: for the versions that were read."""


class UnitMoves:
    """Connects units to the present owners of their shards. Called in the thread of ``ShardRelocations``.

    Args:
        servers: The connections.
        kinds: All units of this trainer.
    """

    def __init__(self, servers: ShardServers, kinds: Sequence[MovableUnits]) -> None:
        self._servers, self._kinds = servers, kinds
        self._replaced: list[ServerConnection] = []
        """Connections to former owners of shards, which are not closed yet."""
        self._unmapped: defaultdict[int, set[int]] = defaultdict(set)
        """Numbers of moved shards that are not mapped again yet, by unit index."""

    def move(self, listed: coordinator_pb2.ListUnitsResponse, anew: bool) -> None:
        """Moves all shards to their owners. Called again if it has failed.

        Args:
            listed: The owners.
            anew: Whether to open new connections and mappings to all owners.
        """
        if anew:
            self._replaced += self._servers.forget()
        owners = {unit.unit_index: unit.shards for unit in listed.units}
        for kind in self._kinds:
            for index, unit in list(kind.units.items()):
                kind.units[index] = self._follow(unit, owners[index], kind.wire(), anew)
        used = {shard.server for kind in self._kinds for unit in kind.units.values() for shard in unit.shards}
        self._servers.retire([server for server in dict.fromkeys(self._replaced) if server not in used])
        self._replaced.clear()
        for kind in self._kinds:
            for index in [index for index in self._unmapped if index in kind.units]:
                kind.units[index] = kind.remap(kind.units[index], sorted(self._unmapped[index]), not anew)
                del self._unmapped[index]

    def _follow(self, unit: RemoteUnit, owners: Sequence[common_pb2.ShardRange], wire: Wire, anew: bool) -> RemoteUnit:
        """Connects the shards of a unit to their owners; returns the unit."""
        ranges = [(owner.start_bytes, owner.stop_bytes) for owner in owners]
        if ranges != [(shard.start_bytes, shard.stop_bytes) for shard in unit.shards]:
            # Only a rollback cuts a unit anew.
            shards = tuple(self._servers.shard(wire, unit.layout, owner) for owner in owners)
            self._replaced += [shard.server for shard in unit.shards]
            for shard in unit.shards:
                shard.forget()
                shard.owner.retire()
            if unit.vector is not None:
                unit.vector.cut(ranges)
            self._unmapped[unit.index] = set(range(len(shards)))
            return replace(unit, shards=shards)
        for number, (shard, owner) in enumerate(zip(unit.shards, owners, strict=True)):
            server = self._servers.connect(owner, open_timeout_s=_REOPEN_TIMEOUT_S)
            if anew or server is not shard.server:
                self._unmapped[unit.index].add(number)
            if server is not shard.server:
                self._replaced.append(shard.server)
                shard.move(server)
        return unit
