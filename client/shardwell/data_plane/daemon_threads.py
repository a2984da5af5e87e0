"""Background threads that a process does not wait for when it ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


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
    """Begins calls in the order in which they are submitted, as many at once as there may be threads.

    Python joins the threads of a ``ThreadPoolExecutor`` at exit before it closes what is open then. A trainer whose
    training loop raised while they wait for a server would live on, and keep its place in the run, as long as they do.

    Args:
        max_count: How many threads there may be; they are started as calls need them.
        name: Begins their names.
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
        """See ``Executor``. Raises RuntimeError after ``shutdown``, and if not even one thread can be started."""
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads were shut down")
            if len(self._calls) >= self._idle_count and len(self._threads) < self._max_count:
                self._start_another()
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
        """After ``shutdown``: waits until the threads have ended, for so long at the most; None: without limit."""
        give_up = None if limit_s is None else time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(None if give_up is None else max(0.0, give_up - time.monotonic()))

    def _start_another(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more of them
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            del call  # and what it holds, before another one comes

    def _next(self) -> _Call | None:
        with self._changed:
            self._idle_count += 1
            self._changed.wait_for(lambda: self._calls or self._closed)
            self._idle_count -= 1
            return self._calls.popleft() if self._calls else None
