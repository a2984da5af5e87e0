"""The encoded streams of a unit and of its shards: which values a stream has, how they are encoded, and where they are.

A stream contains segments of a unit, one after another, each as blocks or as factors; see ``wire_dtypes``.
``RangePlans`` caches what is known of the streams of one shard. A ``StreamPlan`` converts values and streams, slice by
slice: adjacent segments with blocks of one size are converted together, so a shard needs few passes however many
parameters it has.

A ``StreamPiece`` finds bytes of a shard's stream in the stream of its whole unit. Quantization blocks are never cut, so
the streams of all shards, one after another, are the stream of the unit. Matrices of low rank are cut: every shard that
has elements of one needs its right factor, and some rows of its left factor.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import torch

from shardwell_wire.encoding import low_rank_factors, quantization_blocks
from shardwell_wire.encoding.chunk_streams import Buffer, memory_at
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.encoding.wire_dtypes import (
    AS_STORED,
    LOW_RANK,
    WireDtype,
    applied,
    applied_to_segment,
    columns_of,
    encoded_block_bytes,
    encoded_size,
    factor_bytes,
    rows_of,
    stream_size,
    uniform_blocks,
)
from shardwell_wire.model.layout import Parameter, Segment, UnitLayout

_FLOAT_BYTES = 4

Indices = tuple[int, ...] | None
"""Ascending layout indices of the parameters in a stream. None: all parameters of the unit."""

_CACHE_SIZE = 16
"""Number of cached plans. Most shards need few, but pushes in buckets may need new ones in every step."""


class RangePlans:
    """Caches the plans of one range of a unit. May be shared between threads.

    Args:
        start_bytes: First byte of the range in the flat vector.
        stop_bytes: End of the range, exclusive.
    """

    def __init__(self, layout: UnitLayout, start_bytes: int, stop_bytes: int) -> None:
        self._layout, self._start_bytes, self._stop_bytes = layout, start_bytes, stop_bytes
        self.segments = lru_cache(_CACHE_SIZE)(self._make_segments)
        """Returns the segments of the given parameters in the range. (indices)"""
        self.plan = lru_cache(_CACHE_SIZE)(self._make_plan)
        """Returns the plan of their stream. (indices, wire dtype)"""
        self.pieces_of_unit = lru_cache(_CACHE_SIZE)(self._find_pieces)
        """Returns the pieces of their stream in the stream of the whole unit. (indices, wire dtype)"""

    def _make_segments(self, indices: Indices) -> list[Segment]:
        if indices is None:
            return self._layout.segments(self._start_bytes, self._stop_bytes)
        return self._layout.packed_segments(indices, self._start_bytes, self._stop_bytes)

    def _make_plan(self, indices: Indices, wire_dtype: WireDtype) -> StreamPlan:
        return StreamPlan(self._layout, self.segments(indices), wire_dtype)

    def _find_pieces(self, indices: tuple[int, ...], wire_dtype: WireDtype) -> tuple[StreamPiece, ...]:
        return pieces_of_range(self._layout, indices, self._start_bytes, self._stop_bytes, wire_dtype)


class StreamPlan:
    """The slices of a stream. Immutable; may be shared between threads.

    Args:
        layout: The unit. Only dtypes and shapes are used.
        segments: Segments in the order of the stream.
        wire_dtype: Encoding of float32 values.

    Raises:
        ValueError: The wire dtype does not exist.
    """

    def __init__(self, layout: UnitLayout, segments: Iterable[Segment], wire_dtype: WireDtype) -> None:
        self.slices: list[Slice] = []
        self.size_bytes = 0
        """Size of the stream."""
        self._cut_matrix: str | None = None
        """Name of a matrix of low rank of which the stream has only some elements."""
        stretch: _Stretch | None = None
        for segment in segments:
            index, parameter = segment.parameter_index, layout.parameters[segment.parameter_index]
            if segment.size_bytes < parameter.size_bytes and applied(wire_dtype, parameter) in LOW_RANK:
                self._cut_matrix = self._cut_matrix or parameter.name
            kind = applied_to_segment(wire_dtype, parameter, segment)
            if kind in LOW_RANK:
                self._add(stretch)
                stretch = None
                self._add_matrix(kind, segment, parameter)
                continue
            begin = segment.start_bytes - segment.start_element * parameter.item_size
            for start, stop, block_bytes in uniform_blocks(segment, kind):
                if stretch is None or not stretch.is_continued_by(kind, block_bytes, start):
                    self._add(stretch)
                    stretch = _Stretch(kind, block_bytes, start, stop)
                stretch.stop_bytes = stop
                stretch.parameters.append((index, begin, start, stop))
        self._add(stretch)

    def _add(self, stretch: _Stretch | None) -> None:
        if stretch is not None:
            self.slices += stretch.slices(self.size_bytes)
            self.size_bytes = self.slices[-1].in_stream.stop

    def _add_matrix(self, kind: WireDtype, segment: Segment, parameter: Parameter) -> None:
        columns, numel = columns_of(parameter), segment.stop_element - segment.start_element
        stop = self.size_bytes + factor_bytes(kind, len(rows_of(segment, columns)), columns)
        part = Part(segment.parameter_index, slice(segment.start_element, segment.stop_element), slice(0, numel))
        in_stream, shape = slice(self.size_bytes, stop), (parameter.shape[0], columns)
        self.slices.append(MatrixSlice(kind, numel, segment.start_bytes, segment.stop_bytes, in_stream, (part,), shape))
        self.size_bytes = stop

    def encode(self, source: Values, out: Buffer) -> None:
        """Encodes values into a stream. [size_bytes]

        Raises:
            ValueError: The stream has another size, or only some elements of a matrix of low rank.
        """
        self._check_whole()
        stream = self._stream(out)
        for part in self.slices:
            part.encode(source.of(part), stream)

    def decode(self, data: Buffer, target: InVector) -> None:
        """Decodes a stream. [size_bytes]

        Raises:
            ValueError: The stream has another size, or is malformed.
        """
        stream = self._stream(data)
        for part in self.slices:
            part.decode(stream, target.of(part))

    def decode_in_place(self, memory: memoryview, start_bytes: int) -> None:
        """Decodes a stream that is stored at the end of the memory for its values.

        Decoding from front to back never overwrites bytes that are not decoded yet: the rest of the values, with
        padding, is never smaller than the rest of the stream.

        Args:
            memory: Memory with the layout of a range between two cuts. The last ``size_bytes`` are the stream.
            start_bytes: Position of the memory in the flat vector.

        Raises:
            ValueError: The stream is malformed.
        """
        target, stream = InVector(memory, start_bytes), memory[len(memory) - self.size_bytes :]
        for part in self.slices:
            part.decode_overlapping(bytes_tensor(stream[part.in_stream]), target.of(part))

    def round_trip(self, source: Values, target: InVector) -> None:
        """Rounds values as a transfer would: ``decode(encode(source))``, slice by slice.

        Used by transports that do not encode values, so that all transports round alike. Source and target may be the
        same.

        Raises:
            ValueError: The stream has only some elements of a matrix of low rank.
        """
        self._check_whole()
        for part in self.slices:
            part.round_trip(source.of(part), target.of(part))

    def _check_whole(self) -> None:
        if self._cut_matrix is not None:
            raise ValueError(
                f"the stream has only some elements of matrix {self._cut_matrix!r}, but factors are those of a whole "
                "matrix: encode the whole unit, and use RangePlans.pieces_of_unit"
            )

    def _stream(self, data: Buffer) -> torch.Tensor:
        if len(data) != self.size_bytes:
            raise ValueError(f"expected a buffer of {self.size_bytes} encoded bytes, got {len(data)}")
        return bytes_tensor(data)


Values: TypeAlias = "InVector | InParameters"
"""Access to the values of a stream."""


class InVector:
    """Values in memory with the layout of a range of the flat vector.

    Args:
        memory: Contains all segments of the plan. Must not move. Padding is neither read nor written.
        start_bytes: Position of the memory in the flat vector.
    """

    def __init__(self, memory: Buffer, start_bytes: int) -> None:
        self._bytes, self._start_bytes = bytes_tensor(memory), start_bytes

    def of(self, part: Slice) -> torch.Tensor:
        """Returns the values of a slice. The tensor may be written to. [part.numel]"""
        own = self._bytes[part.start_bytes - self._start_bytes : part.stop_bytes - self._start_bytes]
        return own if part.kind == AS_STORED else own.view(torch.float32)


class InParameters:
    """Values in whole parameters. Read-only.

    Args:
        flats: Flattened parameters by layout index, contiguous, on the CPU, without a graph. Each [numel]
    """

    def __init__(self, flats: Mapping[int, torch.Tensor]) -> None:
        self._flats = flats

    def of(self, part: Slice) -> torch.Tensor:
        """Returns the values of a slice, valid until the next call in this thread. [part.numel]"""
        if len(part.parts) == 1:
            return self.piece(part, part.parts[0])
        values = quantization_blocks.scratch_values(part.numel)
        for piece in part.parts:
            values[piece.of_slice].copy_(self.piece(part, piece))
        return values

    def piece(self, whole: Slice, part: Part) -> torch.Tensor:
        """Returns the part of one parameter in a slice."""
        flat = self._flats[part.parameter_index]
        return (flat.view(torch.uint8) if whole.kind == AS_STORED else flat)[part.of_parameter]


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one parameter in a slice. Ranges count the slice's items."""

    parameter_index: int
    of_parameter: slice
    """Range in the flattened parameter."""
    of_slice: slice


