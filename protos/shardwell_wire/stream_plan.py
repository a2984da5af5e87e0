"""Which blocks a stream has and where their values lie, worked out once for all the streams of a shard.

A stream is segments of a unit, one after another, each as blocks; see ``wire_dtypes``. Neighbours whose blocks are of
one
size and that follow each other in the flat vector are converted together, so a shard takes few passes however many
parameters it has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch

from shardwell_wire import quantization_blocks
from shardwell_wire.codec import Buffer
from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.quantization_blocks import bytes_tensor
from shardwell_wire.wire_dtypes import AS_STORED, WireDtype, applied, encoded_block_bytes, stream_size, uniform_blocks

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """What a slice has of one parameter, counted in the slice's items."""

    parameter_index: int
    of_parameter: slice
    """Range of the flattened parameter."""
    of_slice: slice


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive blocks of one size that are converted at once; their values are consecutive in the flat vector.

    Its items are float32 values, or bytes of one parameter if that travels as it is stored.
    """

    kind: WireDtype
    """How the values travel."""
    block_numel: int
    """Items in each block."""
    numel: int
    """Items."""
    start_bytes: int
    """Half-open, in the unit's flat vector."""
    stop_bytes: int
    in_stream: slice
    """Bytes of the stream."""
    parts: tuple[Part, ...]

    def encode(self, values: torch.Tensor, stream: torch.Tensor) -> None:
        """Encodes the values to their place in the whole stream. [numel]"""
        quantization_blocks.encode(self.kind, self.block_numel, values, stream[self.in_stream])

    def decode(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes the values from their place in the whole stream. [numel]"""
        quantization_blocks.decode(self.kind, self.block_numel, stream[self.in_stream], values)


class Values(Protocol):
    """Where values are."""

    def of(self, part: Slice) -> torch.Tensor:
        """Those of a slice, until another is asked for in this thread. [part.numel]"""
        ...


class InVector:
    """Values in memory laid out like a range of the flat vector.

    Args:
        memory: Has all of the plan's segments; must stay in place. What is between them is left alone.
        start_bytes: Where it begins in the flat vector.
    """

    def __init__(self, memory: Buffer, start_bytes: int) -> None:
        self._bytes, self._start_bytes = bytes_tensor(memory), start_bytes

    def of(self, part: Slice) -> torch.Tensor:
        """See ``Values``; may be written to."""
        own = self._bytes[part.start_bytes - self._start_bytes : part.stop_bytes - self._start_bytes]
        return own if part.kind == AS_STORED else own.view(torch.float32)


class InParameters:
    """Values in whole parameters, to be read.

    Args:
        flats: By parameter index; contiguous, on the CPU, without a graph. Each [numel]
    """

    def __init__(self, flats: Mapping[int, torch.Tensor]) -> None:
        self._flats = flats

    def of(self, part: Slice) -> torch.Tensor:
        """See ``Values``."""
        if len(part.parts) == 1:
            return self.piece(part, part.parts[0])
        values = quantization_blocks.scratch_values(part.numel)
        for piece in part.parts:
            values[piece.of_slice].copy_(self.piece(part, piece))
        return values

    def piece(self, whole: Slice, part: Part) -> torch.Tensor:
        """What a slice has of one parameter."""
        flat = self._flats[part.parameter_index]
        return (flat.view(torch.uint8) if whole.kind == AS_STORED else flat)[part.of_parameter]


class StreamPlan:
    """How some segments of a unit travel. Does not change; may be shared between threads.

    Args:
        layout: Of the unit; only the dtypes matter.
        segments: In the order of the stream.
        wire_dtype: How float32 travels.

    Raises:
        ValueError: There is no such wire dtype.
    """

    def __init__(self, layout: UnitLayout, segments: Iterable[Segment], wire_dtype: WireDtype) -> None:
        self.slices: list[Slice] = []
        self.size_bytes = 0
        """Of the stream."""
        for stretch in _stretches(layout, segments, wire_dtype):
            self.slices += stretch.slices(self.size_bytes)
            self.size_bytes = self.slices[-1].in_stream.stop

    def encode(self, source: Values, out: Buffer) -> None:
        """Encodes values. [size_bytes]"""
        stream = self._stream(out)
        for part in self.slices:
            part.encode(source.of(part), stream)

    def decode(self, data: Buffer, target: InVector) -> None:
        """Decodes a stream. [size_bytes]

        Raises:
            ValueError: It is of another length.
        """
        stream = self._stream(data)
        for part in self.slices:
            part.decode(stream, target.of(part))

    def decode_in_place(self, memory: memoryview, start_bytes: int) -> None:
        """Decodes a stream that lies at the end of the memory that its values go to.

        From front to back no value is laid on what is yet to be decoded: with the padding behind them, what a range
        has left of values is never less than what it has left of their stream.

        Args:
            memory: Laid out like a range of the flat vector between two cuts; the last ``size_bytes`` are the stream.
            start_bytes: Where it begins in the flat vector.
        """
        target, stream = InVector(memory, start_bytes), memory[len(memory) - self.size_bytes :]
        for part in self.slices:
            own = bytes_tensor(stream[part.in_stream])
            if part.kind == AS_STORED:
                # They may overlap; and other threads run meanwhile.
                ctypes.memmove(target.of(part).data_ptr(), own.data_ptr(), own.numel())
            else:
                # Out of the way first: torch decodes the blocks of a slice in any order.
                passing = quantization_blocks.scratch_encoded(own.numel()).copy_(own)
                quantization_blocks.decode(part.kind, part.block_numel, passing, target.of(part))

    def carry(self, source: Values, target: InVector) -> None:
        """Has values arrive as if they had travelled: ``decode(encode(source))``, slice by slice.

        For transports on which bytes do not cross a network, so that every transport rounds alike. The target may be
        the source.
        """
        for part in self.slices:
            values, arrived = source.of(part), target.of(part)
            if part.kind == AS_STORED:
                arrived.copy_(values)
            else:
                passing = quantization_blocks.scratch_encoded(part.in_stream.stop - part.in_stream.start)
                quantization_blocks.encode(part.kind, part.block_numel, values, passing)
                quantization_blocks.decode(part.kind, part.block_numel, passing, arrived)

    def _stream(self, data: Buffer) -> torch.Tensor:
        if len(data) != self.size_bytes:
            raise ValueError(f"expected room for {self.size_bytes} encoded bytes, got {len(data)}")
        return bytes_tensor(data)


@dataclass(slots=True)
class _Stretch:
    """Cells of one size whose values are consecutive in the flat vector."""

    kind: WireDtype
    block_bytes: int
    """Of a block's values as they are stored."""
    start_bytes: int
    stop_bytes: int
    parameters: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Index, where the parameter begins in the flat vector, and the half-open range of it that is here."""

    def slices(self, stream_start: int) -> Iterator[Slice]:
        """What is converted at once, in order."""
        item_bytes = 1 if self.kind == AS_STORED else _FLOAT_BYTES
        block_numel, travels_bytes = self.block_bytes // item_bytes, encoded_block_bytes(self.kind, self.block_bytes)
        # What is only copied needs no scratch.
        most_bytes = (
            self.stop_bytes
            if self.kind == AS_STORED
            else self.block_bytes * quantization_blocks.at_once(self.kind, block_numel)
        )
        for start in range(self.start_bytes, self.stop_bytes, most_bytes):
            stop = min(start + most_bytes, self.stop_bytes)
            stream_stop = stream_start + (stop - start) // self.block_bytes * travels_bytes
            yield Slice(
                self.kind,
                block_numel,
                (stop - start) // item_bytes,
                start,
                stop,
                slice(stream_start, stream_stop),
                tuple(self._parts(start, stop, item_bytes)),
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


def _stretches(layout: UnitLayout, segments: Iterable[Segment], wire_dtype: WireDtype) -> Sequence[_Stretch]:
    found: list[_Stretch] = []
    for segment in segments:
        index, parameter = segment.parameter_index, layout.parameters[segment.parameter_index]
        kind = applied(wire_dtype, parameter.dtype)
        begin = segment.start_bytes - segment.start_element * parameter.item_size
        for start, stop, block_bytes in uniform_blocks(segment, kind):
            last = found[-1] if found else None
            goes_on = last is not None and (last.kind, last.block_bytes, last.stop_bytes) == (kind, block_bytes, start)
            if last is None or not goes_on or kind == AS_STORED:
                last = _Stretch(kind, block_bytes, start, stop)
                found.append(last)
            last.stop_bytes = stop
            last.parameters.append((index, begin, start, stop))
    return found


Indices = tuple[int, ...] | None
"""Of the parameters in a stream, rising; None: all of the unit's."""

_KEPT = 16
"""Sets of parameters that are pushed together are few, but who pushes in buckets may find others in every step."""


class RangePlans:
    """Plans by parameters and wire dtype; may be shared between threads.

    Args:
        layout: Of the unit.
        start_bytes: Half-open range of the flat vector.
        stop_bytes: Its end.
    """

    def __init__(self, layout: UnitLayout, start_bytes: int, stop_bytes: int) -> None:
        self._layout, self._start_bytes, self._stop_bytes = layout, start_bytes, stop_bytes
        self.segments = lru_cache(_KEPT)(self._make_segments)
        """What the range has of some parameters, in the order of their stream. (indices)"""
        self.plan = lru_cache(_KEPT)(self._make_plan)
        """How that travels. (indices, wire dtype)"""
        self.part_of_unit = lru_cache(_KEPT)(self._find_part)
        """Where its stream is in the unit's of the same parameters. (indices, wire dtype)"""

    def _make_segments(self, indices: Indices) -> list[Segment]:
        if indices is None:
            return self._layout.segments(self._start_bytes, self._stop_bytes)
        return self._layout.packed_segments(indices, self._start_bytes, self._stop_bytes)

    def _make_plan(self, indices: Indices, wire_dtype: WireDtype) -> StreamPlan:
        return StreamPlan(self._layout, self.segments(indices), wire_dtype)

    def _find_part(self, indices: tuple[int, ...], wire_dtype: WireDtype) -> slice:
        # Cuts are between blocks: the streams of the ranges, one after another, are that of the whole unit.
        before = self._layout.packed_segments(indices, 0, self._start_bytes)
        start = stream_size(self._layout, before, wire_dtype)
        return slice(start, start + self.plan(indices, wire_dtype).size_bytes)
