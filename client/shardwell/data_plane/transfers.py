"""Background transfers: their order, their threads and their counters. Few run per server at a time.

Python runs signal handlers between any two bytecodes of the main thread. A handler that raises at the wrong moment can
leave a transfer that was counted but never started, or a locked ``threading.Condition``, and other threads then hang.

Note: [Order of pushes]
    A server accepts the parts of a contribution in order, so the push of a part waits for the push before it. This
    cannot deadlock: queues and threads are first-in first-out, so the earlier push has a thread already.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, fields
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from shardwell.transport.base import NEARLY_DONE_BYTES, NearlyDone, RouteStats
from shardwell_wire.errors import UnavailableError

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], Any]

# The functions of ``signal`` take 5 microseconds per call, because they convert numbers to enums. A push calls six.
_this_thread = threading.get_ident
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Handler], Any] = _signal.signal

_POLL_S = 0.05
"""How long a wait may defer a signal."""


class _Uninterrupted:
    """A context that defers signal handlers of the main thread. May be nested. Does nothing in other threads."""

    def __init__(self) -> None:
        self._depth = 0
        self._thread = 0
        """The main thread while it is in the context; otherwise 0."""
        self._former: dict[int, Handler] = {}
        """The handlers to run. Not cleared: a handler that raises in ``__exit__`` can leave ``_defer`` in its place."""
        self._deferred: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if self._thread == _this_thread():
            self._depth += 1
        elif threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                former = _get_handler(number)
                if former == self._defer:
                    continue
                if callable(former):
                    self._former[number] = former
                    _set_handler(number, self._defer)
                else:
                    self._former.pop(number, None)
            self._depth, self._thread = 1, _this_thread()

    def __exit__(self, *_: object) -> None:
        if self._thread != _this_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        self._thread = 0
        try:
            for number, former in tuple(self._former.items()):
                _set_handler(number, former)  # a handler may run here, and raise
        finally:
            if self._deferred:
                self._run(self._former)

    def _run(self, handlers: Mapping[int, Handler]) -> None:
        """Runs the handlers of the deferred signals. A handler may raise."""
        if self._deferred:
            number, frame = self._deferred.pop(0)
            try:
                if number in handlers:
                    handlers[number](number, frame)
            finally:
                self._run(handlers)

    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool]) -> None:
        """Calls ``changed.wait_for(is_true)`` and runs deferred handlers between polls. ``changed`` must be held."""
        if threading.current_thread() is not threading.main_thread():
            changed.wait_for(is_true)
            return
        while not changed.wait_for(is_true, _POLL_S):
            self._run(self._former)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._thread:
            self._deferred.append((number, frame))
        else:
            self._former[number](number, frame)


uninterrupted = _Uninterrupted()


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MAX_ACTIVE = 2
"""Active streams to or from one server. Where trainers share links, a single stream does not fill its share. On four
hosts at 200 Mbit/s a step in bf16 took 5.0 to 6.2 s with one stream and 4.6 s with two (medians of four steps)."""


Ended = Callable[[int, BaseException | None], None]
"""Called once, in any thread, with the result of a transfer, or with 0 and its error. Must not raise."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer; see ``TransferQueue.submit``."""

    size_bytes: int
    work: Callable[[NearlyDone], int | None]
    ended: Ended
    is_active: bool = False
    """Whether the transfer has started and is not nearly done yet."""


