"""Which contributions of a step a shard has: what is held, what is dropped, what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Contribution:
    """What one logical rank pushed of one shard's gradient in the step in flight."""

    attempt: int
    buffer: torch.Tensor
    """Laid out like the shard. uint8. [stop_bytes - start_bytes]"""
    views: Sequence[torch.Tensor]
    """The parts of parameters in ``buffer``, by segment number, in the parameter's dtype. Each [numel]."""
    present: set[int] = field(default_factory=set)
    """Segments that have a gradient; the others' bytes mean nothing."""
    checksums: list[int] = field(default_factory=list)
    """Of the parts, in order."""

    @property
    def part_count(self) -> int:
        return len(self.checksums)

    def gradient(self, number: int) -> torch.Tensor | None:
        """The sum of the parts so far, of one segment."""
        return self.views[number] if number in self.present else None

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

    @property
    def size_bytes(self) -> int:
        return sum(contribution.buffer.numel() for contribution in self.by_rank.values())

    def attempt(self, dp_rank: int) -> int:
        """The attempt of a rank that is held; 0 if none is."""
        contribution = self.by_rank.get(dp_rank)
        return 0 if contribution is None else contribution.attempt

    def part_count(self, dp_rank: int, attempt: int) -> int:
        """Parts of a rank's attempt that are here."""
        contribution = self.by_rank.get(dp_rank)
        return contribution.part_count if contribution is not None and contribution.attempt == attempt else 0

    def drop_older(self, dp_rank: int, attempt: int) -> list[torch.Tensor]:
        """Drops a rank's contribution if it is of an older attempt; returns its buffer."""
        contribution = self.by_rank.get(dp_rank)
        if contribution is None or contribution.attempt >= attempt:
            return []
        return [self.by_rank.pop(dp_rank).buffer]

    def clear(self) -> list[torch.Tensor]:
        """Drops all; returns their buffers."""
        buffers = [contribution.buffer for contribution in self.by_rank.values()]
        self.by_rank.clear()
        return buffers

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
