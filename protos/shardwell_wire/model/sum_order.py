"""The order in which the gradients of data ranks are added.

Note: [Reduction groups]
    Floating-point addition is not associative, so the order of a sum belongs to the run. By default the gradients of
    all data ranks are added in rank order. With the reduction groups ``(4, 2)``, ranks 0 to 3 are added in rank order,
    then ranks 4 to 7, and then the two sums. The first number counts the ranks of an innermost group, and each further
    number counts groups of the level below. Ranks without a gradient are left out. If one rank of a group has a
    gradient, this gradient is the group's sum.

    Any process may add the gradients of a whole group: the result has the same bits on a trainer and on a shard server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import mul

import torch

from shardwell_wire.model.topology import checked_groups

Term = tuple[int, torch.Tensor]
"""The lowest data rank of a gradient, or of a sum of gradients, and the gradient. [numel]"""


class SumOrder:
    """The order of additions in one run. See Note: [Reduction groups].

    Args:
        dp: Number of logical data ranks.
        groups: Sizes of the reduction groups, innermost first. Empty: one group.
        num_contributors: Number of trainers of a replica that contribute to a rank's gradient: pipeline stages and
            context-parallel ranks. If these are several, the terms are numbered by ``UnitLayout.contributor`` in place
            of ranks, and those of a rank are added first.
        cp: Number of context-parallel ranks. Each has a part of the rank's sequences, so the mean is that of all parts.

    Raises:
        WorldError: The sizes do not fit ``dp``.
    """

    def __init__(self, dp: int, groups: Iterable[int] = (), *, num_contributors: int = 1, cp: int = 1) -> None:
        self.dp, self.groups = dp, checked_groups(dp, groups)
        self.divisor = dp * cp
        """The sum divided by this number is the mean."""
        own = self.groups or (dp,)
        self._spans = tuple(accumulate(own if num_contributors == 1 else (num_contributors, *own), mul))
        """Number of terms in a group of each level. The last one is ``dp * num_contributors``."""

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for orders that add, and divide by, the same."""
        return self.divisor, *self._spans

    def groups_of(self, dp_rank: int) -> list[range]:
        """Returns the ranks of the groups that contain a rank, innermost first. The last one has all ranks."""
        starts = (dp_rank // span * span for span in self._spans)
        return [range(start, start + span) for start, span in zip(starts, self._spans, strict=True)]

    def is_group(self, dp_ranks: Sequence[int]) -> bool:
        """True if these are the ranks of one group, in ascending order."""
        return bool(dp_ranks) and any(list(dp_ranks) == list(group) for group in self.groups_of(dp_ranks[0]))

    def add(self, terms: Sequence[Term], out: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Adds gradients of consecutive elements of one parameter.

        The result depends only on the terms and their ranks. 16-bit terms are added in the dtype of ``out``.

        Args:
            terms: At least one, by ascending rank. Ranks without a gradient are missing.
            out: Receives the sum. Must not overlap a term. [numel]
            scratch: Memory for the sums of inner groups.

        Returns:
            ``out``, or the only term unchanged.
        """
        return self._add(terms, len(self._spans) - 1, out, scratch)

    def _add(self, terms: Sequence[Term], level: int, out: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        if len(terms) == 1:
            return terms[0][1]
        total: torch.Tensor | None = None
        if level == 0:
            total = terms[0][1]
            for _, term in terms[1:]:
                total = _add(total, term, out)
            return total
        span = self._spans[level - 1]
        for _, group in groupby(terms, lambda term: term[0] // span):
            own = list(group)
            if total is None:
                total = self._add(own, level - 1, out, scratch)
            else:
                # ``out`` may contain the sum of the groups before.
                memory = scratch.like(out, level) if len(own) > 1 else out
                total = _add(total, self._add(own, level - 1, memory, scratch), out)
        assert total is not None
        return total


class Scratch:
    """Memory for the sums of inner groups, reused for consecutive parts of a gradient. For one thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def like(self, out: torch.Tensor, level: int) -> torch.Tensor:
        """Returns memory with the size and dtype of a tensor, separate for every level. [numel]"""
        buffer = self._buffers.get((level, out.dtype))
        if buffer is None or buffer.numel() < out.numel():
            buffer = self._buffers[level, out.dtype] = torch.empty_like(out)
        return buffer[: out.numel()]


def _add(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if one.dtype != out.dtype:  # 16-bit terms: torch would add two of them in 16 bits
        one = out.copy_(one)
    return torch.add(one, other, out=out)
