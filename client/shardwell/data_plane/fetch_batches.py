"""Small fetches from one server, requested together.

A message costs each side about as much time as the bytes of several small units. Fetches that are added before a
``flush`` share messages, as do those that are flushed while enough messages are in flight.

Note: [Rejected fetches]
    A batch is requested once. Each fetch that it does not complete is fetched by itself, with the retries, the
    explanations and the moves that a single fetch has. These may take as long as the session waits for a server, so
    they delay neither the other fetches of the batch nor each other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from shardwell.data_plane.batches import run_all, take_batch
from shardwell.data_plane.transfer_queue import closed_error
from shardwell_wire.errors import ShardwellError

logger = logging.getLogger(__name__)

MAX_STREAM_BYTES = 64 << 10
"""Largest shard that is fetched in a batch."""

_MAX_FETCHES, _USUAL_BYTES = 32, 256 << 10
"""Most fetches of a message, and usual size of their values; see ``take_batch``. The first unit of a larger message
would be late."""

_MAX_ALONE = 8
"""Rejected fetches of all messages in flight that run at the same time. A server must not occupy all threads."""


class BatchedFetch(Protocol):
    """A fetch as a part of a batch."""

    size_bytes: int

    def fetch_alone(self) -> int:
        """Fetches the shard by itself; returns its version."""
        ...

    def end(self, version: int, error: BaseException | None = None) -> None:
        """Called once, in any thread: the shard has arrived, or the fetch has failed."""
        ...


Fetch = TypeVar("Fetch", bound=BatchedFetch)


class FetchBatches(Generic[Fetch]):
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
        send: Callable[[Sequence[Fetch], Callable[[int, int], None]], None],
        *,
        max_in_flight: int,
    ) -> None:
        self._threads, self._send_message, self._max_in_flight = threads, send, max_in_flight
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._waiting: deque[Fetch] = deque()
        self._ready_count = self._in_flight = 0
        """Fetches at the front of the queue that were flushed, and messages in flight."""
        self._closed = False

    def add(self, fetch: Fetch) -> None:
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
            left = self._send(batch) if len(batch) > 1 else batch
            if left:
                alone = max(1, _MAX_ALONE // self._max_in_flight)
                run_all(deque(left), self._fetch_alone, self._threads, alone)

    def _next_batch(self) -> list[Fetch]:
        with self._lock:
            batch = take_batch(self._waiting, self._ready_count, max_count=_MAX_FETCHES, usual_bytes=_USUAL_BYTES)
            self._ready_count -= len(batch)
            if not batch:
                self._in_flight -= 1
            elif self._ready_count and self._in_flight < self._max_in_flight:
                with suppress(RuntimeError):  # the threads were shut down
                    self._threads.submit(self._run)
                    self._in_flight += 1
            return batch

    def _send(self, batch: Sequence[Fetch]) -> list[Fetch]:
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

    def _fetch_alone(self, fetch: Fetch) -> None:
        """See Note: [Rejected fetches]."""
        try:
            if self._closed:
                raise closed_error()
            version = fetch.fetch_alone()
        except BaseException as error:
            fetch.end(0, error)
        else:
            fetch.end(version)
