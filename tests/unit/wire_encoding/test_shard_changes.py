"""Changes of a shard: round trips for all dtypes, and malformed changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwell_wire.encoding import shard_changes, value_deltas
from shardwell_wire.encoding.shard_changes import ShardChanges, spans_of
from shardwell_wire.encoding.wire_dtypes import AS_STORED
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.model.layout import ITEM_SIZES, Parameter, UnitLayout
from shardwell_wire.v1 import common_pb2

LAYOUT = UnitLayout("u", tuple(Parameter(dtype, (211, 13), dtype) for dtype in ITEM_SIZES))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.6, 1.0])
def test_changed_elements_of_all_dtypes(share: float) -> None:
    generator = np.random.default_rng(3)
    base = generator.integers(0, 256, LAYOUT.size_bytes, np.uint8)
    stream = np.where(generator.random(len(base)) < share, generator.integers(0, 256, len(base), np.uint8), base)
    start = 4096
    spans = spans_of(LAYOUT, LAYOUT.segments(start, LAYOUT.size_bytes), AS_STORED, start)
    pieces = shard_changes.encode(spans, base[start:].tobytes(), stream[start:].tobytes(), 1 << 30)
    assert pieces is not None
    changes = ShardChanges.decode(spans, b"".join(pieces), LAYOUT.size_bytes - start, "u")
    for span in spans:
        before, after = (
            torch.from_numpy(each[start:][span.start : span.stop].copy()).view(-1, span.dtype.itemsize)
            for each in (base, stream)
        )
        found = changes.of(span)
        elements = found.elements
        assert bool((elements[1:] > elements[:-1]).all())
        changed = (before != after).any(1).nonzero().flatten()
        assert set(changed.tolist()) <= set(elements.tolist())
        before[elements] = found.values.view(torch.uint8).view(-1, span.dtype.itemsize)
        assert torch.equal(before, after), span.dtype


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("largest", [2, 1 << 15])
def test_differences_give_the_new_values(share: float, largest: int) -> None:
    layout = UnitLayout("u", tuple(Parameter(name, (211, 13), "bfloat16") for name in "ab"))
    generator = np.random.default_rng(4)
    base = generator.integers(0, 1 << 16, layout.size_bytes // 2, np.uint16)
    moved = base + generator.integers(-largest, largest + 1, len(base)).astype(np.uint16)
    moved[1000:1512] = generator.integers(0, 1 << 16, 512, np.uint16)
    stream = np.where(generator.random(len(base)) < share, moved, base)
    spans = spans_of(layout, layout.segments(0, layout.size_bytes), AS_STORED, 0)
    pieces = shard_changes.encode(spans, base.tobytes(), stream.tobytes(), 1 << 30, True)
    assert pieces is not None
    changes = ShardChanges.decode(spans, b"".join(pieces), layout.size_bytes, "u", has_differences=True)
    for span in spans:
        former, expected = (
            torch.from_numpy(each[span.start // 2 : span.stop // 2].view(np.int16)).view(torch.bfloat16)
            for each in (base, stream)
        )
        result, found = former.clone(), changes.of(span)
        for _ in range(2):  # of another tensor with the same values
            found.resolve(former[found.elements])
            result[found.elements] = found.values
            assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


def test_streams_without_changes() -> None:
    layout = UnitLayout("u", (Parameter("a", (8,), "float32"), Parameter("b", (8,), "float64")))
    segments = layout.segments(0, layout.size_bytes)
    for wire_dtype in (common_pb2.WIRE_DTYPE_BFLOAT16, common_pb2.WIRE_DTYPE_INT8):
        assert not spans_of(layout, segments, wire_dtype, 0)
        assert shard_changes.encode([], b"12", b"34", 100) is None
    spans = spans_of(layout, segments, AS_STORED, 0)
    assert shard_changes.encode(spans, bytes(layout.size_bytes), b"\1" * layout.size_bytes, 40) is None


def test_malformed_changes_are_rejected() -> None:
    layout = UnitLayout("u", (Parameter("a", (600,), "float32"),))
    spans = spans_of(layout, layout.segments(0, layout.size_bytes), AS_STORED, 0)
    base = bytes(layout.size_bytes)
    stream = base[:400] + b"\1" * 4 + base[404:]
    valid = b"".join(shard_changes.encode(spans, base, stream, 1 << 20) or [])
    found = ShardChanges.decode(spans, valid, len(stream), "u").of(spans[0])
    assert found.elements.tolist() == [100] and found.values.view(torch.uint8).tolist() == [1] * 4

    def rejects(changes: bytes, message: str) -> None:
        with pytest.raises(CorruptDataError, match=message):
            ShardChanges.decode(spans, changes, len(stream), "u").of(spans[0])

    for size in range(len(valid)):
        rejects(valid[:size], "bytes")
    rejects(valid + b"\0", "bytes more")
    for entry in (33, 35, 255):
        rejects(bytes([entry]) + valid[1:], "table entry")
    half = value_deltas.encode(base, stream[:402] + base[402:], 1 << 20, 1)
    rejects(b"".join(half or []) + valid[-8:], "a part of an element of 4 bytes")
    beyond = b"\0" * 4 + bytes([34]) + b"\1" * 512
    rejects(beyond + valid[-8:], "after the end of the stream")
