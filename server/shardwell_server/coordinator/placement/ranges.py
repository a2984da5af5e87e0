"""Which server holds which part of a unit. Pure arithmetic.

What a run computes does not depend on placement, so it is free to follow the servers' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell_wire.layout import UnitLayout, cut, cut_between


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live server that may take a shard."""

    server_id: str
    free_bytes: int
    """Budget that is not reserved."""


@dataclass(frozen=True, slots=True)
class Range:
    """A half-open byte range of a unit's flat vector and who shall own it."""

    server_id: str
    start_bytes: int
    stop_bytes: int


def place(layout: UnitLayout, candidates: Sequence[Candidate], min_shard_bytes: int) -> list[Range]:
    """Cuts a unit over servers in proportion to their free memory, as far as its placement allows.

    A unit that is too small for all goes to those with the most. The result depends on the
    candidates, not on their order.

    Args:
        layout: The unit.
        candidates: At least one.
        min_shard_bytes: Smaller units are not cut further.

    Returns:
        Ranges in order, covering the vector; none is empty unless the unit is.
    """
    ranked = sorted(candidates, key=lambda candidate: (-candidate.free_bytes, candidate.server_id))
    weights = [float(candidate.free_bytes) for candidate in ranked]
    if not any(weights):
        # Nobody has room: the servers themselves shall say so, with their advice.
        weights = [1.0] * len(ranked)
    if layout.placement == "tensor":
        bounds = cut_between(layout, weights, min_shard_bytes)
    else:
        bounds = cut(layout.size_bytes, weights, min_shard_bytes)
    ranges = [Range(candidate.server_id, start, stop) for candidate, (start, stop) in zip(ranked, bounds, strict=True)]
    return [piece for piece in ranges if piece.start_bytes < piece.stop_bytes] or ranges[:1]
