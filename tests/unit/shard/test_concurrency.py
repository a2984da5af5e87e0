"""Cancellation in a shard server: work in threads finishes, streams are replaced by newer ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwell_server.shard.concurrency import OpenStreams, in_thread, uninterrupted
from shardwell_wire.errors import StaleEpochError


async def test_uninterrupted_work_finishes_before_the_cancellation() -> None:
    started, resume, finished = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        started.set()
        await resume.wait()
        finished.append(True)
        raise ValueError("no caller receives this error")

    task = asyncio.ensure_future(uninterrupted(work()))
    await started.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    resume.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished == [True]


async def test_cancelled_caller_waits_for_its_thread() -> None:
    started, resume = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert resume.wait(20)

    with ThreadPoolExecutor(1) as pool:
        task = asyncio.ensure_future(in_thread(pool, work))
        while not started.is_set():
            await asyncio.sleep(0)
        task.cancel()
        # The cancellation must not end the task while its thread runs.
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        resume.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def replace(
    streams: OpenStreams, order: tuple[int, ...], what: str, receive: Callable[[], Awaitable[None]]
) -> None:
    async with streams.replace("key", order, what):
        await receive()


def test_newer_stream_starts_after_the_older_has_ended() -> None:
    async def scenario() -> list[str]:
        streams, notes, clean_up = OpenStreams(), [], asyncio.Event()

        async def older() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await uninterrupted(clean_up.wait())
                notes.append("older is gone")

        async def newer() -> None:
            notes.append("newer begins")

        first = asyncio.ensure_future(replace(streams, (1,), "the first", older))
        # Each sleep lets every ready task run once.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        following = [asyncio.ensure_future(replace(streams, (1,), f"number {n}", newer)) for n in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        # Streams with other numbers start at once.
        for other in ((0,), (2,)):
            await replace(streams, other, "of another lease", newer)
        assert not first.done()
        clean_up.set()
        for ended in (first, following[0]):
            with pytest.raises(StaleEpochError, match="a newer stream replaced this one"):
                await ended
        await following[1]
        assert len(streams) == 0
        return notes

    assert asyncio.run(scenario()) == ["newer begins", "newer begins", "older is gone", "newer begins"]


async def test_fencing_ends_streams_with_lower_numbers() -> None:
    streams, reason = OpenStreams(), StaleEpochError("over")

    async def receive() -> None:
        await asyncio.Event().wait()

    running = asyncio.ensure_future(replace(streams, (3, 1), "it", receive))
    await asyncio.sleep(0)
    streams.end("key", (3, 1), reason)
    streams.end("other", (9, 9), reason)
    await asyncio.sleep(0)
    assert not running.done()
    streams.end("key", (2, 2), reason)
    with pytest.raises(StaleEpochError, match="over"):
        await running
