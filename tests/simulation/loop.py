"""An asyncio event loop with virtual time, on which simulated processes can stop, continue and die."""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any

_DISK_S, _THREAD_S = 0.0005, 0.0003
"""Mean duration of work in an executor: writes of the coordinator, and tensor work."""


_MOST_EVENTS = 500_000


class ProcessDied(BaseException):
    """Unwinds the code of a process that dies at a fault point. Nothing of the process runs afterwards."""


class Process:
    """One simulated process. Its tasks, callbacks and timers know it by a context variable.

    Args:
        name: Name in traces, such as ``coordinator``.
        loop: The event loop.
        identity: Tells processes of the same name apart.

    Attributes:
        dead: True once the process has died. Nothing of it runs any more.
    """

    def __init__(self, name: str, loop: VirtualLoop, identity: str = "") -> None:
        self.name, self._loop, self.identity = name, loop, identity
        self.dead = False
        self._stopped = False
        self._backlog: list[events.Handle] = []
        self.context = copy_context()
        self.context.run(_current.set, self)
        self.when_killed: list[Callable[[], None]] = []
        """Called at once when the process dies."""
        self.when_dead: list[Callable[[], None]] = []
        """Called when the process dies, outside the process."""

    @property
    def stopped(self) -> bool:
        """True between ``stop`` and ``resume``, as between SIGSTOP and SIGCONT."""
        return self._stopped

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task of this process."""
        return self._loop.create_task(work, context=self.context.copy())

    def kill(self) -> None:
        """Ends the process as SIGKILL does."""
        if self.dead:
            return
        self.dead = True
        self._backlog.clear()
        for callback in self.when_killed:
            callback()
        for callback in self.when_dead:
            self._loop.call_soon(callback, context=self._loop.outside)

    def stop(self) -> None:
        """Suspends the process as SIGSTOP does."""
        self._stopped = True

    def resume(self) -> None:
        """Continues a stopped process."""
        self._stopped = False
        self._loop.extend(self._backlog)
        self._backlog = []

    def keep(self, handle: events.Handle) -> None:
        """Keeps a callback of a stopped process until it continues."""
        self._backlog.append(handle)


_current: ContextVar[Process | None] = ContextVar("simulated process", default=None)


def current_process() -> Process:
    """Returns the process whose code is running."""
    process = _current.get()
    assert process is not None, "no simulated process is running"
    return process


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order of their virtual time. Nothing waits in real time.

    Args:
        rng: Decides the duration of work in executors.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._now, self._count = rng, 0.0, 0
        self._ready: deque[events.Handle] = deque()
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._executors: dict[int, float] = {}
        self.event_count = 0
        self.thread_s = _THREAD_S
        """Mean time of work in threads."""
        self.outside = copy_context()
        """Context of the simulation itself, which belongs to no process."""
        self.problems: list[str] = []
        """Exceptions that nobody handled."""
        self._tasks: list[asyncio.Task[Any]] = []
        """All tasks. Those of dead processes must not be collected before the end: that would run their cleanup."""

    # ---- running ----

    def run(self, until: Callable[[], bool], limit_s: Callable[[], float]) -> bool:
        """Runs callbacks until a condition is true; returns False once the virtual time passes ``limit_s()``."""
        events._set_running_loop(self)
        try:
            while not until():
                if not self._ready and not self._advance(limit_s()):
                    return False
                while self._ready:
                    self._run_one(self._ready.popleft())
                    self.event_count += 1
                    if self.event_count > _MOST_EVENTS:
                        self.problems.append(f"more than {_MOST_EVENTS} events: something repeats for ever")
                        return False
            return True
        finally:
            events._set_running_loop(None)

    def _advance(self, limit_s: float) -> bool:
        """Moves to the time of the next timer."""
        while self._timers:
            when, _, handle = heapq.heappop(self._timers)
            if handle._cancelled:
                continue
            if when > limit_s:
                heapq.heappush(self._timers, (when, 0, handle))
                return False
            self._now = max(self._now, when)
            self._ready.append(handle)
            return True
        return False

    def _run_one(self, handle: events.Handle) -> None:
        if handle._cancelled:
            return
        process = handle._context.get(_current)  # type: ignore[attr-defined]
        if process is not None:
            if process.dead:
                return
            if process.stopped:
                process.keep(handle)
                return
        try:
            handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
        except ProcessDied:
            assert process is not None and process.dead
        except Exception as error:
            self.problems.append(f"{handle!r} raised {error!r}")

    def extend(self, handles: list[events.Handle]) -> None:
        """Makes callbacks ready."""
        self._ready.extend(handles)

    def close(self) -> None:
        """Releases all tasks that are left.

        A real process that is killed runs no cleanup. Python closes every coroutine that it releases, so cleanup code
        runs here, after the end of the schedule. What it raises or reports is not a problem of the schedule.
        """
        events._set_running_loop(self)
        count = len(self.problems)
        try:
            for task in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with suppress(Exception, ProcessDied):
                        task.get_coro().close()  # type: ignore[union-attr]
        finally:
            events._set_running_loop(None)
        del self.problems[count:]
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()

    # ---- the interface of asyncio ----

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> events.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> events.TimerHandle:
        handle = events.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """The timer is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs work at one instant in the near future. An executor with one thread keeps the order of its work."""
        done = self.create_future()
        one_thread = getattr(executor, "_max_workers", 2) == 1
        mean_s = _DISK_S if one_thread else self.thread_s
        start = self._now + self._rng.expovariate(1 / mean_s)
        if one_thread:
            start = self._executors[id(executor)] = max(start, self._executors.get(id(executor), 0.0))

        def work() -> None:
            try:
                result, failed = func(*args), None
            except ProcessDied:
                raise
            except BaseException as error:
                result, failed = None, error
            self.call_later(self._rng.expovariate(1 / mean_s), finish, result, failed)

        def finish(result: Any, failed: BaseException | None) -> None:
            if done.done():
                return
            if failed is not None:
                done.set_exception(failed)
            else:
                done.set_result(result)

        self.call_at(start, work)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, ProcessDied):
            self.problems.append(f"{context.get('message')}: {error!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False
