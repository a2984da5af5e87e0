"""Gradients of one shard that are kept for a later step, which another optimizer makes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardwell_server.shard.state.contributions import Contribution
from shardwell_wire.errors import CapacityError

_NO_LEASE = 0


class KeptGradients:
    """Gradients of each rank that the last commit did not use, kept for another optimizer's step.

    A rank is the number of a contributor here, see ``UnitLayout.contributor``.
    A rank's contribution to the next step starts from its kept gradient. Kept gradients change at commits only, so work
    that is retried within a step starts from the same values.

    Args:
        reserve: Reserves memory for this many buffers. Raises CapacityError if there is none.
        acquire: Returns a buffer of the shard's size. [size_bytes]
        release: Releases a buffer.
        views: Splits a buffer into segments, by segment number.
    """

    def __init__(
        self,
        reserve: Callable[[int], None],
        acquire: Callable[[], torch.Tensor],
        release: Callable[[torch.Tensor], None],
        views: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        self._reserve, self._acquire, self._release, self._views = reserve, acquire, release, views
        self._by_rank: dict[int, Contribution] = {}
        """Every entry has a buffer. The buffer of some entries contains no gradient."""

    @property
    def size_bytes(self) -> int:
        return sum(kept.buffer.numel() for kept in self._by_rank.values())

    def find(self, dp_rank: int, *, excluding: Collection[int] = ()) -> Contribution | None:
        """Returns the kept gradient of a rank without some segments. None if nothing is left."""
        kept = self._by_rank.get(dp_rank)
        present = kept.present.difference(excluding) if kept is not None else set()
        if kept is None or not present:
            return None
        return Contribution(kept.epoch, kept.attempt, kept.buffer, kept.views, _do_nothing, present)

    def of_segment(self, number: int) -> dict[int, torch.Tensor]:
        """Returns the kept gradients of a segment by rank, rising. Each [numel]."""
        found = sorted(self._by_rank.items())
        return {rank: kept.views[number] for rank, kept in found if number in kept.present}

    def allocate(self, present: Mapping[int, set[int]]) -> dict[int, Sequence[torch.Tensor]]:
        """Allocates kept gradients that are imported; returns their memory by rank and segment, which the caller fills.

        Args:
            present: Numbers of the segments that have a kept gradient, by rank.

        Raises:
            CapacityError: There is no memory; nothing changed.
        """
        self.drop()
        numbers = set[int]().union(*present.values())
        self.reserve({rank: _placeholder(own) for rank, own in present.items()}, numbers)
        for rank, own in present.items():
            self._by_rank[rank].present = set(own)
        return {rank: self._by_rank[rank].views for rank in present}

    @property
    def ranks(self) -> set[int]:
        """Ranks that have a kept gradient."""
        return {rank for rank, kept in self._by_rank.items() if kept.present}

    def reserve(self, contributions: Mapping[int, Contribution], numbers: Collection[int]) -> None:
        """Allocates the memory that ``compute_keep`` will need.

        Args:
            contributions: The step's contributions, by rank.
            numbers: Segments to keep.

        Raises:
            CapacityError: There is no memory; nothing changed.
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
                buffer = self._acquire()
                self._by_rank[rank] = Contribution(_NO_LEASE, 0, buffer, self._views(buffer), _do_nothing)
        except (CapacityError, RuntimeError, MemoryError):
            for rank in lacking:
                if (kept := self._by_rank.pop(rank, None)) is not None:
                    self._release(kept.buffer)
            self._reserve(before)
            raise

    def compute_keep(self, contributions: Mapping[int, Contribution], numbers: Collection[int]) -> None:
        """Keeps some segments of a committed step's contributions. Idempotent for the same arguments.

        The contributions include the gradients that were kept before.
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
        """Releases all kept gradients."""
        for kept in self._by_rank.values():
            self._release(kept.buffer)
        if self._by_rank:
            self._by_rank.clear()
            self._reserve(0)


def _placeholder(present: set[int]) -> Contribution:
    return Contribution(_NO_LEASE, 0, torch.empty(0, dtype=torch.uint8), (), _do_nothing, set(present))


def _do_nothing() -> None:
    pass
