"""Top-k streams keep the largest values, never drop a NaN, and are rejected if they are malformed.

tests/unit/wire_encoding/test_wire_dtypes.py compares their bytes with a slow reference, for any cut of a unit.
"""

from __future__ import annotations

import struct

import pytest
import torch

from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.streams import InParameters, InVector, StreamPlan
from shardwell_wire.encoding.wire_dtypes import TOP_K_PERCENT, WireDtype, check_gather_dtype
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.v1.common_pb2 import WIRE_DTYPE_TOP_K_1_PERCENT, WIRE_DTYPE_TOP_K_10_PERCENT

TOP_K = list(TOP_K_PERCENT)


def plan_of(numel: int, wire_dtype: WireDtype = WIRE_DTYPE_TOP_K_1_PERCENT) -> StreamPlan:
    layout = UnitLayout("u", (Parameter("x", (numel,), "float32"),))
    return StreamPlan(layout, layout.segments(0, layout.size_bytes), wire_dtype)


def encoded(x: torch.Tensor, wire_dtype: WireDtype = WIRE_DTYPE_TOP_K_1_PERCENT) -> bytes:
    plan = plan_of(x.numel(), wire_dtype)
    stream = bytearray(plan.size_bytes)
    plan.encode(InParameters({0: x}), stream)
    return bytes(stream)


def decoded(stream: bytes, numel: int, wire_dtype: WireDtype = WIRE_DTYPE_TOP_K_1_PERCENT) -> torch.Tensor:
    x = torch.full((numel,), 7.0)
    plan_of(numel, wire_dtype).decode(stream, InVector(memory_at(x.data_ptr(), x.nbytes, x), 0))
    return x


def gradient(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_streams_have_1_and_10_percent_of_the_bytes() -> None:
    numel = 1_000_000
    assert plan_of(numel).size_bytes <= 0.011 * 4 * numel
    assert plan_of(numel, WIRE_DTYPE_TOP_K_10_PERCENT).size_bytes <= 0.102 * 4 * numel
    assert plan_of(40).size_bytes == 0.025 * 160, "the share of a small parameter: one value of up to 100"


@pytest.mark.parametrize("wire_dtype", TOP_K)
@pytest.mark.parametrize("seed", range(5))
def test_kept_values_are_the_largest_of_every_block(wire_dtype: WireDtype, seed: int) -> None:
    x = gradient(5 * 1024, seed)
    arrived = decoded(encoded(x, wire_dtype), x.numel(), wire_dtype)
    for own, other in zip(x.view(-1, 1024), arrived.view(-1, 1024), strict=True):
        kept = other != 0
        assert int(kept.sum()) == (11 if wire_dtype == WIRE_DTYPE_TOP_K_1_PERCENT else 103)
        assert torch.equal(other[kept], own[kept].bfloat16().float())
        assert own[kept].abs().min() >= own[~kept].abs().max()


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.ones(1024)
    x[::2] = -1
    x[500] = 2
    arrived = decoded(encoded(x), 1024)
    assert arrived.nonzero().flatten().tolist() == [*range(10), 500]
    assert arrived[:10].tolist() == x[:10].tolist()
    assert encoded(torch.zeros(1024))[:22] == struct.pack("<11H", *range(11)), "also if all are 0"


@pytest.mark.parametrize("wire_dtype", TOP_K)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1023, 1024, 2047, 3000])
def test_non_finite_value_is_kept(wire_dtype: WireDtype, bad: float, where: int) -> None:
    x = gradient(3001) * 1e30
    x[where] = bad
    arrived = decoded(encoded(x, wire_dtype), 3001, wire_dtype)
    torch.testing.assert_close(arrived[where], torch.tensor(bad), equal_nan=True)
    assert int((~arrived.isfinite()).sum()) == 1


def test_block_with_more_non_finite_values_than_it_keeps_stays_non_finite() -> None:
    x = gradient(2048)
    x[:1000] = torch.inf
    x[500:600] = -torch.nan
    arrived = decoded(encoded(x), 2048)
    assert int((~arrived[:1024].isfinite()).sum()) == 11
    assert bool(arrived[1024:].isfinite().all())


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (
            [3, 3],
            r"a block of 150 values keeps the indices \[3, 3\], up to 3: expected strictly rising numbers below 150",
        ),
        ([4, 3], "keeps the indices"),
        ([0, 150], "up to 150: expected strictly rising numbers below 150"),
        ([0, 0xFFFF], "up to 65535"),
        ([0x8000, 1], "up to 32768"),
    ],
)
def test_malformed_indices_are_rejected(indices: list[int], message: str) -> None:
    good = encoded(gradient(150))
    assert len(good) == 8
    with pytest.raises(ValueError, match=message):
        decoded(struct.pack("<2H", *indices) + good[4:], 150)
    decoded(struct.pack("<2H", 0, 149) + good[4:], 150)


@pytest.mark.parametrize("size_bytes", [0, 4, 7, 12])
def test_stream_with_another_number_of_values_is_rejected(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"expected a buffer of 8 encoded bytes, got {size_bytes}"):
        decoded(bytes(size_bytes), 150)


@pytest.mark.parametrize("wire_dtype", TOP_K)
def test_weights_cannot_be_read_in_a_top_k_dtype(wire_dtype: WireDtype) -> None:
    with pytest.raises(InvalidRequestError, match=f"wire_dtype is {wire_dtype}, which leaves out most of the values"):
        check_gather_dtype(wire_dtype)
