"""Background pushes of gradients to the shard servers: order, limits in flight and errors."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from shardwell.data_plane.batches import MAX_STREAM_BYTES, Batches
from shardwell.data_plane.error_feedback import EncodedGradients
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.data_plane.shard_push import ShardPush, push_together
from shardwell.data_plane.traffic_stats import TrafficStats
from shardwell.data_plane.transfer_queue import DaemonThreads, TransferQueue
from shardwell.memory.device_copies import to_host
from shardwell.transport.base import NearlyDone, ignore
from shardwell.transport.server_connection import ServerConnection
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import shard_pb2

_THREADS = 16
"""The threads mostly wait for the network."""

PushBatches = Batches[ShardPush, None]
"""The small pushes to one server."""

Excuse = Callable[[BaseException], bool]
"""Returns whether the error of a push does not matter, because the push does not count any more."""


class Pushes:
    """Pushes gradients in background threads. Called by the training thread, where nothing else is said.

    Args:
        stats: Counts pushes, bytes and waiting times.
        push_bytes: Limit of gradient bytes in flight. ``push`` waits while they exceed it.
        max_batched_bytes: Largest part that is streamed in one message with others. None: no part is batched.
    """

    def __init__(
        self, stats: TrafficStats, *, push_bytes: int, max_batched_bytes: int | None = MAX_STREAM_BYTES
    ) -> None:
        self.stats = stats
        self._push_limit, self._max_batched_bytes = push_bytes, max_batched_bytes
        self._threads = DaemonThreads(_THREADS, "shardwell-push")
        self._queues = defaultdict[ServerConnection, TransferQueue[None]](lambda: TransferQueue(self._threads))
        self._batches: dict[ServerConnection, PushBatches] = {}
        self._starting = threading.Lock()
        """Held while a push is queued, by the training thread or by the thread that adds gradients."""
        self._changed = threading.Condition()
        """Protects the next four fields, which the push threads change too."""
        self._bytes_in_flight, self._pushes_in_flight, self._waiter_count = 0, 0, 0
        self._push_error: BaseException | None = None
        self._last_part: dict[tuple[int, int], tuple[Future[None], PushBatches | None]] = {}
        """The last push to each shard and the batches that contain it, keyed by unit index and shard number."""

    def push(
        self,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        excuse: Excuse = lambda _: False,
        *,
        route: str | None = None,
    ) -> None:
        """Starts to push one part of a contribution to every owner of the unit.

        Waits while more than ``push_bytes`` are in flight. Raises the error of an earlier push that failed.

        Args:
            unit: The unit.
            header: See ``RemoteShard.prepare_push``.
            gradients: ``(parameter index, gradient)`` by rising index. The caller must not change them afterwards.
            excuse: Returns whether an error of this push does not matter. Called in any thread.
            route: The route for which the push is counted. None: none.
        """
        flats, copied = self.start_copies(gradients)
        size = _size_of(flats)
        # Gradients on the CPU that go through shared memory are copied before this method returns.
        on_cpu = all(gradient.device.type == "cpu" for _, gradient in gradients)
        with uninterrupted:
            if on_cpu:
                release = self._counted(route, size, self.hold(size if _are_streamed(unit) else 0))
                self.push_held(unit, header, flats, excuse, release)
            else:
                release = self._counted(route, size, self.hold(size))
                self._start(
                    unit, lambda shard: partial(_push_after_copy, copied, shard, header, flats), size, excuse, release
                )

    def push_encoded(
        self,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        gradients: EncodedGradients,
        excuse: Excuse = lambda _: False,
        *,
        route: str | None = None,
    ) -> None:
        """Starts to push encoded gradients; see ``push``. Releases them when all shards have their part."""
        self._raise_push_error()
        with uninterrupted:
            held_bytes = len(gradients.stream) if _are_streamed(unit) else 0
            release = self._counted(route, gradients.stored_bytes, self.hold(held_bytes))

            def when_pushed() -> None:
                gradients.release()
                release()

            self._start(
                unit,
                lambda shard: shard.prepare_push_encoded(header, gradients),
                gradients.stored_bytes,
                excuse,
                when_pushed,
            )

    def start_copies(
        self, gradients: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[dict[int, torch.Tensor], Callable[[], None]]:
        """Starts to copy gradients to the host. Raises the error of an earlier push that failed.

        Returns:
            Flat gradients by parameter index, and a function that waits until they are complete.
        """
        self._raise_push_error()
        copies, copied = to_host([gradient for _, gradient in gradients])
        return {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}, copied

    def hold(self, size_bytes: int) -> Callable[[], None]:
        """Counts gradients as in flight, once there is room within ``push_bytes``.

        Returns:
            A function to call in any thread when the gradients are pushed or dropped. Harmless to repeat.
        """
        self._reserve(size_bytes)
        held = True

        def release() -> None:
            nonlocal held
            with self._changed:
                if not held:
                    return
                held = False
                self._bytes_in_flight -= size_bytes
                self._pushes_in_flight -= 1
                if self._waiter_count and (size_bytes or not self._pushes_in_flight):
                    self._changed.notify_all()

        return release

    def _counted(self, route: str | None, size_bytes: int, release: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that counts a push for a route when it is acknowledged, and calls ``release``."""
        if route is None:
            return release
        started_s = time.perf_counter()

        def when_pushed() -> None:
            self.stats.routes.add(route, pushed_bytes=size_bytes, seconds=time.perf_counter() - started_s)
            release()

        return when_pushed

    def push_held(
        self,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        flats: Mapping[int, torch.Tensor],
        excuse: Excuse,
        release: Callable[[], None],
    ) -> None:
        """Starts to push gradients on the CPU that are counted as in flight. Called in any thread.

        Args:
            unit: See ``push``.
            header: See ``push``.
            flats: Flat gradients by parameter index.
            excuse: See ``push``.
            release: The result of ``hold``.
        """
        self._start(unit, lambda shard: shard.prepare_push(header, flats), _size_of(flats), excuse, release)

    def push_sums(
        self,
        unit: RemoteUnit,
        header: shard_pb2.ReduceScatterHeader,
        indices: Sequence[int],
        sums: Mapping[int, torch.Tensor],
        excuse: Excuse,
        when_pushed: Callable[[], None],
    ) -> None:
        """Starts to push sums of several ranks' gradients to some shards of a unit. Called in any thread.

        Args:
            unit: The unit.
            header: See ``push``. Names the ranks.
            indices: Parameters that have a gradient, by rising index.
            sums: By shard number. Each laid out like its shard. uint8. [stop_bytes - start_bytes]
            excuse: See ``push``.
            when_pushed: Called when all sums are pushed.
        """
        by_start = {unit.shards[number].start_bytes: buffer for number, buffer in sums.items()}
        size = sum(buffer.numel() for buffer in sums.values())

        def prepare(shard: RemoteShard) -> Callable[[NearlyDone], None]:
            return shard.prepare_push_sum(header, indices, by_start[shard.start_bytes])

        self._start(unit, prepare, size, excuse, when_pushed, numbers=sums.keys())

    def fail(self, error: BaseException) -> None:
        """Makes the next ``push`` or ``drain`` raise an error. Called in any thread."""
        with self._changed:
            self._push_error = self._push_error or error

    def _start(
        self,
        unit: RemoteUnit,
        prepare: Callable[[RemoteShard], Callable[[NearlyDone], None]],
        size_bytes: int,
        excuse: Excuse,
        when_pushed: Callable[[], None],
        numbers: Collection[int] | None = None,
    ) -> None:
        """Starts the pushes to shards of a unit.

        Args:
            unit: The unit.
            prepare: Returns a function that pushes one shard's part.
            size_bytes: Size of the gradients.
            excuse: See ``push``.
            when_pushed: Called when all parts are pushed.
            numbers: Numbers of the shards. None: all.
        """
        with uninterrupted, self._starting:
            self.stats.push_count += 1
            self.stats.pushed_bytes += size_bytes
            futures: list[Future[None]] = []
            try:
                for number, shard in enumerate(unit.shards):
                    if numbers is not None and number not in numbers:
                        continue
                    futures.append(self._submit((unit.index, number), shard, _prepared(prepare, shard)))
            finally:  # wait only for the parts that were started
                self._call_when_done(futures, excuse, when_pushed)
            if self._waiter_count:
                self._flush()

    def _submit(self, key: tuple[int, int], shard: RemoteShard, push: Callable[[NearlyDone], None]) -> Future[None]:
        """Queues the push of a shard's part: with those of other units if it is small, or else by itself."""
        previous, batched_with = self._last_part.get(key, (None, None))
        shard_bytes = shard.stop_bytes - shard.start_bytes
        batches = self._batches_for(push) if isinstance(push, ShardPush) else None
        # The pushes of one queue are sent in order.
        in_order = previous is None or batched_with is batches or previous.done()
        if batches is not None and isinstance(push, ShardPush) and in_order:
            future = batches.submit(push, shard_bytes, key)
            self._last_part[key] = future, batches
            return future
        self._flush()  # the push may wait for one of them
        streamed_bytes = 0 if shard.server.copies_gradients else shard_bytes
        future = self._queues[shard.server].submit(streamed_bytes, partial(_send, push, previous))
        self._last_part[key] = future, None
        return future

    def _batches_for(self, push: ShardPush) -> PushBatches | None:
        """Returns the batches that a push belongs to. None: it is sent by itself."""
        limit_bytes = self._max_batched_bytes
        if limit_bytes is None or push.stream_bytes > limit_bytes:
            return None
        batches = self._batches.get(push.server)
        if batches is None:
            batches = self._batches[push.server] = PushBatches(
                self._threads, push_together, lambda each: each(ignore), max_in_flight=1, holds=True
            )
        return batches

    def _flush(self) -> None:
        """Starts to send the pushes that wait for others, because somebody waits for them."""
        for batches in list(self._batches.values()):
            batches.flush()

    def drain(self) -> None:
        """Waits until every push is acknowledged; raises the first error."""
        self._await_pushes()
        self._raise_push_error()

    def discard(self) -> None:
        """Waits until no push is in flight and drops their errors. Called when their work item is restarted."""
        self._await_pushes()
        self._push_error = None

    def _await_pushes(self) -> None:
        self._wait_for(lambda: not self._pushes_in_flight)
        self._last_part.clear()

    def close(self) -> None:
        """Fails all waiting pushes. Pushes in flight end when the connection to their server is closed."""
        for queue in self._queues.values():
            queue.close()
        for batches in self._batches.values():
            batches.close()
        self._threads.shutdown(wait=False)

    def join(self, limit_s: float) -> None:
        """Waits after ``close`` until no push reads memory of units, at most ``limit_s``."""
        self._threads.join(limit_s)

    def _reserve(self, size_bytes: int) -> None:
        with uninterrupted:
            while True:
                with self._changed:
                    if self._has_room(size_bytes):
                        self._bytes_in_flight += size_bytes
                        self._pushes_in_flight += 1
                        return
                self._wait_for(lambda: self._has_room(size_bytes))

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        """Waits for the end of pushes. Meanwhile no push waits for others."""
        with self.stats.waiting_for_push(), uninterrupted:
            with self._changed:
                self._waiter_count += 1
            try:
                self._flush()
                with self._changed:
                    uninterrupted.wait_for(self._changed, is_true)
            finally:
                with self._changed:
                    self._waiter_count -= 1

    def _has_room(self, size_bytes: int) -> bool:
        """True if a push may start. A push larger than the limit goes alone."""
        return not self._bytes_in_flight or self._bytes_in_flight + size_bytes <= self._push_limit

    def _call_when_done(self, futures: Sequence[Future[None]], excuse: Excuse, when_done: Callable[[], None]) -> None:
        missing = len(futures)

        def done(future: Future[None]) -> None:
            nonlocal missing
            error = future.exception()
            if error is not None and excuse(error):
                error = None
            with self._changed:
                if error is not None and self._push_error is None:
                    self._push_error = error
                missing -= 1
                is_last = not missing
            if is_last:
                when_done()

        for future in futures:
            future.add_done_callback(done)
        if not futures:
            when_done()

    def _raise_push_error(self) -> None:
        with uninterrupted, self._changed:
            error, self._push_error = self._push_error, None
        if error is not None:
            raise error


