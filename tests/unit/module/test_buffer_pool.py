"""How long the buffer pool keeps released buffers."""

from __future__ import annotations

import pytest

from shardwell.memory.buffers import BufferPool

LIMIT = 1000


def kept(pool: BufferPool, size_bytes: int) -> bool:
    """Returns whether a released buffer is acquired again by the next request of its size."""
    buffer = pool.acquire(size_bytes)
    pool.release(buffer)
    return pool.acquire(size_bytes) is buffer


@pytest.mark.parametrize("one_larger", [False, True])
def test_buffers_are_kept_up_to_the_limit(one_larger: bool) -> None:
    pool = BufferPool(LIMIT, one_larger=one_larger)
    taken = [pool.acquire(400) for _ in range(3)]
    for buffer in taken:
        pool.release(buffer)
    assert pool.idle_bytes == 800, "the third does not fit, and is not larger than the limit"
    assert {id(pool.acquire(400)) for _ in range(2)} == {id(buffer) for buffer in taken[:2]}
    assert pool.idle_bytes == 0


def test_buffer_larger_than_the_limit_is_kept_on_request() -> None:
    assert not kept(BufferPool(LIMIT), LIMIT + 1)
    assert kept(BufferPool(LIMIT, one_larger=True), LIMIT + 1)
    assert kept(BufferPool(LIMIT), LIMIT)


def test_oversized_buffer_is_freed_before_another_size_is_kept() -> None:
    pool = BufferPool(LIMIT, one_larger=True)
    small, large = pool.acquire(400), pool.acquire(5000)
    pool.release(small)
    pool.release(large)
    assert pool.idle_bytes == 5400, "in addition to the limit"
    assert pool.acquire(400) is small
    assert pool.idle_bytes == 0
    pool.release(large)
    assert pool.acquire(5001).numel() == 5001
    assert pool.idle_bytes == 0


def test_last_of_several_oversized_buffers_is_kept() -> None:
    pool = BufferPool(LIMIT, one_larger=True)
    first, second = pool.acquire(2000), pool.acquire(3000)
    pool.release(second)
    pool.release(first)
    assert pool.idle_bytes == 2000
    assert pool.acquire(2000) is first


def test_zero_limit_keeps_no_buffer() -> None:
    pool = BufferPool(0, one_larger=True)
    assert not kept(pool, 400)
    assert pool.idle_bytes == 0


def test_lower_limit_frees_idle_buffers() -> None:
    pool = BufferPool(LIMIT, one_larger=True)
    small, large = pool.acquire(400), pool.acquire(5000)
    for limit, expected in ((0, 0), (LIMIT, 5400)):
        pool.release(small)
        pool.release(large)
        pool.set_limit(limit)
        assert pool.idle_bytes == 0
        pool.release(small)
        pool.release(large)
        assert pool.idle_bytes == expected


@pytest.mark.parametrize("size_bytes", [0, 1, 1 << 20, (1 << 20) + 1])
def test_buffer_is_writable_and_has_the_requested_size(size_bytes: int) -> None:
    pool = BufferPool(4 << 20)
    with pool.acquired(size_bytes) as buffer:
        buffer[:] = b"\x07" * size_bytes
        assert len(buffer) == size_bytes
    assert bytes(memoryview(pool.acquire(size_bytes).numpy())) == b"\x07" * size_bytes


def test_acquired_buffer_stays_readable_after_it_is_freed() -> None:
    """gRPC may read a buffer for a moment after its rpc has failed."""
    pool = BufferPool(0)
    with pool.acquired(2 << 20) as buffer:
        buffer[-1:] = b"x"
    assert bytes(buffer[-1:]) == b"x"
