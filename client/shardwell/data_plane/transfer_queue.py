"""The order of background transfers: few per server at a time, in threads that do not delay the end of a process.

Note: [Order of pushes]
    A server accepts the parts of a contribution in order, so the push of a part waits for the push before it. This
    cannot deadlock: queues and threads are first-in first-out, so the earlier push has a thread already.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from shardwell.transport.base import NEARLY_DONE_BYTES, NearlyDone
from shardwell_wire.errors import UnavailableError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MAX_ACTIVE = 2
"""Active streams to or from one server. Where trainers share links, a single stream does not fill its share. On four
hosts at 200 Mbit/s a step in bf16 took 5.0 to 6.2 s with one stream and 4.6 s with two (medians of four steps)."""


@dataclass(slots=True, eq=False)
class _Transfer(Generic[Result]):
    size_bytes: int
    work: Callable[[NearlyDone], Result]
    future: Future[Result]
    is_active: bool = True
    """Whether the transfer is not nearly done yet."""


class TransferQueue(Generic[Result]):
    """Starts the transfers of one server in order, a few at a time; the next starts when one is nearly done.

    If all started at once, the first would end no earlier than the last, and no layer could be computed meanwhile.
    More transfers may be active if they are small.

    Args:
        threads: Run the transfers. They must start calls in the order in which they are submitted.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._waiting: deque[_Transfer[Result]] = deque()
        self._active_count = self._active_bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, size_bytes: int, work: Callable[[NearlyDone], Result]) -> Future[Result]:
        """Queues a transfer; returns the future of its result.

        Args:
            size_bytes: Size of the transfer.
            work: Runs the transfer. Called with a ``NearlyDone`` callback.
        """
        transfer = _Transfer(size_bytes, work, Future())
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append(transfer)
        self._start()
        return transfer.future

    def close(self) -> None:
        """Fails the waiting transfers. Active transfers continue."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for transfer in waiting:
            transfer.future.set_exception(closed_error())

    def _start(self) -> None:
        """Submits transfers while there is room. The lock keeps the order if several threads call this method."""
        with self._lock:
            while self._waiting and self._has_room(self._waiting[0]):
                transfer = self._waiting.popleft()
                self._active_count += 1
                self._active_bytes += transfer.size_bytes
                self._threads.submit(self._run, transfer)

    def _has_room(self, transfer: _Transfer[Result]) -> bool:
        return self._active_count < _MAX_ACTIVE or self._active_bytes + transfer.size_bytes <= NEARLY_DONE_BYTES

    def _run(self, transfer: _Transfer[Result]) -> None:
        def nearly_done() -> None:
            if self._deactivate(transfer):
                self._start()

        try:
            if self._closed:
                raise closed_error()
            result = transfer.work(nearly_done)
        except BaseException as error:
            self._deactivate(transfer)
            transfer.future.set_exception(error)
        else:
            self._deactivate(transfer)
            transfer.future.set_result(result)
        self._start()

    def _deactivate(self, transfer: _Transfer[Result]) -> bool:
        """Marks a transfer as nearly done; returns False if it was marked before."""
        with self._lock:
            if not transfer.is_active:
                return False
            transfer.is_active = False
            self._active_count -= 1
            self._active_bytes -= transfer.size_bytes
            return True


@dataclass(slots=True, eq=False)
class _Call:
    future: Future[Any]
    function: Callable[[], Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class DaemonThreads(Executor):
    """Runs calls in background threads, in the order in which they are submitted.

    Python joins the threads of a ``ThreadPoolExecutor`` before it runs other exit handlers. A trainer whose training
    loop raised would then stay in its run for as long as these threads wait for a server.

    Args:
        max_count: Maximum number of threads. They are started on demand.
        name: Prefix of the threads' names.
    """

    def __init__(self, max_count: int, name: str) -> None:
        self._max_count, self._name = max_count, name
        self._threads: list[threading.Thread] = []
        self._calls: deque[_Call] = deque()
        self._idle_count = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """See ``Executor``. Raises RuntimeError after ``shutdown``, or if not a single thread can be started."""
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads were shut down")
            if len(self._calls) >= self._idle_count and len(self._threads) < self._max_count:
                self._start_thread()
            self._calls.append(_Call(future, partial(fn, *args, **kwargs)))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See ``Executor``."""
        with self._changed:
            self._closed = True
            cancelled = list(self._calls) if cancel_futures else []
            if cancel_futures:
                self._calls.clear()
            self._changed.notify_all()
        for call in cancelled:
            call.future.cancel()
        if wait:
            self.join(None)

    def join(self, limit_s: float | None) -> None:
        """Waits after ``shutdown`` until the threads have ended, for at most ``limit_s``. None: without a limit."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of the system is reached
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while (call := self._next_call()) is not None:
            call.run()
            del call  # release its arguments before waiting for the next call

    def _next_call(self) -> _Call | None:
        with self._changed:
            self._idle_count += 1
            self._changed.wait_for(lambda: self._calls or self._closed)
            self._idle_count -= 1
            return self._calls.popleft() if self._calls else None


def closed_error() -> UnavailableError:
    """Returns the error of a transfer that did not start before its session was closed."""
    return UnavailableError("the session was closed before this transfer started")
