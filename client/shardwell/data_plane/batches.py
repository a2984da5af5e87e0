"""Small fetches from one server that are requested together, and small pushes to one server that share a message.

A message costs each side about as much time as the bytes of several small units. Fetches that are added before a
``flush`` share messages, as do those that are flushed while enough messages are in flight. Pushes are held back until a
batch is full, until somebody waits for them, or until the next push finds them older than ``_MAX_AGE_S``. A thread
starts with a full batch: a push by itself wakes none.

Note: [Rejected transfers]
    A batch is sent once. Each fetch that it does not complete, and each part that the server rejects or does not
    answer, is transferred by itself, with the retries, the explanations and the moves that a single transfer has. These
    may take as long as the session waits for a server, so they delay neither the other results of the batch nor each
    other. Only pushes with the same key are made in order, and all of them before the next batch of pushes.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import ClassVar, Generic, TypeVar

from shardwell.data_plane.shard import ShardFetch, ShardPush
from shardwell.data_plane.transfers import DaemonThreads, closed_error
from shardwell_wire.errors import ShardwellError

logger = logging.getLogger(__name__)

Transfer = TypeVar("Transfer", ShardFetch, ShardPush)
Task = TypeVar("Task")

MAX_STREAM_BYTES = 64 << 10
"""Largest shard that is fetched or streamed in a batch. Messages are built from copies, which cost little then."""

_MAX_FETCHES, _USUAL_FETCH_BYTES = 32, 256 << 10
"""Most fetches of a message, and usual size of their values; see ``take_batch``. The first unit of a larger message
would be late."""

_MAX_PARTS, _USUAL_PUSH_BYTES = 32, 512 << 10
"""Most parts of a push message, and usual size of their values; see ``take_batch``."""

_MAX_ALONE = 8
"""Rejected fetches of all messages in flight, or rejected parts, that run at the same time. A server must not occupy
all threads."""

_FULL_BYTES = 256 << 10
"""A batch of pushes is sent when its values have this size. Limits how long a server's reduction is delayed."""

_MAX_AGE_S = 0.01
"""A batch of pushes whose first is older is sent with the next push."""


def take_batch(waiting: deque[Transfer], ready_count: int, *, max_count: int, usual_bytes: int) -> list[Transfer]:
    """Removes the transfers of the next message from a queue.

    Args:
        ready_count: Number of transfers at its front that may be sent. At least 1.
        max_count: Most transfers of a message.
        usual_bytes: Size of a message. The transfers that may be sent are divided evenly over as many messages as this
            takes, so that no small message is left: a message with several transfers has at most 1.5 times this size.

    Returns:
        The transfers in order.
    """
    if ready_count == 1:
        return [waiting.popleft()]
    batch: list[Transfer] = []
    ready_bytes = sum(transfer.size_bytes for transfer in islice(waiting, ready_count))
    left_bytes = ready_bytes // max(1, (ready_bytes + usual_bytes // 2) // usual_bytes)
    while len(batch) < min(ready_count, max_count):
        left_bytes -= waiting[0].size_bytes
        if batch and left_bytes < 0:
            break
        batch.append(waiting.popleft())
    return batch


def run_all(tasks: deque[Task], run: Callable[[Task], None], threads: DaemonThreads, max_threads: int) -> None:
    """Runs tasks in this thread and in others. Returns when all have ended.

    Args:
        tasks: The tasks. They are removed.
        threads: The other threads. If none is free, this thread runs all tasks.
        max_threads: Most threads, with this one.
    """

    def work() -> None:
        while True:
            try:
                task = tasks.popleft()
            except IndexError:  # no task is left
                return
            run(task)

    helpers: list[Future[None]] = []
    with suppress(RuntimeError):  # the threads were shut down
        for _ in range(min(len(tasks), max_threads) - 1):
            helpers.append(threads.submit(work))
    work()
    for helper in helpers:
        if not helper.cancel():  # do not wait for a thread: all may be waiting like this one
            helper.result()


