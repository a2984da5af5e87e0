"""Gradients that trainers add before they push them: each adds and pushes some shards of every unit.

Note: [Rounds of an exchange]
    A round exchanges the gradients of one unit. It takes place for all members or for none: a member adds its shards
    only if the gradients of all members are there, and all members see that alike. If a round does not take place, each
    member pushes its own gradient to all shards.

Note: [Sums among trainers]
    The trainers of a reduction group show each other the gradient of a unit. Each of them adds the gradients of all
    members, in the order of the run, for its shards of the unit, and pushes the sum as the contribution of all members.
    The members thus push one gradient together instead of one each, with the bits that the servers would have computed.
    If the members do not agree on a round, each of them pushes its own gradient to all shards. See Note: [Rounds of an
    exchange].

    A sum is void when one of its ranks starts another attempt, because a gradient cannot be taken out of it. See Note:
    [Sums of items] in ``coordinator/steps/step.py``. Later attempts push their own gradients.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from shardwell.data_plane.push import Excuse, Pushes
from shardwell.data_plane.shard import RemoteShard, RemoteUnit
from shardwell.memory.buffers import BufferPool
from shardwell.peers.node_group import Round
from shardwell.transport.base import DIRECT, PartHeader
from shardwell_wire.model.layout import Segment
from shardwell_wire.model.sum_order import Scratch, SumOrder
from shardwell_wire.v1 import shard_pb2


@dataclass(frozen=True, slots=True)
class WholeGradient:
    """The gradient of one unit of one member."""

    epoch: int
    """Epoch of the lease on the member's work item."""
    lease_proof: bytes
    """Proves this lease to shard servers. Zeros: the cluster has no key."""
    attempt: int
    """Attempt at the work item."""
    cuts: int
    """Identifies how the unit is cut into shards. Members with different cuts cannot share the work."""
    flats: Mapping[int, torch.Tensor]
    """Flattened gradients by parameter index. Each [numel]."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Parameters that have a gradient, by rising index."""
        return tuple(sorted(self.flats))

    def part(self, segment: Segment) -> torch.Tensor | None:
        """Returns the gradient of a segment. None: its parameter has none. [numel]"""
        flat = self.flats.get(segment.parameter_index)
        return None if flat is None else flat[segment.start_element : segment.stop_element]


@dataclass(frozen=True, slots=True)
class ReceivedGradient:
    """The parts of another member's gradient that this trainer adds. The fields are those of ``WholeGradient``."""

    epoch: int
    lease_proof: bytes
    attempt: int
    cuts: int
    indices: tuple[int, ...]
    parts: Mapping[tuple[int, int], torch.Tensor]
    """Segments by parameter and first element. Each [numel]."""

    def part(self, segment: Segment) -> torch.Tensor | None:
        """See ``WholeGradient.part``."""
        return self.parts.get((segment.parameter_index, segment.start_element))


Shown = WholeGradient | ReceivedGradient
"""The gradient that one member shows to the others."""


class Exchange(Protocol):
    """One member's view of the exchange. See Note: [Rounds of an exchange].

    The thread that adds calls ``collect``. Any thread calls ``leave``. The training thread calls the other methods.
    """

    @property
    def active(self) -> bool:
        """False if this trainer has left the group for good."""
        ...

    def start_round(self, version: int) -> Round | None:
        """Starts the next round of a version. None: this trainer pushes its own gradient."""
        ...

    def offer(
        self,
        this_round: Round,
        unit: RemoteUnit,
        own: WholeGradient,
        copied: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        """Starts to show this trainer's gradient to the others. Does not wait.

        Args:
            this_round: The result of ``start_round``.
            unit: The unit.
            own: The gradient.
            copied: Waits until the gradient is complete.
            sent: Called once, in any thread, when the gradient is not read any more by this method's work.
        """
        ...

    def collect(
        self, this_round: Round, unit: RemoteUnit, own: WholeGradient, is_over: Callable[[], bool]
    ) -> Sequence[Shown] | None:
        """Waits for the gradients of all members; returns them in the order of the members.

        Args:
            this_round: The round that was offered.
            unit: The unit.
            own: This trainer's gradient, which is complete.
            is_over: Returns True if the gradient does not count any more.

        Returns:
            None: the round does not take place.

        Raises:
            Exception: A member is gone. It is unknown whether the round takes place for the others.
        """
        ...

    def finish_version(self, version: int) -> None:
        """Called when all gradients of a version are offered. The other members expect no more."""
        ...

    def skip(self, version: int) -> None:
        """Pushes own gradients for the rest of a version. The other members do not wait for this trainer."""
        ...

    def leave(self, reason: BaseException | str) -> None:
        """Leaves the group for good."""
        ...

    def stop(self) -> None:
        """Leaves the group at the end of the session. ``collect`` returns or raises soon."""
        ...

    def close(self) -> None:
        """Releases memory and connections. Called after ``stop``, when ``collect`` is not called any more."""
        ...


def adder_of(unit: RemoteUnit, number: int, num_members: int) -> int:
    """Returns the member that adds and pushes a shard. The members take turns, also from unit to unit."""
    return (unit.index * len(unit.shards) + number) % num_members


def cuts_of(unit: RemoteUnit) -> int:
    """Returns a number that differs for different ranges of shards, with the bits of a positive int64."""
    return hash(tuple((shard.start_bytes, shard.stop_bytes) for shard in unit.shards)) & ((1 << 62) - 1)


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
    header: PartHeader
    own: WholeGradient
    copied: Callable[[], None]
    """Waits until ``own`` is complete."""
    item: Item
    excuse: Excuse
    release: Callable[[], None]
    """Called when the gradient is pushed or dropped, and when it is shown to all members."""
    started_s: float
    generation: int

    @property
    def size_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.own.flats.values())


