"""Gradients of one shard that outlive a commit, because another optimizer's step will use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardwell_server.shard.state.contributions import Contribution
from shardwell_wire.errors import CapacityError

_NO_LEASE = 0


class KeptGradients:
    """What each rank's gradient is after the last commit, of the parameters that the commit did not use it for.

    A step's contribution begins with it. It stays as it is until the next commit, whatever happens to the step's
    contributions, so work that is begun anew begins with it, too.

    Args:
        reserve: Sets memory for so many buffers aside; raises CapacityError if there is none.
        take: Takes a buffer of the shard's size. [size_bytes]
        give: Gives one back.
        views: The parts of parameters in a buffer, by segment number.
    """

    def __init__(
        self,
        reserve: Callable[[int], None],
        take: Callable[[], torch.Tensor],
        give: Callable[[torch.Tensor], None],
        views: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        self._reserve, self._take, self._give, self._views = reserve, take, give, views
        self._by_rank: dict[int, Contribution] = {}
        """By rank; all have a buffer, and some no gradient."""

    @property
    def size_bytes(self) -> int:
        return sum(kept.buffer.numel() for kept in self._by_rank.values())

    def of(self, dp_rank: int, *, but: Collection[int] = ()) -> Contribution | None:
        """What is kept of a rank, without some segments; None: nothing."""
        kept = self._by_rank.get(dp_rank)
        present = kept.present.difference(but) if kept is not None else set()
        if kept is None or not present:
            return None
        return Contribution(kept.epoch, kept.attempt, kept.buffer, kept.views, _nothing, present)

    @property
    def ranks(self) -> set[int]:
        """The ranks of which something is kept."""
        return {rank for rank, kept in self._by_rank.items() if kept.present}

    def make_room(self, contributions: Mapping[int, Contribution], numbers: Collection[int]) -> None:
        """Makes sure that ``keep`` needs no memory.

        Args:
            contributions: Of the step, by rank.
            numbers: The segments to keep.

        Raises:
            CapacityError: There is none; nothing changed.
        """
        lacking = [
            rank
            for rank, contribution in contributions.items()
            if rank not in self._by_rank and not contribution.present.isdisjoint(numbers)
        ]
        if not lacking:
            return
        before = len(self._by_rank)
        self._reserve(before + len(lacking))
        try:
            for rank in lacking:
                buffer = self._take()
                self._by_rank[rank] = Contribution(_NO_LEASE, 0, buffer, self._views(buffer), _nothing)
        except (CapacityError, RuntimeError, MemoryError):
            for rank in lacking:
                if (kept := self._by_rank.pop(rank, None)) is not None:
                    self._give(kept.buffer)
            self._reserve(before)
            raise

    def compute_keep(self, contributions: Mapping[int, Contribution], numbers: Collection[int]) -> None:
        """A step is committed: keeps some segments of its contributions, which began with what was kept before.

        May be repeated with the same arguments.
        """
        for rank, contribution in contributions.items():
            present = contribution.present.intersection(numbers)
            if not present and rank not in self._by_rank:
                continue
            kept = self._by_rank[rank]
            for number in present:
                kept.views[number].copy_(contribution.views[number])
            kept.present = present
        for rank, kept in self._by_rank.items():
            if rank not in contributions:
                kept.present.intersection_update(numbers)

    def drop(self) -> None:
        """Gives everything back."""
        for kept in self._by_rank.values():
            self._give(kept.buffer)
        if self._by_rank:
            self._by_rank.clear()
            self._reserve(0)


def _nothing() -> None:
    pass
