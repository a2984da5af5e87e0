"""Where gradients are reduced: ranks are added in rising order, then the mean is taken. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwell_server.shard.arithmetic.norms import block_powers, block_squares, exact_partials
from shardwell_wire.layout import BLOCK_BYTES

_SLICE_BYTES = 1 << 20
"""So much of a gradient is summed, divided and squared before the next, while it is in the cache."""


@dataclass(frozen=True)
class Reduced:
    """The mean gradient of one shard in one step."""

    gradients: Sequence[torch.Tensor | None]
    """By segment number; None where no rank had one."""
    buffer: torch.Tensor | None
    """What they lie in, if not in a contribution."""
    square_partials: list[float]
    non_finite: int | None = None
    """The first segment with NaN or infinity; then the rest was not looked at."""
    skipped: bool = False
    """Whether it is nothing because the step is skipped, not because nothing was pushed."""

    def max_abs(self) -> float:
        """The largest absolute value; 0 if there is no gradient."""
        values = (torch.aminmax(gradient) for gradient in self.gradients if gradient is not None and gradient.numel())
        return max((abs(float(value)) for pair in values for value in pair), default=0.0)

    def power_partials(self, first_bytes: Sequence[int], norm_type: float) -> list[float]:
        """The share of another norm than the Euclidean one, as ``square_partials`` are of that.

        Args:
            first_bytes: Where segments begin in the flat vector.
            norm_type: Above 0 and finite.
        """
        powers: list[float] = []
        for gradient, first_byte in zip(self.gradients, first_bytes, strict=True):
            if gradient is not None:
                for here in _slices(gradient, first_byte):
                    start = first_byte + here.start * gradient.element_size()
                    powers += block_powers(gradient[here], start, norm_type)
        return exact_partials(powers)


def reduce_shard(
    terms: Sequence[Sequence[torch.Tensor]],
    dp: int,
    outs: Sequence[torch.Tensor] | None,
    first_bytes: Sequence[int],
    *,
    buffer: torch.Tensor | None,
) -> Reduced:
    """The mean gradients of all segments of a shard, with their share of the norm.

    Args:
        terms: Of each segment, by rising logical rank; none: it has no gradient.
        dp: Logical data ranks.
        outs: Receive the results. None: when ``dp`` is 1.
        first_bytes: Where segments begin in the flat vector.
        buffer: What ``outs`` lie in.
    """
    gradients: list[torch.Tensor | None] = [None] * len(terms)
    squares: list[float] = []
    for number, own in enumerate(terms):
        if not own:
            continue
        mean = own[0] if outs is None else outs[number]
        found: list[float] = []
        for here in _slices(mean, first_bytes[number]):
            if dp > 1:
                mean_in_rank_order([term[here] for term in own], dp, mean[here])
            found += block_squares(mean[here], first_bytes[number] + here.start * mean.element_size())
        # A sum of squares may overflow where no value does.
        if not all(map(math.isfinite, found)) and not bool(torch.isfinite(mean).all()):
            return Reduced(gradients, buffer, [], non_finite=number)
        gradients[number] = mean
        squares += found
    return Reduced(gradients, buffer, exact_partials(squares))


def _slices(values: torch.Tensor, first_byte: int) -> Iterator[slice]:
    """Consecutive parts of a segment that end with a block of the flat vector."""
    size, stop = values.element_size(), 0
    while stop < values.numel():
        start = stop
        end_byte = (first_byte + start * size) // BLOCK_BYTES * BLOCK_BYTES + _SLICE_BYTES
        stop = min(values.numel(), (end_byte - first_byte) // size)
        yield slice(start, stop)


def mean_in_rank_order(terms: Sequence[torch.Tensor], dp: int, out: torch.Tensor) -> None:
    """The mean gradient of consecutive elements of one parameter.

    The result depends on the terms and their order alone. 16-bit terms are added in fp32 and rounded
    once.

    Args:
        terms: By rising logical rank, of the ranks that have a gradient; the others count as zero.
            Each [numel].
        dp: Logical data ranks: what the sum is divided by.
        out: Receives the result. [numel]
    """
    if out.element_size() < 4:
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        out.copy_(_divide(total, dp, out=total))
        return
    if len(terms) == 1:
        _divide(terms[0], dp, out=out)
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out += term
    _divide(out, dp, out=out)


def _divide(values: torch.Tensor, dp: int, *, out: torch.Tensor) -> torch.Tensor:
    """The quotient. By a power of two it is the same as a product, which takes half the time."""
    if dp & (dp - 1):
        return torch.div(values, dp, out=out)
    return torch.mul(values, 1.0 / dp, out=out)
