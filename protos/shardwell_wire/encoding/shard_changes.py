"""What has changed between two versions of a shard: the changed elements of each parameter, and checksums.

An encoding has the changes of the shard's stream (``value_deltas.encode``). The XXH3-64 of each segment in the new
stream follows, with 8 bytes each. docs/wire-format.md specifies the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.chunk_streams import Buffer
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype, applied
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.model.layout import Segment, UnitLayout
from shardwell_wire.v1 import common_pb2

_DTYPES = {common_pb2.WIRE_DTYPE_BFLOAT16: torch.bfloat16, common_pb2.WIRE_DTYPE_FLOAT16: torch.float16}
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Span:
    """The values of one segment in a stream."""

    segment: Segment
    start: int
    """Half-open, in the stream, in bytes."""
    stop: int
    dtype: torch.dtype
    """Dtype in the stream."""


def spans_of(layout: UnitLayout, segments: Sequence[Segment], wire_dtype: WireDtype, start_bytes: int) -> list[Span]:
    """Returns the segments of a shard in its stream.

    Args:
        wire_dtype: Encoding of float32 values.
        start_bytes: Start of the shard in the flat vector.

    Returns:
        Empty if the stream has no changes: a changed value cannot be told apart from those around it.
    """
    spans, position = list[Span](), 0
    for segment in segments:
        parameter = layout.parameters[segment.parameter_index]
        dtype = getattr(torch, parameter.dtype)
        if wire_dtype == AS_STORED:
            position = segment.start_bytes - start_bytes
        else:
            dtype = _DTYPES.get(applied(wire_dtype, parameter), dtype)
            if dtype.itemsize != value_deltas.ITEM_BYTES:
                return []
        stop = position + (segment.stop_element - segment.start_element) * dtype.itemsize
        spans.append(Span(segment, position, stop, dtype))
        position = stop
    return spans


def encode(
    spans: Sequence[Span], base: Buffer, stream: Buffer, limit_bytes: int, differences: bool = False
) -> list[bytes] | None:
    """Returns the changes from one stream of a shard to another one, in consecutive pieces.

    Args:
        base: The former stream.
        stream: The new stream, of the same size.
        limit_bytes: Largest useful size of the changes.
        differences: Whether to send differences where they are smaller than values. All items have 16 bits.

    Returns:
        None: The changes are larger, or the stream has none.
    """
    if not spans or len(stream) % value_deltas.ITEM_BYTES:
        return None
    item_words = max(1, *(span.dtype.itemsize // value_deltas.ITEM_BYTES for span in spans))
    checksums = checksums_of(spans, stream).tobytes()
    pieces = value_deltas.encode(base, stream, limit_bytes - len(checksums), 0 if differences else item_words)
    return None if pieces is None else [*pieces, checksums]


def checksums_of(spans: Sequence[Span], stream: Buffer) -> NDArray[np.uint64]:
    """Returns the XXH3-64 of each segment in a stream."""
    data = memoryview(stream)
    return np.array([xxhash.xxh3_64_intdigest(data[span.start : span.stop]) for span in spans], "<u8")


@dataclass(slots=True)
class SpanChanges:
    """The changed elements of one segment."""

    elements: torch.Tensor
    """Counted from the start of the segment, rising. int64. [n]"""
    values: torch.Tensor
    """The new values, in the dtype of the stream. Some are differences until ``resolve`` is called. [n]"""
    is_difference: torch.Tensor | None
    """Where ``values`` has differences, modulo 2^16. bool. [n] None: nowhere."""

    def resolve(self, former: torch.Tensor) -> None:
        """Replaces differences with new values.

        Args:
            former: The former values, in the dtype of ``values``. [n]
        """
        if self.is_difference is not None:
            words = self.values.view(torch.int16)
            words += former.view(torch.int16) * self.is_difference
            self.is_difference = None


@dataclass(frozen=True, slots=True)
class ShardChanges:
    """The changed elements of a shard."""

    spans: Sequence[Span]
    places: NDArray[np.int64]
    """Places of changed 16-bit values in the stream, rising."""
    words: NDArray[np.uint16]
    """The new values, or differences from the former ones, modulo 2^16."""
    is_new: NDArray[np.bool_]
    """Where ``words`` has new values."""
    checksums: NDArray[np.uint64]
    """XXH3-64 of each segment in the new stream. [len(spans)]"""
    what: str
    """Names the shard in errors."""

    @classmethod
    def decode(
        cls, spans: Sequence[Span], changes: Buffer, stream_bytes: int, what: str, has_differences: bool = False
    ) -> ShardChanges:
        """Decodes changes.

        Args:
            changes: The encoded changes.
            has_differences: As ``differences`` in ``encode``.

        Raises:
            CorruptDataError: The changes are malformed.
        """
        checksum_bytes = _CHECKSUM_BYTES * len(spans)
        if not spans or len(changes) < checksum_bytes:
            raise CorruptDataError(f"{what}: got {len(changes)} bytes of changes, expected {checksum_bytes} or more")
        data, numel = memoryview(changes), stream_bytes // value_deltas.ITEM_BYTES
        split = len(data) - checksum_bytes
        found = value_deltas.decode_changes(data[:split], numel, what, has_differences)
        return cls(spans, *found, np.frombuffer(data[split:], "<u8").copy(), what)

    @classmethod
    def between(cls, spans: Sequence[Span], base: Buffer, stream: Buffer, what: str) -> ShardChanges:
        """Compares two streams of 16-bit values."""
        before, after = (np.frombuffer(each, "<u2") for each in (base, stream))
        places = np.flatnonzero(before != after)
        is_new = np.ones(len(places), np.bool_)
        return cls(spans, places, after[places], is_new, checksums_of(spans, stream), what)

    def of(self, span: Span) -> SpanChanges:
        """Returns the changed elements of a segment.

        Raises:
            CorruptDataError: A changed element is incomplete.
        """
        numel, size = span.segment.stop_element - span.segment.start_element, span.dtype.itemsize
        first, stop = span.start // value_deltas.ITEM_BYTES, -(-span.stop // value_deltas.ITEM_BYTES)
        place = slice(*np.searchsorted(self.places, (first, stop)))
        places, data = self.places[place] - first, self.words[place].view(np.uint8)
        if size == value_deltas.ITEM_BYTES:
            elements = places
        elif size < value_deltas.ITEM_BYTES:
            elements = (places[:, None] * 2 + np.arange(2)).reshape(-1)
            count = int(np.searchsorted(elements, numel))  # the last value has padding
            elements, data = elements[:count], data[:count]
        else:
            item_words = size // value_deltas.ITEM_BYTES
            whole = places[: len(places) // item_words * item_words].reshape(-1, item_words)
            elements = whole[:, 0] // item_words
            if whole.size < len(places) or (whole != elements[:, None] * item_words + np.arange(item_words)).any():
                raise CorruptDataError(f"{self.what}: the changes have a part of an element of {size} bytes")
        values = torch.empty(len(elements), dtype=span.dtype)
        values.view(torch.uint8).numpy()[:] = data
        is_difference = torch.from_numpy(~self.is_new[place])
        return SpanChanges(torch.from_numpy(elements), values, is_difference if is_difference.any() else None)
