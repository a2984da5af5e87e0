"""Computes the mean gradients of several shards of a server, those of small shards together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shardwell_server.shard.arithmetic.small_reductions import SmallReduction, reduce_small
from shardwell_server.shard.concurrency import InThread
from shardwell_server.shard.state.unit_shard import UnitShard

_Begun: TypeAlias = tuple[UnitShard, SmallReduction]


async def reduce_shards(shards: Iterable[UnitShard], in_thread: InThread) -> None:
    """Computes the mean gradients that are missing. The shards belong to one run. Call in ``HostedRun.exclusively``.

    Small shards are reduced on the event loop: this takes less time than waking a thread for each of them.
    """
    alike: dict[object, list[_Begun]] = {}
    alone: list[UnitShard] = []
    try:
        for shard in shards:
            if (work := shard.begin_small_reduction()) is None:
                alone.append(shard)
            else:
                alike.setdefault((shard.order.key, work.mean.vector.dtype), []).append((shard, work))
        for begun in list(alike.values()):
            alone += _reduce_small(begun)
            begun.clear()
    finally:
        for begun in alike.values():
            for shard, work in begun:
                shard.mean.end_small(work, None)
    for shard in alone:
        await shard.reduce_alone(in_thread)


def _reduce_small(begun: Sequence[_Begun]) -> list[UnitShard]:
    """Reduces shards with the same order of additions. Returns those whose means are not finite."""
    found = reduce_small([work for _, work in begun], begun[0][0].order)
    for (shard, work), reduced in zip(begun, found, strict=True):
        shard.mean.end_small(work, reduced)
    return [shard for (shard, _), reduced in zip(begun, found, strict=True) if reduced is None]
