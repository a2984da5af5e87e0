"""Limits on messages that clients have not read."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_server.shard.memory import buffer_reuse
from shardwell_server.shard.memory.buffer_reuse import Sending
from shardwell_wire.errors import CapacityError


class Reader:
    """A stream of messages to one client, which reads one per ``read`` call.

    Args:
        limits: Counts the messages.
        size_bytes: Size of each message.
        peer: The client's connection.
        wait_s: Seconds that the stream waits for memory.
    """

    def __init__(self, limits: Sending, size_bytes: int, peer: str = "a", wait_s: float = 5.0) -> None:
        self._taken, self.count = asyncio.Event(), 0

        async def stream() -> None:
            while True:
                async with limits.message(size_bytes, peer, wait_s):
                    self.count += 1
                    await self._taken.wait()
                    self._taken.clear()

        self.task = asyncio.ensure_future(stream())

    def read(self) -> None:
        self._taken.set()


async def turns() -> None:
    """Lets tasks run until all of them wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def end(*readers: Reader) -> None:
    for reader in readers:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)


async def test_stalled_readers_stay_within_the_limits_in_total_and_per_connection() -> None:
    limits = Sending(40)
    stalled = [Reader(limits, 2, "a") for _ in range(50)]
    await turns()
    assert limits.used_bytes == 10, "one connection gets a quarter of the limit"
    others = [Reader(limits, 2, f"b{number}") for number in range(100)]
    await turns()
    assert limits.used_bytes == 40
    await end(*stalled)
    await turns()
    assert limits.used_bytes == 40
    await end(*others)
    assert (limits.used_bytes, limits._used_by, limits._waiting_by) == (0, {}, {})


async def test_active_readers_are_served_beside_stalled_readers() -> None:
    limits = Sending(40)
    stalled = [Reader(limits, 2, "a") for _ in range(50)]
    reading = [Reader(limits, 10, f"b{number}") for number in range(6)]
    for _ in range(60):
        await turns()
        for reader in reading:
            reader.read()
    assert min(reader.count for reader in reading) > 10
    assert limits.used_bytes <= 40
    await end(*stalled, *reading)


async def test_message_larger_than_the_limits_is_sent_alone() -> None:
    limits = Sending(4)
    first, second = Reader(limits, 100), Reader(limits, 100)
    await turns()
    assert (first.count, second.count) == (1, 0)
    await end(first)
    await turns()
    assert second.count == 1
    await end(second)


async def test_stalled_connection_is_closed_when_other_streams_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_reuse, "_SWEEP_S", 0.01)
    # Only a stream that waits for memory can cause the close, not the length of the stall.
    monkeypatch.setattr(buffer_reuse, "STALL_LIMIT_S", 3600.0)
    monkeypatch.setattr(buffer_reuse, "PRESSED_LIMIT_S", 0.05)
    closed: list[str] = []

    def close(peer: str) -> bool:
        closed.append(peer)
        stalled.task.cancel()  # gRPC cancels the streams of a closed connection
        return True

    limits = Sending(4, close)
    stalled = Reader(limits, 4)
    await asyncio.sleep(0.1)
    assert not closed, "no stream waits for its memory"
    wanting = Reader(limits, 4, "b")
    await asyncio.wait({stalled.task}, timeout=20)
    await turns()
    assert (closed, wanting.count) == (["a"], 1)
    await end(wanting)


async def test_errors_name_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Sending(4)
    stalled, late = Reader(limits, 4), Reader(limits, 4, "b", wait_s=0.01)
    with pytest.raises(CapacityError, match=r"clients have not read 4 bytes yet, 0 .*; the limits are 4 and 1"):
        await late.task
    monkeypatch.setattr(buffer_reuse, "_MAX_WAITING_PER_PEER", 1)
    waiting, rejected = Reader(limits, 4, "b"), Reader(limits, 4, "b")
    with pytest.raises(CapacityError, match="limits are 4096 and 1: read the open streams"):
        await rejected.task
    await end(stalled, waiting)
    assert limits.used_bytes == 0
