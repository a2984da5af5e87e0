"""Which contributions of a step a shard has: what is accepted, what is dropped, what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class PushKey:
    """Names one push to one shard."""

    dp_rank: int
    attempt: int
    part: int


@dataclass
class Contribution:
    """What one logical rank pushed of one shard's gradient in the step in flight."""

    attempt: int
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By segment number: the sum of its parts so far, in the parameter's dtype. Each [numel]."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    """What the gradients lie in."""
    checksums: list[int] = field(default_factory=list)
    """Of the parts, in order."""

    @property
    def part_count(self) -> int:
        return len(self.checksums)

    def add(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor, checksum: int) -> bool:
        """Adds the next part, as torch accumulates gradients.

        Returns:
            Whether ``buffer`` is kept: some gradients lie in it.
        """
        kept = False
        for number, gradient in gradients.items():
            if number in self.gradients:
                self.gradients[number] += gradient
            else:
                self.gradients[number], kept = gradient, True
        if kept:
            self.buffers.append(buffer)
        self.checksums.append(checksum)
        return kept


class Contributions:
    """The contributions of one shard in the step in flight, kept apart by rank."""

    def __init__(self) -> None:
        self.by_rank: dict[int, Contribution] = {}

    @property
    def size_bytes(self) -> int:
        return sum(buffer.numel() for contribution in self.by_rank.values() for buffer in contribution.buffers)

    def begin(self, key: PushKey) -> list[torch.Tensor]:
        """Makes room for a push of a newer attempt; returns the buffers that the older one had."""
        old = self.by_rank.get(key.dp_rank)
        if old is not None and old.attempt < key.attempt:
            del self.by_rank[key.dp_rank]
            return old.buffers
        return []

    def part_count(self, dp_rank: int, attempt: int) -> int:
        """Parts of a rank's attempt that are here."""
        contribution = self.by_rank.get(dp_rank)
        return contribution.part_count if contribution is not None and contribution.attempt == attempt else 0

    def of(self, key: PushKey) -> Contribution:
        """The contribution that a push belongs to; a new one for the first part."""
        return self.by_rank.setdefault(key.dp_rank, Contribution(key.attempt))

    def drop_older(self, dp_rank: int, attempt: int) -> list[torch.Tensor]:
        """Drops a rank's contribution if it is of an older attempt; returns its buffers."""
        contribution = self.by_rank.get(dp_rank)
        if contribution is None or contribution.attempt >= attempt:
            return []
        del self.by_rank[dp_rank]
        return contribution.buffers

    def clear(self) -> list[torch.Tensor]:
        """Drops all; returns their buffers."""
        buffers = [buffer for contribution in self.by_rank.values() for buffer in contribution.buffers]
        self.by_rank.clear()
        return buffers

    def differences(self, expected: Mapping[int, tuple[int, int]], ranks: Iterable[int]) -> list[str]:
        """How what is here differs from a manifest.

        Args:
            expected: ``(attempt, part_count)`` by rank.
            ranks: All ranks of the manifest.
        """
        lines = []
        for dp_rank in sorted({*ranks, *self.by_rank}):
            attempt, count = expected.get(dp_rank, (0, 0))
            here = self.by_rank.get(dp_rank)
            have = 0 if here is None else here.part_count
            if have != count or (here is not None and count and here.attempt != attempt):
                got = f"{have} of attempt {here.attempt}" if here is not None else "none"
                lines.append(f"rank {dp_rank}: expected {count} parts of attempt {attempt}, have {got}")
        return lines
