"""Gathers shared by the trainers of a node: each fetches a part of a unit, and they exchange the parts.

Fetches run ahead; one thread takes their results in the order of the rounds and exchanges them. See Note: [Order of
rounds] in ``node_group.py``.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from concurrent.futures import Future
from dataclasses import dataclass, replace

from shardwell.data_plane.fetch import Alternative, Fetches, Gather
from shardwell.data_plane.shard import RemoteUnit
from shardwell.module.flat_vector import FlatVector
from shardwell.peers.node_group import EXCHANGE_LIMIT_S, PATIENCE_S, NodeGroup, NodeRounds, Round
from shardwell_wire.model.layout import UnitLayout


@dataclass(frozen=True, slots=True)
class _SharedGather:
    """A gather in flight."""

    unit: RemoteUnit
    this_round: Round
    target: memoryview
    layout: UnitLayout
    """The dtypes to deliver."""
    vector: FlatVector
    start_bytes: int
    """Half-open range of this member's part."""
    stop_bytes: int
    part: Future[int]
    whole: Gather


class NodeGathers:
    """Shares gathers with the other members of a group. Called by the training thread.

    Args:
        group: The members. Closed with this object.
        fetches: Fetches parts and whole units.
        patience_s: How long to wait for live members.
    """

    def __init__(self, group: NodeGroup, fetches: Fetches, *, patience_s: float = PATIENCE_S) -> None:
        self.shared_bytes = 0
        """Bytes received from other members."""
        self._group, self._fetches = group, fetches
        self._rounds = NodeRounds(group, patience_s=patience_s)
        self._jobs: queue.SimpleQueue[_SharedGather | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._exchange_in_order, name="shardwell-node", daemon=True)
        self._thread.start()

    def gather(
        self,
        unit: RemoteUnit,
        version: int,
        target: memoryview,
        layout: UnitLayout,
        vector: FlatVector,
        alternative: Alternative | None = None,
    ) -> Future[int]:
        """Starts to fetch a unit: this member's part if the group can share the gather, else the whole unit.

        Args:
            unit: The unit. None of its shards is read in place.
            version: The version to fetch.
            target: The receive buffer of the vector. [layout.size_bytes]
            layout: The dtypes to deliver.
            vector: The vector that the exchange completes.
            alternative: See ``Alternative``.
        """
        part = self._group.part(layout.size_bytes)
        if part is None or vector.device_type != self._group.device_type:
            return self._fetches.gather(unit, version, target, layout, alternative=alternative)
        if (this_round := self._rounds.next(version)) is None:
            return self._fetches.gather(unit, version, target, layout, alternative=alternative)
        own = _part_of(unit, layout, *part)
        gather = _SharedGather(
            unit,
            this_round,
            target,
            layout,
            vector,
            *part,
            part=self._fetches.gather(own, version, target, layout),
            whole=Gather(self._fetches.stats, alternative),
        )
        self._jobs.put(gather)
        return gather.whole

    def leave(self, reason: str) -> None:
        """Leaves the group for good: every unit is fetched whole from now on."""
        self._rounds.leave(reason)

    def close(self) -> None:
        """Leaves the group. Gathers in flight fail once the fetches are closed."""
        self._rounds.left = True
        self._group.close()
        self._jobs.put(None)
        self._thread.join(EXCHANGE_LIMIT_S)

    # ---- in the thread of this object ----

    def _exchange_in_order(self) -> None:
        while (gather := self._jobs.get()) is not None:
            try:
                version = Future.result(gather.part)  # not counted: the training thread does not wait here
            except BaseException as error:
                self._rounds.cancel(gather.this_round)  # the other members do not wait for this part
                gather.whole.fail(error)
                continue
            if self._is_exchanged(gather):
                self.shared_bytes += len(gather.target) - (gather.stop_bytes - gather.start_bytes)
                gather.whole.set_result(version)
            else:
                self._fetch_whole(gather)

    def _is_exchanged(self, gather: _SharedGather) -> bool:
        """Exchanges a gather if all members can; returns whether they did."""
        try:
            if not self._rounds.agree(gather.this_round, gather.unit.index):
                return False
            gather.vector.complete(gather.start_bytes, gather.stop_bytes, self._group.exchange, EXCHANGE_LIMIT_S)
        except Exception as error:  # any error: the training thread waits for this gather
            self._rounds.leave(error)
            return False
        return True

    def _fetch_whole(self, gather: _SharedGather) -> None:
        try:
            whole = self._fetches.gather(gather.unit, gather.this_round.version, gather.target, gather.layout)
        except BaseException as error:
            gather.whole.fail(error)
        else:
            whole.add_done_callback(gather.whole.finish_as)


def _part_of(unit: RemoteUnit, layout: UnitLayout, start_bytes: int, stop_bytes: int) -> RemoteUnit:
    """Returns the part of a unit that fills a range of the delivered vector."""
    start, stop = (_stored_byte(unit.layout, layout, byte) for byte in (start_bytes, stop_bytes))
    shards = (
        shard.narrowed(max(start, shard.start_bytes), min(stop, shard.stop_bytes))
        for shard in unit.shards
        if max(start, shard.start_bytes) < min(stop, shard.stop_bytes)
    )
    return replace(unit, shards=tuple(shards))


def _stored_byte(stored: UnitLayout, delivered: UnitLayout, byte: int) -> int:
    """Returns the offset in ``stored`` of the element at a byte of ``delivered``.

    A byte in the padding after a parameter's last element maps to the end of that parameter.
    """
    if stored == delivered or byte == 0:
        return byte
    if byte == delivered.size_bytes:
        return stored.size_bytes
    index = bisect_right(delivered.starts, byte) - 1
    element = min(
        (byte - delivered.starts[index]) // delivered.parameters[index].item_size, stored.parameters[index].numel
    )
    return stored.starts[index] + element * stored.parameters[index].item_size
