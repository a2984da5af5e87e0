"""Who waits for whom and may interrupt whom: work that is finished once begun, streams that replace each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from shardwell_wire.errors import ShardwellError, StaleEpochError

Result = TypeVar("Result")


async def uninterrupted(work: Awaitable[Result]) -> Result:
    """Awaits ``work`` to its end even when cancelled meanwhile; then it is cancelled.

    Buffers that a thread reads or writes so stay its own until it is done.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await _end_of(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # seen: nobody is left to raise it to
        raise asyncio.CancelledError
    return task.result()


def _end_of(task: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Done when a task is, however it ended; cancelling it leaves the task alone."""
    ended: asyncio.Future[None] = task.get_loop().create_future()
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    return ended


async def first_of(*events: asyncio.Event) -> None:
    """Returns once one of several events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class _Stream:
    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order
        self.reason: ShardwellError | None = None
        self.ended = asyncio.Event()
        self._task = asyncio.current_task()

    def end(self, reason: ShardwellError) -> None:
        """Has what receives it raise the first reason that is given."""
        if self.reason is None:
            self.reason = reason
            assert self._task is not None
            self._task.cancel()

    def was_ended(self) -> bool:
        """Whether that, and nothing else, is why the task that receives it is cancelled."""
        assert self._task is not None
        return self.reason is not None and self._task.uncancel() == 0


class OpenStreams:
    """The unfinished streams to one shard: one per key, and the newest wins."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def replace(
        self, key: Hashable, order: tuple[int, ...], what: str, receive: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Receives a stream after ending the one that is open under ``key``.

        Args:
            key: What the stream is of.
            order: Its fencing numbers; one with higher numbers is not replaced.
            what: Names the stream in errors.
            receive: Receives it; begun once nothing is left of the older one.

        Raises:
            StaleEpochError: A newer stream took its place, or is there already.
        """
        older = self._open.get(key)
        if older is not None and older.order > order:
            raise StaleEpochError(f"{what}: a stream of a later lease or attempt is being received")
        own = self._open[key] = _Stream(order)
        try:
            if older is not None:
                older.end(StaleEpochError(f"{what}: a newer stream took its place"))
                await uninterrupted(older.ended.wait())
            return await receive()
        except asyncio.CancelledError:
            if not own.was_ended():
                raise
            assert own.reason is not None
            raise own.reason from None
        finally:
            own.ended.set()
            if self._open.get(key) is own:
                del self._open[key]

    def end(self, key: Hashable, before: tuple[int, ...], reason: ShardwellError) -> None:
        """Ends the stream under ``key`` if its fencing numbers are not at least ``before``, each."""
        stream = self._open.get(key)
        if stream is not None and any(own < oldest for own, oldest in zip(stream.order, before, strict=True)):
            stream.end(reason)

    def end_all(self, reason: ShardwellError) -> None:
        """Ends every stream."""
        for stream in self._open.values():
            stream.end(reason)
