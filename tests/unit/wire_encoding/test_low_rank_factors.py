"""Low-rank streams: near the best approximation, the same bits for any cut, and never larger than their values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from shardwell_wire.encoding import low_rank_factors
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.streams import InParameters, InVector, RangePlans, StreamPlan
from shardwell_wire.encoding.wire_dtypes import AS_STORED, LOW_RANK, WireDtype, applied, stream_size
from shardwell_wire.model.layout import Parameter, UnitLayout, cut
from shardwell_wire.v1.common_pb2 import WIRE_DTYPE_LOW_RANK_4, WIRE_DTYPE_UNSPECIFIED

EVERY = list(LOW_RANK)

LAYOUT = UnitLayout(
    "block",
    (
        Parameter("bias", (37,), "float32"),
        Parameter("wide", (40, 701), "float32"),
        Parameter("double", (33, 65), "float64"),
        Parameter("empty", (0, 3), "float32"),
        Parameter("scalar", (), "float32"),
        Parameter("half", (33, 65), "bfloat16"),
        Parameter("tall", (1201, 48), "float32"),
        Parameter("filter", (64, 8, 3, 3), "float32"),
        Parameter("small", (3, 5), "float32"),
        Parameter("long_rows", (40, 70_001), "float32"),
    ),
)


def matrix_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Returns a matrix whose singular values fall like those of gradients: a few large ones and a long tail."""
    generator = torch.Generator().manual_seed(seed)
    count = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, count, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, count, generator=generator)).Q
    return left * torch.arange(1, count + 1).float().rsqrt() @ right.t()


def factors_of(matrix: torch.Tensor, rank: int, seed: int = 0) -> torch.Tensor:
    encoded = torch.zeros(2 * rank * sum(matrix.shape), dtype=torch.uint8)
    low_rank_factors.encode(matrix, rank, encoded, seed)
    return encoded


def product_of(encoded: torch.Tensor, rank: int, shape: Sequence[int]) -> torch.Tensor:
    values = torch.full((math.prod(shape),), 7.0)
    low_rank_factors.decode(encoded, rank, shape[1], 0, values)
    return values.view(*shape)


def memory_of(x: torch.Tensor) -> memoryview:
    return memory_at(x.data_ptr(), x.nbytes, x)


@pytest.mark.parametrize("rank", LOW_RANK.values())
@pytest.mark.parametrize("shape", [(96, 384), (384, 96), (200, 200), (31, 1000)])
def test_product_is_nearly_the_best_of_its_rank(rank: int, shape: tuple[int, int]) -> None:
    matrix = matrix_of(*shape)
    error = (matrix - product_of(factors_of(matrix, rank), rank, shape)).norm()
    best = torch.linalg.svdvals(matrix)[rank:].norm()
    assert error < 1.15 * best
    assert error < matrix.norm(), "the product is farther from the matrix than zero"


