"""Small fetches from one server that are requested together, and small pushes to one server that share a message.

A message costs each side about as much time as the bytes of several small units. Fetches that are added before a
``flush`` share messages, as do those that are flushed while enough messages are in flight. Pushes are held back until a
batch is full, until somebody waits for them, or until the next push finds them older than ``_MAX_AGE_S``. A thread
starts with a full batch: a push by itself wakes none.

Note: [Rejected fetches]
    A batch is requested once. Each fetch that it does not complete is fetched by itself, with the retries, the
    explanations and the moves that a single fetch has. These may take as long as the session waits for a server, so
    they delay neither the other fetches of the batch nor each other.

Note: [Rejected pushes]
    A batch is sent once. If it fails, or the server rejects some of its parts, each of these parts is pushed by itself,
    with the retries, the explanations and the moves that a single push has. These may take as long as the session waits
    for a server, so they delay neither the other results of the batch nor each other. Only parts with the same key are
    pushed in order, and all of them before the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from shardwell.data_plane.shard import ShardFetch, ShardPush
from shardwell.data_plane.transfers import closed_error
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
        waiting: The queue.
        ready_count: Number of transfers at its front that may be sent.
        max_count: Most transfers of a message.
        usual_bytes: Size of a message. The transfers that may be sent are divided evenly over as many messages as this
            takes, so that no small message is left: a message with several transfers has at most 1.5 times this size.

    Returns:
        The transfers in order. Empty if ``ready_count`` is 0.
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


def run_all(tasks: deque[Task], run: Callable[[Task], None], threads: Executor, max_threads: int) -> None:
    """Runs tasks in this thread and in others. Returns when all have ended.

    Args:
        tasks: The tasks. They are removed.
        run: Runs one task.
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


