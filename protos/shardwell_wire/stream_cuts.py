"""Finds the stream of a shard in the encoded stream of its whole unit.

Quantization blocks are never cut, so the streams of all shards, one after another, are the stream of the unit. Matrices
of low rank are cut: every shard that has elements of one needs its right factor, and some rows of its left factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwell_wire import low_rank_factors
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.quantization_blocks import bytes_tensor
from shardwell_wire.wire_dtypes import (
    LOW_RANK,
    WireDtype,
    applied,
    applied_to_segment,
    columns_of,
    encoded_size,
    factor_bytes,
    rows_of,
    stream_size,
)


class StreamPiece(Protocol):
    """Consecutive bytes of a shard's stream."""

    def of(self, stream: memoryview) -> memoryview:
        """Returns the bytes, given the stream of the unit."""
        ...


@dataclass(frozen=True, slots=True)
class _Copied:
    """Bytes that are in the stream of the unit."""

    in_unit: slice

    def of(self, stream: memoryview) -> memoryview:
        return stream[self.in_unit]


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Elements of a matrix that are sent as stored, because their factors are too large."""

    right: slice
    """The right factor in the stream of the unit."""
    left: slice
    """Rows of the left factor that the elements meet."""
    rank: int
    columns: int
    first: int
    """Index of the first element in the flattened matrix."""
    numel: int

    def of(self, stream: memoryview) -> memoryview:
        factors = torch.cat([bytes_tensor(stream[self.right]), bytes_tensor(stream[self.left])])
        values = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        low_rank_factors.decode(factors, self.rank, self.columns, self.first, values)
        return memory_at(values.data_ptr(), values.nbytes, values)


def pieces_of_range(
    layout: UnitLayout, indices: Iterable[int], start_bytes: int, stop_bytes: int, wire_dtype: WireDtype
) -> tuple[StreamPiece, ...]:
    """Returns the pieces of the stream of a range.

    Args:
        layout: The unit.
        indices: Layout indices of the parameters in the streams.
        start_bytes: First byte of the range in the flat vector.
        stop_bytes: End of the range, exclusive.
        wire_dtype: Encoding of float32 values.
    """
    indices = frozenset(indices)
    own = layout.packed_segments(indices, start_bytes, stop_bytes)
    if wire_dtype not in LOW_RANK:
        start = stream_size(layout, layout.packed_segments(indices, 0, start_bytes), wire_dtype)
        return (_Copied(slice(start, start + stream_size(layout, own, wire_dtype))),)
    starts, position = {}, 0
    for whole in layout.packed_segments(indices, 0, layout.size_bytes):
        starts[whole.parameter_index] = position
        position += encoded_size(whole, layout.parameters[whole.parameter_index], wire_dtype)
    return tuple(
        piece
        for segment in own
        for piece in _pieces_of_segment(layout, segment, starts[segment.parameter_index], wire_dtype)
    )


def _pieces_of_segment(
    layout: UnitLayout, segment: Segment, start: int, wire_dtype: WireDtype
) -> Iterator[StreamPiece]:
    """Yields the pieces of a segment. ``start`` is the position of its whole parameter in the stream of the unit."""
    parameter = layout.parameters[segment.parameter_index]
    kind = applied(wire_dtype, parameter)
    if kind not in LOW_RANK:
        first = start + segment.start_element * parameter.item_size
        yield _Copied(slice(first, first + segment.size_bytes))
        return
    columns = columns_of(parameter)
    rows, right_stop = rows_of(segment, columns), start + factor_bytes(kind, 0, columns)
    right = slice(start, right_stop)
    left = slice(*(right_stop + factor_bytes(kind, row, 0) for row in (rows.start, rows.stop)))
    if applied_to_segment(wire_dtype, parameter, segment) == kind:
        yield _Copied(right)
        yield _Copied(left)
    else:
        numel = segment.stop_element - segment.start_element
        yield _Decoded(right, left, LOW_RANK[kind], columns, segment.start_element, numel)
