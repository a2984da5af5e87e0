"""What streams of one range of a unit have: worked out when it is first asked for, and kept."""

from __future__ import annotations

from functools import lru_cache

from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.stream_plan import StreamPlan
from shardwell_wire.wire_dtypes import WireDType, stream_size

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

    def _make_plan(self, indices: Indices, wire_dtype: WireDType) -> StreamPlan:
        return StreamPlan(self._layout, self.segments(indices), wire_dtype)

    def _find_part(self, indices: tuple[int, ...], wire_dtype: WireDType) -> slice:
        # Cuts are between blocks: the streams of the ranges, one after another, are that of the whole unit.
        before = self._layout.packed_segments(indices, 0, self._start_bytes)
        start = stream_size(self._layout, before, wire_dtype)
        return slice(start, start + self.plan(indices, wire_dtype).size_bytes)
