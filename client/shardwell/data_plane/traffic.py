"""Moves units between this trainer and the shard servers, behind the training thread's back."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from functools import partial

import torch

from shardwell.data_plane.daemon_threads import DaemonThreads
from shardwell.data_plane.encoded_gradients import EncodedGradients
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.transfer_queue import TransferQueue
from shardwell.memory.device_copies import to_host
from shardwell.transport.base import Nearly
from shardwell.transport.selector import ServerConnection
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.errors import ShardwellError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2

_GATHER_THREADS = _PUSH_THREADS = 16
"""Threads mostly wait for the network; a gather may also wait for a version."""

_LOOKING_S = 0.1
"""A version in shared memory is looked for so long before its servers are asked, who may know that it is gone."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.001


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A declared unit and where it lives."""

    index: int
    layout: UnitLayout
    shards: tuple[RemoteShard, ...]
    vector: SharedVector | None = None
    """Its flat vector in shared memory, of servers or of the host's cache, if all of it can be read in place."""


@dataclass
class TrafficStats:
    """What was moved, and how long the training thread waited for it."""

    gather_count: int = 0
    gathered_bytes: int = 0
    gather_wait_s: float = 0.0
    push_count: int = 0
    pushed_bytes: int = 0
    push_wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


class WaitedFor(Future[int]):
    """A gather's version; counts the time waited for it."""

    def __init__(self, stats: TrafficStats) -> None:
        super().__init__()
        self._stats = stats

    def result(self, timeout: float | None = None) -> int:
        started = time.perf_counter()
        try:
            return super().result(timeout)
        finally:
            self._stats.gather_wait_s += time.perf_counter() - started


class GatherFuture(WaitedFor):
    """Done when every shard of a unit has arrived, or has failed."""

    def __init__(self, parts: Sequence[Future[int]], stats: TrafficStats) -> None:
        super().__init__(stats)
        self._parts, self._missing = parts, len(parts)
        self._count_lock = threading.Lock()
        for part in parts:
            part.add_done_callback(self._part_done)

    def _part_done(self, _: Future[int]) -> None:
        with self._count_lock:
            self._missing -= 1
            if self._missing:
                return
        # Every part is done: none writes to the target any more, also when one has failed.
        for part in self._parts:
            if (error := part.exception()) is not None:
                self.set_exception(error)
                return
        self.set_result(self._parts[0].result())


class VersionInPlace(Future[int]):
    """A version that comes to be in memory that is read in place: one looks for it when it is needed, no sooner.

    Args:
        unit: The unit, all of whose servers share their memory.
        version: The one to wait for.
        stats: Counts the time waited for it.
    """

    def __init__(self, unit: RemoteUnit, version: int, stats: TrafficStats) -> None:
        super().__init__()
        self._unit, self._version, self._stats = unit, version, stats

    def result(self, timeout: float | None = None) -> int:
        if not self.done():
            started = time.perf_counter()
            try:
                self.set_result(self._wait())
            except ShardwellError as error:
                self.set_exception(error)
            self._stats.gather_wait_s += time.perf_counter() - started
        return super().result(timeout)

    def _wait(self) -> int:
        vector = self._unit.vector
        assert vector is not None
        # An update takes milliseconds, and asking the server about one nearly as much of two processors' time.
        give_up, pause_s = time.perf_counter() + _LOOKING_S, _FIRST_PAUSE_S
        while not vector.shows(self._version):
            if time.perf_counter() > give_up:
                return min(shard.await_version(self._version) for shard in self._unit.shards)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._version


