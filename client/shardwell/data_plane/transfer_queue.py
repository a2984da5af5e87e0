"""Transfers from one server, or to it, in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwell.transport.base import NEARLY_BYTES, Nearly
from shardwell_wire.errors import UnavailableError

Result = TypeVar("Result")

_AT_ONCE = 2
"""Streams to or from one server: where several trainers share the links, one alone does not fill its part of them. On
four hosts at 200 Mbit/s a step in bf16 took 5.0 to 6.2 s with one and 4.6 s with two (medians of four steps)."""


@dataclass(slots=True, eq=False)
class _Transfer(Generic[Result]):
    size_bytes: int
    work: Callable[[Nearly], Result]
    future: Future[Result]
    is_far: bool = True
    """Whether much of it is still to be moved."""


class TransferQueue(Generic[Result]):
    """Lets few transfers share the link to a server; the next begins when one is nearly done.

    All at once, the first would end when the last one does, and nothing could be computed meanwhile. Small ones may
    be more.

    Args:
        threads: Where transfers run; they begin them in the order in which they get them.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._waiting: deque[_Transfer[Result]] = deque()
        self._far_count = self._far_bytes = 0
        """Of the transfers under way of which much is still to be moved."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, size_bytes: int, work: Callable[[Nearly], Result]) -> Future[Result]:
        """Has a transfer done when its turn comes; the future has its result.

        Args:
            size_bytes: How much will be moved.
            work: Moves it, and says when it is nearly done.
        """
        transfer = _Transfer(size_bytes, work, Future())
        with self._lock:
            if self._closed:
                raise _closed()
            self._waiting.append(transfer)
        self._begin()
        return transfer.future

    def close(self) -> None:
        """Fails what waits; what is under way goes on."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for transfer in waiting:
            transfer.future.set_exception(_closed())

    def _begin(self) -> None:
        """Hands to the threads what may begin, in order also if several threads come here: see ``traffic._send``."""
        with self._lock:
            while self._waiting and self._has_room(self._waiting[0]):
                transfer = self._waiting.popleft()
                self._far_count += 1
                self._far_bytes += transfer.size_bytes
                self._threads.submit(self._run, transfer)

    def _has_room(self, transfer: _Transfer[Result]) -> bool:
        return self._far_count < _AT_ONCE or self._far_bytes + transfer.size_bytes <= NEARLY_BYTES

    def _run(self, transfer: _Transfer[Result]) -> None:
        def nearly() -> None:
            if self._come_near(transfer):
                self._begin()

        try:
            if self._closed:
                raise _closed()
            result = transfer.work(nearly)
        except BaseException as error:
            self._come_near(transfer)
            transfer.future.set_exception(error)
        else:
            self._come_near(transfer)
            transfer.future.set_result(result)
        self._begin()

    def _come_near(self, transfer: _Transfer[Result]) -> bool:
        """Notes that little is left of a transfer; returns whether that is news."""
        with self._lock:
            if not transfer.is_far:
                return False
            transfer.is_far = False
            self._far_count -= 1
            self._far_bytes -= transfer.size_bytes
            return True


def _closed() -> UnavailableError:
    return UnavailableError("the session was closed before this was sent or fetched")
