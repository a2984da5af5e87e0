"""Gathers of which every trainer of a node fetches a part, and exchanges it for the others' parts.

Note: Order
    Members exchange units in the order in which their training threads asked for them, counted anew in every
    version. The fetches run ahead of that, as others do; one thread takes their results in order, comes to the round
    and exchanges. Whoever is at another unit at that round, or does not come, ends sharing for the rest of the
    version: all go on by themselves until the next, where they start together again.
"""

from __future__ import annotations

import logging
import queue
import threading
from bisect import bisect_right
from concurrent.futures import Future
from dataclasses import dataclass, replace

from shardwell.data_plane.node_group import EXCHANGE_LIMIT_S, NodeGroup
from shardwell.data_plane.node_rendezvous import Outcome, Round
from shardwell.data_plane.traffic import RemoteUnit, Traffic, WaitedFor
from shardwell.memory.device_copies import Completable
from shardwell_wire.layout import UnitLayout

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long to wait for members that are alive: what it costs if they come later is their parts of one version."""

MOST_FAILURES = 3
"""In as many versions in a row members may miss each other, before they stop trying."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """One unit on its way."""

    unit: RemoteUnit
    this_round: Round
    target: memoryview
    layout: UnitLayout
    """Of what is delivered."""
    vector: Completable
    start_bytes: int
    """Half-open range of this member's part."""
    stop_bytes: int
    part: Future[int]
    whole: WaitedFor


class NodeGathers:
    """Shares gathers with the other members of a group. Called by the training thread.

    Args:
        group: The members; closed with this.
        traffic: Fetches.
        patience_s: How long to wait for members that are alive.
    """

    def __init__(self, group: NodeGroup, traffic: Traffic, *, patience_s: float = PATIENCE_S) -> None:
        self.shared_bytes = 0
        """What came from other members."""
        self._group, self._traffic, self._patience_s = group, traffic, patience_s
        self._last = Round(-1, 0)
        self._version_apart, self._num_failures = -1, 0
        self._left = False
        self._jobs: queue.SimpleQueue[_Gather | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._exchange_in_turn, name="shardwell-node", daemon=True)
        self._thread.start()

    def gather(
        self, unit: RemoteUnit, version: int, target: memoryview, layout: UnitLayout, vector: Completable
    ) -> Future[int]:
        """Starts to fetch a unit, together with the other members if it can be; as ``Traffic.gather`` and
        ``gather_cast`` otherwise.

        Args:
            unit: The unit, none of which is read in place.
            version: Of it.
            target: The vector's receive buffer. [layout.size_bytes]
            layout: The dtypes to deliver.
            vector: What is completed.
        """
        part = self._group.part(layout.size_bytes)
        if part is None or vector.device_type != self._group.device_type:
            return fetch(self._traffic, unit, version, target, layout)
        number = self._last.number + 1 if self._last.version == version else 0
        self._last = Round(version, number)
        if self._left or self._version_apart == version:
            return fetch(self._traffic, unit, version, target, layout)
        own = _part_of(unit, layout, *part)
        gather = _Gather(
            unit,
            self._last,
            target,
            layout,
            vector,
            *part,
            part=fetch(self._traffic, own, version, target, layout),
            whole=WaitedFor(self._traffic.stats),
        )
        self._jobs.put(gather)
        return gather.whole

    def close(self) -> None:
        """Leaves the group. What is still on its way fails, once the traffic is closed."""
        self._left = True
        self._group.close()
        self._jobs.put(None)
        self._thread.join(EXCHANGE_LIMIT_S)

    # ---- in a thread of its own ----

    def _exchange_in_turn(self) -> None:
        while (gather := self._jobs.get()) is not None:
            try:
                version = _awaited(gather.part)
            except BaseException as error:
                self._abandon(gather)
                gather.whole.set_exception(error)
                continue
            if self._is_exchanged(gather):
                self.shared_bytes += len(gather.target) - (gather.stop_bytes - gather.start_bytes)
                gather.whole.set_result(version)
            else:
                self._fetch_whole(gather)

    def _is_exchanged(self, gather: _Gather) -> bool:
        if self._left or self._version_apart == gather.this_round.version:
            return False
        try:
            if self._group.decide(gather.this_round, gather.unit.index, self._patience_s) is Outcome.TOGETHER:
                gather.vector.complete(gather.start_bytes, gather.stop_bytes, self._group.exchange, EXCHANGE_LIMIT_S)
                return True
        except Exception as error:  # the training thread waits for a gather, whatever ends its exchange
            self._leave(str(error).partition("\n")[0] or type(error).__name__)
            return False
        self._go_apart(gather)
        return False

    def _abandon(self, gather: _Gather) -> None:
        """The others need not wait for a part that cannot be fetched."""
        self._version_apart = gather.this_round.version
        try:
            self._group.call_off(gather.this_round)
        except OSError as error:
            self._leave(str(error))

    def _fetch_whole(self, gather: _Gather) -> None:
        def done(whole: Future[int]) -> None:
            if (error := whole.exception()) is not None:
                gather.whole.set_exception(error)
            else:
                gather.whole.set_result(_awaited(whole))

        try:
            whole = fetch(self._traffic, gather.unit, gather.this_round.version, gather.target, gather.layout)
        except BaseException as error:
            gather.whole.set_exception(error)
        else:
            whole.add_done_callback(done)

    def _go_apart(self, gather: _Gather) -> None:
        in_a_row = self._version_apart == gather.this_round.version - 1
        self._version_apart, self._num_failures = gather.this_round.version, self._num_failures + 1 if in_a_row else 1
        if self._num_failures >= MOST_FAILURES:
            self._leave(f"its trainers asked for different units, or not in time, in {MOST_FAILURES} steps in a row")
            return
        logger.warning(
            "node group: the trainers of this node came to gather %d of step %d with different units, or not within "
            "%.0f s: each fetches the rest of the step for itself",
            gather.this_round.number,
            gather.this_round.version,
            self._patience_s,
        )

    def _leave(self, reason: str) -> None:
        if not self._left:
            self._left = True
            logger.warning("node group: every unit is fetched whole from now on: %s", reason)
            self._group.leave()


