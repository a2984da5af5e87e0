"""Lossy forms of 32-bit floats on the wire: two 16-bit formats, and int8 with a scale per block.

A piece, consecutive elements of one parameter, is encoded as *cells*, the smallest parts of a stream that
decode by themselves: a 16-bit number, a block of int8 with its scale, or one byte where values travel as
they are stored. Blocks are fixed windows of the unit's flat vector, and cuts between shards never split
one; so the encoded bytes of a shard are a part of those of the whole unit, and what a value decodes to
depends neither on how the unit is cut nor on the way it travels. The format is in docs/wire-format.md.

Encoding and decoding are single passes of torch over slices that fit a core's cache; torch gives up the
interpreter lock in them. They allocate nothing large, and may run in several threads at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from shardwell_wire.codec import Buffer, memory_at
from shardwell_wire.layout import DTYPE_NUMBERS, Segment, UnitLayout
from shardwell_wire.v1 import common_pb2

WireDType: TypeAlias = "common_pb2.WireDType.ValueType"

INT8_BLOCK_NUMEL = 256
"""Elements that share a scale, where their parameter fills the window."""

INT8_BLOCK_BYTES = 1024
"""Blocks begin at multiples of this in the flat vector, and where a parameter begins."""

_SCALE_BYTES = 4
_LARGEST_INT8 = 127.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: with a subnormal scale a quotient could exceed 127."""

_SLICE_NUMEL = 1 << 17
"""Elements converted at once: with as much scratch 1 MiB, which a core's own cache can be expected to hold. On the
machine where it was measured int8 ran at 5.1, 6.4 and 7.7 GB/s with half, this, and twice as many."""

_HALF_DTYPES = {common_pb2.WIRE_DTYPE_BFLOAT16: torch.bfloat16, common_pb2.WIRE_DTYPE_FLOAT16: torch.float16}


NAMES: dict[str, WireDType] = {
    "float32": common_pb2.WIRE_DTYPE_UNSPECIFIED,
    "bfloat16": common_pb2.WIRE_DTYPE_BFLOAT16,
    "float16": common_pb2.WIRE_DTYPE_FLOAT16,
    "int8": common_pb2.WIRE_DTYPE_INT8,
}
"""What users call them."""


def applied(wire_dtype: WireDType, dtype: str) -> WireDType:
    """How a parameter travels: as asked for if it is float32, else as it is stored.

    Args:
        wire_dtype: What was asked for.
        dtype: torch's name of the parameter's dtype.

    Raises:
        ValueError: There is no such wire dtype.
    """
    if wire_dtype not in common_pb2.WireDType.values():
        raise ValueError(f"wire dtype {wire_dtype}: expected one of {', '.join(common_pb2.WireDType.keys())}")
    return wire_dtype if dtype == "float32" else common_pb2.WIRE_DTYPE_UNSPECIFIED


