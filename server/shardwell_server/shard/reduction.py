"""Where gradients are reduced: ranks are added in rising order, then the mean is taken. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        return out.copy_(total.div_(dp))
    if len(terms) == 1:
        return torch.div(terms[0], dp, out=out)
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out += term
    return out.div_(dp)
