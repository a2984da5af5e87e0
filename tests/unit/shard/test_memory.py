"""The memory budget of a shard server: reservations, the buffer pool, unreserved memory."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shardwell_server.shard.memory.budget import BufferQuota, Memory, shard_need_bytes
from shardwell_server.shard.memory.buffer_reuse import BufferPool, UnreservedMemory
from shardwell_server.shard.memory.mapped_memory import ShardFile, SharedMemory
from shardwell_server.shard.unit.values import HeldVersions, Snapshots, VersionBytes
from shardwell_wire.errors import CapacityError
from shardwell_wire.host.server_folders import FolderOwner


def test_idle_buffers_are_reused_and_stay_within_the_limit() -> None:
    pool = BufferPool(1000)
    first = pool.acquire(400)
    pool.release(first)
    assert pool.acquire(400) is first
    assert (pool.taken_bytes, pool.idle_bytes) == (400, 0)
    chooser, taken = random.Random(0), [first]
    for _ in range(500):
        if taken and chooser.random() < 0.5:
            pool.release(taken.pop(chooser.randrange(len(taken))))
        elif pool.taken_bytes < 800:
            taken.append(pool.acquire(chooser.choice([0, 7, 64, 200])))
        assert pool.taken_bytes == sum(buffer.numel() for buffer in taken)
        assert pool.taken_bytes + pool.idle_bytes <= 1000
    pool.trim()
    assert pool.idle_bytes == 0


def test_memory_counted_elsewhere_frees_idle_buffers() -> None:
    pool = BufferPool(1000)
    pool.release(pool.acquire(600))
    pool.elsewhere_bytes = 500
    pool.acquire(10)
    assert pool.idle_bytes == 0


@pytest.mark.parametrize(("dp", "buffers"), [(1, 4), (2, 6), (3, 7)])
def test_a_reservation_covers_parameters_moments_contributions_and_their_mean(dp: int, buffers: int) -> None:
    # Parameters, two moments, one contribution per rank, and their mean if there are several ranks.
    assert shard_need_bytes(10, dp) == 10 * buffers


def test_a_reservation_grows_with_the_optimizer_and_is_released_with_the_run() -> None:
    memory = Memory(1000)
    memory.reserve(("r", "u", 0), 100, 1)
    assert (memory.reserved_bytes, memory.free_bytes) == (500, 500)
    memory.reserve(("s", "u", 0), 50, 1)
    assert memory.reserved_bytes == 700
    memory.note_optimizer(("r", "u", 0), 350)
    assert (memory.reserved_bytes, memory.used_bytes) == (850, 350)
    with pytest.raises(CapacityError):
        memory.reserve(("s", "v", 0), 50, 1)
    assert memory.reserved_bytes == 850
    assert memory.release([("r", "u", 0)]) == 600
    assert (memory.reserved_bytes, memory.used_bytes, memory.release([])) == (250, 0, 0)


def test_unreserved_memory_in_use_counts_against_the_memory_set_aside() -> None:
    memory = Memory(1000)
    memory.reserve(("r", "u", 0), 100, 1)
    assert memory.unreserved.try_acquire(300)
    assert (memory.reserved_bytes, memory.free_bytes) == (700, 300)
    assert not memory.unreserved.try_acquire(301)
    assert memory.unreserved.try_acquire(300)
    with pytest.raises(CapacityError):
        memory.reserve(("r", "v", 0), 1, 1)
    memory.unreserved.release(600)
    memory.reserve(("r", "v", 0), 1, 1)


def test_unreserved_memory_is_granted_in_request_order() -> None:
    async def scenario() -> list[str]:
        unreserved, order = UnreservedMemory(), []
        unreserved.set_limit(10)
        await unreserved.acquire(10, 1.0, "first")

        async def ask(name: str, size: int) -> None:
            await unreserved.acquire(size, 5.0, name)
            order.append(name)

        sizes = [("large", 10), ("small", 1), ("cancelled", 1)]
        asking = [asyncio.ensure_future(ask(name, size)) for name, size in sizes]
        await asyncio.sleep(0)
        assert not unreserved.try_acquire(0), "another caller waits"
        asking.pop().cancel()
        await asyncio.sleep(0)
        unreserved.release(10)
        await asyncio.sleep(0)
        assert order == ["large"]
        unreserved.release(10)
        await asyncio.gather(*asking)
        unreserved.release(1)
        assert unreserved.used_bytes == 0
        return order

    assert asyncio.run(scenario()) == ["large", "small"]


async def test_a_caller_cancelled_when_it_is_admitted_passes_the_memory_on() -> None:
    unreserved = UnreservedMemory()
    unreserved.set_limit(10)
    await unreserved.acquire(10, 1.0, "first")
    cancelled = asyncio.ensure_future(unreserved.acquire(10, 5.0, "cancelled"))
    following = asyncio.ensure_future(unreserved.acquire(10, 5.0, "follows"))
    await asyncio.sleep(0)
    unreserved.release(10)
    cancelled.cancel()
    await asyncio.wait_for(following, 5)
    assert (unreserved.used_bytes, cancelled.cancelled()) == (10, True)


async def test_old_versions_are_evicted_before_a_caller_waits() -> None:
    unreserved = UnreservedMemory()
    unreserved.set_limit(10)
    assert unreserved.try_acquire(10)
    unreserved.evict = lambda: unreserved.release(10)
    await unreserved.acquire(10, 0.0, "a push")


async def test_the_timeout_error_names_the_purpose_and_the_memory_in_use() -> None:
    unreserved = UnreservedMemory()
    unreserved.set_limit(10)
    assert unreserved.try_acquire(4)
    expected = r"a push: no buffer of 7 bytes became free within 0.0 s; other streams use 4 of 10 bytes"
    with pytest.raises(CapacityError, match=expected):
        await unreserved.acquire(7, 0.0, "a push")
    assert unreserved.try_acquire(6), "no caller is waiting"


def test_a_failed_allocation_releases_its_grant() -> None:
    more_than_exists = 1 << 62
    memory, quota = Memory(more_than_exists), BufferQuota(1)

    async def receive(quota: BufferQuota) -> None:
        with await memory.incoming(more_than_exists, quota, wait_s=1.0, what="a push"):
            raise AssertionError("no such buffer exists")

    async def scenario() -> None:
        for acquiring in (receive(quota), receive(BufferQuota(0)), memory.acquire(more_than_exists, 1.0, "a copy")):
            with pytest.raises(CapacityError, match=f"allocate {more_than_exists} bytes, .*lower the budget"):
                await acquiring

    asyncio.run(scenario())
    assert memory.try_acquire(more_than_exists) is None
    assert (memory.unreserved.used_bytes, memory.pool.taken_bytes, quota.try_acquire()) == (0, 0, True)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldVersions]:
    """Held versions in files, with memory for one."""
    with closing(SharedMemory(tmp_path, FolderOwner(server_id="s", coordinator="here:1"))) as shared:
        memory = Memory(1 << 20, shared=shared)
        yield HeldVersions("a shard", "u", memory, 1, Snapshots("a shard", "u", memory))


def test_files_of_versions_that_are_still_read_are_not_pooled(held: HeldVersions) -> None:
    pool, unreserved = held._memory.pool, held._memory.unreserved
    for version in range(3):
        held.allocate(4096)
        added = held.add(VersionBytes(torch.empty(0), version, readers=1, newest=False))
        assert len(held.file_names) == 1
        held.keep([])
        assert (pool.taken_bytes, unreserved.used_bytes) == (4096, 4096)
        held._snapshots.release(added)
        assert (pool.taken_bytes, pool.idle_bytes, unreserved.used_bytes) == (0, 0, 0)


def test_a_version_is_held_without_a_file_that_cannot_be_made(
    held: HeldVersions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> ShardFile:
        raise PermissionError(errno.EACCES, "not allowed")

    monkeypatch.setattr(SharedMemory, "create_shard_file", fail)
    for version in range(2):
        held.allocate(4096)
        held.add(VersionBytes(torch.empty(0), version, newest=False))
        held.keep([])
    assert not held.file_names and "in ordinary memory, without a file: [Errno 13] not allowed" in caplog.text
    assert (held._quota.try_acquire(), held._memory.unreserved.used_bytes) == (True, 0)
