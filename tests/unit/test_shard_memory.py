"""What a shard server sets aside, lends and keeps: never more than its budget."""

from __future__ import annotations

import asyncio
import random

import pytest

from shardwell_server.shard.memory.budget import Cover, Memory, shard_need_bytes
from shardwell_server.shard.memory.buffer_pool import BufferPool
from shardwell_server.shard.memory.staging import Staging
from shardwell_wire.errors import CapacityError


def test_idle_buffers_are_used_again_and_never_exceed_the_limit() -> None:
    pool = BufferPool(1000)
    first = pool.take(400)
    pool.give(first)
    assert pool.take(400) is first
    assert (pool.taken_bytes, pool.idle_bytes) == (400, 0)
    chooser, taken = random.Random(0), [first]
    for _ in range(500):
        if taken and chooser.random() < 0.5:
            pool.give(taken.pop(chooser.randrange(len(taken))))
        elif pool.taken_bytes < 800:
            taken.append(pool.take(chooser.choice([0, 7, 64, 200])))
        assert pool.taken_bytes == sum(buffer.numel() for buffer in taken)
        assert pool.taken_bytes + pool.idle_bytes <= 1000
    pool.trim()
    assert pool.idle_bytes == 0


def test_optimizer_state_leaves_less_for_idle_buffers() -> None:
    pool = BufferPool(1000)
    pool.give(pool.take(600))
    pool.elsewhere_bytes = 500
    pool.take(10)
    assert pool.idle_bytes == 0


@pytest.mark.parametrize(("dp", "buffers"), [(1, 4), (2, 6), (3, 7)])
def test_a_reservation_covers_what_a_shard_may_come_to_use(dp: int, buffers: int) -> None:
    # Parameters, two moments, one contribution per rank, and with several ranks their sum.
    assert shard_need_bytes(10, dp) == 10 * buffers


def test_reservations_grow_with_the_optimizer_and_go_with_the_run() -> None:
    memory = Memory(1000)
    memory.reserve("r", "u", 100, 1)
    assert (memory.reserved_bytes, memory.free_bytes) == (500, 500)
    memory.reserve("s", "u", 50, 1)
    assert memory.reserved_bytes == 700
    memory.note_optimizer("r", "u", 350)
    assert (memory.reserved_bytes, memory.used_bytes) == (850, 350)
    with pytest.raises(CapacityError):
        memory.reserve("s", "v", 50, 1)
    assert memory.reserved_bytes == 850
    assert memory.release("r") == 600
    assert (memory.reserved_bytes, memory.used_bytes, memory.release("r")) == (250, 0, 0)


def test_what_is_lent_is_not_reserved_twice() -> None:
    memory = Memory(1000)
    memory.reserve("r", "u", 100, 1)
    assert memory.staging.try_take(300)
    assert (memory.reserved_bytes, memory.free_bytes) == (700, 300)
    assert not memory.staging.try_take(301)
    assert memory.staging.try_take(300)
    with pytest.raises(CapacityError):
        memory.reserve("r", "v", 1, 1)
    memory.staging.give(600)
    memory.reserve("r", "v", 1, 1)


def test_room_is_given_in_the_order_of_asking() -> None:
    async def scenario() -> list[str]:
        staging, order = Staging(), []
        staging.set_limit(10)
        await staging.take(10, 1.0, "first")

        async def ask(name: str, size: int) -> None:
            await staging.take(size, 5.0, name)
            order.append(name)

        asking = [asyncio.ensure_future(ask(name, size)) for name, size in (("large", 10), ("small", 1), ("gone", 1))]
        await asyncio.sleep(0)
        assert not staging.try_take(0), "somebody waits"
        asking.pop().cancel()
        await asyncio.sleep(0)
        staging.give(10)
        await asyncio.sleep(0)
        assert order == ["large"]
        staging.give(10)
        await asyncio.gather(*asking)
        staging.give(1)
        assert staging.used_bytes == 0
        return order

    assert asyncio.run(scenario()) == ["large", "small"]


def test_who_gives_up_as_its_turn_comes_leaves_the_room_to_the_next() -> None:
    async def scenario() -> None:
        staging = Staging()
        staging.set_limit(10)
        await staging.take(10, 1.0, "first")
        giving_up = asyncio.ensure_future(staging.take(10, 5.0, "gives up"))
        following = asyncio.ensure_future(staging.take(10, 5.0, "follows"))
        await asyncio.sleep(0)
        staging.give(10)
        giving_up.cancel()
        await asyncio.wait_for(following, 5)
        assert (staging.used_bytes, giving_up.cancelled()) == (10, True)

    asyncio.run(scenario())


def test_old_versions_give_way_before_anybody_waits() -> None:
    async def scenario() -> None:
        staging = Staging()
        staging.set_limit(10)
        assert staging.try_take(10)
        staging.make_room = lambda: staging.give(10)
        await staging.take(10, 0.0, "a push")

    asyncio.run(scenario())


def test_who_waits_too_long_is_told_what_for() -> None:
    async def scenario() -> None:
        staging = Staging()
        staging.set_limit(10)
        assert staging.try_take(4)
        with pytest.raises(CapacityError, match=r"a push: waited 0.0 s for 7 bytes .* other streams hold 4 of 10"):
            await staging.take(7, 0.0, "a push")
        assert staging.try_take(6), "nobody is in line any more"

    asyncio.run(scenario())


def test_no_room_stays_taken_for_what_the_system_does_not_give() -> None:
    more_than_any_has = 1 << 62
    memory, cover = Memory(more_than_any_has), Cover(1)

    async def receive(cover: Cover) -> None:
        async with memory.incoming(more_than_any_has, cover, wait_s=1.0, what="a push"):
            raise AssertionError("there is no such buffer")

    async def scenario() -> None:
        for taking in (receive(cover), receive(Cover(0)), memory.lend(more_than_any_has, 1.0, "a copy")):
            with pytest.raises(CapacityError, match=f"no memory for {more_than_any_has} bytes, .*lower the budget"):
                await taking

    asyncio.run(scenario())
    assert memory.try_lend(more_than_any_has) is None
    assert (memory.staging.used_bytes, memory.pool.taken_bytes, cover.take()) == (0, 0, True)
