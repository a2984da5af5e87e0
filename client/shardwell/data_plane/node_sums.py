"""Gradients that the trainers of a node add before they push them: each adds and pushes some shards of every unit.

Note: [Sums in a node]
    The trainers of a reduction group that are on one node show each other the gradient of a unit. Each of them adds the
    gradients of all members, in the order of the run, for its shards of the unit, and pushes the sum as the
    contribution of all members. The members thus push one gradient together instead of one each, with the bits that
    the servers would have computed. If the members do not agree on a round, each of them pushes its own gradient to all
    shards.

    A sum is void when one of its ranks starts another attempt, because a gradient cannot be taken out of it. See Note:
    [Sums of items] in the coordinator's ``work_items.py``. Later attempts push their own gradients.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from shardwell.data_plane.node_group import NodeRendezvous, Round
from shardwell.data_plane.node_rounds import PATIENCE_S, NodeRounds
from shardwell.data_plane.pushes import Excuse, Pushes
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.data_plane.shared_gradients import SharedGradient, SharedGradients, identify_cuts
from shardwell.memory.buffer_pool import BufferPool
from shardwell_wire.layout import Segment
from shardwell_wire.sum_order import Scratch, SumOrder
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 5.0
_IDLE_BYTES = 64 << 20
_SLICE_NUMEL = 1 << 17
"""Elements that are added together, while they are in the cache."""


class Item(Protocol):
    """The attempt at a work item that a gradient belongs to. Used in any thread."""

    @property
    def is_over(self) -> bool:
        """True if its pushes do not count any more."""
        ...

    def note_summed(self, dp_ranks: Sequence[int]) -> None:
        """Records that the servers get sums of its gradients and those of other data ranks."""
        ...

    def spoil(self) -> None:
        """Records that the item must start another attempt."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    """A gradient that is about to be added to those of the other members."""

    this_round: Round
    unit: RemoteUnit
    header: shard_pb2.ReduceScatterHeader
    flats: Mapping[int, torch.Tensor]
    """Flattened gradients on the CPU, by parameter index. Each [numel]."""
    copied: Callable[[], None]
    """Waits until ``flats`` are complete."""
    item: Item
    excuse: Excuse
    release: Callable[[], None]
    """Called once, when the gradients are pushed or dropped."""


class NodeSums:
    """Adds gradients with the other members of a group. Called by the training thread. See Note: [Sums in a node].

    Args:
        rendezvous: The rendezvous of the members. Closed with this object.
        memory: The memory in which the members show each other their gradients.
        dp_ranks: Data ranks of the members, in ascending order: a reduction group of the run.
        position: Index of this trainer in ``dp_ranks``.
        order: The run's order of additions.
        pushes: Pushes gradients and sums.
        patience_s: How long to wait for live members.
    """

    def __init__(
        self,
        rendezvous: NodeRendezvous,
        memory: SharedGradients,
        dp_ranks: Sequence[int],
        position: int,
        order: SumOrder,
        pushes: Pushes,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.summed_bytes = 0
        """Bytes of other trainers' gradients that this trainer has added."""
        self._rendezvous, self._memory, self._patience_s = rendezvous, memory, patience_s
        self._dp_ranks, self._position, self._order, self._pushes = tuple(dp_ranks), position, order, pushes
        self._rounds = NodeRounds(rendezvous, name="sum", alone="pushes its own gradients", patience_s=patience_s)
        self._buffers = BufferPool(_IDLE_BYTES)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shardwell-sums", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        """False if this trainer has left the group for good."""
        return not self._rounds.left

    def start_round(self, version: int) -> Round | None:
        """Starts the next round of a version. None: this trainer pushes its own gradient."""
        return self._rounds.next(version)

    def push(
        self,
        this_round: Round,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        item: Item,
        excuse: Excuse,
    ) -> None:
        """Starts to add a gradient to those of the other members, and to push the sum.

        Waits while more than ``push_bytes`` are in flight. Raises the error of an earlier push that failed.

        Args:
            this_round: The result of ``start_round``.
            unit: The unit. None of its shards takes gradients through shared memory.
            header: Header of the push of this trainer's own gradient. See ``RemoteShard.prepare_push``.
            gradients: ``(parameter index, gradient)`` by rising index, of 32 or 64 bits. The caller must not change
                them afterwards.
            item: The work item that the gradient belongs to.
            excuse: See ``Pushes.push``.
        """
        flats, copied = self._pushes.start_copies(gradients)
        release = self._pushes.hold(sum(flat.nbytes for flat in flats.values()))
        self._jobs.put(_Job(this_round, unit, header, flats, copied, item, excuse, release))

    def skip(self, version: int) -> None:
        """Pushes own gradients for the rest of a version. The other members do not wait for this trainer."""
        self._rounds.skip(version)

    def leave(self, reason: str) -> None:
        """Leaves the group for good."""
        self._rounds.leave(reason)

    def close(self) -> None:
        """Leaves the group and releases the shared memory."""
        self._rounds.left = True
        self._rendezvous.leave()
        self._jobs.put(None)
        self._thread.join(_CLOSE_LIMIT_S)
        self._rendezvous.close()

    # ---- in the thread of this object ----

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._run(job)
            except BaseException as error:  # the training thread raises it
                self._pushes.fail(error)
                job.release()
            del job  # releases the gradients before the next job is awaited

    def _run(self, job: _Job) -> None:
        job.copied()
        try:
            takes_place = self._meet(job)
        except Exception as error:
            # Other members may count on this one. A new attempt is right whatever they do.
            self._rounds.leave(error)
            job.item.spoil()
            takes_place = False
        if takes_place:
            self._push_sums(job)
        elif job.item.is_over:
            job.release()
        else:
            self._pushes.push_held(job.unit, job.header, job.flats, job.excuse, job.release)

    def _meet(self, job: _Job) -> bool:
        """Shows this member's gradient to the others; returns whether all of them did."""
        this_round, header = job.this_round, job.header
        if job.item.is_over:
            self._rounds.skip(this_round.version)
        if self._rounds.is_closed(this_round.version):
            return False
        if not self._rendezvous.wait_for(lambda: self._memory.is_free(this_round), self._patience_s):
            self._rounds.cancel(this_round)
            return False
        own = SharedGradient(
            header.context.epoch,
            header.context.lease_proof,
            header.attempt,
            identify_cuts(_cuts(job.unit)),
            job.flats,
        )
        try:
            self._memory.write(this_round, job.unit.layout, own)
        except OSError as error:  # shared memory is full
            logger.warning("node group: the gradient of %s cannot be shared: %s", job.unit.layout.unit, error)
            self._rounds.cancel(this_round)
            return False
        return self._rounds.agree(this_round, job.unit.index)

    def _push_sums(self, job: _Job) -> None:
        """Adds the gradients of all members for this member's shards, and starts to push the sums."""
        try:
            shown = self._memory.read_all(job.this_round, job.unit.layout)
            # All members see the same gradients, so all of them decide alike.
            if len({(one.attempt, one.cuts) for one in shown}) > 1:
                self._pushes.push_held(job.unit, job.header, job.flats, job.excuse, job.release)
                return
            job.item.note_summed(self._dp_ranks)
            own = [number for number in range(len(job.unit.shards)) if self._adds(job.unit, number)]
            sums = {number: self._sum(job.unit.shards[number], shown) for number in own}
        except Exception as error:
            self._rounds.leave(error)
            job.item.spoil()
            job.release()
            return
        finally:
            self._memory.end_round(job.this_round)
        self.summed_bytes += (len(shown) - 1) * sum(buffer.numel() for buffer in sums.values())
        header = shard_pb2.ReduceScatterHeader()
        header.CopyFrom(job.header)
        for dp_rank, one in zip(self._dp_ranks, shown, strict=True):
            header.summed.add(dp_rank=dp_rank, epoch=one.epoch, lease_proof=one.lease_proof)
        self._pushes.push_sums(job.unit, header, _indices(shown), sums, job.excuse, partial(self._end, job, sums))

    def _end(self, job: _Job, sums: Mapping[int, torch.Tensor]) -> None:
        for buffer in sums.values():
            self._buffers.release(buffer)
        job.release()

    def _adds(self, unit: RemoteUnit, number: int) -> bool:
        """True if this member adds and pushes a shard. The members take turns, also from unit to unit."""
        return (unit.index + number) % len(self._dp_ranks) == self._position

    def _sum(self, shard: RemoteShard, shown: Sequence[SharedGradient]) -> torch.Tensor:
        """Returns the sum of all members' gradients, laid out like the shard. uint8. [stop_bytes - start_bytes]"""
        buffer, scratch = self._buffers.acquire(shard.stop_bytes - shard.start_bytes), Scratch()
        for segment in shard.segments_of(_indices(shown)):
            terms = [
                (dp_rank, flat[segment.start_element : segment.stop_element])
                for dp_rank, one in zip(self._dp_ranks, shown, strict=True)
                if (flat := one.flats.get(segment.parameter_index)) is not None
            ]
            out = _segment_in(buffer, shard, segment, terms[0][1].dtype)
            for start in range(0, out.numel(), _SLICE_NUMEL):
                here = slice(start, start + _SLICE_NUMEL)
                total = self._order.add([(rank, term[here]) for rank, term in terms], out[here], scratch)
                if len(terms) == 1:
                    out[here].copy_(total)
        return buffer


def _indices(shown: Sequence[SharedGradient]) -> tuple[int, ...]:
    """Returns the parameters that have a gradient in any of them, by rising index."""
    return tuple(sorted(set[int]().union(*(one.flats for one in shown))))


def _cuts(unit: RemoteUnit) -> list[tuple[int, int]]:
    return [(shard.start_bytes, shard.stop_bytes) for shard in unit.shards]


def _segment_in(buffer: torch.Tensor, shard: RemoteShard, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    return buffer[segment.start_bytes - shard.start_bytes : segment.stop_bytes - shard.start_bytes].view(dtype)
