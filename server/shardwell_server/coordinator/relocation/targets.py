"""Chooses the servers of backups and of shards that move. Pure functions of the registry."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwell_server.coordinator.servers.cluster import Cluster, Server

ShardKey = tuple[int, int]
"""A shard of a run: unit index and first byte."""


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard and the server of its primary."""

    key: ShardKey
    size_bytes: int
    server_id: str


def host_of(server: Server) -> str:
    """Returns a name of the server's host: the boot id of its process if known, else the host of its address."""
    return server.process.partition("/")[0] or server.address.rpartition(":")[0]


def choose_server(cluster: Cluster, holders: Collection[str], refused: Collection[str]) -> Server | None:
    """Returns the server for another copy of a shard: on another host where there is one, with the most free memory.

    Args:
        cluster: The shard servers.
        holders: Ids of the servers that have a copy.
        refused: Ids of servers that have no memory, or cannot be reached.

    Returns:
        None if no live server can take a copy.
    """
    hosts = {host_of(cluster.servers[holder]) for holder in holders if holder in cluster.servers}
    able = [
        server
        for server in cluster.live
        if not server.draining and server.server_id not in holders and server.server_id not in refused
    ]
    return min(able, key=lambda server: (host_of(server) in hosts, -server.free_bytes, server.server_id), default=None)


def plan_moves(
    shards: Sequence[OwnedShard], servers: Sequence[str], refused: Mapping[ShardKey, Collection[str]]
) -> dict[ShardKey, str]:
    """Returns moves that spread the bytes of a run's primaries evenly: the new server of each shard that moves.

    Repeatedly moves the largest shard that makes the difference between two servers smaller. The same state gives the
    same plan, so moves that have not happened yet stay planned.

    Args:
        shards: The shards.
        servers: Ids of the servers that may own shards.
        refused: Servers that have no memory for a shard.
    """
    loads = dict.fromkeys(sorted(servers), 0)
    owned: dict[str, list[OwnedShard]] = {server: [] for server in loads}
    for shard in sorted(shards, key=lambda shard: (-shard.size_bytes, shard.key)):
        if shard.server_id in loads:
            loads[shard.server_id] += shard.size_bytes
            owned[shard.server_id].append(shard)
    moves: dict[ShardKey, str] = {}
    while (move := _best_move(loads, owned, refused)) is not None:
        shard, source, target = move
        owned[source].remove(shard)
        owned[target].append(shard)
        loads[source] -= shard.size_bytes
        loads[target] += shard.size_bytes
        if target == shard.server_id:
            moves.pop(shard.key, None)
        else:
            moves[shard.key] = target
    return moves


def _best_move(
    loads: Mapping[str, int], owned: Mapping[str, Sequence[OwnedShard]], refused: Mapping[ShardKey, Collection[str]]
) -> tuple[OwnedShard, str, str] | None:
    """Returns the largest shard of the fullest server, and its target, that makes their difference smaller."""
    sources = sorted(loads, key=lambda server: (-loads[server], server))
    for source in sources:
        for target in reversed(sources):
            gap = loads[source] - loads[target]
            fitting = [
                shard
                for shard in owned[source]
                if 0 < shard.size_bytes < gap and target not in refused.get(shard.key, ())
            ]
            if fitting:
                # The shard closest to half of the gap evens out the two servers best.
                best = min(fitting, key=lambda shard: (abs(2 * shard.size_bytes - gap), shard.key))
                return best, source, target
    return None
