"""The mean gradient of a shard: where its memory comes from, and when it is released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch

from shardwell_server.shard.arithmetic.reduction import Reduced, reduce_small
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.shard_spec import segment_views
from shardwell_server.shard.unit.contributions import Contribution
from shardwell_server.shard.unit.step_gradient import MeanGradient
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.sum_order import SumOrder

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


SIZES = [(37, 37), (5000, 3), (1024, 1024, 2049)]
"""Numbers of elements of the parameters of each shard: within a block, across blocks, and whole blocks."""


class Split:
    """Splits buffers of the shard of one unit.

    Args:
        sizes: Numbers of elements of its parameters.
        dtype: Dtype of its parameters.
    """

    def __init__(self, sizes: Sequence[int], dtype: str) -> None:
        self.layout = UnitLayout("u", tuple(Parameter(f"p{n}", (size,), dtype) for n, size in enumerate(sizes)))
        self.segments = self.layout.segments(0, self.layout.size_bytes)

    def __call__(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return segment_views(buffer, self.layout, self.segments, 0)

    def mean(self, memory: Memory) -> MeanGradient:
        return MeanGradient(memory, self.layout.size_bytes, [segment.start_bytes for segment in self.segments], self)

    def pushed(self, generator: torch.Generator) -> Contribution:
        buffer = torch.full((self.layout.size_bytes,), 0xFF, dtype=torch.uint8)  # NaN between the segments
        for view in self(buffer):
            view.copy_(torch.randn(view.numel(), generator=generator))
        return Contribution(0, 0, buffer, self(buffer), lambda: None, set(range(len(self.segments))))


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "order",
    [
        SumOrder(2),
        SumOrder(3),
        SumOrder(4, (2, 2)),
        SumOrder(3, num_contributors=2),
        SumOrder(2, num_contributors=3, cp=3),
    ],
)
def test_small_shards_that_are_reduced_together_get_the_same_bits(
    order: SumOrder, dtype: str, in_file: bool, memory: Memory
) -> None:
    generator, begun, expected = torch.Generator().manual_seed(0), [], []
    for sizes in SIZES:
        split = Split(sizes, dtype)
        counts = [1, order.dp] if sizes == SIZES[0] else [order.dp]  # one rank may have the only gradient
        for count in counts:
            found = ranks(*(split.pushed(generator) for _ in range(count)))
            alone, together = split.mean(memory), split.mean(memory)
            asyncio.run(alone.compute(found, order, None, at_once))
            file = torch.zeros(split.layout.size_bytes, dtype=torch.uint8) if in_file else None
            work = together.begin_small(found, file)
            assert work is not None
            begun.append((together, work))
            expected.append(alone.reduced)
    reductions = reduce_small([work for _, work in begun], order)
    for (mean, work), reduced, wanted in zip(begun, reductions, expected, strict=True):
        mean.end_small(work, reduced)
        assert mean.reduced is not None and wanted is not None and mean.in_file is in_file
        assert mean.reduced.square_partials == wanted.square_partials
        for gradient, other in zip(mean.reduced.gradients, wanted.gradients, strict=True):
            assert gradient is not None and other is not None and torch.equal(gradient, other)
        mean.discard()


def test_shards_that_cannot_be_reduced_together_release_their_memory(memory: Memory) -> None:
    generator, order, split = torch.Generator().manual_seed(0), SumOrder(2), Split((37, 37), "float32")
    found = ranks(*(split.pushed(generator) for _ in range(2)))
    mean = split.mean(memory)
    work = mean.begin_small(found, None)
    assert work is not None
    found[0][1].views[1][3] = torch.inf
    (reduced,) = reduce_small([work], order)
    mean.end_small(work, reduced)
    assert (reduced, mean.reduced) == (None, None)  # the general reduction names the segment
    found[1][1].drop([0])
    assert mean.begin_small(found, None) is None
    for other in (Split((37,), "bfloat16"), Split((1 << 20,), "float32")):
        assert other.mean(memory).begin_small(ranks(other.pushed(generator)), None) is None
    assert memory.pool.taken_bytes == 0


def test_received_mean_replaces_the_former_one(memory: Memory, mean: MeanGradient) -> None:
    for value in (1.0, 2.0):
        buffer, received = mean.acquire([1], lambda: None)
        assert buffer is not None
        received[0].fill_(value)
        mean.set(buffer, [1])
        assert memory.pool.taken_bytes == SIZE
    assert mean.present == [1]
    assert mean.acquire([], lambda: None) == (None, [])
    mean.set(None, (), skipped=True)
    assert mean.reduced is not None and mean.reduced.skipped and memory.pool.taken_bytes == 0


def test_received_mean_is_in_the_file_unless_the_file_is_in_use(memory: Memory, mean: MeanGradient) -> None:
    file = torch.zeros(SIZE, dtype=torch.uint8)
    first, received = mean.acquire([0, 1], lambda: file)
    second, _ = mean.acquire([1], lambda: file)
    assert first is file and second is not file and mean.filling is file
    mean.release(second)
    received[0].fill_(3.0)
    mean.set(first, [0, 1])
    assert mean.in_file and mean.filling is None and memory.pool.taken_bytes == 0
    assert views(file)[0].eq(3.0).all()
    third, _ = mean.acquire([1], lambda: file)
    assert third is not file, "a stream that fails must not damage the mean"
    mean.set(third, [1])
    assert not mean.in_file and mean.present == [1]
    mean.discard()
    again, _ = mean.acquire([1], lambda: file)
    mean.release(again)
    assert again is file and mean.filling is None and memory.pool.taken_bytes == 0


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