def fetch(traffic: Traffic, unit: RemoteUnit, version: int, target: memoryview, layout: UnitLayout) -> Future[int]:
    """Starts to fetch what a unit's shards hold, in the dtypes of a layout."""
    if layout == unit.layout:
        return traffic.gather(unit, version, target)
    return traffic.gather_cast(unit, version, target, layout)


def _awaited(fetched: Future[int]) -> int:
    """A fetch's result, without counting the time: it is not the training thread that waits for it."""
    return Future.result(fetched)


def _part_of(unit: RemoteUnit, layout: UnitLayout, start_bytes: int, stop_bytes: int) -> RemoteUnit:
    """What of a unit makes a range of the vector to deliver."""
    start, stop = (_stored_byte(unit.layout, layout, byte) for byte in (start_bytes, stop_bytes))
    shards = (
        shard.narrowed(max(start, shard.start_bytes), min(stop, shard.stop_bytes))
        for shard in unit.shards
        if max(start, shard.start_bytes) < min(stop, shard.stop_bytes)
    )
    return replace(unit, shards=tuple(shards))


def _stored_byte(stored: UnitLayout, delivered: UnitLayout, byte: int) -> int:
    """Where the element at a byte of one layout begins in another; after a parameter's last element, its end."""
    if stored == delivered or byte == 0:
        return byte
    if byte == delivered.size_bytes:
        return stored.size_bytes
    index = bisect_right(delivered.starts, byte) - 1
    element = min(
        (byte - delivered.starts[index]) // delivered.parameters[index].item_size, stored.parameters[index].numel
    )
    return stored.starts[index] + element * stored.parameters[index].item_size