class FetchBatches:
    """The small fetches from one server, in order. Thread-safe.

    Args:
        threads: Run the fetches. They must start calls in the order in which they are submitted.
        send: Requests fetches in one message. Calls its second argument with the position and the version of each shard
            as soon as it has arrived. See Note: [Rejected fetches].
        max_in_flight: Limit of messages in flight.
    """

    def __init__(
        self,
        threads: Executor,
        send: Callable[[Sequence[ShardFetch], Callable[[int, int], None]], None],
        *,
        max_in_flight: int,
    ) -> None:
        self._threads, self._send_message, self._max_in_flight = threads, send, max_in_flight
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._waiting: deque[ShardFetch] = deque()
        self._ready_count = self._in_flight = 0
        """Fetches at the front of the queue that were flushed, and messages in flight."""
        self._closed = False

    def add(self, fetch: ShardFetch) -> None:
        """Adds a fetch, which waits for ``flush``. Raises UnavailableError if the session was closed."""
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append(fetch)

    def flush(self) -> None:
        """Starts the fetches that wait."""
        if not self._waiting:
            return
        with self._lock:
            self._ready_count = len(self._waiting)
            if self._ready_count and self._in_flight < self._max_in_flight:
                self._threads.submit(self._run)
                self._in_flight += 1

    def close(self) -> None:
        """Fails the fetches that wait, and those in flight that would have to be fetched again."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._ready_count = 0
        for fetch in waiting:
            fetch.end(0, closed_error())

    def _run(self) -> None:
        while batch := self._next_batch():
            if len(batch) == 1:
                self._fetch_alone(batch[0])
            elif left := self._send(batch):
                alone = max(1, _MAX_ALONE // self._max_in_flight)
                run_all(deque(left), self._fetch_alone, self._threads, alone)

    def _next_batch(self) -> list[ShardFetch]:
        with self._lock:
            batch = take_batch(self._waiting, self._ready_count, max_count=_MAX_FETCHES, usual_bytes=_USUAL_FETCH_BYTES)
            self._ready_count -= len(batch)
            if not batch:
                self._in_flight -= 1
            elif self._ready_count and self._in_flight < self._max_in_flight:
                with suppress(RuntimeError):  # the threads were shut down
                    self._threads.submit(self._run)
                    self._in_flight += 1
            return batch

    def _send(self, batch: Sequence[ShardFetch]) -> list[ShardFetch]:
        """Requests a batch; returns the fetches that have not ended."""
        left = dict(enumerate(batch))

        def arrived(number: int, version: int) -> None:
            left.pop(number).end(version)

        try:
            self._send_message(batch, arrived)
        except Exception as error:  # the fetches must end in any case
            defect = None if isinstance(error, ShardwellError | OSError) else error
            logger.info("%d of %d fetches are made one by one: %s", len(left), len(batch), error, exc_info=defect)
        return list(left.values())

    def _fetch_alone(self, fetch: ShardFetch) -> None:
        """See Note: [Rejected fetches]."""
        try:
            if self._closed:
                raise closed_error()
            version = fetch()
        except BaseException as error:
            fetch.end(0, error)
        else:
            fetch.end(version)


class PushBatches:
    """The small pushes to one server, in order. Thread-safe.

    Args:
        threads: Run the pushes. They must start calls in the order in which they are submitted.
        send: Sends pushes in one message; returns for each whether it was accepted.
        ended: Called in any thread with pushes that have ended.
    """

    def __init__(
        self,
        threads: Executor,
        send: Callable[[Sequence[ShardPush]], Sequence[bool]],
        ended: Callable[[Sequence[ShardPush]], None],
    ) -> None:
        self._threads, self._send_message, self._ended = threads, send, ended
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._waiting: deque[ShardPush] = deque()
        self._ready_count = self._held_bytes = 0
        """Pushes at the front of the queue that are not held back, and bytes of the others."""
        self._oldest_s = 0.0
        """When the first push that is held back was added."""
        self._is_sending = self._closed = False

    def add(self, push: ShardPush) -> None:
        """Adds a push to the present batch. Raises UnavailableError if the session was closed."""
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append(push)
            self._held_bytes += push.size_bytes
            held_count, now = len(self._waiting) - self._ready_count, time.monotonic()
            if held_count == 1:
                self._oldest_s = now
            if self._held_bytes >= _FULL_BYTES or held_count >= _MAX_PARTS or now - self._oldest_s > _MAX_AGE_S:
                self._start()

    def flush(self) -> None:
        """Starts the pushes that are held back."""
        if self._waiting:
            with self._lock:
                self._start()

    def close(self) -> None:
        """Fails the waiting pushes, and the parts of the batch in flight that would have to be pushed again."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._ready_count = 0
        for push in waiting:
            push.error = closed_error()
        self._ended(waiting)

    def _start(self) -> None:
        self._ready_count, self._held_bytes = len(self._waiting), 0
        if self._ready_count and not self._is_sending:
            self._threads.submit(self._run)
            self._is_sending = True

    def _run(self) -> None:
        while batch := self._next_batch():
            if len(batch) > 1:
                self._finish(batch, self._send(batch))
            else:
                self._push_alone(batch[0])

    def _next_batch(self) -> list[ShardPush]:
        with self._lock:
            batch = take_batch(self._waiting, self._ready_count, max_count=_MAX_PARTS, usual_bytes=_USUAL_PUSH_BYTES)
            self._ready_count -= len(batch)
            self._is_sending = bool(batch)
            return batch

    def _send(self, batch: Sequence[ShardPush]) -> Sequence[bool]:
        try:
            return self._send_message(batch)
        except Exception as error:  # the pushes must be reported in any case
            defect = None if isinstance(error, ShardwellError | OSError) else error
            logger.info("%d parts of a batch are pushed one by one: %s", len(batch), error, exc_info=defect)
            return [False] * len(batch)

    def _finish(self, batch: Sequence[ShardPush], accepted: Sequence[bool]) -> None:
        """Reports the pushes of a batch. See Note: [Rejected pushes]."""
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
            self._push_alone(push)

    def _push_alone(self, push: ShardPush) -> None:
        try:
            if self._closed:
                raise closed_error()
            push()
        except BaseException as error:
            push.error = error
        self._ended([push])