def _size_of(flats: Mapping[int, torch.Tensor]) -> int:
    return sum(flat.nbytes for flat in flats.values())


def _are_streamed(unit: RemoteUnit) -> bool:
    """Whether some gradients of a unit stay in memory until they are sent."""
    return any(not shard.server.copies_gradients for shard in unit.shards)


def _prepared(
    prepare: Callable[[RemoteShard], Callable[[NearlyDone], None]], shard: RemoteShard
) -> Callable[[NearlyDone], None]:
    """Returns a function that pushes a shard's part, or one that raises the error of preparing the push."""
    try:
        return prepare(shard)
    except ShardwellError as error:
        # In this frame nothing refers to the error: a cycle would keep the gradients until a garbage collection.
        return partial(_fail, error)


def _push_after_copy(
    copied: Callable[[], None],
    shard: RemoteShard,
    header: shard_pb2.ReduceScatterHeader,
    flats: Mapping[int, torch.Tensor],
    nearly_done: NearlyDone,
) -> None:
    """Pushes a shard's part when the copy from the GPU is done."""
    copied()
    shard.prepare_push(header, flats)(nearly_done)


def _fail(error: ShardwellError, _: NearlyDone) -> None:
    raise error


def _send(push: Callable[[NearlyDone], None], previous: Future[None] | None, nearly_done: NearlyDone) -> None:
    """Pushes a part after the previous part to the same shard. See Note: [Order of pushes] in ``transfer_queue.py``."""
    if previous is not None:
        previous.result()
    push(nearly_done)
