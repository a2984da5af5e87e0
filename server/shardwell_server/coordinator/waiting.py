"""Signals, shared calls and background tasks for one asyncio event loop. Not thread-safe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Signal:
    """Wakes all waiters when some state changes. Each waiter then checks its own condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiters."""
        self._event.set()
        self._event = asyncio.Event()

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

    async def __call__(self, start: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Awaits the running call, or starts ``start()`` if no call is running."""
        return await asyncio.shield(self.start(start))

    def start(self, start: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Starts ``start()`` in the background if no call is running. Returns the running call."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(start())
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