def encoded_size(segment: Segment, dtype: str, wire_dtype: WireDType) -> int:
    """Bytes that a segment has in a stream.

    Args:
        segment: Part of a parameter.
        dtype: torch's name of the parameter's dtype.
        wire_dtype: How float32 travels.
    """
    kind = applied(wire_dtype, dtype)
    if kind in _HALF_DTYPES:
        return segment.size_bytes // 2
    if kind == common_pb2.WIRE_DTYPE_INT8 and segment.size_bytes:
        num_blocks = -(-segment.stop_bytes // INT8_BLOCK_BYTES) - segment.start_bytes // INT8_BLOCK_BYTES
        return segment.size_bytes // 4 + num_blocks * _SCALE_BYTES
    return segment.size_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of one parameter, and where they lie."""

    first_byte: int
    """Where they begin in the unit's flat vector."""
    values: torch.Tensor
    """Contiguous, on the CPU; what is encoded or decoded to. [numel]"""

    def runs(self, wire_dtype: WireDType) -> list[Run]:
        """The piece as runs of like cells, in the order of the stream."""
        dtype = str(self.values.dtype).removeprefix("torch.")
        assert dtype in DTYPE_NUMBERS and self.values.dim() == 1 and self.values.is_contiguous()
        kind, values = applied(wire_dtype, dtype), self.values.detach()
        if not values.numel():
            return []
        if kind == common_pb2.WIRE_DTYPE_UNSPECIFIED:
            return [Run(kind, values.view(torch.uint8), 1, 1)]
        if kind in _HALF_DTYPES:
            return [Run(kind, values, 1, 2)]
        numel = values.numel()
        head = min(numel, -self.first_byte % INT8_BLOCK_BYTES // 4)
        tail = numel - (numel - head) % INT8_BLOCK_NUMEL
        bounds = ((0, head, head), (head, tail, INT8_BLOCK_NUMEL), (tail, numel, numel - tail))
        return [
            Run(kind, values[start:stop], width, _SCALE_BYTES + width) for start, stop, width in bounds if start < stop
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive cells of one size."""

    kind: WireDType
    """How the values travel; ``WIRE_DTYPE_UNSPECIFIED``: as stored, and ``values`` are bytes."""
    values: torch.Tensor
    """[num_cells * cell_numel]"""
    cell_numel: int
    cell_bytes: int
    """Of a cell in the stream."""

    @property
    def num_cells(self) -> int:
        return self.values.numel() // self.cell_numel

    @property
    def size_bytes(self) -> int:
        """In the stream."""
        return self.num_cells * self.cell_bytes

    def is_followed_by(self, other: Run) -> bool:
        """Whether another run's cells are of this size, and its values come next in memory."""
        own, its = self.values, other.values
        return (
            (self.kind, self.cell_numel) == (other.kind, other.cell_numel)
            and own.untyped_storage().data_ptr() == its.untyped_storage().data_ptr()
            and own.data_ptr() + own.nbytes == its.data_ptr()
        )

    def with_next(self, other: Run) -> Run:
        """This run and the one that follows, as one."""
        values = self.values.as_strided((self.values.numel() + other.values.numel(),), (1,))
        return Run(self.kind, values, self.cell_numel, self.cell_bytes)

    @property
    def cells_at_once(self) -> int:
        """How many cells are converted in one pass."""
        return _SLICE_NUMEL // self.cell_numel

    @torch.no_grad()
    def encode(self, first_cell: int, out: torch.Tensor) -> None:
        """Encodes as many cells as fill ``out``. [num_cells * cell_bytes], uint8"""
        for values, cells in self._slices(first_cell, out):
            if self.kind == common_pb2.WIRE_DTYPE_UNSPECIFIED:
                cells.copy_(values)
            elif self.kind == common_pb2.WIRE_DTYPE_INT8:
                _quantise(values.view(-1, self.cell_numel), cells.view(-1, self.cell_bytes))
            else:
                _encode_halves(values, cells, _HALF_DTYPES[self.kind])

    @torch.no_grad()
    def decode(self, first_cell: int, data: torch.Tensor) -> None:
        """Decodes whole cells into the values from ``first_cell`` on. [num_cells * cell_bytes], uint8"""
        for values, cells in self._slices(first_cell, data):
            if self.kind == common_pb2.WIRE_DTYPE_UNSPECIFIED:
                values.copy_(cells)
            elif self.kind == common_pb2.WIRE_DTYPE_INT8:
                _dequantise(cells.view(-1, self.cell_bytes), values.view(-1, self.cell_numel))
            else:
                _decode_halves(cells, values, _HALF_DTYPES[self.kind])

    def _slices(self, first_cell: int, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        num_cells = data.numel() // self.cell_bytes
        for start in range(0, num_cells, self.cells_at_once):
            stop = min(start + self.cells_at_once, num_cells)
            values = self.values[(first_cell + start) * self.cell_numel : (first_cell + stop) * self.cell_numel]
            yield values, data[start * self.cell_bytes : stop * self.cell_bytes]


class _Scratch(threading.local):
    """Memory that one thread's conversions pass through; it stays in that core's cache."""

    def __init__(self) -> None:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.quotients = torch.empty(_SLICE_NUMEL, dtype=torch.float32, device="cpu")
            self.scales = torch.empty(_SLICE_NUMEL // INT8_BLOCK_NUMEL, dtype=torch.float32, device="cpu")
            self.halves = torch.empty(_SLICE_NUMEL, dtype=torch.int16, device="cpu")
            self.cells = torch.empty(_SLICE_NUMEL * 2, dtype=torch.uint8, device="cpu")


_scratch = _Scratch()


def _quantise(values: torch.Tensor, cells: torch.Tensor) -> None:
    """[num_blocks, numel] -> [num_blocks, 4 + numel]"""
    num_blocks = len(values)
    quotients, scales = _scratch.quotients[: values.numel()].view_as(values), _scratch.scales[:num_blocks]
    torch.amax(torch.abs(values, out=quotients), 1, out=scales)
    scales.div_(_LARGEST_INT8).clamp_(min=_SMALLEST_SCALE)
    torch.div(values, scales[:, None], out=quotients).round_()
    if not math.isfinite(scales.sum().item()):
        # Not finite stays not finite, whatever the integers are; these make them the same everywhere.
        scales.masked_fill_(~scales.isfinite(), math.nan)
        quotients.masked_fill_(scales.isnan()[:, None], 0.0)
    cells[:, :_SCALE_BYTES].copy_(scales.view(torch.uint8).view(num_blocks, _SCALE_BYTES))
    cells.view(torch.int8)[:, _SCALE_BYTES:].copy_(quotients)


def _dequantise(cells: torch.Tensor, values: torch.Tensor) -> None:
    """[num_blocks, 4 + numel] -> [num_blocks, numel]"""
    num_blocks = len(values)
    scales = _scratch.scales[:num_blocks]
    scales.view(torch.uint8).view(num_blocks, _SCALE_BYTES).copy_(cells[:, :_SCALE_BYTES])
    values.copy_(cells.view(torch.int8)[:, _SCALE_BYTES:]).mul_(scales[:, None])


def _encode_halves(values: torch.Tensor, cells: torch.Tensor, dtype: torch.dtype) -> None:
    """[numel] -> [2 * numel]"""
    if _is_even(cells):
        cells.view(dtype).copy_(values)
    else:
        halves = _scratch.halves[: values.numel()]
        halves.view(dtype).copy_(values)
        cells.copy_(halves.view(torch.uint8))


def _decode_halves(cells: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """[2 * numel] -> [numel]"""
    if _is_even(cells):
        values.copy_(cells.view(dtype))
    else:
        halves = _scratch.halves[: values.numel()]
        halves.view(torch.uint8).copy_(cells)
        values.copy_(halves.view(dtype))


def _is_even(cells: torch.Tensor) -> bool:
    """Whether 16-bit numbers can be used in place: a received payload may lie at any address."""
    return cells.data_ptr() % 2 == 0 and int(cells.storage_offset()) % 2 == 0


def segment_pieces(
    layout: UnitLayout, segments: Sequence[Segment], memory: Buffer, memory_start_bytes: int
) -> list[Piece]:
    """Pieces whose values lie in memory laid out like a part of the unit's flat vector.

    Args:
        layout: Of the unit.
        segments: Parts of parameters.
        memory: Holds all of them; must stay in place.
        memory_start_bytes: Where the memory begins in the flat vector.
    """
    whole = bytes_tensor(memory)
    return [
        Piece(
            segment.start_bytes,
            whole[segment.start_bytes - memory_start_bytes : segment.stop_bytes - memory_start_bytes].view(
                getattr(torch, layout.parameters[segment.parameter_index].dtype)
            ),
        )
        for segment in segments
    ]


def stream_size(layout: UnitLayout, segments: Sequence[Segment], wire_dtype: WireDType) -> int:
    """Bytes of the stream of some segments."""
    return sum(
        encoded_size(segment, layout.parameters[segment.parameter_index].dtype, wire_dtype) for segment in segments
    )


def encode_pieces(pieces: Sequence[Piece], wire_dtype: WireDType, out: Buffer) -> None:
    """Encodes pieces one after the other. [stream_size(segments)]"""
    for run, cells in _split(_joined_runs(pieces, wire_dtype), bytes_tensor(out)):
        run.encode(0, cells)


def decode_pieces(data: Buffer, wire_dtype: WireDType, pieces: Sequence[Piece]) -> None:
    """Decodes what ``encode_pieces`` made into the values of ``pieces``. [stream_size(segments)]"""
    for run, cells in _split(_joined_runs(pieces, wire_dtype), bytes_tensor(data)):
        run.decode(0, cells)


def _joined_runs(pieces: Sequence[Piece], wire_dtype: WireDType) -> list[Run]:
    """The pieces' runs; small parameters that lie side by side are converted together."""
    return [run for (run,) in _joined([run] for piece in pieces for run in piece.runs(wire_dtype))]


def _joined(rows: Iterable[list[Run]]) -> list[list[Run]]:
    """Rows of runs, all of whose runs go on in memory where those of the row before end, as one row."""
    joined: list[list[Run]] = []
    for row in rows:
        if joined and all(one.is_followed_by(other) for one, other in zip(joined[-1], row, strict=True)):
            joined[-1] = [one.with_next(other) for one, other in zip(joined[-1], row, strict=True)]
        else:
            joined.append(row)
    return joined


def _split(runs: list[Run], stream: torch.Tensor) -> list[tuple[Run, torch.Tensor]]:
    """Each run with its part of the stream."""
    sizes = [run.size_bytes for run in runs]
    if sum(sizes) != stream.numel():
        raise ValueError(f"expected room for {sum(sizes)} encoded bytes, got {stream.numel()}")
    return list(zip(runs, torch.split(stream, sizes), strict=True))


def round_trip_(sources: Sequence[Piece], wire_dtype: WireDType, targets: Sequence[Piece]) -> None:
    """What the values are after they have travelled: ``decode(encode(values))``, slice by slice.

    For lanes on which bytes do not cross a network, so that every lane rounds alike.

    Args:
        sources: What travels.
        wire_dtype: How float32 travels.
        targets: Receive what arrives; pieces of the same places, or ``sources`` themselves.
    """
    for sent, arrived in _rows(sources, wire_dtype, targets):
        if sent.kind == common_pb2.WIRE_DTYPE_UNSPECIFIED:
            arrived.values.copy_(sent.values)
            continue
        for _ in _arriving(sent, arrived):
            pass


@torch.no_grad()
def rounding_errors(sources: Sequence[Piece], wire_dtype: WireDType, outs: Sequence[Piece]) -> None:
    """What the values lose when they travel: ``values - decode(encode(values))``; 0 where that is not finite.

    Args:
        sources: What travels.
        wire_dtype: A lossy one; all values are float32.
        outs: Receive the errors; pieces of the same places.
    """
    for sent, lost in _rows(sources, wire_dtype, outs):
        for values, arrived in _arriving(sent, lost):
            torch.sub(values, arrived, out=arrived).nan_to_num_(0.0, 0.0, 0.0)


def _rows(sources: Sequence[Piece], wire_dtype: WireDType, targets: Sequence[Piece]) -> list[list[Run]]:
    return _joined(
        [one, other]
        for source, target in zip(sources, targets, strict=True)
        for one, other in zip(source.runs(wire_dtype), target.runs(wire_dtype), strict=True)
    )


def _arriving(sent: Run, arrived: Run) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Converts slice by slice: what was sent, and what has just arrived, while both are in the cache."""
    for first in range(0, sent.num_cells, sent.cells_at_once):
        stop = min(first + sent.cells_at_once, sent.num_cells)
        cells = _scratch.cells[: (stop - first) * sent.cell_bytes]
        sent.encode(first, cells)
        arrived.decode(first, cells)
        part = slice(first * sent.cell_numel, stop * sent.cell_numel)
        yield sent.values[part], arrived.values[part]


def bytes_tensor(data: Buffer) -> torch.Tensor:
    """A buffer as a tensor of uint8, also if it is read-only; the caller keeps it alive and does not write."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return torch.frombuffer(memory_at(address, len(data)), dtype=torch.uint8)
