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
    def __init__(self) -> None:
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
    """The unfinished streams to one shard. Of those with the same key and fencing numbers the newest wins.

    Streams with other numbers leave each other alone. Only the coordinator knows which of them belongs to a lease: it
    fences those of former leases before it gives out a new one (``end``). A stream under a number that nobody leased
    therefore neither ends the leaseholder's nor keeps it from being received.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[Hashable, tuple[int, ...]], _Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def replace(
        self, key: Hashable, order: tuple[int, ...], what: str, receive: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Receives a stream after ending the one that is open under the same key and numbers.

        Args:
            key: What the stream is of.
            order: Its fencing numbers.
            what: Names the stream in errors.
            receive: Receives it; begun once nothing is left of the older one.

        Raises:
            StaleEpochError: A newer stream took its place, or its numbers were fenced.
        """
        name = key, order
        older = self._open.get(name)
        own = self._open[name] = _Stream()
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
            if self._open.get(name) is own:
                del self._open[name]

    def end(self, key: Hashable, before: tuple[int, ...], reason: ShardwellError) -> None:
        """Ends the streams under ``key`` whose fencing numbers are not at least ``before``, each."""
        for (of, order), stream in self._open.items():
            if of == key and any(own < oldest for own, oldest in zip(order, before, strict=True)):
                stream.end(reason)

    def end_all(self, reason: ShardwellError) -> None:
        """Ends every stream."""
        for stream in self._open.values():
            stream.end(reason)
