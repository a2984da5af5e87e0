"""Cuts a unit into one byte range per shard server. Pure arithmetic.

A run computes the same bits wherever its units are placed, so placement may depend on the servers' free memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell_wire.layout import UnitLayout, cut, cut_between


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live server that may own a shard."""

    server_id: str
    free_bytes: int
    """Part of the memory budget that is not reserved."""
    budget_bytes: int
    """The memory budget."""


@dataclass(frozen=True, slots=True)
class Range:
    """A half-open byte range of a unit's flat vector and the server that will own it."""

    server_id: str
    start_bytes: int
    stop_bytes: int


def place(layout: UnitLayout, candidates: Sequence[Candidate], min_shard_bytes: int) -> list[Range]:
    """Cuts a unit into ranges in proportion to the free memory of the servers.

    With placement "tensor", cuts fall between tensors. A unit that is too small for all servers goes to servers that
    can hold it and have the largest part of their budgets free: many small units then spread in proportion to the
    budgets. The result does not depend on the order of the candidates.

    Args:
        layout: Layout of the unit.
        candidates: At least one server.
        min_shard_bytes: Smallest range.

    Returns:
        Ranges in order, which cover the flat vector. A range is empty only if the unit is empty.
    """

    def rank(candidate: Candidate) -> tuple[bool, float, str]:
        is_too_full = candidate.free_bytes < layout.size_bytes
        return is_too_full, -candidate.free_bytes / candidate.budget_bytes, candidate.server_id

    ranked = sorted(candidates, key=rank)
    weights = [float(candidate.free_bytes) for candidate in ranked]
    if not any(weights):
        # No server has free memory. Place the unit anyway: the servers then refuse it, and their error says what to do.
        weights = [1.0] * len(ranked)
    if layout.placement == "tensor":
        bounds = cut_between(layout, weights, min_shard_bytes)
    else:
        bounds = cut(layout.size_bytes, weights, min_shard_bytes)
    ranges = [Range(candidate.server_id, start, stop) for candidate, (start, stop) in zip(ranked, bounds, strict=True)]
    return [piece for piece in ranges if piece.start_bytes < piece.stop_bytes] or ranges[:1]
