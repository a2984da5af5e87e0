"""What the pool of layers' memory keeps, and for how long."""

from __future__ import annotations

import pytest

from shardwell.memory.buffer_pool import BufferPool

LIMIT = 1000


def kept(pool: BufferPool, size_bytes: int) -> bool:
    """Whether a buffer that was given back is what is taken next of its size."""
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


def test_one_that_is_larger_than_the_limit_is_kept_if_that_is_wanted() -> None:
    assert not kept(BufferPool(LIMIT), LIMIT + 1)
    assert kept(BufferPool(LIMIT, one_larger=True), LIMIT + 1)
    assert kept(BufferPool(LIMIT), LIMIT)


def test_it_goes_before_another_size_comes() -> None:
    pool = BufferPool(LIMIT, one_larger=True)
    small, large = pool.acquire(400), pool.acquire(5000)
    pool.release(small)
    pool.release(large)
    assert pool.idle_bytes == 5400, "beside what the limit allows"
    assert pool.acquire(400) is small
    assert pool.idle_bytes == 0
    pool.release(large)
    assert pool.acquire(5001).numel() == 5001
    assert pool.idle_bytes == 0


def test_of_several_the_last_stays() -> None:
    pool = BufferPool(LIMIT, one_larger=True)
    first, second = pool.acquire(2000), pool.acquire(3000)
    pool.release(second)
    pool.release(first)
    assert pool.idle_bytes == 2000
    assert pool.acquire(2000) is first


def test_a_limit_of_nothing_keeps_nothing() -> None:
    pool = BufferPool(0, one_larger=True)
    assert not kept(pool, 400)
    assert pool.idle_bytes == 0


def test_another_limit_frees_what_is_idle() -> None:
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
def test_a_buffer_is_writable_and_of_the_size_asked_for(size_bytes: int) -> None:
    pool = BufferPool(4 << 20)
    with pool.acquired(size_bytes) as lent:
        lent[:] = b"\x07" * size_bytes
        assert len(lent) == size_bytes
    assert bytes(memoryview(pool.acquire(size_bytes).numpy())) == b"\x07" * size_bytes


def test_what_was_lent_can_be_read_after_it_was_freed() -> None:
    """gRPC reads on for a moment when its rpc has failed."""
    pool = BufferPool(0)
    with pool.acquired(2 << 20) as buffer:
        buffer[-1:] = b"x"
    assert bytes(buffer[-1:]) == b"x"
