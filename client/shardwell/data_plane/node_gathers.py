"""Gathers shared by the trainers of a node: each fetches a part of a unit, and they exchange the parts.

Note: [Order of rounds]
    Members exchange units in the order in which their training threads asked for them, numbered from 0 in every
    version. Fetches run ahead; one thread takes their results in order and exchanges them. If a member is late or asks
    for a different unit, the round is cancelled for all members, and each of them fetches whole units for the rest of
    the version. They share again from the next version.
"""

from __future__ import annotations

import logging
import queue
import threading
from bisect import bisect_right
from concurrent.futures import Future
from dataclasses import dataclass, replace

from shardwell.data_plane.fetches import Fetches, Gather
from shardwell.data_plane.node_group import EXCHANGE_LIMIT_S, NodeGroup, Outcome, Round
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.memory.device_copies import Completable
from shardwell_wire.layout import UnitLayout

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long to wait for live members. If they arrive later, their parts of one version are fetched twice."""

MAX_FAILURES = 3
"""Consecutive versions with a cancelled round after which the group is disabled."""


@dataclass(frozen=True, slots=True)
class _SharedGather:
    """A gather in flight."""

    unit: RemoteUnit
    this_round: Round
    target: memoryview
    layout: UnitLayout
    """The dtypes to deliver."""
    vector: Completable
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
        self._group, self._fetches, self._patience_s = group, fetches, patience_s
        self._last = Round(-1, 0)
        self._separate_version, self._num_failures = -1, 0
        """The last version with a cancelled round, and the number of such versions in a row."""
        self._left = False
        self._jobs: queue.SimpleQueue[_SharedGather | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._exchange_in_order, name="shardwell-node", daemon=True)
        self._thread.start()

    def gather(
        self, unit: RemoteUnit, version: int, target: memoryview, layout: UnitLayout, vector: Completable
    ) -> Future[int]:
        """Starts to fetch a unit: this member's part if the group can share the gather, else the whole unit.

        Args:
            unit: The unit. None of its shards is read in place.
            version: The version to fetch.
            target: The receive buffer of the vector. [layout.size_bytes]
            layout: The dtypes to deliver.
            vector: The vector that the exchange completes.
        """
        part = self._group.part(layout.size_bytes)
        if part is None or vector.device_type != self._group.device_type:
            return self._fetches.gather(unit, version, target, layout)
        number = self._last.number + 1 if self._last.version == version else 0
        self._last = Round(version, number)
        if self._left or self._separate_version == version:
            return self._fetches.gather(unit, version, target, layout)
        own = _part_of(unit, layout, *part)
        gather = _SharedGather(
            unit,
            self._last,
            target,
            layout,
            vector,
            *part,
            part=self._fetches.gather(own, version, target, layout),
            whole=Gather(self._fetches.stats),
        )
        self._jobs.put(gather)
        return gather.whole

    def leave(self, reason: str) -> None:
        """Leaves the group for good: every unit is fetched whole from now on."""
        self._leave(reason)

    def close(self) -> None:
        """Leaves the group. Gathers in flight fail once the fetches are closed."""
        self._left = True
        self._group.close()
        self._jobs.put(None)
        self._thread.join(EXCHANGE_LIMIT_S)

    # ---- in the thread of this object ----

    def _exchange_in_order(self) -> None:
        while (gather := self._jobs.get()) is not None:
            try:
                version = Future.result(gather.part)  # not counted: the training thread does not wait here
            except BaseException as error:
                self._cancel(gather)
                gather.whole.set_exception(error)
                continue
            if self._is_exchanged(gather):
                self.shared_bytes += len(gather.target) - (gather.stop_bytes - gather.start_bytes)
                gather.whole.set_result(version)
            else:
                self._fetch_whole(gather)

    def _is_exchanged(self, gather: _SharedGather) -> bool:
        """Exchanges a gather if all members can; returns whether they did."""
        if self._left or self._separate_version == gather.this_round.version:
            return False
        try:
            if self._group.decide(gather.this_round, gather.unit.index, self._patience_s) is Outcome.EXCHANGE:
                gather.vector.complete(gather.start_bytes, gather.stop_bytes, self._group.exchange, EXCHANGE_LIMIT_S)
                return True
        except Exception as error:  # any error: the training thread waits for this gather
            self._leave(str(error).partition("\n")[0] or type(error).__name__)
            return False
        self._separate(gather)
        return False

    def _cancel(self, gather: _SharedGather) -> None:
        """Cancels the round of a part that could not be fetched, so that the other members do not wait for it."""
        self._separate_version = gather.this_round.version
        try:
            self._group.cancel(gather.this_round)
        except OSError as error:
            self._leave(str(error))

    def _fetch_whole(self, gather: _SharedGather) -> None:
        try:
            whole = self._fetches.gather(gather.unit, gather.this_round.version, gather.target, gather.layout)
        except BaseException as error:
            gather.whole.set_exception(error)
        else:
            whole.add_done_callback(gather.whole.finish_as)

    def _separate(self, gather: _SharedGather) -> None:
        """Stops sharing for the rest of the version, and for good after ``MAX_FAILURES``."""
        version = gather.this_round.version
        self._num_failures = self._num_failures + 1 if self._separate_version == version - 1 else 1
        self._separate_version = version
        if self._num_failures >= MAX_FAILURES:
            self._leave(
                f"in {MAX_FAILURES} consecutive steps its trainers asked for different units, or one was too late"
            )
            return
        logger.warning(
            "node group: gather %d of step %d was cancelled: the trainers of this node asked for different units, or "
            "one did not arrive within %.0f s; each of them fetches whole units for the rest of the step",
            gather.this_round.number,
            version,
            self._patience_s,
        )

    def _leave(self, reason: str) -> None:
        if not self._left:
            self._left = True
            logger.warning("node group: every unit is fetched whole from now on: %s", reason)
            self._group.leave()


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
