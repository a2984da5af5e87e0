"""Where tensor work runs, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from shardwell_server.shard.concurrency import uninterrupted

Result = TypeVar("Result")


class InThread(Protocol):
    """Runs a function in a thread and awaits its result."""

    def __call__(self, work: Callable[[], Result], /) -> Awaitable[Result]: ...


def in_threads_of(pool: ThreadPoolExecutor) -> InThread:
    """Runs functions in a pool; a caller that is cancelled still waits, for a thread cannot be stopped."""

    async def in_thread(work: Callable[[], Result], /) -> Result:
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(pool, work))

    return in_thread
