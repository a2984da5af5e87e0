"""Fetches from one server in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from shardwell_wire.errors import UnavailableError

_AT_LEAST = 2
"""Fetches under way at once: while one ends the next has begun."""

_WINDOW_BYTES = 8 << 20
"""Small fetches may be more, until they are so many bytes: enough to keep a link of 1 Gbit/s busy over 60 ms."""


Outcome: TypeAlias = int | BaseException
"""The version that was fetched, or why it was not."""


@dataclass(slots=True, eq=False)
class _Fetch:
    size_bytes: int
    work: Callable[[], int]
    done: Callable[[Outcome], None]


class FetchQueue:
    """Lets few fetches share the link to a server, so that what is needed first arrives first.

    All at once, the first unit would arrive when the last one does, and nothing could be computed meanwhile.

    Args:
        threads: Where fetches run.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._waiting: deque[_Fetch] = deque()
        self._count = self._bytes = 0
        """Of the fetches under way."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, size_bytes: int, work: Callable[[], int], done: Callable[[Outcome], None]) -> None:
        """Has a fetch done when its turn comes.

        Args:
            size_bytes: How much will come.
            work: Fetches.
            done: Is told how it went, in another thread; must not raise.

        Raises:
            UnavailableError: The queue is closed.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("the session is closed")
            self._waiting.append(_Fetch(size_bytes, work, done))
        self._begin()

    def close(self) -> None:
        """Fails what waits; what is under way goes on."""
        with self._lock:
            self._closed = True
        while (fetch := self._next()) is not None:
            self._do(fetch)

    def _begin(self) -> None:
        while (fetch := self._next()) is not None:
            try:
                self._threads.submit(self._run, fetch)
            except RuntimeError:  # closed meanwhile, and the threads with it
                self._do(fetch)

    def _next(self) -> _Fetch | None:
        with self._lock:
            if not self._waiting:
                return None
            size_bytes = self._waiting[0].size_bytes
            if self._count >= _AT_LEAST and self._bytes + size_bytes > _WINDOW_BYTES and not self._closed:
                return None
            self._count += 1
            self._bytes += size_bytes
            return self._waiting.popleft()

    def _run(self, fetch: _Fetch) -> None:
        self._do(fetch)
        if not self._closed:
            # Not in this thread: fetches from other servers may have waited for one longer.
            self._begin()

    def _do(self, fetch: _Fetch) -> None:
        outcome: Outcome
        try:
            if self._closed:
                raise UnavailableError("the session was closed before the weights were fetched")
            outcome = fetch.work()
        except BaseException as error:
            outcome = error
        self._end(fetch)
        fetch.done(outcome)

    def _end(self, fetch: _Fetch) -> None:
        with self._lock:
            self._count -= 1
            self._bytes -= fetch.size_bytes
