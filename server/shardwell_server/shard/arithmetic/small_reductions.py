"""Reduces several small shards together. The results have the same bits as those of ``reduce_shard``.

Most of the time of a small shard is the fixed cost of each tensor operation. Shards with the same order of additions
share the division and the squares: rows of blocks of all shards are summed by one operation, each row by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from shardwell_server.shard.arithmetic.reduction import Reduced, exact_partials
from shardwell_wire.sum_order import Scratch, SumOrder, Term

MAX_BYTES = 64 << 10
"""Size of the largest shard that is worth it."""
_TOGETHER_BYTES = 1 << 20
"""Size of the shards that are reduced together, so that their means stay in the cache."""


@dataclass(frozen=True, slots=True)
class SmallMean:
    """Where the mean gradient of a small shard is written: all segments, and the bytes between them, as one vector."""

    vector: torch.Tensor
    """The whole shard. [numel]"""
    gradients: Sequence[torch.Tensor]
    """The segments, by number. Each [numel]"""
    rows: Sequence[torch.Tensor]
    """The segments, divided at the blocks of the flat vector. Each [num_rows, row]"""
    buffer: torch.Tensor | None
    """Memory of the server that contains the vector. None: it is in a file."""


@dataclass(frozen=True, slots=True)
class SmallReduction:
    """One small shard to reduce. Every rank has a gradient of each segment, or none at all."""

    terms: Sequence[Term]
    """Gradients of the whole shard by ascending data rank. Bytes between the segments are undefined. Each [numel]"""
    mean: SmallMean


def reduce_small(shards: Sequence[SmallReduction], order: SumOrder) -> list[Reduced | None]:
    """Returns the mean gradient of each shard. None: it is not finite, and ``reduce_shard`` must find out where.

    Args:
        shards: Shards with gradients of one dtype of 32 or 64 bits.
        order: The run's order of additions.
    """
    found: list[Reduced | None] = []
    for some in _in_cache(shards):
        scratch = Scratch()
        for shard in some:
            _add(shard, order, scratch)
        _divide([shard.mean.vector for shard in some], order.dp)
        for shard, squares in zip(some, _squares([shard.mean.rows for shard in some]), strict=True):
            is_finite = all(map(math.isfinite, squares))
            mean = shard.mean
            found.append(Reduced(mean.gradients, mean.buffer, exact_partials(squares)) if is_finite else None)
    return found


def _in_cache(shards: Sequence[SmallReduction]) -> list[Sequence[SmallReduction]]:
    """Divides shards into groups whose means are in the cache from the additions to the norm."""
    count = max(1, _TOGETHER_BYTES // max(shard.mean.vector.nbytes for shard in shards))
    return [shards[start : start + count] for start in range(0, len(shards), count)]


def _add(shard: SmallReduction, order: SumOrder, scratch: Scratch) -> None:
    total = order.add(shard.terms, shard.mean.vector, scratch)
    if total is not shard.mean.vector:  # one rank's gradient
        shard.mean.vector.copy_(total)


def _divide(means: list[torch.Tensor], dp: int) -> None:
    """As ``reduction.compute_mean`` divides."""
    if dp & (dp - 1):
        torch._foreach_div_(means, dp)
    elif dp > 1:
        torch._foreach_mul_(means, 1.0 / dp)


def _squares(shards: Sequence[Sequence[torch.Tensor]]) -> list[list[float]]:
    """Returns ``block_squares`` of the rows of each shard."""
    by_length: dict[int, list[torch.Tensor]] = {}
    for rows in shards:
        for piece in rows:
            by_length.setdefault(piece.shape[1], []).append(piece)
    norms = {
        length: iter(torch.linalg.vector_norm(torch.cat(pieces), 2.0, dim=1, dtype=torch.float64).tolist())
        for length, pieces in by_length.items()
    }
    return [
        [norm * norm for piece in rows for norm in islice(norms[piece.shape[1]], piece.shape[0])] for rows in shards
    ]
