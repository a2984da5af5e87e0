"""Small transfers of one server, collected and sent in one message.

A message costs each side about as much time as the bytes of several small units. Transfers that are awaited later, such
as pushes, are held back until a batch is full, until somebody waits for them, or until the next transfer finds them
older than ``_MAX_AGE_S``. Other transfers start at once, and those that come while a batch is in flight form the next.

Note: [Rejected batches]
    A batch is sent once. If it fails, or the server rejects some of its parts, each of these parts is transferred by
    itself, with the retries, the explanations and the moves that a single transfer has. These may take as long as the
    session waits for a server, so they delay neither the other results of the batch nor each other. Only parts with the
    same key are transferred in order, and all of them before the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardwell.data_plane.transfer_queue import closed_error
from shardwell_wire.errors import ShardwellError

logger = logging.getLogger(__name__)

MAX_STREAM_BYTES = 64 << 10
"""Largest part that a batch streams. The message is built from copies, which cost little at this size."""

_MAX_PARTS, _MAX_BYTES = 32, 512 << 10
"""Most parts of a message, and most bytes of their values: servers answer with no more."""

_FULL_BYTES = 256 << 10
"""A batch that is held back is sent when its values have this size. Limits how long a server's reduction is delayed."""

_MAX_AGE_S = 0.01
"""A batch whose first transfer is older is sent with the next transfer."""


_MAX_ALONE = 8
"""Rejected parts of a batch that are transferred at the same time. A server must not occupy all threads."""


Transfer = TypeVar("Transfer")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Transfer, Result]):
    transfer: Transfer
    key: Hashable
    size_bytes: int
    future: Future[Result] = field(default_factory=Future)


class Batches(Generic[Transfer, Result]):
    """The small transfers of one server in one direction, in order. Thread-safe.

    Args:
        threads: Run the transfers. They must start calls in the order in which they are submitted.
        send: Sends transfers in one message. Calls its second argument with the position and the result of each
            transfer as soon as it is done. The others are transferred by themselves.
        alone: Runs one transfer by itself.
        max_in_flight: Limit of messages in flight. With 1, transfers with the same key end in order.
        holds: Whether transfers are held back until they are awaited.
    """

    def __init__(
        self,
        threads: Executor,
        send: Callable[[Sequence[Transfer], Callable[[int, Result], None]], None],
        alone: Callable[[Transfer], Result],
        *,
        max_in_flight: int,
        holds: bool,
    ) -> None:
        self._threads, self._send_message, self._alone = threads, send, alone
        self._max_in_flight, self._holds = max_in_flight, holds
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._waiting: deque[_Waiting[Transfer, Result]] = deque()
        self._ready_count = self._held_bytes = self._in_flight = 0
        """Transfers at the front of the queue that are not held back, bytes of the others, and messages in flight."""
        self._oldest_s = 0.0
        """When the first transfer that is held back was submitted."""
        self._closed = False

    def submit(self, transfer: Transfer, size_bytes: int, key: Hashable = None) -> Future[Result]:
        """Queues a transfer; returns the future of its result.

        Args:
            transfer: The transfer.
            size_bytes: Size of its values.
            key: Orders it after earlier transfers with the same key. None: it is independent of all others.
        """
        waiting = _Waiting[Transfer, Result](transfer, object() if key is None else key, size_bytes)
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append(waiting)
            if not self._holds or self._is_full(size_bytes):
                self._start()
        return waiting.future

    def _is_full(self, size_bytes: int) -> bool:
        """Counts a transfer that is held back; returns whether the batch is to be sent now."""
        held_count, now = len(self._waiting) - self._ready_count, time.monotonic()
        if held_count == 1:
            self._oldest_s = now
        self._held_bytes += size_bytes
        return self._held_bytes >= _FULL_BYTES or held_count >= _MAX_PARTS or now - self._oldest_s > _MAX_AGE_S

    def flush(self) -> None:
        """Starts the transfers that are held back."""
        if self._waiting:
            with self._lock:
                self._start()

    def close(self) -> None:
        """Fails the waiting transfers, and the parts of batches in flight that would have to be transferred again."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._ready_count = 0
        for each in waiting:
            each.future.set_exception(closed_error())

    def _start(self) -> None:
        self._ready_count, self._held_bytes = len(self._waiting), 0
        if self._ready_count and self._in_flight < self._max_in_flight:
            self._threads.submit(self._run)
            self._in_flight += 1

    def _run(self) -> None:
        while batch := self._next_batch():
            if len(batch) > 1:
                self._send(batch)
            self._finish(batch)

    def _next_batch(self) -> list[_Waiting[Transfer, Result]]:
        with self._lock:
            batch: list[_Waiting[Transfer, Result]] = []
            left_bytes = _MAX_BYTES
            while self._ready_count and len(batch) < _MAX_PARTS:
                left_bytes -= self._waiting[0].size_bytes
                if batch and left_bytes < 0:
                    break
                batch.append(self._waiting.popleft())
                self._ready_count -= 1
            if not batch:
                self._in_flight -= 1
            return batch

    def _send(self, batch: Sequence[_Waiting[Transfer, Result]]) -> None:
        try:
            self._send_message(
                [each.transfer for each in batch], lambda number, result: batch[number].future.set_result(result)
            )
        except Exception as error:  # the futures must be completed in any case
            defect = None if isinstance(error, ShardwellError | OSError) else error
            logger.info("the rest of a batch of %d is transferred one by one: %s", len(batch), error, exc_info=defect)

    def _finish(self, batch: Sequence[_Waiting[Transfer, Result]]) -> None:
        """Runs the transfers that the message did not complete. See Note: [Rejected batches]."""
        rejected = dict[Hashable, list[_Waiting[Transfer, Result]]]()
        for each in batch:
            if not each.future.done():
                rejected.setdefault(each.key, []).append(each)
        if rejected:
            self._run_alone(deque(rejected.values()))

    def _run_alone(self, groups: deque[list[_Waiting[Transfer, Result]]]) -> None:
        """Runs each transfer by itself: those of one group in order, several groups at the same time."""

        def work() -> None:
            with suppress(IndexError):  # no group is left
                while True:
                    for each in groups.popleft():
                        self._complete(each)

        helpers: list[Future[None]] = []
        with suppress(RuntimeError):  # the threads were shut down
            for _ in range(min(len(groups), _MAX_ALONE) - 1):
                helpers.append(self._threads.submit(work))
        work()
        for helper in helpers:
            if not helper.cancel():  # do not wait for a thread: all may be waiting like this one
                helper.result()

    def _complete(self, waiting: _Waiting[Transfer, Result]) -> None:
        try:
            if self._closed:
                raise closed_error()
            result = self._alone(waiting.transfer)
        except BaseException as error:
            waiting.future.set_exception(error)
        else:
            waiting.future.set_result(result)
