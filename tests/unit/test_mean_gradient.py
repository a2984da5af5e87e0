"""The mean gradient of a shard: where its memory comes from, and when it is released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from shardwell_server.shard.arithmetic.reduction import Reduced
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.state.mean_gradient import MeanGradient
from shardwell_wire.sum_order import SumOrder

SIZE, HALF = 128, 64


def views(buffer: torch.Tensor) -> list[torch.Tensor]:
    return [half.view(torch.float32) for half in buffer.split(HALF)]


async def at_once(work: Callable[[], Reduced]) -> Reduced:
    return work()


async def fail(work: Callable[[], Reduced]) -> Reduced:
    raise MemoryError("no thread")


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 20)


@pytest.fixture
def mean(memory: Memory) -> MeanGradient:
    return MeanGradient(memory, SIZE, [0, HALF], views)


def term(value: float) -> torch.Tensor:
    return torch.full((HALF // 4,), value)


def test_mean_of_one_rank_takes_no_memory(memory: Memory, mean: MeanGradient) -> None:
    only = term(3.0)
    asyncio.run(mean.compute([[(0, only)], []], SumOrder(1), None, at_once))
    assert mean.reduced is not None and mean.reduced.gradients[0] is only
    assert (mean.present, memory.pool.taken_bytes, mean.in_file) == ([0], 0, False)


def test_mean_of_several_ranks_is_in_a_buffer_until_it_is_discarded(memory: Memory, mean: MeanGradient) -> None:
    asyncio.run(mean.compute([[(0, term(1.0)), (1, term(3.0))], []], SumOrder(2), None, at_once))
    assert mean.reduced is not None and mean.reduced.gradients[0] is not None
    assert mean.reduced.gradients[0].eq(2.0).all()
    assert memory.pool.taken_bytes == SIZE
    mean.discard()
    assert (mean.reduced, mean.present, memory.pool.taken_bytes) == (None, [], 0)


def test_mean_in_a_file_takes_no_buffer(memory: Memory, mean: MeanGradient) -> None:
    file = torch.zeros(SIZE, dtype=torch.uint8)
    asyncio.run(mean.compute([[(0, term(1.0)), (1, term(3.0))], [(1, term(5.0))]], SumOrder(2), file, at_once))
    assert (mean.in_file, mean.present, memory.pool.taken_bytes) == (True, [0, 1], 0)
    assert views(file)[0].eq(2.0).all() and views(file)[1].eq(2.5).all()


def test_failed_computation_releases_its_buffer(memory: Memory, mean: MeanGradient) -> None:
    with pytest.raises(MemoryError):
        asyncio.run(mean.compute([[(0, term(1.0)), (1, term(3.0))], []], SumOrder(2), None, fail))
    assert (mean.reduced, memory.pool.taken_bytes) == (None, 0)


def test_received_mean_replaces_the_former_one(memory: Memory, mean: MeanGradient) -> None:
    for value in (1.0, 2.0):
        buffer, received = mean.acquire([1])
        assert buffer is not None
        received[0].fill_(value)
        mean.set(buffer, [1])
        assert memory.pool.taken_bytes == SIZE
    assert mean.present == [1]
    assert mean.acquire([]) == (None, [])
    mean.set(None, (), skipped=True)
    assert mean.reduced is not None and mean.reduced.skipped and memory.pool.taken_bytes == 0


def test_mean_of_a_former_process_stays_in_its_file(memory: Memory, mean: MeanGradient) -> None:
    file = torch.zeros(SIZE, dtype=torch.uint8)
    views(file)[0].fill_(4.0)
    mean.take_up(file, [0], skipped=False)
    copy = torch.ones(SIZE, dtype=torch.uint8)
    mean.compute_write(copy)
    assert mean.present == [0] and views(copy)[0].eq(4.0).all()
    assert copy[HALF:].eq(1).all(), "segments without a gradient are not written"
    mean.discard()
    assert memory.pool.taken_bytes == 0
