"""Lossy wire dtypes match a slow reference bit for bit, for any cut of the unit and any slices of the stream."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.streams import InParameters, InVector, StreamPlan
from shardwell_wire.encoding.wire_dtypes import LOW_RANK, TOP_K_BLOCK_NUMEL, WireDtype, stream_size
from shardwell_wire.model.layout import Parameter, Segment, UnitLayout, cut
from shardwell_wire.v1 import common_pb2
from shardwell_wire.v1.common_pb2 import (
    WIRE_DTYPE_BFLOAT16,
    WIRE_DTYPE_FLOAT8,
    WIRE_DTYPE_FLOAT16,
    WIRE_DTYPE_INT8,
    WIRE_DTYPE_TOP_K_1_PERCENT,
    WIRE_DTYPE_TOP_K_10_PERCENT,
    WIRE_DTYPE_UNSPECIFIED,
)

EVERY = sorted(
    set(common_pb2.WireDtype.values()) - LOW_RANK.keys()
)  # tests/unit/wire_encoding/test_low_rank_factors.py has these
SCALED = [WIRE_DTYPE_INT8, WIRE_DTYPE_FLOAT8]
TOP_K = [WIRE_DTYPE_TOP_K_1_PERCENT, WIRE_DTYPE_TOP_K_10_PERCENT]
ROUNDED = [WIRE_DTYPE_BFLOAT16, WIRE_DTYPE_FLOAT16, *SCALED]
LOSSY = [*ROUNDED, *TOP_K]

LAYOUT = UnitLayout(
    "block",
    (
        Parameter("odd", (15, 17), "float32"),
        Parameter("double", (1031,), "float64"),
        Parameter("long", (70_001,), "float32"),
        Parameter("empty", (0, 3), "float32"),
        Parameter("scalar", (), "float32"),
        Parameter("half", (33,), "bfloat16"),
        Parameter("matrix", (512, 521), "float32"),
        Parameter("window", (256,), "float32"),
    ),
)
STARTS = (0, 64, 960, 1024, 1088, 4096, 5056)
"""First bytes of parameters: at, just before and just after the start of a block."""


def slow_bfloat16(x: np.ndarray) -> tuple[bytes, np.ndarray]:
    # Rounds half to even: adds 0x7FFF, and 1 more if the last kept bit is 1.
    bits = x.view(np.uint32).astype(np.uint64)
    high = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return high.tobytes(), (high.astype(np.uint32) << 16).view(np.float32)


def slow_float16(x: np.ndarray) -> tuple[bytes, np.ndarray]:
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    return half.tobytes(), half.astype(np.float32)


def float8_value(byte: int) -> float:
    """Returns the value of an 8-bit float with 4 exponent and 3 mantissa bits."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


FLOAT8_VALUES = np.array([float8_value(byte) for byte in range(0x7F)], np.float32)
"""The values without a sign, from 0 to 448, at the index of their byte."""


def nearest_float8(value: np.float32) -> int:
    """Returns the byte of the nearest 8-bit float, of two equally near ones the byte with an even mantissa."""
    errors = np.abs(FLOAT8_VALUES - np.abs(value))
    byte = min(np.flatnonzero(errors == errors.min()).tolist(), key=lambda found: found & 1)
    return byte | (0x80 if np.signbit(value) else 0)


def slow_scaled(x: np.ndarray, first_byte: int, wire_dtype: WireDtype) -> tuple[bytes, np.ndarray]:
    """Encodes block by block and element by element, as docs/wire-format.md specifies."""
    largest = np.float32(127 if wire_dtype == WIRE_DTYPE_INT8 else 448)
    stream, decoded, start = b"", [], 0
    while start < len(x):
        stop = start + (1024 - (first_byte + 4 * start) % 1024) // 4
        block = x[start:stop]
        # 2**-126 is the smallest normal float32. Below it, the scale would be subnormal.
        if np.isfinite(block).all():
            scale = max(np.float32(max(abs(v) for v in block)) / largest, np.float32(2.0**-126))
            quotients = [v / scale for v in block]
        else:
            scale, quotients = np.float32("nan"), [np.float32(0)] * len(block)
        if wire_dtype == WIRE_DTYPE_INT8:
            rounded = [int(np.rint(v)) for v in quotients]
            values = [np.float32(v) for v in rounded]
        else:
            rounded = [nearest_float8(v) for v in quotients]
            values = [np.float32(float8_value(v)) for v in rounded]
        stream += struct.pack("<f", scale) + bytes(v & 0xFF for v in rounded)
        decoded += [v * scale for v in values]
        start = stop
    return stream, np.array(decoded, np.float32)


