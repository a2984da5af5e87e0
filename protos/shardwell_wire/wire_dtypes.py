"""The lossy forms that 32-bit floats may have on the wire: two 16-bit formats, and int8 with a scale per block.

Consecutive elements of one parameter travel as *blocks*, the smallest parts of a stream that decode by themselves: a
16-bit number, a block of int8 with its scale, or one byte where values travel as they are stored. Blocks are fixed
windows of the unit's flat vector, and cuts between shards never split one; so the encoded bytes of a shard are a part
of those of the whole unit, and what a value decodes to depends neither on how the unit is cut nor on the way it
travels. The format is in docs/wire-format.md; ``blocks`` converts, ``stream_plan`` says which blocks a stream has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.v1 import common_pb2

WireDtype: TypeAlias = "common_pb2.WireDtype.ValueType"

AS_STORED: WireDtype = common_pb2.WIRE_DTYPE_UNSPECIFIED
"""Values travel as the servers hold them."""

INT8_BLOCK_NUMEL = 256
"""Elements that share a scale, where their parameter fills the window."""

INT8_BLOCK_BYTES = 1024
"""Blocks begin at multiples of this in the flat vector, and where a parameter begins."""

SCALE_BYTES = 4
"""Of an int8 block, before its integers."""

_FLOAT_BYTES = 4

NAMES: dict[str, WireDtype] = {
    "float32": common_pb2.WIRE_DTYPE_UNSPECIFIED,
    "bfloat16": common_pb2.WIRE_DTYPE_BFLOAT16,
    "float16": common_pb2.WIRE_DTYPE_FLOAT16,
    "int8": common_pb2.WIRE_DTYPE_INT8,
}
"""What users call them."""

_KNOWN = frozenset(common_pb2.WireDtype.values())


def applied(wire_dtype: WireDtype, dtype: str) -> WireDtype:
    """How a parameter travels: as asked for if it is float32, else as it is stored.

    Args:
        wire_dtype: What was asked for.
        dtype: torch's name of the parameter's dtype.

    Raises:
        ValueError: There is no such wire dtype.
    """
    if wire_dtype not in _KNOWN:
        raise ValueError(f"wire dtype {wire_dtype}: expected one of {', '.join(common_pb2.WireDtype.keys())}")
    return wire_dtype if dtype == "float32" else AS_STORED


def encoded_size(segment: Segment, dtype: str, wire_dtype: WireDtype) -> int:
    """Bytes that a segment has in a stream.

    Args:
        segment: Part of a parameter.
        dtype: torch's name of the parameter's dtype.
        wire_dtype: How float32 travels.
    """
    kind = applied(wire_dtype, dtype)
    if kind == AS_STORED:
        return segment.size_bytes
    if kind == common_pb2.WIRE_DTYPE_INT8 and segment.size_bytes:
        num_blocks = -(-segment.stop_bytes // INT8_BLOCK_BYTES) - segment.start_bytes // INT8_BLOCK_BYTES
        return segment.size_bytes // _FLOAT_BYTES + num_blocks * SCALE_BYTES
    return segment.size_bytes // 2


def encoded_block_bytes(kind: WireDtype, stored_bytes: int) -> int:
    """Bytes that a block has in a stream, from what its values have as they are stored."""
    if kind == AS_STORED:
        return stored_bytes
    return SCALE_BYTES + stored_bytes // _FLOAT_BYTES if kind == common_pb2.WIRE_DTYPE_INT8 else stored_bytes // 2


def stream_size(layout: UnitLayout, segments: Sequence[Segment], wire_dtype: WireDtype) -> int:
    """Bytes of the stream of some segments."""
    return sum(
        encoded_size(segment, layout.parameters[segment.parameter_index].dtype, wire_dtype) for segment in segments
    )


def uniform_blocks(segment: Segment, kind: WireDtype) -> Iterator[tuple[int, int, int]]:
    """Cuts a segment into ranges of blocks of one size.

    Args:
        segment: Part of a parameter.
        kind: How it travels, see ``applied``.

    Yields:
        First and last byte of a range in the flat vector, half-open, and the stored bytes of each of its blocks.
    """
    start, stop = segment.start_bytes, segment.stop_bytes
    if kind == AS_STORED:
        yield start, stop, 1
    elif kind != common_pb2.WIRE_DTYPE_INT8:
        yield start, stop, _FLOAT_BYTES
    else:
        head = min(stop, -(-start // INT8_BLOCK_BYTES) * INT8_BLOCK_BYTES)
        tail = max(head, stop // INT8_BLOCK_BYTES * INT8_BLOCK_BYTES)
        for low, high, block_bytes in (
            (start, head, head - start),
            (head, tail, INT8_BLOCK_BYTES),
            (tail, stop, stop - tail),
        ):
            if low < high:
                yield low, high, block_bytes