class _Batches(ABC, Generic[Transfer]):
    """The small transfers of one server that share messages, in order. Thread-safe.

    Args:
        threads: Run the transfers. They must start calls in the order in which they are submitted.
        max_in_flight: Limit of messages in flight.
    """

    max_count: ClassVar[int]
    """Most transfers of a message."""
    usual_bytes: ClassVar[int]
    """Usual size of a message's values; see ``take_batch``."""

    def __init__(self, threads: DaemonThreads, max_in_flight: int) -> None:
        self._threads, self._max_in_flight = threads, max_in_flight
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._waiting: deque[Transfer] = deque()
        self._ready_count = self._in_flight = 0
        """Transfers at the front of the queue that are not held back, and messages in flight."""
        self._closed = False

    def add(self, transfer: Transfer) -> None:
        """Adds a transfer, which may wait for ``flush``. Raises UnavailableError if the session was closed."""
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append(transfer)
            if self._is_full(transfer):
                self._start()

    def flush(self) -> None:
        """Starts the transfers that are held back."""
        if self._waiting:
            with self._lock:
                self._start()

    def close(self) -> None:
        """Fails the transfers that wait, and those in flight that would have to be repeated."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._ready_count = 0
        for transfer in waiting:
            self._end(transfer, 0, closed_error())

    @abstractmethod
    def _is_full(self, transfer: Transfer) -> bool:
        """Whether the transfers that are held back are sent without a flush. ``transfer`` is the last of them."""

    @abstractmethod
    def _send(self, batch: Sequence[Transfer]) -> None:
        """Sends a batch of several transfers in one message, once. All have ended when the method returns."""

    @abstractmethod
    def _end(self, transfer: Transfer, result: int, error: BaseException | None = None) -> None:
        """Reports the end of a transfer."""

    def _start(self) -> None:
        """Starts the transfers that wait. The lock must be held."""
        self._ready_count = len(self._waiting)
        if self._ready_count and self._in_flight < self._max_in_flight:
            self._threads.start(self._run)
            self._in_flight += 1

    def _run(self) -> None:
        while batch := self._next_batch():
            if len(batch) > 1:
                self._send(batch)
            else:
                self._run_alone(batch[0])

    def _next_batch(self) -> list[Transfer]:
        with self._lock:
            if not self._ready_count:
                self._in_flight -= 1
                return []
            batch = take_batch(self._waiting, self._ready_count, max_count=self.max_count, usual_bytes=self.usual_bytes)
            self._ready_count -= len(batch)
            if self._ready_count and self._in_flight < self._max_in_flight:
                with suppress(RuntimeError):  # the threads were shut down
                    self._threads.start(self._run)
                    self._in_flight += 1
            return batch

    def _run_alone(self, transfer: Transfer) -> None:
        """Runs a transfer by itself. See Note: [Rejected transfers]."""
        try:
            if self._closed:
                raise closed_error()
            result = transfer() or 0  # type: ignore[func-returns-value]  # a push has no result
        except BaseException as error:
            self._end(transfer, 0, error)
        else:
            self._end(transfer, result)


class FetchBatches(_Batches[ShardFetch]):
    """The small fetches from one server, in order. Thread-safe.

    Args:
        threads: See ``_Batches``.
        send: Requests fetches in one message. Calls its second argument with the position and the version of each shard
            as soon as it has arrived. See Note: [Rejected transfers].
        max_in_flight: See ``_Batches``.
    """

    max_count, usual_bytes = _MAX_FETCHES, _USUAL_FETCH_BYTES

    def __init__(
        self,
        threads: DaemonThreads,
        send: Callable[[Sequence[ShardFetch], Callable[[int, int], None]], None],
        *,
        max_in_flight: int,
    ) -> None:
        super().__init__(threads, max_in_flight)
        self._send_message = send

    def _is_full(self, transfer: ShardFetch) -> bool:
        return False

    def _send(self, batch: Sequence[ShardFetch]) -> None:
        left = dict(enumerate(batch))

        def arrived(number: int, version: int) -> None:
            left.pop(number).end(version)

        try:
            self._send_message(batch, arrived)
        except Exception as error:  # the fetches must end in any case
            defect = None if isinstance(error, ShardwellError | OSError) else error
            logger.info("%d of %d fetches are made one by one: %s", len(left), len(batch), error, exc_info=defect)
        if left:
            alone = max(1, _MAX_ALONE // self._max_in_flight)
            run_all(deque(left.values()), self._run_alone, self._threads, alone)

    def _end(self, transfer: ShardFetch, result: int, error: BaseException | None = None) -> None:
        transfer.end(result, error)


class PushBatches(_Batches[ShardPush]):
    """The small pushes to one server, in order. Thread-safe.

    Args:
        threads: See ``_Batches``.
        send: Sends pushes in one message; returns for each whether it was accepted.
        ended: Called in any thread with pushes that have ended.
    """

    max_count, usual_bytes = _MAX_PARTS, _USUAL_PUSH_BYTES

    def __init__(
        self,
        threads: DaemonThreads,
        send: Callable[[Sequence[ShardPush]], Sequence[bool]],
        ended: Callable[[Sequence[ShardPush]], None],
    ) -> None:
        super().__init__(threads, max_in_flight=1)
        self._send_message, self._ended = send, ended
        self._held_bytes, self._oldest_s = 0, 0.0
        """Bytes of the pushes that are held back, and when the first of them was added."""

    def _is_full(self, transfer: ShardPush) -> bool:
        held_count, now = len(self._waiting) - self._ready_count, time.monotonic()
        if held_count == 1:
            self._held_bytes, self._oldest_s = 0, now
        self._held_bytes += transfer.size_bytes
        return self._held_bytes >= _FULL_BYTES or held_count >= _MAX_PARTS or now - self._oldest_s > _MAX_AGE_S

    def _send(self, batch: Sequence[ShardPush]) -> None:
        accepted: Sequence[bool] = [False] * len(batch)
        try:
            accepted = self._send_message(batch)
        except Exception as error:  # the pushes must be reported in any case
            defect = None if isinstance(error, ShardwellError | OSError) else error
            logger.info("%d parts of a batch are pushed one by one: %s", len(batch), error, exc_info=defect)
        rejected = dict[tuple[int, int], list[ShardPush]]()
        ended = list[ShardPush]()
        for push, is_accepted in zip(batch, accepted, strict=True):
            if is_accepted:
                ended.append(push)
            else:
                rejected.setdefault(push.key, []).append(push)
        self._ended(ended)
        if rejected:
            run_all(deque(rejected.values()), self._push_in_order, self._threads, _MAX_ALONE)

    def _push_in_order(self, pushes: Sequence[ShardPush]) -> None:
        for push in pushes:
            self._run_alone(push)

    def _end(self, transfer: ShardPush, result: int, error: BaseException | None = None) -> None:
        transfer.error = error
        self._ended([transfer])