@pytest.mark.parametrize("rank", LOW_RANK.values())
def test_matrix_of_the_rank_arrives_up_to_rounding(rank: int) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(100, rank, generator=generator) @ torch.randn(rank, 90, generator=generator)
    arrived = product_of(factors_of(matrix, rank), rank, (100, 90))
    assert (arrived - matrix).norm() < 2**-7 * matrix.norm(), "bfloat16 has 8 bits"


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scale_of_a_matrix_does_not_matter(scale: float) -> None:
    matrix = matrix_of(80, 60)
    expected = product_of(factors_of(matrix, 4), 4, (80, 60))
    arrived = product_of(factors_of(matrix * scale, 4), 4, (80, 60)) / scale
    assert (arrived - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("rank", [1, 4])
def test_zero_and_dependent_columns_are_encoded(rank: int) -> None:
    zero = torch.zeros(40, 30)
    assert not product_of(factors_of(zero, rank), rank, (40, 30)).any()
    zero[7, 11] = 3.0
    assert torch.equal(product_of(factors_of(zero, rank), rank, (40, 30)), zero)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_matrix_with_a_bad_value_arrives_with_one(bad: float) -> None:
    """The servers reject the step: a bad value must not become a finite one."""
    matrix = matrix_of(40, 30)
    matrix[17, 5] = bad
    assert not product_of(factors_of(matrix, 4), 4, (40, 30))[17, 5].isfinite()


@pytest.mark.parametrize("rank", LOW_RANK.values())
def test_elements_are_sums_in_rising_order_of_the_rank(rank: int) -> None:
    rows, columns = 67, 1031
    encoded = factors_of(matrix_of(rows, columns), rank)
    numbers = (encoded.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    right, left = numbers[: rank * columns].reshape(rank, columns), numbers[rank * columns :].reshape(rows, rank)
    expected = np.zeros((rows, columns), np.float32)
    for index in range(rank):
        expected = expected + left[:, index, None] * right[index]
    assert np.array_equal(product_of(encoded, rank, (rows, columns)).numpy(), expected)


def test_bytes_depend_on_the_matrix_and_the_seed_only() -> None:
    matrix = matrix_of(200, 70)
    expected = factors_of(matrix, 4)
    assert not torch.equal(factors_of(matrix, 4, seed=1), expected)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert torch.equal(factors_of(matrix, 4), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(factors_of(matrix.clone().requires_grad_(), 4), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_subtraction_leaves_what_the_product_lacks() -> None:
    matrix = matrix_of(300, 701)
    encoded = factors_of(matrix, 4)
    rest = matrix.clone()
    low_rank_factors.subtract(encoded, 4, 701, 0, rest.view(-1))
    assert torch.equal(rest, matrix - product_of(encoded, 4, (300, 701)))


# Streams of units and shards.


def values() -> dict[int, torch.Tensor]:
    found = {}
    for index, parameter in enumerate(LAYOUT.parameters):
        generator = torch.Generator().manual_seed(index)
        found[index] = torch.randn(parameter.numel, generator=generator).to(getattr(torch, parameter.dtype))
    return found


def encoded_unit(wire_dtype: WireDtype, indices: Sequence[int]) -> bytearray:
    plan = StreamPlan(LAYOUT, LAYOUT.packed_segments(indices, 0, LAYOUT.size_bytes), wire_dtype)
    stream = bytearray(plan.size_bytes)
    plan.encode(InParameters({index: flat for index, flat in values().items() if index in indices}), stream)
    return stream


def decoded_unit(wire_dtype: WireDtype, indices: Sequence[int], stream: bytearray) -> torch.Tensor:
    vector = torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8)
    plan = StreamPlan(LAYOUT, LAYOUT.packed_segments(indices, 0, LAYOUT.size_bytes), wire_dtype)
    plan.decode(stream, InVector(memory_of(vector), 0))
    return vector


def test_only_matrices_with_small_factors_have_a_low_rank() -> None:
    names = {
        kind: [parameter.name for parameter in LAYOUT.parameters if applied(kind, parameter) != AS_STORED]
        for kind in EVERY
    }
    large = ["wide", "tall", "filter", "long_rows"]
    assert list(names.values()) == [[*large[:3], "small", large[3]], large, large]
    square = Parameter("square", (8, 8), "float32")  # 256 bytes
    assert applied(WIRE_DTYPE_LOW_RANK_4, square) == WIRE_DTYPE_LOW_RANK_4, "2 * 4 * 16 = 128 bytes"
    smaller = Parameter("smaller", (7, 8), "float32")
    assert applied(WIRE_DTYPE_LOW_RANK_4, smaller) == AS_STORED


def test_streams_have_the_bytes_of_the_factors() -> None:
    layout = UnitLayout("mlp", (Parameter("weight", (4096, 1024), "float32"), Parameter("bias", (4096,), "float32")))
    for kind, rank in LOW_RANK.items():
        size = stream_size(layout, layout.segments(0, layout.size_bytes), kind)
        assert size == 2 * rank * (4096 + 1024) + 4 * 4096


@pytest.mark.parametrize("wire_dtype", EVERY)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("every_other", [False, True])
def test_any_cut_gives_the_bits_of_the_unit(wire_dtype: WireDtype, num_shards: int, every_other: bool) -> None:
    indices = tuple(range(0, len(LAYOUT.parameters), 2 if every_other else 1))
    stream = encoded_unit(wire_dtype, indices)
    expected = decoded_unit(wire_dtype, indices, stream)
    for start, stop in cut(LAYOUT.size_bytes, [1.0 + 0.3 * number for number in range(num_shards)], 4096):
        plans = RangePlans(LAYOUT, start, stop)
        plan = plans.plan(indices, wire_dtype)
        own = b"".join(piece.of(memoryview(stream)) for piece in plans.pieces_of_unit(indices, wire_dtype))
        assert len(own) == plan.size_bytes == stream_size(LAYOUT, plans.segments(indices), wire_dtype)
        arrived, in_place = (torch.zeros(stop - start, dtype=torch.uint8) for _ in range(2))
        plan.decode(own, InVector(memory_of(arrived), start))
        assert torch.equal(arrived, expected[start:stop])
        memory = memory_of(in_place)
        memory[len(memory) - len(own) :] = own
        plan.decode_in_place(memory, start)
        for at in plans.segments(indices):
            here = slice(at.start_bytes - start, at.stop_bytes - start)
            assert torch.equal(in_place[here], expected[at.start_bytes : at.stop_bytes])


def test_end_of_a_matrix_with_few_rows_is_sent_as_its_decoded_values() -> None:
    layout = UnitLayout("rows", (Parameter("matrix", (64, 1024), "float32"),))
    matrix = matrix_of(64, 1024)
    whole = RangePlans(layout, 0, layout.size_bytes).plan((0,), WIRE_DTYPE_LOW_RANK_4)
    stream = bytearray(whole.size_bytes)
    whole.encode(InParameters({0: matrix.view(-1)}), stream)
    product = product_of(torch.tensor(list(stream), dtype=torch.uint8), 4, (64, 1024))
    for rows, is_smaller in ((3, False), (4, False), (5, True), (63, True)):
        plans = RangePlans(layout, 0, rows * 4096)
        own = b"".join(piece.of(memoryview(stream)) for piece in plans.pieces_of_unit((0,), WIRE_DTYPE_LOW_RANK_4))
        stored = product[:rows].contiguous().numpy().tobytes()
        assert (own == stored) != is_smaller
        assert len(own) == (2 * 4 * (rows + 1024) if is_smaller else rows * 4096)


def test_no_stream_is_larger_than_its_values() -> None:
    """A server receives a stream into the memory of its values."""
    rng = random.Random(0)
    for _ in range(300):
        shape = tuple(rng.choice((1, 2, 3, 16, 57, 300, 2000)) for _ in range(rng.choice((1, 2, 2, 3))))
        layout = UnitLayout("u", (Parameter("a", (5,), "float32"), Parameter("matrix", shape, "float32")))
        blocks = layout.size_bytes // 4096
        start = 4096 * rng.randint(0, blocks)
        stop = min(layout.size_bytes, start + 4096 * rng.randint(1, 4))
        for kind in EVERY:
            for segment in layout.segments(start, stop):
                assert stream_size(layout, [segment], kind) <= segment.size_bytes


@pytest.mark.parametrize("wire_dtype", EVERY)
def test_part_of_a_matrix_cannot_be_encoded(wire_dtype: WireDtype) -> None:
    plan = StreamPlan(LAYOUT, LAYOUT.segments(0, 8192), wire_dtype)
    source, target = InParameters(values()), InVector(bytearray(8192), 0)
    with pytest.raises(ValueError, match="only some elements of matrix 'wide'"):
        plan.encode(source, bytearray(plan.size_bytes))
    with pytest.raises(ValueError, match="only some elements of matrix 'wide'"):
        plan.round_trip(source, target)
    StreamPlan(LAYOUT, LAYOUT.segments(0, 8192), WIRE_DTYPE_UNSPECIFIED).round_trip(source, target)


@pytest.mark.parametrize("wire_dtype", EVERY)
def test_round_trip_has_the_bits_of_a_transfer(wire_dtype: WireDtype) -> None:
    indices = tuple(range(len(LAYOUT.parameters)))
    expected = decoded_unit(wire_dtype, indices, encoded_unit(wire_dtype, indices))
    arrived = torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8)
    plan = StreamPlan(LAYOUT, LAYOUT.segments(0, LAYOUT.size_bytes), wire_dtype)
    plan.round_trip(InParameters(values()), InVector(memory_of(arrived), 0))
    assert torch.equal(arrived, expected)