class GradientSums:
    """Adds gradients with the other members of a group. Called by the training thread. See Note: [Sums among trainers].

    Args:
        route: Name of the route, for statistics.
        exchange: Shows the members each other's gradients. Closed with this object.
        dp_ranks: Data ranks of the members, in ascending order: a reduction group of the run.
        position: Index of this trainer in ``dp_ranks``.
        order: The run's order of additions.
        pushes: Pushes gradients and sums.
    """

    def __init__(
        self, route: str, exchange: Exchange, dp_ranks: Sequence[int], position: int, order: SumOrder, pushes: Pushes
    ) -> None:
        self.summed_bytes = 0
        """Bytes of other trainers' gradients that this trainer has added."""
        self.route, self._exchange = route, exchange
        self._dp_ranks, self._position, self._order, self._pushes = tuple(dp_ranks), position, order, pushes
        self._generation = 0
        """Rises when the gradients in flight become void."""
        self._buffers = BufferPool(_IDLE_BYTES)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"shardwell-{route}", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        """False if this trainer has left the group for good."""
        return self._exchange.active

    def start_round(self, version: int) -> Round | None:
        """See ``Exchange.start_round``."""
        return self._exchange.start_round(version)

    def push(
        self,
        this_round: Round,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        item: Item,
        excuse: Excuse,
    ) -> None:
        """Starts to add a gradient to those of the other members, and to push the sum.

        Waits while more than ``push_bytes`` are in flight. Raises the error of an earlier push that failed.

        Args:
            this_round: The result of ``start_round``.
            unit: The unit.
            header: Header of the push of this trainer's own gradient. See ``RemoteShard.prepare_push``.
            gradients: ``(parameter index, gradient)`` by rising index, of 32 or 64 bits. The caller must not change
                them afterwards.
            item: The work item that the gradient belongs to.
            excuse: See ``Pushes.push``.
        """
        started_s = time.perf_counter()
        flats, copied = self._pushes.start_copies(gradients)
        context, attempt = header.common.context, header.common.attempt
        own = WholeGradient(context.epoch, context.lease_proof, attempt, cuts_of(unit), flats)
        release = after(2, self._pushes.hold(sum(flat.nbytes for flat in flats.values())))
        self._exchange.offer(this_round, unit, own, copied, release)
        self._jobs.put(_Job(this_round, unit, header, own, copied, item, excuse, release, started_s, self._generation))

    def finish_version(self, version: int) -> None:
        """See ``Exchange.finish_version``."""
        self._exchange.finish_version(version)

    def skip(self, version: int) -> None:
        """See ``Exchange.skip``."""
        self._exchange.skip(version)

    def abandon(self, version: int) -> None:
        """Drops the gradients in flight, whose attempts are over, and skips the rest of the version."""
        self._generation += 1
        self._exchange.skip(version)

    def leave(self, reason: str) -> None:
        """Leaves the group for good."""
        self._exchange.leave(reason)

    def close(self) -> None:
        """Leaves the group and releases its memory and connections."""
        self._generation += 1
        self._exchange.stop()
        self._jobs.put(None)
        self._thread.join(_CLOSE_LIMIT_S)
        self._exchange.close()

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
        shown = None
        try:
            shown = self._exchange.collect(job.this_round, job.unit, job.own, partial(self._is_over, job))
        except Exception as error:
            self._void(job, error)
        # All members see the same gradients, so all of them decide alike.
        if shown is not None and len({(one.attempt, one.cuts) for one in shown}) == 1:
            self._push_sums(job, shown)
            return
        if self._is_over(job):
            job.release()
            return
        done = self._counting(job, DIRECT, job.size_bytes, job.release)
        self._pushes.push_held(job.unit, job.header, job.own.flats, job.excuse, done)

    def _is_over(self, job: _Job) -> bool:
        return job.item.is_over or job.generation != self._generation

    def _void(self, job: _Job, error: BaseException) -> None:
        """Leaves the group. Other members may count on this one, so only a new attempt is right for all."""
        self._exchange.leave(error)
        job.item.spoil()

    def _push_sums(self, job: _Job, shown: Sequence[Shown]) -> None:
        """Adds the gradients of all members for this member's shards, and starts to push the sums."""
        try:
            job.item.note_summed(self._dp_ranks)
            size, numbers = len(self._dp_ranks), range(len(job.unit.shards))
            own = [number for number in numbers if adder_of(job.unit, number, size) == self._position]
            sums = {number: self._sum(job.unit.shards[number], shown) for number in own}
        except Exception as error:
            self._void(job, error)
            job.release()
            return
        added_bytes = sum(buffer.numel() for buffer in sums.values())
        self.summed_bytes += (len(shown) - 1) * added_bytes
        header = replace(
            job.header,
            summed=[
                shard_pb2.SummedRank(dp_rank=dp_rank, epoch=one.epoch, lease_proof=one.lease_proof)
                for dp_rank, one in zip(self._dp_ranks, shown, strict=True)
            ],
        )
        indices = _indices(shown)
        pushed_bytes = sum(
            segment.size_bytes for number in sums for segment in job.unit.shards[number].segments_of(indices)
        )
        done = self._counting(job, self.route, pushed_bytes, partial(self._end, job, sums))
        self._pushes.push_sums(job.unit, header, indices, sums, job.excuse, done)

    def _counting(self, job: _Job, route: str, pushed_bytes: int, done: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that counts a pushed gradient and calls ``done``."""
        peer_bytes = 0 if route == DIRECT else job.size_bytes - self._kept_bytes(job)

        def when_pushed() -> None:
            seconds = time.perf_counter() - job.started_s
            self._pushes.stats.routes.add(route, pushed_bytes=pushed_bytes, peer_bytes=peer_bytes, seconds=seconds)
            done()

        return when_pushed

    def _kept_bytes(self, job: _Job) -> int:
        """Returns the bytes of this trainer's gradient that this trainer adds itself."""
        size, shards = len(self._dp_ranks), enumerate(job.unit.shards)
        own = [shard for number, shard in shards if adder_of(job.unit, number, size) == self._position]
        return sum(segment.size_bytes for shard in own for segment in shard.segments_of(job.own.indices))

    def _end(self, job: _Job, sums: Mapping[int, torch.Tensor]) -> None:
        for buffer in sums.values():
            self._buffers.release(buffer)
        job.release()

    def _sum(self, shard: RemoteShard, shown: Sequence[Shown]) -> torch.Tensor:
        """Returns the sum of all members' gradients, laid out like the shard. uint8. [stop_bytes - start_bytes]"""
        buffer, scratch = self._buffers.acquire(shard.stop_bytes - shard.start_bytes), Scratch()
        for segment in shard.segments_of(_indices(shown)):
            terms = [
                (dp_rank, part)
                for dp_rank, one in zip(self._dp_ranks, shown, strict=True)
                if (part := one.part(segment)) is not None
            ]
            out = _segment_in(buffer, shard, segment, terms[0][1].dtype)
            for start in range(0, out.numel(), _SLICE_NUMEL):
                here = slice(start, start + _SLICE_NUMEL)
                total = self._order.add([(rank, term[here]) for rank, term in terms], out[here], scratch)
                if len(terms) == 1:
                    out[here].copy_(total)
        return buffer


def after(count: int, action: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls ``action`` when it is called for the ``count``-th time, in any thread."""
    lock, missing = threading.Lock(), count

    def call() -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        action()

    return call


def _indices(shown: Sequence[Shown]) -> tuple[int, ...]:
    """Returns the parameters that have a gradient in any of them, by rising index."""
    return tuple(sorted(set[int]().union(*(one.indices for one in shown))))


def _segment_in(buffer: torch.Tensor, shard: RemoteShard, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    return buffer[segment.start_bytes - shard.start_bytes : segment.stop_bytes - shard.start_bytes].view(dtype)
