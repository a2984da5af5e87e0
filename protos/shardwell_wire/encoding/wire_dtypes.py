"""Wire dtypes of float32 values: as stored, 16-bit and 8-bit formats, largest values of blocks, and low rank.

A block is the smallest part of a stream that can be decoded alone: a 16-bit number, a quantization block with its scale
or indices, or one byte of values that are sent as stored. Quantization blocks are fixed windows of the unit's flat
vector that no cut between shards splits. The encoded bytes of a shard are therefore a part of those of the unit, and
decoded values depend neither on the cuts nor on the transport. docs/wire-format.md specifies the format,
``streams`` finds the blocks of a stream, and ``quantization_blocks`` converts them.

The low-rank dtypes have no blocks. They send a matrix of ``rows`` x ``columns`` as the product of a left factor,
``rows`` x ``rank``, and a right factor, ``rank`` x ``columns``. The stream of a shard has the right factor and the rows
of the left factor that the shard's range meets. Factors are those of the whole matrix, so decoded values do not depend
on the cuts either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import Parameter, Segment, UnitLayout
from shardwell_wire.v1 import common_pb2

WireDtype: TypeAlias = "common_pb2.WireDtype.ValueType"

AS_STORED: WireDtype = common_pb2.WIRE_DTYPE_UNSPECIFIED
"""Values are sent as the servers store them."""

SCALED_BLOCK_NUMEL = 256
"""Maximum number of elements that share a scale. The blocks at both ends of a parameter may have fewer."""

SCALE_BYTES = 4
"""Size of the scale of a block of 8-bit values, which precedes the values."""

TOP_K_PERCENT: dict[WireDtype, int] = {
    common_pb2.WIRE_DTYPE_TOP_K_1_PERCENT: 1,
    common_pb2.WIRE_DTYPE_TOP_K_10_PERCENT: 10,
}
"""Wire dtypes that keep only the largest values of every block, and the percentage of the values that they keep."""

TOP_K_BLOCK_NUMEL = 1024
"""Maximum number of elements of which the largest are kept. The blocks at both ends of a parameter may have fewer."""

TOP_K_ENTRY_BYTES = 4
"""Size of a kept value and its index."""

LOW_RANK: dict[WireDtype, int] = {
    common_pb2.WIRE_DTYPE_LOW_RANK_1: 1,
    common_pb2.WIRE_DTYPE_LOW_RANK_4: 4,
    common_pb2.WIRE_DTYPE_LOW_RANK_16: 16,
}
"""Wire dtypes that send matrices as products of two factors, and the rank of the product."""

FACTOR_ITEM_BYTES = 2
"""Size of a number in a factor."""

_FLOAT_BYTES = 4

_WINDOW_BYTES: dict[WireDtype, int] = {
    common_pb2.WIRE_DTYPE_INT8: SCALED_BLOCK_NUMEL * _FLOAT_BYTES,
    common_pb2.WIRE_DTYPE_FLOAT8: SCALED_BLOCK_NUMEL * _FLOAT_BYTES,
    **dict.fromkeys(TOP_K_PERCENT, TOP_K_BLOCK_NUMEL * _FLOAT_BYTES),
}
"""Quantization blocks start at multiples of this in the flat vector, and at the start of a parameter. Divides 4096."""

GATHER_NAMES: dict[str, WireDtype] = {
    "float32": common_pb2.WIRE_DTYPE_UNSPECIFIED,
    "bfloat16": common_pb2.WIRE_DTYPE_BFLOAT16,
    "float16": common_pb2.WIRE_DTYPE_FLOAT16,
    "int8": common_pb2.WIRE_DTYPE_INT8,
    "float8": common_pb2.WIRE_DTYPE_FLOAT8,
}
"""Wire dtypes of weights, by the names in user options."""

PUSH_NAMES: dict[str, WireDtype] = {
    **GATHER_NAMES,
    **{f"topk-{percent}%": kind for kind, percent in TOP_K_PERCENT.items()},
    **{f"lowrank-{rank}": kind for kind, rank in LOW_RANK.items()},
}
"""Wire dtypes of gradients, by the names in user options."""

FEEDBACK_NAMES: tuple[str, ...] = tuple(
    name for name, kind in PUSH_NAMES.items() if kind in {**TOP_K_PERCENT, **LOW_RANK}
)
"""Wire dtypes of ``PUSH_NAMES`` that leave out most of a gradient, so that they are useless without error feedback."""

_KNOWN = frozenset(common_pb2.WireDtype.values())


def check_wire_dtype(wire_dtype: int) -> None:
    """Raises InvalidRequestError unless the wire dtype of a request exists."""
    if wire_dtype not in _KNOWN:
        raise InvalidRequestError(
            f"wire_dtype is {wire_dtype}, expected one of {', '.join(common_pb2.WireDtype.keys())}"
        )


def check_gather_dtype(wire_dtype: int) -> None:
    """Raises InvalidRequestError unless the wire dtype of a request exists and is suitable for weights."""
    check_wire_dtype(wire_dtype)
    if wire_dtype not in GATHER_NAMES.values():
        raise InvalidRequestError(
            f"wire_dtype is {wire_dtype}, which leaves out most of the values and is for gradients: read weights with "
            f"one of {', '.join(map(common_pb2.WireDtype.Name, GATHER_NAMES.values()))}"
        )


def applied(wire_dtype: WireDtype, parameter: Parameter) -> WireDtype:
    """Returns the encoding of a parameter: ``wire_dtype`` where it is lossy and pays, ``AS_STORED`` otherwise.

    Only float32 parameters that are not ``exact`` are encoded, and with a low rank only matrices whose factors have at
    most half the bytes of their values.

    Args:
        wire_dtype: The requested wire dtype.

    Raises:
        ValueError: The wire dtype does not exist.
    """
    if wire_dtype not in _KNOWN:
        raise ValueError(f"wire dtype {wire_dtype}: expected one of {', '.join(common_pb2.WireDtype.keys())}")
    if parameter.dtype != "float32" or parameter.exact:
        return AS_STORED
    if wire_dtype in LOW_RANK:
        is_matrix = len(parameter.shape) > 1 and parameter.numel > 0
        whole = Segment(0, 0, parameter.size_bytes, 0, parameter.numel)
        return wire_dtype if is_matrix and _factors_pay(whole, columns_of(parameter), wire_dtype) else AS_STORED
    return wire_dtype


def applied_to_segment(wire_dtype: WireDtype, parameter: Parameter, segment: Segment) -> WireDtype:
    """Returns the encoding of a segment in its stream.

    It is that of the parameter, except for the ends of matrices: a segment whose factors have more than half the bytes
    of its values is sent as the decoded values. A stream is therefore never larger than its values.
    """
    kind = applied(wire_dtype, parameter)
    if kind in LOW_RANK and not _factors_pay(segment, columns_of(parameter), kind):
        return AS_STORED
    return kind


def columns_of(parameter: Parameter) -> int:
    """Returns the number of columns of a parameter as a matrix, whose rows are the indices of the first dim."""
    return parameter.numel // parameter.shape[0]


def rows_of(segment: Segment, columns: int) -> range:
    """Returns the rows of a matrix that a segment meets, also if it has only a part of the first or last one."""
    return range(segment.start_element // columns, -(-segment.stop_element // columns))


def factor_bytes(kind: WireDtype, rows: int, columns: int) -> int:
    """Returns the size of the two factors of a matrix, in bytes."""
    return LOW_RANK[kind] * (rows + columns) * FACTOR_ITEM_BYTES


def _factors_pay(segment: Segment, columns: int, kind: WireDtype) -> bool:
    return factor_bytes(kind, len(rows_of(segment, columns)), columns) <= segment.size_bytes // 2


def encoded_size(segment: Segment, parameter: Parameter, wire_dtype: WireDtype) -> int:
    """Returns the size of a segment in a stream, in bytes.

    Args:
        segment: Part of the parameter.
        wire_dtype: Encoding of float32 values.
    """
    kind = applied_to_segment(wire_dtype, parameter, segment)
    if kind in LOW_RANK:
        columns = columns_of(parameter)
        return factor_bytes(kind, len(rows_of(segment, columns)), columns)
    return sum(
        (stop - start) // block_bytes * encoded_block_bytes(kind, block_bytes)
        for start, stop, block_bytes in uniform_blocks(segment, kind)
    )


def encoded_block_bytes(kind: WireDtype, stored_bytes: int) -> int:
    """Returns the size of a block in a stream, in bytes.

    Args:
        kind: Encoding of the block; see ``applied``.
        stored_bytes: Size of the block's values as stored.
    """
    if kind == AS_STORED:
        return stored_bytes
    numel = stored_bytes // _FLOAT_BYTES
    if kind in TOP_K_PERCENT:
        return -(-numel * TOP_K_PERCENT[kind] // 100) * TOP_K_ENTRY_BYTES  # rounded up: every block keeps a value
    return SCALE_BYTES + numel if kind in _WINDOW_BYTES else stored_bytes // 2


def has_windows(kind: WireDtype) -> bool:
    """Returns whether the blocks of an encoding are windows of the flat vector, instead of single values."""
    return kind in _WINDOW_BYTES


def stream_size(layout: UnitLayout, segments: Sequence[Segment], wire_dtype: WireDtype) -> int:
    """Returns the size of the stream of some segments, in bytes."""
    return sum(encoded_size(segment, layout.parameters[segment.parameter_index], wire_dtype) for segment in segments)


def uniform_blocks(segment: Segment, kind: WireDtype) -> Iterator[tuple[int, int, int]]:
    """Cuts a segment into ranges of blocks of one size.

    Args:
        segment: Part of a parameter.
        kind: Encoding of the segment, but not a low rank; see ``applied_to_segment``.

    Yields:
        Start and end of a range in the flat vector, half-open, and the stored size of each of its blocks.
    """
    start, stop = segment.start_bytes, segment.stop_bytes
    if kind == AS_STORED:
        yield start, stop, 1
    elif not has_windows(kind):
        yield start, stop, _FLOAT_BYTES
    else:
        window = _WINDOW_BYTES[kind]
        head = min(stop, -(-start // window) * window)
        tail = max(head, stop // window * window)
        for low, high, block_bytes in ((start, head, head - start), (head, tail, window), (tail, stop, stop - tail)):
            if low < high:
                yield low, high, block_bytes
