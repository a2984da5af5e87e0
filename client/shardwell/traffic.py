"""Moves units between this trainer and the shard servers, behind the training thread's back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import torch

from shardwell.lanes import Piece
from shardwell.server_connection import ServerConnection
from shardwell.shared_vector import SharedVector
from shardwell_wire import codec
from shardwell_wire.errors import CapacityError, ShardwellError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2

_GATHER_THREADS, _PUSH_THREADS = 16, 8
"""Threads mostly wait for the network; a gather may also wait for a version."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The range of a unit's flat vector that one server owns."""

    server: ServerConnection
    start_bytes: int
    stop_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A declared unit and where it lives."""

    index: int
    layout: UnitLayout
    shards: tuple[Shard, ...]
    vector: SharedVector | None = None
    """Its flat vector in shared memory, if all of it can be read in place."""


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


class GatherFuture(Future[int]):
    """Done when every shard of a unit has arrived, or has failed; counts the time waited for it."""

    def __init__(self, parts: Sequence[Future[int]], stats: TrafficStats) -> None:
        super().__init__()
        self._stats, self._parts, self._missing = stats, parts, len(parts)
        self._count_lock = threading.Lock()
        for part in parts:
            part.add_done_callback(self._part_done)

    def result(self, timeout: float | None = None) -> int:
        started = time.perf_counter()
        try:
            return super().result(timeout)
        finally:
            self._stats.gather_wait_s += time.perf_counter() - started

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


class Traffic:
    """Background gathers and pushes of one trainer.

    Args:
        run: Name of the run.
        push_bytes: Gradients in flight beyond which ``push`` waits.
        wait_limit_s: The longest wait for a version to exist, or for a lost server to return.
    """

    def __init__(self, run: str, *, push_bytes: int, wait_limit_s: float) -> None:
        self.stats = TrafficStats()
        self._run, self._push_limit, self._wait_limit_s = run, push_bytes, wait_limit_s
        self._gathers = ThreadPoolExecutor(_GATHER_THREADS, thread_name_prefix="shardwell-gather")
        self._pushes = ThreadPoolExecutor(_PUSH_THREADS, thread_name_prefix="shardwell-push")
        self._changed = threading.Condition()
        self._bytes_in_flight, self._parts_in_flight = 0, 0
        self._push_error: BaseException | None = None
        self._last_part: dict[tuple[int, int], Future[None]] = {}

    def gather(self, unit: RemoteUnit, version: int | None, target: memoryview) -> Future[int]:
        """Starts to fetch a unit. [unit.layout.size_bytes]

        Args:
            unit: The unit.
            version: None: the newest.
            target: Receives the flat vector; must stay in place until the future is done.
        """
        self.stats.gather_count += 1
        self.stats.gathered_bytes += unit.layout.size_bytes
        parts = [self._gathers.submit(self._gather_shard, unit, shard, version, target) for shard in unit.shards]
        return GatherFuture(parts, self.stats)

    def _gather_shard(self, unit: RemoteUnit, shard: Shard, version: int | None, target: memoryview) -> int:
        request = shard_pb2.GatherRequest(
            run=self._run,
            unit=unit.layout.unit,
            version=version,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
        )
        view = target[shard.start_bytes : shard.stop_bytes]
        return shard.server.stream.gather(request, view, timeout_s=self._wait_limit_s, retry_for_s=self._wait_limit_s)

    def await_version(self, unit: RemoteUnit, version: int) -> Future[int]:
        """Starts to wait until a unit that is read in place is of a version."""
        assert unit.vector is not None
        self.stats.gather_count += 1
        if unit.vector.shows(version):
            there: Future[int] = Future()
            there.set_result(version)
            return there
        parts = [self._gathers.submit(self._await_shard, unit, shard, version) for shard in unit.shards]
        return GatherFuture(parts, self.stats)

    def _await_shard(self, unit: RemoteUnit, shard: Shard, version: int) -> int:
        lane, limit_s = shard.server.require_shm(), self._wait_limit_s
        return lane.locate(unit.layout.unit, version, timeout_s=limit_s, retry_for_s=limit_s).version

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
        flats = {index: gradient.detach().cpu().contiguous() for index, gradient in gradients}
        size = sum(flat.nbytes for flat in flats.values())
        self._take_room(size)
        self.stats.push_count += 1
        self.stats.pushed_bytes += size
        header.parameter_indices[:] = sorted(flats)
        futures = []
        for number, shard in enumerate(unit.shards):
            own = shard_pb2.ReduceScatterHeader()
            own.CopyFrom(header)
            own.start_bytes, own.stop_bytes = shard.start_bytes, shard.stop_bytes
            previous = self._last_part.get((unit.index, number))
            future = self._pushes.submit(self._push_shard, unit, shard, own, flats, previous)
            self._last_part[unit.index, number] = future
            futures.append(future)
        self._give_back_when_done(futures, size)

    def _push_shard(
        self,
        unit: RemoteUnit,
        shard: Shard,
        header: shard_pb2.ReduceScatterHeader,
        flats: dict[int, torch.Tensor],
        previous: Future[None] | None,
    ) -> None:
        if previous is not None:
            # A server takes parts in order. The pool is first-in first-out: `previous` has a thread.
            previous.result()
        pieces = []
        for segment in unit.layout.packed_segments(flats, shard.start_bytes, shard.stop_bytes):
            flat = flats[segment.parameter_index]
            address = flat.data_ptr() + segment.start_element * flat.element_size()
            data = codec.memory_at(address, segment.size_bytes)
            pieces.append(Piece(segment.start_bytes - shard.start_bytes, data))
        limit_s = self._wait_limit_s
        if shard.server.pushes_through_shm:
            try:
                shard.server.require_shm().deliver(header, pieces, timeout_s=limit_s, retry_for_s=limit_s)
                return
            except (CapacityError, OSError) as error:
                shard.server.stream_gradients(error)
        parts = [piece.data for piece in pieces]
        shard.server.stream.reduce_scatter(header, parts, timeout_s=limit_s, retry_for_s=limit_s)

    def drain(self) -> None:
        """Waits until every push is acknowledged; raises what the first failed one met."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not self._parts_in_flight)
        self.stats.push_wait_s += time.perf_counter() - started
        self._last_part.clear()
        self._raise_push_error()

    def forget(self) -> None:
        """Waits until nothing is in flight and drops what failed: its work is begun anew."""
        try:
            self.drain()
        except ShardwellError:
            return

    def close(self) -> None:
        self._gathers.shutdown(wait=False, cancel_futures=True)
        self._pushes.shutdown(wait=False, cancel_futures=True)

    def _take_room(self, size: int) -> None:
        started = time.perf_counter()
        with self._changed:
            # A part larger than the limit goes alone.
            self._changed.wait_for(
                lambda: not self._bytes_in_flight or self._bytes_in_flight + size <= self._push_limit
            )
            self._bytes_in_flight += size
            self._parts_in_flight += 1
        self.stats.push_wait_s += time.perf_counter() - started

    def _give_back_when_done(self, futures: Sequence[Future[None]], size: int) -> None:
        missing = len(futures)

        def done(future: Future[None]) -> None:
            nonlocal missing
            with self._changed:
                if (error := future.exception()) is not None and self._push_error is None:
                    self._push_error = error
                missing -= 1
                if missing == 0:
                    self._bytes_in_flight -= size
                    self._parts_in_flight -= 1
                self._changed.notify_all()

        for future in futures:
            future.add_done_callback(done)

    def _raise_push_error(self) -> None:
        with self._changed:
            error, self._push_error = self._push_error, None
        if error is not None:
            raise error
