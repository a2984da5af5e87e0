"""Where gradients are reduced: ranks are added in rising order, then the mean is taken. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwell_server.shard.norms import block_squares, exact_partials

_SLICE_ELEMENTS = 1 << 18
"""16-bit terms are widened so many at a time: 1 MiB of fp32."""


@dataclass(frozen=True)
class Reduced:
    """The mean gradient of one shard in one step."""

    gradients: Sequence[torch.Tensor | None]
    """By segment number; None where no rank had one."""
    buffer: torch.Tensor | None
    """What they lie in, if not in a contribution."""
    square_partials: list[float]
    max_abs: float
    non_finite: int | None = None
    """The first segment with NaN or infinity; then the rest was not looked at."""


def reduce_shard(
    terms: Sequence[Sequence[torch.Tensor]],
    dp: int,
    outs: Sequence[torch.Tensor] | None,
    first_bytes: Sequence[int],
    *,
    buffer: torch.Tensor | None,
    with_max_abs: bool,
) -> Reduced:
    """The mean gradients of all segments of a shard, with their share of the norm.

    Args:
        terms: Of each segment, by rising logical rank; none: it has no gradient.
        dp: Logical data ranks.
        outs: Receive the results. None: when ``dp`` is 1.
        first_bytes: Where segments begin in the flat vector.
        buffer: What ``outs`` lie in.
        with_max_abs: Whether the largest absolute value is wanted.
    """
    gradients: list[torch.Tensor | None] = [None] * len(terms)
    squares: list[float] = []
    max_abs = 0.0
    for number, own in enumerate(terms):
        if not own:
            continue
        mean = mean_in_rank_order(own, dp, own[0] if outs is None else outs[number])
        found = block_squares(mean, first_bytes[number])
        # A sum of squares may overflow where no value does.
        if not all(map(math.isfinite, found)) and not bool(torch.isfinite(mean).all()):
            return Reduced(gradients, buffer, [], 0.0, non_finite=number)
        gradients[number] = mean
        squares += found
        if with_max_abs:
            max_abs = max(max_abs, *(abs(float(value)) for value in torch.aminmax(mean)))
    return Reduced(gradients, buffer, exact_partials(squares), max_abs)


def mean_in_rank_order(terms: Sequence[torch.Tensor], dp: int, out: torch.Tensor) -> torch.Tensor:
    """The mean gradient of one parameter's part.

    The result depends on the terms and their order alone. 16-bit terms are added in fp32 and rounded
    once.

    Args:
        terms: By rising logical rank, of the ranks that have a gradient; the others count as zero.
            Each [numel].
        dp: Logical data ranks: what the sum is divided by.
        out: Receives the result unless a term can serve as it is. [numel]

    Returns:
        ``out``, or the only term when ``dp`` is 1.
    """
    if dp == 1:
        return terms[0]
    if out.element_size() < 4:
        for start in range(0, out.numel(), _SLICE_ELEMENTS):
            here = slice(start, start + _SLICE_ELEMENTS)
            total = terms[0][here].float()
            for term in terms[1:]:
                total += term[here]
            out[here] = total.div_(dp)
        return out
    if len(terms) == 1:
        return torch.div(terms[0], dp, out=out)
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out += term
    return out.div_(dp)
