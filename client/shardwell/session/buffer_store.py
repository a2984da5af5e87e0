"""The run's buffers on the shard servers: units of their own, which rank 0 pushes and the others read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.traffic import RemoteUnit, Traffic, VersionInPlace
from shardwell.module.store import InitialValues
from shardwell.session.membership import Membership
from shardwell.session.progress import ItemProgress
from shardwell.session.shards_in_place import ShardsInPlace
from shardwell.session.unit_declaration import UnitDeclarations
from shardwell_wire.codec import memory_at
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

_READS = 8
"""Ranges of one unit that are read at once."""

_GAP_BYTES = 64 << 10
"""Buffers that are no further apart are read as one range: a further request takes longer than these bytes."""

Reach = Callable[[UnitLayout, coordinator_pb2.DeclareUnitResponse], tuple[RemoteShard, ...]]


class RemoteBuffers:
    """A ``BufferStore`` on the shard servers.

    Args:
        membership: This trainer's place in the run.
        declarations: Declares units.
        reach: Connects to the shards of a declared unit, whose values travel as they are stored.
        traffic: Pushes.
        in_place: Maps shards of servers on this host.
    """

    def __init__(
        self,
        membership: Membership,
        declarations: UnitDeclarations,
        reach: Reach,
        traffic: Traffic,
        in_place: ShardsInPlace,
    ) -> None:
        self._membership, self._declarations, self._reach = membership, declarations, reach
        self._traffic, self._in_place = traffic, in_place
        self._units: dict[int, RemoteUnit] = {}

    def declare(self, layout: UnitLayout, values: InitialValues, step: int) -> int:
        """See ``BufferStore.declare``."""
        unit = self._declarations.declare(layout, values, step, lambda declared: self._reach(layout, declared))
        self._units[unit.index] = self._in_place.map_served(unit)
        return unit.index

    def push(self, unit_index: int, step: int, item: ItemProgress, buffers: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``BufferStore.push``. A failure is raised by the next push or drain."""
        self._membership.check()
        unit = self._units[unit_index]
        header = shard_pb2.ReduceScatterHeader(
            context=self._membership.context(step, epoch=item.item.epoch),
            unit=unit.layout.unit,
            dp_rank=item.item.dp_rank,
            attempt=item.item.attempt,
            part=item.parts[unit_index],
        )
        with uninterrupted:  # a part that is counted is pushed
            item.parts[unit_index] += 1
            self._traffic.push(unit, header, [(index, tensor.reshape(-1)) for index, tensor in buffers])

    def read(self, unit_index: int, version: int, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``BufferStore.read``."""
        self._membership.check()
        unit = self._units[unit_index]
        present = [(index, target) for index, target in wanted if target.nbytes]
        if not present:
            return
        if unit.vector is not None:
            VersionInPlace(unit, version, self._traffic.stats).result()
            _take(unit.layout, unit.vector.bytes, present)
            unit.vector.check(version)
            return
        flat = torch.empty(unit.layout.size_bytes, dtype=torch.uint8)
        parts = list(_parts(unit, sorted(index for index, _ in present)))

        def fetch(part: RemoteShard) -> int:
            size_bytes = part.stop_bytes - part.start_bytes
            return part.fetch(version, memory_at(flat.data_ptr() + part.start_bytes, size_bytes, flat))

        if len(parts) == 1:
            fetch(parts[0])
        else:
            with ThreadPoolExecutor(min(_READS, len(parts)), thread_name_prefix="shardwell-buffers") as reads:
                list(reads.map(fetch, parts))
        _take(unit.layout, flat, present)


def _take(layout: UnitLayout, flat: torch.Tensor, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Copies buffers out of a unit's flat vector. uint8. [size_bytes]"""
    for index, target in wanted:
        start = layout.starts[index]
        target.view(-1).view(torch.uint8).copy_(flat[start : start + target.nbytes])


def _parts(unit: RemoteUnit, indices: Sequence[int]) -> Iterator[RemoteShard]:
    """The parts of shards in which buffers lie."""
    layout = unit.layout
    spans = [(layout.starts[index], layout.starts[index] + layout.parameters[index].size_bytes) for index in indices]
    cuts = [0, *(n for n, (before, after) in enumerate(pairwise(spans), 1) if after[0] - before[1] > _GAP_BYTES)]
    for first, stop in pairwise([*cuts, len(spans)]):
        low, high = spans[first][0], spans[stop - 1][1]
        for shard in unit.shards:
            start, end = max(low, shard.start_bytes), min(high, shard.stop_bytes)
            if start < end:
                yield shard.narrowed(start, end)
