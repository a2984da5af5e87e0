"""Reduces gradients in the run's order of additions, and sums powers of their elements for norms.

Note: [Norms]
    A term is the fp64 sum over the part of one parameter that is inside one fixed block of the flat vector. Shards are
    cut at blocks, so the terms are the same for any number of servers. Terms are added without rounding error, so
    their order and grouping do not matter either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from shardwell_wire.layout import BLOCK_BYTES
from shardwell_wire.sum_order import Scratch, SumOrder, Term

SLICE_BYTES = 1 << 20
"""Size of the slices that are summed, divided and squared together, while they are in the cache."""


@dataclass(frozen=True)
class Reduced:
    """The mean gradient of one shard in one step."""

    gradients: Sequence[torch.Tensor | None]
    """By segment number. None: no rank has a gradient."""
    buffer: torch.Tensor | None
    """Memory that contains the gradients. None: they are in a contribution."""
    square_partials: list[float]
    non_finite: int | None = None
    """The first segment with NaN or infinity. Later segments were not reduced."""
    skipped: bool = False
    """True if there are no gradients because the step is skipped, not because no rank pushed one."""

    def max_abs(self) -> float:
        """Returns the largest absolute value; 0 if there is no gradient."""
        values = (torch.aminmax(gradient) for gradient in self.gradients if gradient is not None and gradient.numel())
        return max((abs(float(value)) for pair in values for value in pair), default=0.0)

    def power_partials(self, first_bytes: Sequence[int], norm_type: float) -> list[float]:
        """Returns this shard's share of another norm, in the form of ``square_partials``.

        Args:
            first_bytes: First byte of each segment in the flat vector.
            norm_type: Type of the norm, positive and finite.
        """
        powers: list[float] = []
        for gradient, first_byte in zip(self.gradients, first_bytes, strict=True):
            if gradient is not None:
                for here in _slices(gradient, first_byte):
                    start = first_byte + here.start * gradient.element_size()
                    powers += block_powers(gradient[here], start, norm_type)
        return exact_partials(powers)


def reduce_shard(
    terms: Sequence[Sequence[Term]],
    order: SumOrder,
    outs: Sequence[torch.Tensor] | None,
    first_bytes: Sequence[int],
    *,
    buffer: torch.Tensor | None,
) -> Reduced:
    """Returns the mean gradients of all segments of a shard, and their share of the norm.

    Args:
        terms: Gradients of each segment by ascending data rank. Empty: the segment has no gradient.
        order: The run's order of additions.
        outs: Receive the results. None if no segment has more than one gradient, and there is one data rank.
        first_bytes: First byte of each segment in the flat vector.
        buffer: Memory that contains ``outs``.
    """
    gradients: list[torch.Tensor | None] = [None] * len(terms)
    squares: list[float] = []
    scratch = Scratch()
    for number, own in enumerate(terms):
        if not own:
            continue
        mean = own[0][1] if outs is None else outs[number]
        found: list[float] = []
        for here in _slices(mean, first_bytes[number]):
            part = mean if here == slice(0, mean.numel()) else mean[here]
            if outs is not None:
                compute_mean([(rank, term[here]) for rank, term in own], order, part, scratch)
            found += block_squares(part, first_bytes[number] + here.start * mean.element_size())
        # A sum of squares may overflow even if all values are finite.
        if not all(map(math.isfinite, found)) and not bool(torch.isfinite(mean).all()):
            return Reduced(gradients, buffer, [], non_finite=number)
        gradients[number] = mean
        squares += found
    return Reduced(gradients, buffer, exact_partials(squares))


def _slices(values: torch.Tensor, first_byte: int) -> Iterator[slice]:
    """Yields consecutive parts of a segment that end at a block of the flat vector."""
    size, stop = values.element_size(), 0
    while stop < values.numel():
        start = stop
        end_byte = (first_byte + start * size) // BLOCK_BYTES * BLOCK_BYTES + SLICE_BYTES
        stop = min(values.numel(), (end_byte - first_byte) // size)
        yield slice(start, stop)


def compute_mean(terms: Sequence[Term], order: SumOrder, out: torch.Tensor, scratch: Scratch) -> None:
    """Computes the mean gradient of consecutive elements of one parameter.

    The result depends only on the terms and their ranks. 16-bit terms are added in fp32 and rounded once.

    Args:
        terms: Gradients by ascending data rank, without ranks that have none, which count as 0.
        order: The run's order of additions. The sum is divided by its number of data ranks.
        out: Receives the result. [numel]
        scratch: Memory for the sums of inner groups.
    """
    if out.element_size() < 4:
        total = order.add(terms, torch.empty_like(out, dtype=torch.float32), scratch).float()
        out.copy_(_divide(total, order.dp, out=total))
    else:
        _divide(order.add(terms, out, scratch), order.dp, out=out)


def _divide(values: torch.Tensor, dp: int, *, out: torch.Tensor) -> torch.Tensor:
    """Divides by ``dp``. For a power of two, a multiplication gives the same bits in half the time."""
    if dp & (dp - 1):
        return torch.div(values, dp, out=out)
    return torch.mul(values, 1.0 / dp, out=out)


def block_squares(values: torch.Tensor, first_byte: int) -> list[float]:
    """Returns ``block_powers`` for the Euclidean norm."""
    return block_powers(values, first_byte, 2.0)


def block_powers(values: torch.Tensor, first_byte: int, norm_type: float) -> list[float]:
    """Sums absolute values to a power, per block of the flat vector. See Note: [Norms].

    Args:
        values: Consecutive elements of one parameter. [numel]
        first_byte: Position of the first element in the flat vector.
        norm_type: The power, positive and finite.

    Returns:
        One term per block. [num_blocks]
    """
    return list(chain.from_iterable(_row_powers(rows, norm_type) for rows in block_rows(values, first_byte)))


def block_rows(values: torch.Tensor, first_byte: int) -> list[torch.Tensor]:
    """Divides consecutive elements of one parameter at the blocks of the flat vector. Each [num_rows, row]"""
    row = BLOCK_BYTES // values.element_size()
    head = min(values.numel(), -first_byte % BLOCK_BYTES // values.element_size())
    body = (values.numel() - head) // row * row
    if not head and not body:
        return [values[None]] if values.numel() else []
    pieces = (values[:head][None], values[head : head + body].view(-1, row), values[head + body :][None])
    return [piece for piece in pieces if piece.numel()]


def _row_powers(rows: torch.Tensor, norm_type: float) -> list[float]:
    """[num_rows, row] -> [num_rows]"""
    norms = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=torch.float64)
    if norm_type == 2.0:
        return [norm * norm for norm in norms.tolist()]  # as ``pow``, without another operation
    powers: list[float] = norms.pow(norm_type).tolist()
    return powers


def exact_partials(terms: Sequence[float]) -> list[float]:
    """Returns a few doubles whose exact sum is the exact sum of ``terms`` (Shewchuk 1997, with ``math.fsum``).

    If the sum is not finite, returns one partial that is not finite.
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
