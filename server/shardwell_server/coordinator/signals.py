"""Signals, shared calls and background tasks for one asyncio event loop. Not thread-safe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Signal:
    """Wakes all waiters when some state changes. Each waiter then checks its own condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def notify_after(self, seconds: float) -> None:
        """Wakes all waiters later."""
        await asyncio.sleep(seconds)
        self.notify()

    def next_change(self) -> asyncio.Event:
        """Returns an event that is set by the next ``notify``.

        Take the event before checking the condition: a change that happens during the check then sets the event.
        """
        return self._event

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next ``notify``, or after ``timeout_s``."""
        # asyncio.wait_for of Python 3.11 loses a cancellation that comes together with ``notify``.
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return


class SharedCall(Generic[Result]):
    """Runs at most one call at a time. Concurrent callers share its result or exception.

    Cancelling one caller does not cancel the call.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Result] | None = None

    @property
    def in_flight(self) -> bool:
        """True while a call is running."""
        return self._task is not None and not self._task.done()

    async def __call__(
        self, call: Callable[Arguments, Coroutine[Any, Any, Result]], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """Awaits the running call, or starts this one if no call is running."""
        return await asyncio.shield(self.start(call, *args, **options))

    def start(
        self, call: Callable[Arguments, Coroutine[Any, Any, Result]], *args: Arguments.args, **options: Arguments.kwargs
    ) -> asyncio.Task[Result]:
        """Starts a call in the background if no call is running. Returns the running call."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(call(*args, **options))
            self._task.add_done_callback(_retrieve_exception)
        return self._task

    def cancel(self) -> None:
        """Cancels the call in flight, if there is one."""
        if self._task is not None:
            self._task.cancel()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Marks the exception as retrieved. asyncio would warn if all waiters were cancelled before the task failed."""
    if not task.cancelled():
        task.exception()


class BackgroundTasks:
    """Tasks that run until ``close``. A failure is logged and does not affect the other tasks.

    (``asyncio.TaskGroup`` would cancel all tasks when one fails.)
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Starts a task. After ``close``, the work is dropped, as if the process had been killed before it.

        No caller relies on the work then: its process is about to end, and what must happen nevertheless is durable
        before a task is started.
        """
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)

    async def close(self) -> None:
        """Cancels every task and waits until all have ended."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class RunChanges:
    """The epochs of a run, and its changes that must be durable before anyone can observe them."""

    last_epoch: int = 0
    """The highest epoch so far."""
    made: int = 0
    """Number of changes."""
    saved: int = 0
    """Number of changes that are durable."""
    saving: SharedCall[None] = field(default_factory=SharedCall)
    changed: Signal = field(default_factory=Signal)
    """Notified of every change that a request may wait for, durable or not."""

    def touch(self) -> None:
        """Counts a change, so that the next ``CoordinatorState.save`` stores the run."""
        self.made += 1

    def next_epoch(self) -> int:
        """Returns a new epoch, higher than all former ones."""
        self.last_epoch += 1
        self.touch()
        return self.last_epoch


async def poll(changed: Signal, check: Callable[[], Awaitable[Result | None]], wait_s: float) -> Result | None:
    """Calls ``check`` now and after every change until it returns a result.

    Args:
        changed: Signal that is notified when the outcome of ``check`` may have changed.
        check: Returns the result, or None if there is none yet. It is cancelled when ``wait_s`` is over.
        wait_s: Longest time to wait in seconds. 0: check once.

    Returns:
        The result, or None if there was none within ``wait_s``.
    """
    try:
        async with asyncio.timeout(wait_s) as limit:
            while True:
                change = changed.next_change()
                if (result := await check()) is not None:
                    return result
                await change.wait()
    except TimeoutError:
        if not limit.expired():
            raise  # raised by ``check`` itself
        return None
