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

from shardwell_server.shard.arithmetic.squares import SLICE_BYTES, SquarePlan, square_plan
from shardwell_server.shard.arithmetic.update_pieces import Clipping
from shardwell_wire.layout import BLOCK_BYTES
from shardwell_wire.sum_order import Scratch, SumOrder, Term


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

    def power_partials(self, first_bytes: Sequence[int], norm_type: float, bound: float | None = None) -> list[float]:
        """Returns this shard's share of another norm, in the form of ``square_partials``.

        Args:
            first_bytes: First byte of each segment in the flat vector.
            norm_type: Type of the norm, positive and finite.
            bound: Elements are clamped to ``[-bound, bound]`` first. None: they are not.
        """
        clipping = Clipping(value=bound)
        powers: list[float] = []
        for gradient, first_byte in zip(self.gradients, first_bytes, strict=True):
            if gradient is not None:
                for here in _slices(gradient, first_byte):
                    start = first_byte + here.start * gradient.element_size()
                    powers += block_powers(clipping.apply(gradient[here]), start, norm_type)
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
    means = [None if not own else own[0][1] if outs is None else outs[number] for number, own in enumerate(terms)]
    gradients = [None if mean is None or mean.numel() else mean for mean in means]
    squares: list[float] = []
    scratch = Scratch()
    for numbers in _adjacent(terms, means, first_bytes, is_copied=outs is not None):
        first, own_means = numbers[0], [mean for number in numbers if (mean := means[number]) is not None]
        starts = [first_bytes[number] for number in numbers]
        plan = square_plan(tuple(starts), tuple(mean.numel() for mean in own_means), own_means[0].element_size())
        mean, own = _joined(own_means[0], plan), [(rank, _joined(term, plan)) for rank, term in terms[first]]
        norms = torch.empty(plan.row_count, dtype=torch.float64)
        for here, rows in plan.slices():
            part = mean[here]
            if outs is not None:
                compute_mean([(rank, term[here]) for rank, term in own], order, part, scratch)
            plan.compute_norms(mean, rows, norms)
        found = plan.squares(mean, norms)
        # A sum of squares may overflow even if all values are finite.
        if not all(map(math.isfinite, found)):
            for number, each in zip(numbers, own_means, strict=True):
                if not bool(torch.isfinite(each).all()):
                    return Reduced(gradients, buffer, [], non_finite=number)
                gradients[number] = each
        for number, each in zip(numbers, own_means, strict=True):
            gradients[number] = each
        squares += found
    return Reduced(gradients, buffer, exact_partials(squares))


def _adjacent(
    terms: Sequence[Sequence[Term]],
    means: Sequence[torch.Tensor | None],
    first_bytes: Sequence[int],
    *,
    is_copied: bool,
) -> Iterator[list[int]]:
    """Divides the segments that have a gradient into groups of which each can be reduced as one vector.

    Segments of one group have one dtype, gradients of the same ranks, and the same places in every tensor as in the
    flat vector. The bytes between them are reduced too, without a meaning.
    """
    group: list[int] = []
    former: object = None
    for number, own in enumerate(terms):
        if (mean := means[number]) is None or not mean.numel():
            continue
        tensors = [*(term for _, term in own), *([mean] if is_copied else [])]
        # Equal if a tensor continues, in the same memory, where the one of the segment before ended.
        places = [(each.untyped_storage().data_ptr(), each.data_ptr() - first_bytes[number]) for each in tensors]
        key = mean.dtype, [rank for rank, _ in own], places
        if group and key != former:
            yield group
            group = []
        group.append(number)
        former = key
    if group:
        yield group


def _joined(first: torch.Tensor, plan: SquarePlan) -> torch.Tensor:
    """Returns a group of adjacent segments as one vector, given the first one. [numel]"""
    return first if first.numel() == plan.numel else first.as_strided((plan.numel,), (1,))


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
