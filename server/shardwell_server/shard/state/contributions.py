"""Which contributions of a step a shard has: what is held, what is dropped, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Contribution:
    """What one logical rank pushed of one shard's gradient in the step in flight."""

    epoch: int
    """Of the lease under which it was pushed."""
    attempt: int
    buffer: torch.Tensor
    """Laid out like the shard. uint8. [stop_bytes - start_bytes]"""
    views: Sequence[torch.Tensor]
    """The parts of parameters in ``buffer``, by segment number, in the parameter's dtype. Each [numel]."""
    give_back: Callable[[], None]
    """Gives ``buffer`` back to whom it belongs; called once."""
    present: set[int] = field(default_factory=set)
    """Segments that have a gradient; the others' bytes mean nothing."""
    checksums: list[int | None] = field(default_factory=list)
    """Of the parts, in order; None of one that came through shared memory."""

    @property
    def part_count(self) -> int:
        return len(self.checksums)

    def gradient(self, number: int) -> torch.Tensor | None:
        """The sum of the parts so far, of one segment."""
        return self.views[number] if number in self.present else None

    def drop(self, numbers: Iterable[int]) -> None:
        """Some segments have no gradient any more."""
        self.present.difference_update(numbers)

    def compute_add_kept(self, kept: Contribution) -> None:
        """Adds to the first part what was kept from earlier steps: the sum begins there."""
        self.compute_add(kept.views, sorted(kept.present))

    def compute_add(self, views: Sequence[torch.Tensor], numbers: Iterable[int]) -> None:
        """Adds the gradients of the next part, as torch accumulates them.

        Args:
            views: By segment number. Each [numel].
            numbers: Segments that have a gradient in the part.
        """
        for number in numbers:
            if number in self.present:
                self.views[number].add_(views[number])
            else:
                self.views[number].copy_(views[number])
                self.present.add(number)


class Contributions:
    """The contributions of one shard in the step in flight, kept apart by rank."""

    def __init__(self) -> None:
        self.by_rank: dict[int, Contribution] = {}
        self._usual: Mapping[int, int] = {}
        """Parts by rank, of the last step."""

    @property
    def size_bytes(self) -> int:
        return sum(contribution.buffer.numel() for contribution in self.by_rank.values())

    def attempt(self, dp_rank: int) -> int:
        """The attempt of a rank that is held; 0 if none is."""
        contribution = self.by_rank.get(dp_rank)
        return 0 if contribution is None else contribution.attempt

    def part_count(self, dp_rank: int, epoch: int, attempt: int) -> int:
        """Parts of a rank's attempt that were pushed under one lease."""
        contribution = self.by_rank.get(dp_rank)
        if contribution is None or (contribution.epoch, contribution.attempt) != (epoch, attempt):
            return 0
        return contribution.part_count

    def seem_complete(self, dp: int) -> bool:
        """Whether as many parts of every rank are here as in the last step; in the first, one of each."""
        # Asked after every push: cheap until the last rank is there.
        if not self.by_rank or len(self.by_rank) < (len(self._usual) or dp):
            return False
        usual = self._usual or dict.fromkeys(range(dp), 1)
        return all(rank in self.by_rank and self.by_rank[rank].part_count >= count for rank, count in usual.items())

    def drop_older(self, dp_rank: int, attempt: int) -> bool:
        """Drops a rank's contribution if it is of an older attempt; returns whether it was."""
        return self.attempt(dp_rank) < attempt and self.drop(dp_rank)

    def drop(self, dp_rank: int) -> bool:
        """Drops a rank's contribution; returns whether there was one."""
        contribution = self.by_rank.pop(dp_rank, None)
        if contribution is not None:
            contribution.give_back()
        return contribution is not None

    def clear(self) -> None:
        """Drops all."""
        for contribution in self.by_rank.values():
            contribution.give_back()
        self.by_rank.clear()

    def end_step(self) -> None:
        """Drops all, for they are used up, and expects as many parts in the next step."""
        self._usual = {
            rank: contribution.part_count for rank, contribution in self.by_rank.items() if contribution.part_count
        }
        self.clear()

    def differences(self, expected: Mapping[int, tuple[int, int]]) -> list[str]:
        """How what is here differs from a manifest.

        Args:
            expected: ``(attempt, part_count)`` by rank.
        """
        lines = []
        for dp_rank in sorted({*expected, *self.by_rank}):
            attempt, count = expected.get(dp_rank, (0, 0))
            here = self.by_rank.get(dp_rank)
            have = 0 if here is None else here.part_count
            if have != count or (here is not None and here.attempt != attempt):
                got = f"{have} of attempt {here.attempt}" if here is not None else "none"
                lines.append(f"rank {dp_rank}: expected {count} parts of attempt {attempt}, have {got}")
        return lines
