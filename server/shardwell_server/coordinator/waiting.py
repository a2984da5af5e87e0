"""What a waiting rpc waits on, and work that several rpcs wait for together. For one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Signal:
    """Wakes everybody who waits for something to change; they look for themselves what it was."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Set at the next ``notify`` from now on; taken before looking, it misses no change made meanwhile."""
        return self._event

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next ``notify``, or after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return


class SharedCall(Generic[Result]):
    """One call in flight at most: who asks meanwhile shares its outcome.

    A caller that is cancelled leaves the call running for the others.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Result] | None = None

    @property
    def in_flight(self) -> bool:
        return self._task is not None and not self._task.done()

    async def __call__(self, start: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(start())
            self._task.add_done_callback(_retrieve)
        return await asyncio.shield(self._task)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Marks a task's exception as seen: its waiters may all be gone."""
    if not task.cancelled():
        task.exception()


class TaskGroup:
    """Background tasks that end with the process; a failure is logged.

    (``asyncio.TaskGroup`` would end all when one fails.)
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)

    async def close(self) -> None:
        """Cancels every task and waits for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def poll(changed: Signal, look: Callable[[], Awaitable[Result | None]], wait_s: float) -> Result | None:
    """Looks now and after every change until there is a result.

    Args:
        changed: Tells of changes.
        look: Returns the result, or None: not yet. It is cancelled when the time is over.
        wait_s: Time for all of it. 0: only what is there already.

    Returns:
        The result, or None: the time is over.
    """
    try:
        async with asyncio.timeout(wait_s) as limit:
            while True:
                change = changed.next_change()
                if (result := await look()) is not None:
                    return result
                await change.wait()
    except TimeoutError:
        if not limit.expired():
            raise
        return None