class TransferQueue:
    """Starts the transfers of one server in order, a few at a time; the next starts when one is nearly done.

    If all started at once, the first would end no earlier than the last, and no layer could be computed meanwhile.
    More transfers may be active if they are small.

    Args:
        threads: Run the transfers. They must start calls in the order in which they are submitted.
    """

    def __init__(self, threads: DaemonThreads) -> None:
        self._threads = threads
        self._waiting: deque[_Transfer] = deque()
        self._active_count = self._active_bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, size_bytes: int, work: Callable[[NearlyDone], int | None], ended: Ended) -> None:
        """Queues a transfer.

        Args:
            work: Runs the transfer. Called with a ``NearlyDone`` callback. None is the result 0.
            ended: See ``Ended``. Not called if this method raises.

        Raises:
            UnavailableError: The session was closed.
        """
        transfer = _Transfer(size_bytes, work, ended)
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append(transfer)
            self._start()

    def close(self) -> None:
        """Fails the waiting transfers. Active transfers continue."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for transfer in waiting:
            transfer.ended(0, closed_error())

    def _start(self) -> None:
        """Starts transfers while there is room. The lock, which must be held, keeps the order."""
        while self._waiting:
            transfer = self._waiting[0]
            if self._active_count >= _MAX_ACTIVE and self._active_bytes + transfer.size_bytes > NEARLY_DONE_BYTES:
                break
            self._waiting.popleft()
            transfer.is_active = True
            self._active_count += 1
            self._active_bytes += transfer.size_bytes
            self._threads.start(partial(self._run, transfer))

    def _run(self, transfer: _Transfer) -> None:
        try:
            if self._closed:
                raise closed_error()
            result = transfer.work(partial(self._make_room, transfer)) or 0
        except BaseException as error:
            self._make_room(transfer)
            transfer.ended(0, error)
        else:
            if transfer.is_active:
                self._make_room(transfer)
            transfer.ended(result, None)

    def _make_room(self, transfer: _Transfer) -> None:
        """Starts others, because a transfer is nearly done or has ended. Harmless to repeat."""
        with self._lock:
            if transfer.is_active:
                transfer.is_active = False
                self._active_count -= 1
                self._active_bytes -= transfer.size_bytes
                if self._waiting:
                    self._start()


class _Call(Future[Any]):
    """A call in a background thread, and its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def __call__(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


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
        self._calls: deque[Callable[[], None]] = deque()
        self._idle_count = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """See ``Executor``. Raises RuntimeError after ``shutdown``, or if not a single thread can be started."""
        call = _Call(partial(fn, *args, **kwargs))
        self.start(call)
        return call

    def start(self, function: Callable[[], None]) -> None:
        """Runs a function whose result nobody needs; raises as ``submit`` does."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads were shut down")
            if len(self._calls) >= self._idle_count and len(self._threads) < self._max_count:
                self._start_thread()
            self._calls.append(function)
            self._changed.notify()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._closed = True
            cancelled = [call for call in self._calls if cancel_futures and isinstance(call, _Call)]
            for call in cancelled:
                self._calls.remove(call)
            self._changed.notify_all()
        for call in cancelled:
            call.cancel()
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
        while True:
            with self._changed:
                self._idle_count += 1
                while not self._calls and not self._closed:
                    self._changed.wait()
                self._idle_count -= 1
                if not self._calls:
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:  # other calls need the thread
                logger.exception("a call in the background failed")
            del call  # release its arguments before waiting for the next call


def closed_error() -> UnavailableError:
    """Returns the error of a transfer that did not start before its session was closed."""
    return UnavailableError("the session was closed before this transfer started")


_MAX_WAITS = 4096
_SHORTEST_WAIT_S = 1e-5


@dataclass
class TrafficStats:
    """Counts, bytes, and seconds that the training thread waited."""

    gather_count: int = 0
    gathered_bytes: int = 0
    in_place_bytes: int = 0
    """Bytes of weights that were read in the servers' memory, and not copied."""
    gather_wait_s: float = 0.0
    push_count: int = 0
    pushed_bytes: int = 0
    push_wait_s: float = 0.0
    push_copy_s: float = 0.0
    """Seconds that the training thread started pushes, without ``push_wait_s``. This time includes the
    copies of gradients into shared memory."""

    def __post_init__(self) -> None:
        self.gather_waits: list[tuple[float, float]] = []
        """Start and end of each gather wait since the last commit, by ``time.perf_counter``. Waits under 10 us are left
        out, and so are those after the first 4096."""
        self.routes = RouteStats()
        """What the routes of gradients have carried."""

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)} | self.routes.totals

    def add_gather_wait(self, started: float) -> None:
        """Counts a wait for a gather that ends now. ``started``: its start, by ``time.perf_counter``."""
        ended = time.perf_counter()
        self.gather_wait_s += ended - started
        if ended - started >= _SHORTEST_WAIT_S and len(self.gather_waits) < _MAX_WAITS:
            self.gather_waits.append((started, ended))
