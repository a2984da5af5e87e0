"""The mean gradient of a shard: where its memory comes from, and when it is released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from shardwell_server.shard.arithmetic.reduction import Reduced, compute_mean
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.state.contributions import Contribution
from shardwell_server.shard.state.mean_gradient import MeanGradient
from shardwell_server.shard.state.shard_spec import segment_views
from shardwell_wire.layout import Parameter, UnitLayout
from shardwell_wire.sum_order import Scratch, SumOrder

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


def contribution(*values: float | None) -> Contribution:
    """Returns the gradient of one rank, by segment. None: the segment has no gradient, and its bytes are NaN."""
    buffer = torch.full((SIZE // 4,), torch.nan).view(torch.uint8)
    for view, value in zip(views(buffer), values, strict=True):
        if value is not None:
            view.fill_(value)
    present = {number for number, value in enumerate(values) if value is not None}
    return Contribution(0, 0, buffer, views(buffer), lambda: None, present)


def ranks(*contributions: Contribution) -> list[tuple[int, Contribution]]:
    return list(enumerate(contributions))


def test_mean_of_one_rank_takes_no_memory(memory: Memory, mean: MeanGradient) -> None:
    only = contribution(3.0, None)
    asyncio.run(mean.compute(ranks(only), SumOrder(1), None, at_once))
    assert mean.reduced is not None and mean.reduced.gradients[0] is only.views[0]
    assert (mean.present, memory.pool.taken_bytes, mean.in_file) == ([0], 0, False)


def test_mean_of_several_ranks_is_in_a_buffer_until_it_is_discarded(memory: Memory, mean: MeanGradient) -> None:
    asyncio.run(mean.compute(ranks(contribution(1.0, None), contribution(3.0, None)), SumOrder(2), None, at_once))
    assert mean.reduced is not None and mean.reduced.gradients[0] is not None
    assert mean.reduced.gradients[0].eq(2.0).all()
    assert memory.pool.taken_bytes == SIZE
    mean.discard()
    assert (mean.reduced, mean.present, memory.pool.taken_bytes) == (None, [], 0)


def test_mean_in_a_file_takes_no_buffer(memory: Memory, mean: MeanGradient) -> None:
    file = torch.zeros(SIZE, dtype=torch.uint8)
    found = ranks(contribution(1.0, None), contribution(3.0, 5.0))
    asyncio.run(mean.compute(found, SumOrder(2), file, at_once))
    assert (mean.in_file, mean.present, memory.pool.taken_bytes) == (True, [0, 1], 0)
    assert views(file)[0].eq(2.0).all() and views(file)[1].eq(2.5).all()


def test_failed_computation_releases_its_buffer(memory: Memory, mean: MeanGradient) -> None:
    with pytest.raises(MemoryError):
        asyncio.run(mean.compute(ranks(contribution(1.0, None), contribution(3.0, None)), SumOrder(2), None, fail))
    assert (mean.reduced, memory.pool.taken_bytes) == (None, 0)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float64"), ("float32", "bfloat16")])
@pytest.mark.parametrize("order", [SumOrder(3), SumOrder(4, (2, 2))])
def test_shards_that_are_reduced_as_a_whole_get_the_same_bits(
    order: SumOrder, dtypes: tuple[str, str], memory: Memory
) -> None:
    layout = UnitLayout("u", tuple(Parameter(name, (37,), dtype) for name, dtype in zip("ab", dtypes, strict=True)))
    segments, generator = layout.segments(0, layout.size_bytes), torch.Generator().manual_seed(0)

    def split(buffer: torch.Tensor) -> list[torch.Tensor]:
        return segment_views(buffer, layout, segments, 0)

    def pushed(present: set[int]) -> Contribution:
        buffer = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)  # NaN between the segments
        for view in split(buffer):
            view.copy_(torch.randn(view.numel(), generator=generator))
        return Contribution(0, 0, buffer, split(buffer), lambda: None, present)

    assert layout.size_bytes > sum(segment.size_bytes for segment in segments)
    starts = [segment.start_bytes for segment in segments]
    for last in ({0, 1}, {1}):
        found = ranks(*(pushed({0, 1}) for _ in range(order.dp - 1)), pushed(last))
        mean = MeanGradient(memory, layout.size_bytes, starts, split)
        asyncio.run(mean.compute(found, order, None, at_once))
        assert mean.reduced is not None and mean.reduced.non_finite is None
        for number, gradient in enumerate(mean.reduced.gradients):
            assert gradient is not None
            terms = [(rank, own.views[number]) for rank, own in found if number in own.present]
            expected = torch.empty_like(gradient)
            compute_mean(terms, order, expected, Scratch())
            assert torch.equal(gradient, expected)
        mean.discard()


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