def slow_top_k(x: np.ndarray, first_byte: int, wire_dtype: WireDtype) -> tuple[bytes, np.ndarray]:
    percent = 1 if wire_dtype == WIRE_DTYPE_TOP_K_1_PERCENT else 10
    stream, decoded, start = b"", np.zeros_like(x), 0
    while start < len(x):
        block = x[start : start + (4096 - (first_byte + 4 * start) % 4096) // 4]
        by_size = sorted(range(len(block)), key=lambda index: (-abs(block[index]), index))
        kept = sorted(by_size[: math.ceil(len(block) * percent / 100)])
        halves, values = slow_bfloat16(block[kept])
        stream += struct.pack(f"<{len(kept)}H", *kept) + halves
        decoded[start : start + len(block)][kept] = values
        start += len(block)
    return stream, decoded


def slow(x: torch.Tensor, first_byte: int, wire_dtype: WireDtype) -> tuple[bytes, torch.Tensor]:
    if wire_dtype == WIRE_DTYPE_UNSPECIFIED or x.dtype != torch.float32:
        return bytes(x.view(torch.uint8).tolist()), x
    if wire_dtype in SCALED:
        stream, decoded = slow_scaled(x.numpy(), first_byte, wire_dtype)
    elif wire_dtype in TOP_K:
        stream, decoded = slow_top_k(x.numpy(), first_byte, wire_dtype)
    else:
        stream, decoded = (slow_bfloat16 if wire_dtype == WIRE_DTYPE_BFLOAT16 else slow_float16)(x.numpy())
    return stream, torch.from_numpy(decoded)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and (
        left.numel() == 0 or torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    )


def values_of(numel: int, seed: int = 0) -> torch.Tensor:
    """Returns values of many magnitudes, with zeros, rounding ties and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(6 * torch.randn(numel, generator=generator))
    values[::7] = 0.0
    values[1::11] = torch.randint(-127, 128, (len(values[1::11]),), generator=generator) + 0.5
    values[2::13] *= 2.0**-140
    return values


def plan_of(x: torch.Tensor, first_byte: int, wire_dtype: WireDtype) -> StreamPlan:
    """Encodes a parameter that starts at the given byte of its unit's flat vector."""
    layout = UnitLayout("u", (Parameter("x", tuple(x.shape), str(x.dtype).removeprefix("torch.")),))
    segments = [Segment(0, first_byte, first_byte + x.nbytes, 0, x.numel())] if x.numel() else []
    return StreamPlan(layout, segments, wire_dtype)


def memory_of(x: torch.Tensor) -> memoryview:
    return memory_at(x.data_ptr(), x.nbytes, x)


def encoded(x: torch.Tensor, first_byte: int, wire_dtype: WireDtype) -> bytes:
    plan = plan_of(x, first_byte, wire_dtype)
    out = bytearray(plan.size_bytes)
    plan.encode(InVector(memory_of(x), first_byte), out)
    again = bytearray(plan.size_bytes)
    plan.encode(InParameters({0: x.detach()}), again)
    assert out == again
    return bytes(out)


def decode_into(data: bytes, first_byte: int, wire_dtype: WireDtype, out: torch.Tensor) -> None:
    plan_of(out, first_byte, wire_dtype).decode(data, InVector(memory_of(out), first_byte))


def rounded_into(x: torch.Tensor, first_byte: int, wire_dtype: WireDtype, out: torch.Tensor) -> None:
    plan_of(x, first_byte, wire_dtype).round_trip(
        InVector(memory_of(x), first_byte), InVector(memory_of(out), first_byte)
    )


@pytest.mark.parametrize("wire_dtype", EVERY)
@pytest.mark.parametrize("first_byte", STARTS)
@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 17, 240, 255, 256, 257, 511, 512, 769, 5003])
def test_encoding_matches_slow_reference_bit_for_bit(wire_dtype: WireDtype, first_byte: int, numel: int) -> None:
    x = values_of(numel, seed=first_byte + numel)
    stream, expected = slow(x, first_byte, wire_dtype)
    assert encoded(x, first_byte, wire_dtype) == stream
    arrived = torch.full_like(x, 3.0)
    decode_into(stream, first_byte, wire_dtype, arrived)
    assert same_bits(arrived, expected)
    rounded_into(x, first_byte, wire_dtype, arrived.fill_(5.0))
    assert same_bits(arrived, expected)
    rounded_into(x, first_byte, wire_dtype, x)
    assert same_bits(x, expected)


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_input_larger_than_a_slice_equals_its_blocks(wire_dtype: WireDtype) -> None:
    x, first_byte = values_of(300_001), 64
    whole = encoded(x, first_byte, wire_dtype)
    head = TOP_K_BLOCK_NUMEL - first_byte // 4
    bounds = [0, *range(head, x.numel(), 250 * TOP_K_BLOCK_NUMEL), x.numel()]
    parts = [encoded(x[a:b], first_byte + 4 * a, wire_dtype) for a, b in pairwise(bounds)]
    assert b"".join(parts) == whole
    arrived, rounded = torch.empty_like(x), torch.empty_like(x)
    decode_into(whole, first_byte, wire_dtype, arrived)
    rounded_into(x, first_byte, wire_dtype, rounded)
    assert same_bits(arrived, rounded)