@dataclass(frozen=True, slots=True)
class Slice(ABC):
    """Values that are converted together. They are consecutive in the flat vector.

    Its items are float32 values, or bytes of one parameter that is sent as stored.
    """

    kind: WireDtype
    """Encoding of the values."""
    numel: int
    """Number of items."""
    start_bytes: int
    """Half-open range in the unit's flat vector."""
    stop_bytes: int
    in_stream: slice
    """Range in the stream, in bytes."""
    parts: tuple[Part, ...]

    @property
    def encoded_bytes(self) -> int:
        """Size in the stream."""
        return int(self.in_stream.stop - self.in_stream.start)

    @abstractmethod
    def encode(self, values: torch.Tensor, stream: torch.Tensor, seed: int = 0) -> None:
        """Encodes the values into their range of the stream. [numel]

        Args:
            stream: The whole stream.
            seed: Seed of random numbers, which low-rank dtypes use.
        """

    @abstractmethod
    def decode(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes the values from their range of the stream. [numel]"""

    @abstractmethod
    def decode_overlapping(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes the values from memory that may overlap them. [encoded_bytes] -> [numel]"""

    @abstractmethod
    def round_trip(self, values: torch.Tensor, arrived: torch.Tensor) -> None:
        """Rounds the values as a transfer would. ``arrived`` may be ``values``. [numel]"""


@dataclass(frozen=True, slots=True)
class BlockSlice(Slice):
    """Blocks of one size."""

    block_numel: int
    """Items per block."""

    def encode(self, values: torch.Tensor, stream: torch.Tensor, seed: int = 0) -> None:
        quantization_blocks.encode(self.kind, self.block_numel, values, stream[self.in_stream])

    def decode(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        quantization_blocks.decode(self.kind, self.block_numel, stream[self.in_stream], values)

    def decode_overlapping(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        if self.kind == AS_STORED:
            # ctypes releases the interpreter lock.
            ctypes.memmove(values.data_ptr(), encoded.data_ptr(), encoded.numel())
        else:
            # Copied first, because torch decodes the blocks of a slice in any order.
            scratch = quantization_blocks.scratch_encoded(encoded.numel()).copy_(encoded)
            quantization_blocks.decode(self.kind, self.block_numel, scratch, values)

    def round_trip(self, values: torch.Tensor, arrived: torch.Tensor) -> None:
        if self.kind == AS_STORED:
            arrived.copy_(values)
            return
        scratch = quantization_blocks.scratch_encoded(self.encoded_bytes)
        quantization_blocks.encode(self.kind, self.block_numel, values, scratch)
        quantization_blocks.decode(self.kind, self.block_numel, scratch, arrived)


@dataclass(frozen=True, slots=True)
class MatrixSlice(Slice):
    """Consecutive elements of a matrix of low rank. They are encoded only together with all others of the matrix."""

    shape: tuple[int, int]
    """Rows and columns of the whole matrix."""

    @property
    def is_whole(self) -> bool:
        """True if the slice has all elements of the matrix."""
        return self.numel == self.shape[0] * self.shape[1]

    def encode(self, values: torch.Tensor, stream: torch.Tensor, seed: int = 0) -> None:
        assert self.is_whole, "a part of a matrix has no factors of its own"
        low_rank_factors.encode(values.view(self.shape), LOW_RANK[self.kind], stream[self.in_stream], seed)

    def decode(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        low_rank_factors.decode(stream[self.in_stream], *self._place, values)

    def subtract(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        """Subtracts what ``decode`` would return from ``values``. [numel]"""
        low_rank_factors.subtract(stream[self.in_stream], *self._place, values)

    def decode_overlapping(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        low_rank_factors.decode(encoded, *self._place, values)  # which copies the factors first

    def round_trip(self, values: torch.Tensor, arrived: torch.Tensor) -> None:
        assert self.is_whole, "a part of a matrix has no factors of its own"
        factors = torch.empty(self.encoded_bytes, dtype=torch.uint8, device="cpu")
        low_rank_factors.encode(values.view(self.shape), LOW_RANK[self.kind], factors, 0)
        low_rank_factors.decode(factors, *self._place, arrived)

    @property
    def _place(self) -> tuple[int, int, int]:
        """Rank, columns, and index of the first element."""
        return LOW_RANK[self.kind], self.shape[1], self.parts[0].of_parameter.start


@dataclass(slots=True)
class _Stretch:
    """Blocks of one size whose values are consecutive in the flat vector."""

    kind: WireDtype
    block_bytes: int
    """Stored size of a block."""
    start_bytes: int
    stop_bytes: int
    parameters: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Layout index, first byte of the parameter in the flat vector, and the half-open range in this stretch."""

    def is_continued_by(self, kind: WireDtype, block_bytes: int, start_bytes: int) -> bool:
        """True if blocks that start at ``start_bytes`` belong to the same stretch. Values as stored never do."""
        if kind == AS_STORED:
            return False
        return (self.kind, self.block_bytes, self.stop_bytes) == (kind, block_bytes, start_bytes)

    def slices(self, stream_start: int) -> Iterator[Slice]:
        """Yields slices that are converted together, in order."""
        item_bytes = 1 if self.kind == AS_STORED else _FLOAT_BYTES
        block_numel, encoded_bytes = self.block_bytes // item_bytes, encoded_block_bytes(self.kind, self.block_bytes)
        # Values that are only copied need no scratch memory.
        max_bytes = (
            self.stop_bytes
            if self.kind == AS_STORED
            else self.block_bytes * quantization_blocks.at_once(self.kind, block_numel)
        )
        for start in range(self.start_bytes, self.stop_bytes, max_bytes):
            stop = min(start + max_bytes, self.stop_bytes)
            stream_stop = stream_start + (stop - start) // self.block_bytes * encoded_bytes
            yield BlockSlice(
                self.kind,
                (stop - start) // item_bytes,
                start,
                stop,
                slice(stream_start, stream_stop),
                tuple(self._parts(start, stop, item_bytes)),
                block_numel,
            )
            stream_start = stream_stop

    def _parts(self, start: int, stop: int, item_bytes: int) -> Iterator[Part]:
        for index, begin, first, last in self.parameters:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield Part(
                    index,
                    slice((low - begin) // item_bytes, (high - begin) // item_bytes),
                    slice((low - start) // item_bytes, (high - start) // item_bytes),
                )


StreamPiece: TypeAlias = "CopiedPiece | DecodedPiece"
"""Consecutive bytes of a shard's stream."""


@dataclass(frozen=True, slots=True)
class CopiedPiece:
    """Bytes that are in the stream of the unit."""

    in_unit: slice

    def of(self, stream: memoryview) -> memoryview:
        """Returns the bytes, given the stream of the unit."""
        return stream[self.in_unit]


@dataclass(frozen=True, slots=True)
class DecodedPiece:
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
        """Returns the bytes, given the stream of the unit."""
        factors = torch.cat([bytes_tensor(stream[self.right]), bytes_tensor(stream[self.left])])
        values = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        low_rank_factors.decode(factors, self.rank, self.columns, self.first, values)
        return memory_at(values.data_ptr(), values.nbytes, values)


def pieces_of_range(
    layout: UnitLayout, indices: Iterable[int], start_bytes: int, stop_bytes: int, wire_dtype: WireDtype
) -> tuple[StreamPiece, ...]:
    """Returns the pieces of the stream of a range.

    Args:
        indices: Layout indices of the parameters in the streams.
        start_bytes: First byte of the range in the flat vector.
        stop_bytes: End of the range, exclusive.
        wire_dtype: Encoding of float32 values.
    """
    indices = frozenset(indices)
    own = layout.packed_segments(indices, start_bytes, stop_bytes)
    if wire_dtype not in LOW_RANK:
        start = stream_size(layout, layout.packed_segments(indices, 0, start_bytes), wire_dtype)
        return (CopiedPiece(slice(start, start + stream_size(layout, own, wire_dtype))),)
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
        yield CopiedPiece(slice(first, first + segment.size_bytes))
        return
    columns = columns_of(parameter)
    rows, right_stop = rows_of(segment, columns), start + factor_bytes(kind, 0, columns)
    right = slice(start, right_stop)
    left = slice(*(right_stop + factor_bytes(kind, row, 0) for row in (rows.start, rows.stop)))
    if applied_to_segment(wire_dtype, parameter, segment) == kind:
        yield CopiedPiece(right)
        yield CopiedPiece(left)
    else:
        numel = segment.stop_element - segment.start_element
        yield DecodedPiece(right, left, LOW_RANK[kind], columns, segment.start_element, numel)
