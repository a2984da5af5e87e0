"""A declared unit and its shards on the servers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.layout import UnitLayout


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A declared unit and its shards."""

    index: int
    layout: UnitLayout
    shards: tuple[RemoteShard, ...]
    placement: int = 0
    """The run's placement when the shards were connected."""
    vector: SharedVector | None = None
    """The flat vector in shared memory of servers or of the host cache, if all of it can be read in place."""