@pytest.mark.parametrize("wire_dtype", EVERY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_only_float32_is_encoded(wire_dtype: WireDtype, dtype: torch.dtype) -> None:
    x = values_of(515).to(dtype)
    stream = encoded(x, 64, wire_dtype)
    assert stream == bytes(x.view(torch.uint8).tolist())
    arrived, rounded = torch.zeros_like(x), torch.zeros_like(x)
    decode_into(stream, 64, wire_dtype, arrived)
    rounded_into(x, 64, wire_dtype, rounded)
    assert same_bits(arrived, x)
    assert same_bits(rounded, x)


@pytest.mark.parametrize("wire_dtype", ROUNDED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 255, 300, 999])
def test_non_finite_values_stay_non_finite_and_affect_only_their_block(
    wire_dtype: WireDtype, bad: float, where: int
) -> None:
    x = torch.ones(1000)
    x[where] = bad
    arrived = torch.empty_like(x)
    decode_into(encoded(x, 0, wire_dtype), 0, wire_dtype, arrived)
    assert not arrived[where].isfinite()
    # 8-bit values share a scale, so one bad value spoils its whole block.
    block = slice(where // 256 * 256, where // 256 * 256 + 256)
    expected = torch.ones(1000)
    if wire_dtype in SCALED:
        expected[block] = torch.nan
    else:
        expected[where] = bad
    torch.testing.assert_close(arrived, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("wire_dtype", "value", "expected"),
    [
        # 65504 is float16's largest value. From 65520 on, a value is rounded to infinity.
        (WIRE_DTYPE_FLOAT16, 65519.0, 65504.0),
        (WIRE_DTYPE_FLOAT16, 65520.0, float("inf")),
        (WIRE_DTYPE_FLOAT16, -1e5, -float("inf")),
        (WIRE_DTYPE_FLOAT16, 2.0**-24, 2.0**-24),
        (WIRE_DTYPE_BFLOAT16, 3.4028234e38, float("inf")),
        # Ties between two bfloat16 values go to the even one.
        (WIRE_DTYPE_BFLOAT16, 1.00390625, 1.0),
        (WIRE_DTYPE_BFLOAT16, 1.01171875, 1.015625),
        (WIRE_DTYPE_BFLOAT16, 2.0**-133, 2.0**-133),
        (WIRE_DTYPE_INT8, 127 * 2.0**120, 127 * 2.0**120),
        (WIRE_DTYPE_INT8, 3.4028234e38, float("inf")),
        (WIRE_DTYPE_INT8, -0.0, 0.0),
        # The scale is at least 2**-126, so smaller values are rounded to its multiples.
        (WIRE_DTYPE_INT8, 2.0**-149, 0.0),
        (WIRE_DTYPE_INT8, 2.0**-126, 2.0**-126),
        (WIRE_DTYPE_INT8, 200 * 2.0**-130, 12 * 2.0**-126),
        (WIRE_DTYPE_FLOAT8, 448 * 2.0**119, 448 * 2.0**119),
        (WIRE_DTYPE_FLOAT8, 3.4028234e38, 3.4028234e38),
        (WIRE_DTYPE_FLOAT8, -0.0, -0.0),
        (WIRE_DTYPE_FLOAT8, 2.0**-137, 0.0),
        (WIRE_DTYPE_FLOAT8, 2.0**-135, 2.0**-135),
    ],
)
def test_extreme_values_are_encoded(wire_dtype: WireDtype, value: float, expected: float) -> None:
    x = torch.full((300,), value)
    rounded_into(x, 0, wire_dtype, x)
    assert same_bits(x, torch.full((300,), expected))


def test_int8_error_is_at_most_half_a_scale() -> None:
    x = torch.randn(256 * 50, generator=torch.Generator().manual_seed(1))
    arrived = torch.empty_like(x)
    rounded_into(x, 0, WIRE_DTYPE_INT8, arrived)
    steps = x.view(-1, 256).abs().amax(1, keepdim=True) / 127
    assert bool(((arrived - x).view(-1, 256).abs() <= 0.5001 * steps).all())


def test_float8_error_is_at_most_a_sixteenth_of_a_value() -> None:
    x = torch.randn(256 * 50, generator=torch.Generator().manual_seed(1))
    arrived = torch.empty_like(x)
    rounded_into(x, 0, WIRE_DTYPE_FLOAT8, arrived)
    scales = x.view(-1, 256).abs().amax(1, keepdim=True) / 448
    # Below 2**-6 times the scale, values are multiples of 2**-9 times the scale.
    bound = torch.maximum(x.view(-1, 256).abs() / 16, scales * 2.0**-10)
    assert bool(((arrived - x).view(-1, 256).abs() <= 1.0001 * bound).all())


def dtype_of(index: int) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, LAYOUT.parameters[index].dtype)
    return dtype


