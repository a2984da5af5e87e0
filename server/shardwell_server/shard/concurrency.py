"""Concurrency on the event loop: work that must finish, threads for tensor work, streams that replace each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shardwell_wire.errors import DeadlineError, ShardwellError, StaleEpochError

Result = TypeVar("Result")


async def uninterrupted(work: Awaitable[Result]) -> Result:
    """Awaits ``work`` until it is done, even if this task is cancelled; raises CancelledError afterwards.

    Buffers that a thread reads or writes therefore stay in use until the thread is done.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await _completion(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: no caller is left to receive it
        raise asyncio.CancelledError
    return task.result()


def _completion(task: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Returns a future that is done when a task is done. Cancelling the future does not cancel the task."""
    ended: asyncio.Future[None] = task.get_loop().create_future()
    # ``ended`` is done already if the waiting task was cancelled.
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    return ended


@asynccontextmanager
async def deadline_of(limit_s: float, what: str) -> AsyncIterator[None]:
    """Cancels the block after a time. Raises DeadlineError then."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise DeadlineError(f"{what} took longer than its deadline of {limit_s:.1f} s") from None


async def first_of(*events: asyncio.Event) -> None:
    """Waits until one of several events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def in_thread(pool: ThreadPoolExecutor | None, work: Callable[[], Result]) -> Result:
    """Runs work in a thread of a pool. A cancelled caller waits, because a thread cannot be stopped."""
    return await uninterrupted(asyncio.get_running_loop().run_in_executor(pool, work))


class _Stream:
    """One stream, received by the task that creates this object."""

    def __init__(self) -> None:
        self.reason: ShardwellError | None = None
        self.ended = asyncio.Event()
        self._task = asyncio.current_task()

    def end(self, reason: ShardwellError) -> None:
        """Makes the receiving task raise an error. Only the first reason counts."""
        if self.reason is None:
            self.reason = reason
            assert self._task is not None
            self._task.cancel()

    def was_ended(self) -> bool:
        """True if ``end`` is the only reason why the receiving task is cancelled."""
        assert self._task is not None
        return self.reason is not None and self._task.uncancel() == 0


class OpenStreams:
    """The unfinished streams to one shard. A newer stream replaces one with the same key and fencing numbers.

    Streams with different fencing numbers do not affect each other, because only the coordinator knows which number
    belongs to a valid lease. The coordinator fences former leases (``end``) before it grants a new one. A stream under
    an invalid number therefore neither ends nor blocks the leaseholder's stream.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[Hashable, tuple[int, ...]], _Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def replace(self, key: Hashable, order: tuple[int, ...], what: str) -> AsyncIterator[None]:
        """Runs a block that receives a stream, after ending the open stream with the same key and numbers.

        Args:
            key: What the stream contains, such as a dp rank.
            order: The stream's fencing numbers.

        Raises:
            StaleEpochError: A newer stream replaced this one, or its numbers were fenced.
        """
        name = key, order
        older = self._open.get(name)
        own = self._open[name] = _Stream()
        try:
            if older is not None:
                older.end(StaleEpochError(f"{what}: a newer stream replaced this one"))
                # This wait is not interrupted: the stream's successor must not start before the older stream has ended.
                await uninterrupted(older.ended.wait())
            yield
        except asyncio.CancelledError:
            if not own.was_ended():
                raise
            assert own.reason is not None
            raise own.reason from None
        finally:
            own.ended.set()
            if self._open.get(name) is own:
                del self._open[name]

    def end(self, key: Hashable, before: tuple[int, ...], reason: ShardwellError) -> None:
        """Ends the streams of a key that have a fencing number below the one in ``before``."""
        for (stream_key, order), stream in self._open.items():
            if stream_key == key and any(own < oldest for own, oldest in zip(order, before, strict=True)):
                stream.end(reason)

    def end_all(self, reason: ShardwellError) -> None:
        """Ends every stream."""
        for stream in self._open.values():
            stream.end(reason)
