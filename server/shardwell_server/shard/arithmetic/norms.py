"""Sums of powers that do not depend on where shards begin. Pure.

A term is the sum in fp64 over the part of one parameter that lies in one fixed block of the flat
vector; cuts fall on blocks, so the terms are the same for any number of servers. Terms are added
without rounding error, so their order and grouping do not matter either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from shardwell_wire.layout import BLOCK_BYTES


def block_squares(values: torch.Tensor, first_byte: int) -> list[float]:
    """``block_powers`` of the Euclidean norm."""
    return block_powers(values, first_byte, 2.0)


def block_powers(values: torch.Tensor, first_byte: int, norm_type: float) -> list[float]:
    """Sums of absolute values to a power of part of a parameter, per block of the flat vector.

    Args:
        values: Consecutive elements of one parameter. [numel]
        first_byte: Where they begin in the flat vector.
        norm_type: The power, above 0 and finite.

    Returns:
        One term per block touched. [num_blocks]
    """
    row = BLOCK_BYTES // values.element_size()
    head = min(values.numel(), -first_byte % BLOCK_BYTES // values.element_size())
    body = (values.numel() - head) // row * row
    pieces = (values[:head][None], values[head : head + body].view(-1, row), values[head + body :][None])
    return list(chain.from_iterable(_row_powers(piece, norm_type) for piece in pieces if piece.numel()))


def _row_powers(rows: torch.Tensor, norm_type: float) -> list[float]:
    """[num_rows, row] -> [num_rows]"""
    norms = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=torch.float64)
    powers: list[float] = norms.pow(norm_type).tolist()
    return powers


def exact_partials(terms: Sequence[float]) -> list[float]:
    """A few doubles whose exact sum is the exact sum of ``terms`` (Shewchuk 1997, by way of ``math.fsum``).

    A sum that is not finite gives one partial that is not.
    """
    if not all(map(math.isfinite, terms)):
        return [sum(terms)]
    partials: list[float] = []
    try:
        while rest := math.fsum(chain(terms, (-partial for partial in partials))):
            partials.append(rest)
    except OverflowError:
        return [math.inf]
    return partials
