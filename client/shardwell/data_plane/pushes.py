"""Background pushes of gradients to the shard servers: order, limits in flight and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from shardwell.data_plane.error_feedback import EncodedGradients
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.push_batches import MAX_STREAM_BYTES, PushBatches
from shardwell.data_plane.pushes_in_flight import Excuse, PushesInFlight, QueuedPush, Send, UnitPush
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.data_plane.shard_push import ShardPush, push_together
from shardwell.data_plane.traffic_stats import TrafficStats
from shardwell.data_plane.transfer_queue import DaemonThreads, TransferQueue, closed_error
from shardwell.memory.device_copies import to_host
from shardwell.transport.base import NearlyDone
from shardwell.transport.push_header import PartHeader
from shardwell.transport.server_connection import ServerConnection
from shardwell_wire.errors import ShardwellError

_THREADS = 16
"""The threads mostly wait for the network."""

Prepare = Callable[[RemoteShard], Send]
"""Reads one shard's part, or refers to it, so that it can be pushed in any thread."""


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
        self._max_batched_bytes = max_batched_bytes
        self._threads = DaemonThreads(_THREADS, "shardwell-push")
        self._queues: dict[ServerConnection, TransferQueue[None]] = {}
        self._batches: dict[ServerConnection, PushBatches[QueuedPush]] = {}
        self._starting = threading.Lock()
        """Held while a push is queued, by the training thread or by the thread that adds gradients."""
        self._in_flight = PushesInFlight(stats, push_bytes, self._flush)
        self._opening = threading.Lock()
        """Protects ``_closed``, and additions to ``_queues`` and ``_batches``."""
        self._closed = False
        self._last_part: dict[tuple[int, int], QueuedPush] = {}
        """The last push to each shard, by unit index and shard number."""

    def push(
        self,
        unit: RemoteUnit,
        header: PartHeader,
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
        self._in_flight.raise_error()
        # Gradients on the CPU that go through shared memory are copied before this method returns.
        if False not in [gradient.is_cpu for _, gradient in gradients]:
            flats = {
                index: gradient if gradient.is_contiguous() and not gradient.requires_grad else _plain(gradient)
                for index, gradient in gradients
            }
            prepare: Prepare = partial(_read, header, flats)
            copies = _copies_all(unit)
        else:
            flats, copied = self.start_copies(gradients)
            prepare = partial(_read_later, copied, header, flats)
            copies = False
        size = _size_of(flats)
        with uninterrupted:
            held = self._in_flight.hold(0 if copies else size)
            self._start(unit, prepare, UnitPush(excuse, size, held=held, route=route))
            if copies and not _copies_all(unit):  # a server had no memory for a copy
                held.grow(size)

    def push_encoded(
        self,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: EncodedGradients,
        excuse: Excuse = lambda _: False,
        *,
        route: str | None = None,
    ) -> None:
        """Starts to push encoded gradients; see ``push``. Releases them when all shards have their part."""
        self._in_flight.raise_error()
        with uninterrupted:
            copies = _copies_all(unit)
            held = self._in_flight.hold(0 if copies else len(gradients.stream))
            push = UnitPush(excuse, gradients.stored_bytes, held=held, when_pushed=gradients.release, route=route)
            self._start(unit, lambda shard: shard.prepare_push_encoded(header, gradients), push)
            if copies and not _copies_all(unit):
                held.grow(len(gradients.stream))

    def start_copies(
        self, gradients: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[dict[int, torch.Tensor], Callable[[], None]]:
        """Starts to copy gradients to the host. Raises the error of an earlier push that failed.

        Returns:
            Flat gradients by parameter index, and a function that waits until they are complete.
        """
        self._in_flight.raise_error()
        copies, copied = to_host([gradient for _, gradient in gradients])
        return {index: flat for (index, _), flat in zip(gradients, copies, strict=True)}, copied

    def hold(self, size_bytes: int) -> Callable[[], None]:
        """Counts gradients as in flight, once there is room within ``push_bytes``.

        Returns:
            A function to call in any thread when the gradients are pushed or dropped. Harmless to repeat.
        """
        with uninterrupted:
            return self._in_flight.hold(size_bytes).release

    def push_held(
        self,
        unit: RemoteUnit,
        header: PartHeader,
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
        push = UnitPush(excuse, _size_of(flats), when_pushed=release)
        with uninterrupted:
            self._start(unit, partial(_read, header, flats), push)

    def push_sums(
        self,
        unit: RemoteUnit,
        header: PartHeader,
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
        with uninterrupted:
            self._start(
                unit,
                lambda shard: shard.prepare_push_sum(header, indices, by_start[shard.start_bytes]),
                UnitPush(excuse, size, when_pushed=when_pushed),
                numbers=sums.keys(),
            )

    def fail(self, error: BaseException) -> None:
        """Makes the next ``push`` or ``drain`` raise an error. Called in any thread."""
        self._in_flight.fail(error)

    def _start(
        self, unit: RemoteUnit, prepare: Prepare, push: UnitPush, numbers: Collection[int] | None = None
    ) -> None:
        """Starts the pushes to shards of a unit. Call it within ``uninterrupted``.

        Args:
            unit: The unit.
            prepare: Prepares one shard's part.
            push: The push.
            numbers: Numbers of the shards. None: all.
        """
        with self._starting:
            self.stats.push_count += 1
            self.stats.pushed_bytes += push.size_bytes
            shards = list(enumerate(unit.shards))
            if numbers is not None:
                shards = [(number, shard) for number, shard in shards if number in numbers]
            push.missing, started_count = len(shards), 0
            try:
                for number, shard in shards:
                    self._submit(push, (unit.index, number), shard, _prepared(prepare, shard))
                    started_count += 1
            finally:
                if started_count < len(shards) or not shards:  # wait only for the parts that were started
                    self._in_flight.count_ended([push], len(shards) - started_count)
            if self._in_flight.are_awaited:
                self._flush()

    def _submit(self, push: UnitPush, key: tuple[int, int], shard: RemoteShard, send: Send) -> None:
        """Queues the push of a shard's part: with those of other units if it is small, or else by itself."""
        part = QueuedPush(push, key, send, shard.stop_bytes - shard.start_bytes)
        previous = self._last_part.get(key)
        batches = self._batches_for(send) if isinstance(send, ShardPush) else None
        # The pushes of one queue are sent in order.
        if batches is not None and (previous is None or previous.done or previous.batches is batches):
            part.batches = batches
            batches.add(part)
            self._last_part[key] = part
            return
        self._flush()  # the push may wait for one of them
        streamed_bytes = 0 if shard.server.copies_gradients else part.size_bytes
        future = self._queue_of(shard.server).submit(streamed_bytes, partial(self._send, part, previous))
        self._last_part[key] = part
        future.add_done_callback(partial(self._end_alone, part))

    def _batches_for(self, push: ShardPush) -> PushBatches[QueuedPush] | None:
        """Returns the batches that a push belongs to. None: it is sent by itself."""
        limit_bytes = self._max_batched_bytes
        if limit_bytes is None or push.stream_bytes > limit_bytes:
            return None
        if (batches := self._batches.get(push.server)) is None:
            with self._opening:
                self._check_open()
                batches = self._batches[push.server] = PushBatches(self._threads, _send_together, self._in_flight.end)
        return batches

    def _queue_of(self, server: ServerConnection) -> TransferQueue[None]:
        """Returns the queue of pushes that are sent by themselves."""
        if (queue := self._queues.get(server)) is None:
            with self._opening:
                self._check_open()
                queue = self._queues[server] = TransferQueue(self._threads)
        return queue

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()

    def _send(self, part: QueuedPush, previous: QueuedPush | None, nearly_done: NearlyDone) -> None:
        """Pushes a part after the previous part to the same shard. See Note: [Order of pushes] in
        ``transfer_queue.py``."""
        if previous is not None:
            self._in_flight.await_part(previous)
        assert part.send is not None
        part.send(nearly_done)

    def _end_alone(self, part: QueuedPush, future: Future[None]) -> None:
        part.error = future.exception()
        self._in_flight.end([part])

    def _flush(self) -> None:
        """Starts to send the pushes that wait for others, because somebody waits for them."""
        for batches in list(self._batches.values()):
            batches.flush()

    def drain(self) -> None:
        """Waits until every push is acknowledged; raises the first error."""
        self._in_flight.wait()
        self._last_part.clear()
        self._in_flight.raise_error()

    def discard(self) -> None:
        """Waits until no push is in flight and drops their errors. Called when their work item is restarted."""
        self._in_flight.wait()
        self._last_part.clear()
        self._in_flight.drop_error()

    def close(self) -> None:
        """Fails all waiting pushes. Pushes in flight end when the connection to their server is closed."""
        with self._opening:  # the thread that adds gradients may start a push
            self._closed = True
            queues, batches = list(self._queues.values()), list(self._batches.values())
        for queue in queues:
            queue.close()
        for each in batches:
            each.close()
        self._threads.shutdown(wait=False)

    def join(self, limit_s: float) -> None:
        """Waits after ``close`` until no push reads memory of units, at most ``limit_s``."""
        self._threads.join(limit_s)


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient on the CPU without a graph, contiguous."""
    return gradient.detach().contiguous()


def _size_of(flats: Mapping[int, torch.Tensor]) -> int:
    return sum([flat.nbytes for flat in flats.values()])


def _copies_all(unit: RemoteUnit) -> bool:
    """Whether no gradient of a unit stays in memory until it is sent."""
    return False not in [shard.owner.server.copies_gradients for shard in unit.shards]


def _prepared(prepare: Prepare, shard: RemoteShard) -> Send:
    """Returns a function that pushes a shard's part, or one that raises the error of preparing the push."""
    try:
        return prepare(shard)
    except ShardwellError as error:
        # In this frame nothing refers to the error: a cycle would keep the gradients until a garbage collection.
        return partial(_fail, error)


def _read(header: PartHeader, flats: Mapping[int, torch.Tensor], shard: RemoteShard) -> Send:
    return shard.prepare_push(header, flats)


def _read_later(
    copied: Callable[[], None], header: PartHeader, flats: Mapping[int, torch.Tensor], shard: RemoteShard
) -> Send:
    return partial(_push_after_copy, copied, shard, header, flats)


def _push_after_copy(
    copied: Callable[[], None],
    shard: RemoteShard,
    header: PartHeader,
    flats: Mapping[int, torch.Tensor],
    nearly_done: NearlyDone,
) -> None:
    """Pushes a shard's part when the copy from the GPU is done."""
    copied()
    shard.prepare_push(header, flats)(nearly_done)


def _fail(error: ShardwellError, _: NearlyDone) -> None:
    raise error


def _send_together(parts: Sequence[QueuedPush]) -> list[bool]:
    return push_together([part.send for part in parts if isinstance(part.send, ShardPush)])