def part_of(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    return flat[segment.start_bytes : segment.stop_bytes].view(dtype_of(segment.parameter_index))


def filled_unit() -> torch.Tensor:
    flat = torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8)
    for number, segment in enumerate(LAYOUT.segments(0, LAYOUT.size_bytes)):
        part_of(flat, segment).copy_(values_of(segment.stop_element, seed=number))
    return flat


def streamed(layout: UnitLayout, flat: torch.Tensor, segments: Sequence[Segment], wire_dtype: WireDtype) -> bytes:
    plan = StreamPlan(layout, segments, wire_dtype)
    stream = bytearray(plan.size_bytes)
    plan.encode(InVector(memory_of(flat), 0), stream)
    return bytes(stream)


@pytest.mark.parametrize("wire_dtype", EVERY)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
@pytest.mark.parametrize("indices", [None, (2,), (0, 4, 6)])
def test_stream_of_a_unit_is_the_streams_of_its_shards(
    wire_dtype: WireDtype, num_shards: int, indices: Sequence[int] | None
) -> None:
    flat, chosen = filled_unit(), indices or range(len(LAYOUT.parameters))
    whole = streamed(LAYOUT, flat, LAYOUT.packed_segments(chosen, 0, LAYOUT.size_bytes), wire_dtype)
    ranges = cut(LAYOUT.size_bytes, [1.0 + 0.3 * number for number in range(num_shards)], 4096)
    assert len([start for start, stop in ranges if start < stop]) == num_shards
    segments = [LAYOUT.packed_segments(chosen, *at) for at in ranges]
    shards = [streamed(LAYOUT, flat, own, wire_dtype) for own in segments]
    assert b"".join(shards) == whole
    assert [stream_size(LAYOUT, own, wire_dtype) for own in segments] == [len(shard) for shard in shards]


@pytest.mark.parametrize("wire_dtype", EVERY)
def test_encoding_and_decoding_use_the_same_slices(wire_dtype: WireDtype) -> None:
    flat, arrived = filled_unit(), torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8)
    segments = LAYOUT.segments(0, LAYOUT.size_bytes)
    stream = streamed(LAYOUT, flat, segments, wire_dtype)
    StreamPlan(LAYOUT, segments, wire_dtype).decode(stream, InVector(memory_of(arrived), 0))
    padding = torch.ones(LAYOUT.size_bytes, dtype=torch.bool)
    for at in segments:
        assert same_bits(part_of(arrived, at), slow(part_of(flat, at), at.start_bytes, wire_dtype)[1])
        padding[at.start_bytes : at.stop_bytes] = False
    assert not arrived[padding].any()


TIGHT = UnitLayout(
    "tight",
    tuple(Parameter(f"p{i}", (n,), "float32") for i, n in enumerate((1, 16, 17, 1, 257, 10_240, 15, 273, 1))),
)
"""Layouts whose streams are largest relative to their values: no padding, and blocks of one value."""