class Traffic:
    """Background gathers and pushes of one trainer.

    Args:
        push_bytes: Gradients in flight beyond which ``push`` waits.
    """

    def __init__(self, *, push_bytes: int) -> None:
        self.stats = TrafficStats()
        self._push_limit = push_bytes
        self._gathers = DaemonThreads(_GATHER_THREADS, "shardwell-gather")
        self._pushes = DaemonThreads(_PUSH_THREADS, "shardwell-push")
        self._gather_queues = defaultdict[ServerConnection, TransferQueue[int]](lambda: TransferQueue(self._gathers))
        self._push_queues = defaultdict[ServerConnection, TransferQueue[None]](lambda: TransferQueue(self._pushes))
        self._changed = threading.Condition()
        self._bytes_in_flight, self._parts_in_flight = 0, 0
        self._push_error: BaseException | None = None
        self._last_part: dict[tuple[int, int], Future[None]] = {}

    def gather(self, unit: RemoteUnit, version: int | None, target: memoryview, *, exact: bool = False) -> Future[int]:
        """Starts to fetch a unit. [unit.layout.size_bytes]

        Args:
            unit: The unit.
            version: None: the newest.
            target: Receives the flat vector; must stay in place until the future is done.
            exact: Without rounding.
        """
        self.stats.gather_count += 1
        self.stats.gathered_bytes += unit.layout.size_bytes
        return self._fetch(
            unit,
            lambda shard: partial(shard.fetch, version, target[shard.start_bytes : shard.stop_bytes], exact=exact),
        )

    def gather_cast(self, unit: RemoteUnit, version: int, target: memoryview, layout: UnitLayout) -> Future[int]:
        """Starts to fetch a unit as other dtypes than it is stored in.

        Args:
            unit: The unit.
            version: Of it.
            target: Receives the values; must stay in place until the future is done. [layout.size_bytes]
            layout: The same parameters in the dtypes to deliver.
        """
        self.stats.gather_count += 1
        self.stats.gathered_bytes += layout.size_bytes
        return self._fetch(unit, lambda shard: partial(shard.fetch_cast, version, layout, target))

    def await_version(self, unit: RemoteUnit, version: int) -> Future[int]:
        """Starts to wait until a unit that is read in place is of a version."""
        assert unit.vector is not None
        self.stats.gather_count += 1
        if unit.vector.shows(version):
            for shard in unit.shards:
                shard.count_hit()
            there: Future[int] = Future()
            there.set_result(version)
            return there
        if all(shard.cached is None for shard in unit.shards):
            return VersionInPlace(unit, version, self.stats)
        return self._fetch(unit, lambda shard: partial(_await_version, shard, version))

    def push(
        self, unit: RemoteUnit, header: shard_pb2.ReduceScatterHeader, gradients: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Starts to push one part of a contribution to every owner of the unit.

        Waits while more than ``push_bytes`` are in flight. Raises what an earlier push met.

        Args:
            unit: The unit.
            header: All but the range and the parameter indices.
            gradients: ``(parameter index, gradient)`` by rising index, owned by the callee from now on.
        """
        self._raise_push_error()
        copies, copied = to_host([gradient for _, gradient in gradients])
        flats = {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}
        header.parameter_indices[:] = sorted(flats)
        size = sum(flat.nbytes for flat in flats.values())
        # What goes from the CPU through shared memory is copied before this returns, and held no longer.
        here = all(gradient.device.type == "cpu" for _, gradient in gradients)
        held = size if not here or _are_streamed(unit) else 0

        def begin(shard: RemoteShard, own: shard_pb2.ReduceScatterHeader) -> Callable[[Nearly], None]:
            if here:
                return _begun(lambda: shard.begin_send(own, flats))
            return partial(_begin_later, copied, shard, own, flats)

        self._push(unit, header, begin, size, held)

    def push_encoded(
        self, unit: RemoteUnit, header: shard_pb2.ReduceScatterHeader, gradients: EncodedGradients
    ) -> None:
        """``push`` of gradients that are encoded; they are given back when all of their parts are pushed."""
        self._raise_push_error()
        header.parameter_indices[:] = gradients.indices
        self._push(
            unit,
            header,
            lambda shard, own: _begun(lambda: shard.begin_send_encoded(own, gradients)),
            gradients.stored_bytes,
            len(gradients.stream) if _are_streamed(unit) else 0,
            gradients.give_back,
        )

    def _push(
        self,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        begin: Callable[[RemoteShard, shard_pb2.ReduceScatterHeader], Callable[[Nearly], None]],
        size: int,
        held: int,
        when_pushed: Callable[[], None] = lambda: None,
    ) -> None:
        """Pushes what ``begin`` makes of each shard and its own header.

        Args:
            unit: The unit.
            header: All but the range.
            begin: Returns what pushes a shard's part.
            size: Of the gradients, in bytes.
            held: How much is held until all is pushed.
            when_pushed: Called then.
        """
        with uninterrupted:
            self._take_room(held)
            self.stats.push_count += 1
            self.stats.pushed_bytes += size
            futures: list[Future[None]] = []
            try:
                for number, shard in enumerate(unit.shards):
                    own = shard_pb2.ReduceScatterHeader()
                    own.CopyFrom(header)
                    previous = self._last_part.get((unit.index, number))
                    streamed_bytes = 0 if shard.server.pushes_through_shm else shard.stop_bytes - shard.start_bytes
                    send = partial(_send, begin(shard, own), previous)
                    future = self._push_queues[shard.server].submit(streamed_bytes, send)
                    self._last_part[unit.index, number] = future
                    futures.append(future)
            finally:  # what was not begun is not waited for
                self._give_back_when_done(futures, held, when_pushed)

    def drain(self) -> None:
        """Waits until every push is acknowledged; raises what the first failed one met."""
        self._await_pushes()
        self._raise_push_error()

    def forget(self) -> None:
        """Waits until nothing is in flight and drops what failed: its work is begun anew."""
        self._await_pushes()
        self._push_error = None

    def _await_pushes(self) -> None:
        started = time.perf_counter()
        with uninterrupted, self._changed:
            uninterrupted.wait_for(self._changed, lambda: not self._parts_in_flight)
        self.stats.push_wait_s += time.perf_counter() - started
        self._last_part.clear()

    def _fetch(self, unit: RemoteUnit, work_of: Callable[[RemoteShard], Callable[[Nearly], int]]) -> Future[int]:
        parts: list[Future[int]] = []
        with uninterrupted:
            try:
                for shard in unit.shards:
                    queue = self._gather_queues[shard.server]
                    parts.append(queue.submit(shard.stop_bytes - shard.start_bytes, work_of(shard)))
            except BaseException:  # whoever gets no future may use the target for something else
                wait(parts)
                raise
            return GatherFuture(parts, self.stats)

    def close(self) -> None:
        """Fails what waits; what is under way goes on until its server's connection is closed."""
        for gathers in self._gather_queues.values():
            gathers.close()
        for pushes in self._push_queues.values():
            pushes.close()
        self._gathers.shutdown(wait=False)
        self._pushes.shutdown(wait=False)

    def join(self, limit_s: float) -> None:
        """After ``close``: waits until nothing is under way, which would use memory of others, for so long each way."""
        self._gathers.join(limit_s)
        self._pushes.join(limit_s)

    def _take_room(self, size: int) -> None:
        started = time.perf_counter()
        with uninterrupted, self._changed:
            # A part larger than the limit goes alone.
            uninterrupted.wait_for(
                self._changed, lambda: not self._bytes_in_flight or self._bytes_in_flight + size <= self._push_limit
            )
            self._bytes_in_flight += size
            self._parts_in_flight += 1
        self.stats.push_wait_s += time.perf_counter() - started

    def _give_back_when_done(self, futures: Sequence[Future[None]], size: int, when_done: Callable[[], None]) -> None:
        missing = len(futures)

        def give_back() -> None:
            when_done()
            with self._changed:
                self._bytes_in_flight -= size
                self._parts_in_flight -= 1
                self._changed.notify_all()

        def done(future: Future[None]) -> None:
            nonlocal missing
            with self._changed:
                if (error := future.exception()) is not None and self._push_error is None:
                    self._push_error = error
                missing -= 1
                is_last = not missing
            if is_last:
                give_back()

        for future in futures:
            future.add_done_callback(done)
        if not futures:
            give_back()

    def _raise_push_error(self) -> None:
        with uninterrupted, self._changed:
            error, self._push_error = self._push_error, None
        if error is not None:
            raise error


def _are_streamed(unit: RemoteUnit) -> bool:
    """Whether any of a unit's gradients are held until they are sent."""
    return any(not shard.server.pushes_through_shm for shard in unit.shards)


def _await_version(shard: RemoteShard, version: int, _: Nearly) -> int:
    return shard.await_version(version)


def _begun(begin: Callable[[], Callable[[Nearly], None]]) -> Callable[[Nearly], None]:
    """What pushes a shard's part, or raises why that is not possible."""
    try:
        return begin()
    except ShardwellError as error:
        return partial(_fail, error)


def _begin_later(
    copied: Callable[[], None],
    shard: RemoteShard,
    header: shard_pb2.ReduceScatterHeader,
    flats: Mapping[int, torch.Tensor],
    nearly: Nearly,
) -> None:
    """Pushes a shard's part once it has come from a GPU."""
    copied()
    shard.begin_send(header, flats)(nearly)


def _fail(error: ShardwellError, _: Nearly) -> None:
    raise error


def _send(push: Callable[[Nearly], None], previous: Future[None] | None, nearly: Nearly) -> None:
    if previous is not None:
        # A server takes parts in order. Queue and threads are first-in first-out: `previous` has a thread.
        previous.result()
    push(nearly)