@pytest.mark.parametrize("wire_dtype", EVERY)
@pytest.mark.parametrize("layout", [LAYOUT, TIGHT], ids=["mixed", "tight"])
@pytest.mark.parametrize("num_shards", [1, 2, 7])
@pytest.mark.parametrize("every_other", [False, True])
def test_stream_is_decoded_in_place(
    wire_dtype: WireDtype, layout: UnitLayout, num_shards: int, every_other: bool
) -> None:
    flat = values_of(layout.size_bytes // 4).view(torch.uint8)
    chosen = range(0, len(layout.parameters), 2) if every_other else range(len(layout.parameters))
    for start, stop in cut(layout.size_bytes, [1.0] * num_shards, 4096):
        segments = layout.packed_segments(chosen, start, stop)
        plan, stream = StreamPlan(layout, segments, wire_dtype), streamed(layout, flat, segments, wire_dtype)
        expected, arrived = torch.zeros(stop - start, dtype=torch.uint8), torch.zeros(stop - start, dtype=torch.uint8)
        plan.decode(stream, InVector(memory_of(expected), start))
        memory = memory_of(arrived)
        memory[len(memory) - len(stream) :] = stream
        plan.decode_in_place(memory, start)
        for at in segments:
            here = slice(at.start_bytes - start, at.stop_bytes - start)
            assert torch.equal(arrived[here], expected[here])


@pytest.mark.parametrize("wire_dtype", EVERY)
def test_stream_of_wrong_size_is_rejected(wire_dtype: WireDtype) -> None:
    x, arrived = torch.ones(300), torch.zeros(300)
    data = encoded(x, 0, wire_dtype)
    for wrong in (data[:-1], data + b"x"):
        with pytest.raises(ValueError, match=f"expected a buffer of {len(data)} encoded bytes, got {len(wrong)}"):
            decode_into(wrong, 0, wire_dtype, arrived)
    assert not arrived.any()


def test_empty_stream_has_no_bytes() -> None:
    assert encoded(torch.empty(0), 0, WIRE_DTYPE_INT8) == b""


def test_unknown_wire_dtype_is_rejected() -> None:
    with pytest.raises(ValueError, match="wire dtype 99: expected one of WIRE_DTYPE_UNSPECIFIED, "):
        plan_of(torch.ones(3), 0, 99)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_encoding_works_with_autograd_and_inference_mode(wire_dtype: WireDtype) -> None:
    x = torch.randn(300, requires_grad=True)
    stream = encoded(x, 0, wire_dtype)
    with torch.inference_mode():
        assert encoded(x, 0, wire_dtype) == stream
    arrived = torch.empty(300)
    decode_into(stream, 0, wire_dtype, arrived)
    assert same_bits(arrived, slow(x.detach(), 0, wire_dtype)[1])


@pytest.mark.parametrize("wire_dtype", [WIRE_DTYPE_BFLOAT16, *SCALED, WIRE_DTYPE_TOP_K_10_PERCENT])
@pytest.mark.parametrize("sizes", [(512, 256, 1024), (512, 16, 1024), (5, 300, 7, 4096), (16,) * 700, (1,) * 700])
def test_adjacent_parameters_have_the_bits_of_separate_ones(wire_dtype: WireDtype, sizes: tuple[int, ...]) -> None:
    layout = UnitLayout("block", tuple(Parameter(f"p{i}", (size,), "float32") for i, size in enumerate(sizes)))
    vector, segments = values_of(layout.size_bytes // 4), layout.segments(0, layout.size_bytes)
    parts = [vector[at.start_bytes // 4 : at.stop_bytes // 4].clone() for at in segments]
    stream = b"".join(encoded(part, at.start_bytes, wire_dtype) for part, at in zip(parts, segments, strict=True))
    assert streamed(layout, vector, segments, wire_dtype) == stream
    plan, apart = StreamPlan(layout, segments, wire_dtype), bytearray(len(stream))
    plan.encode(InParameters(dict(enumerate(parts))), apart)
    assert apart == stream, "also if they are not adjacent in memory"
    decoded, carried = torch.full_like(vector, 7.0), torch.full_like(vector, 7.0)
    plan.decode(stream, InVector(memory_of(decoded), 0))
    plan.round_trip(InParameters(dict(enumerate(parts))), InVector(memory_of(carried), 0))
    for at, part in zip(segments, parts, strict=True):
        rounded_into(part, at.start_bytes, wire_dtype, part)
        for out in (decoded, carried):
            place = out[at.start_bytes // 4 : at.stop_bytes // 4]
            assert same_bits(place, part)
            place.fill_(7.0)
    assert bool((decoded == 7.0).all() and (carried == 7.0).all()), "nothing between the parameters was written to"
