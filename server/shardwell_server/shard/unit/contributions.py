"""Contributions to the step in flight of one shard, and gradients that are kept for a later step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, overload

import torch

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_wire.errors import CapacityError

_NO_LEASE = 0


class ContributionMemory(Protocol):
    """Memory that holds one complete gradient, laid out like its shard."""

    @property
    def buffer(self) -> torch.Tensor:
        """uint8. [stop_bytes - start_bytes]"""
        ...

    @property
    def views(self) -> Sequence[torch.Tensor] | None:
        """Segments of ``buffer``, by segment number. None: the owner does not keep them."""
        ...

    def check_adoptable(self, shard: Any) -> None:
        """Raises unless the buffer can become a contribution to a ``UnitShard`` now."""
        ...

    def claim(self) -> torch.Tensor:
        """Makes the buffer a contribution: its bytes stay unchanged until ``release``."""
        ...

    def release(self) -> None:
        """Called when the contribution has been used or dropped."""
        ...


class LazyViews(Sequence[torch.Tensor]):
    """Segments of a buffer, which is split when one of them is first read: small shards are reduced as a whole.

    Args:
        split: Returns its segments, by segment number.
    """

    def __init__(self, buffer: torch.Tensor, split: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
        self._buffer, self._split = buffer, split

    @cached_property
    def _views(self) -> Sequence[torch.Tensor]:
        return self._split(self._buffer)

    @overload
    def __getitem__(self, number: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, number: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        return self._views[number]

    def __len__(self) -> int:
        return len(self._views)


@dataclass
class Contribution:
    """The gradient that a dp rank, or one of its stages, pushed in the step in flight, or the sum of several ranks."""

    epoch: int
    """Epoch of the lease under which the gradient was pushed."""
    attempt: int
    buffer: torch.Tensor
    """Laid out like the shard. uint8. [stop_bytes - start_bytes]"""
    views: Sequence[torch.Tensor]
    """Segments of ``buffer`` in the dtype of their parameters, by segment number. Each [numel]."""
    release: Callable[[], None]
    """Releases ``buffer`` to its owner. Called once."""
    present: set[int] = field(default_factory=set)
    """Numbers of the segments that have a gradient. The bytes of other segments are undefined."""
    checksums: list[int | None] = field(default_factory=list)
    """Checksums of the accepted parts, in order. None for a part that came through shared memory."""
    summed: Mapping[int, int] = field(default_factory=dict)
    """Epochs of the ranks whose gradients were added before they were pushed, by rank. Empty: one rank's gradient."""

    @property
    def part_count(self) -> int:
        return len(self.checksums)

    def count_part(self, checksum: int | None) -> None:
        """Records that a part has been accepted."""
        self.checksums.append(checksum)

    def part_differs(self, part: int, checksum: int | None) -> bool:
        """True if both copies of a part have a checksum and these differ."""
        first = self.checksums[part] if part < self.part_count else None
        return first is not None and checksum is not None and first != checksum

    def gradient(self, number: int) -> torch.Tensor | None:
        """The gradient of a segment, summed over the parts so far. None if the segment has no gradient."""
        return self.views[number] if number in self.present else None

    def drop(self, numbers: Iterable[int]) -> None:
        """Drops the gradients of some segments."""
        self.present.difference_update(numbers)

    def compute_add_kept(self, kept: Contribution) -> None:
        """Adds the gradients kept from earlier steps to the first part."""
        self.compute_add(kept.views, sorted(kept.present))

    def compute_add(self, views: Sequence[torch.Tensor], numbers: Iterable[int]) -> None:
        """Adds the gradients of the next part, with the rounding of torch's gradient accumulation.

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
    """The contributions to one shard in the step in flight.

    They are kept by the numbers of their contributors, see ``UnitLayout.contributor``. A contributor is a dp rank, or
    one stage of a dp rank if several pipeline stages hold the unit.
    """

    def __init__(self) -> None:
        self.by_rank: dict[int, Contribution] = {}
        """The sum of several ranks' gradients is the contribution of each of them."""
        self._usual: Mapping[int, int] = {}
        """Number of parts of each contributor in the last step."""

    @property
    def by_lowest_rank(self) -> dict[int, Contribution]:
        """Each contribution once, by the lowest rank in it."""
        found = self.by_rank.items()
        return {rank: own for rank, own in found if not own.summed or rank == min(own.summed)}

    @property
    def has_sums(self) -> bool:
        """True if a contribution is the sum of several ranks' gradients."""
        return any(contribution.summed for contribution in self.by_rank.values())

    @property
    def size_bytes(self) -> int:
        return sum(contribution.buffer.numel() for contribution in self.by_lowest_rank.values())

    def attempt(self, contributor: int) -> int:
        """The attempt of a contribution. 0 if there is none."""
        contribution = self.by_rank.get(contributor)
        return 0 if contribution is None else contribution.attempt

    def part_count(self, contributor: int, epoch: int, attempt: int) -> int:
        """Number of parts that a contributor pushed in one attempt under one lease."""
        contribution = self.by_rank.get(contributor)
        if contribution is None:
            return 0
        own_epoch = contribution.summed.get(contributor, contribution.epoch)
        return contribution.part_count if (own_epoch, contribution.attempt) == (epoch, attempt) else 0

    def seem_complete(self, count: int) -> bool:
        """True if every contributor pushed as many parts as in the last step, or one part in the first step."""
        # Called after every push: cheap until the last contributor has pushed.
        if not self.by_rank or len(self.by_rank) < (len(self._usual) or count):
            return False
        usual = self._usual or dict.fromkeys(range(count), 1)
        return all(rank in self.by_rank and self.by_rank[rank].part_count >= count for rank, count in usual.items())

    def add(self, contributor: int, contribution: Contribution) -> None:
        """Stores the first part of a contributor that has no contribution, or of all ranks of a sum."""
        for rank in contribution.summed or (contributor,):
            assert rank not in self.by_rank
            self.by_rank[rank] = contribution

    def drop_older(self, contributor: int, attempt: int) -> bool:
        """Drops a contribution if it belongs to an older attempt; returns True if it was dropped."""
        return self.attempt(contributor) < attempt and self.drop(contributor)

    def take(self, contributor: int) -> Contribution:
        """Removes a contribution and returns it."""
        return self.by_rank.pop(contributor)

    def drop(self, contributor: int) -> bool:
        """Drops a contribution; returns True if there was one.

        A sum is dropped for all its ranks: the gradient of one of them cannot be taken out.
        """
        contribution = self.by_rank.get(contributor)
        if contribution is None:
            return False
        for rank in contribution.summed or (contributor,):
            del self.by_rank[rank]
        contribution.release()
        return True

    def clear(self) -> None:
        """Drops all contributions."""
        for contribution in self.by_lowest_rank.values():
            contribution.release()
        self.by_rank.clear()

    def end_step(self, contributors: Set[int]) -> None:
        """Drops the contributions that an update applied, and expects as many parts in the next step."""
        applied = {each: self.by_rank[each] for each in contributors & self.by_rank.keys()}
        self._usual = {
            each: contribution.part_count for each, contribution in applied.items() if contribution.part_count
        }
        for contributor in applied:
            self.drop(contributor)

    def differences(
        self,
        expected: Mapping[int, tuple[int, int]],
        contributors: Set[int],
        name: Callable[[int], str] = "rank {}".format,
    ) -> list[str]:
        """Describes how the accepted contributions of a step differ from a manifest.

        Args:
            expected: ``(attempt, part_count)`` by contributor.
            name: Names a contributor.
        """
        lines = []
        for contributor in sorted({*expected, *self.by_rank} & contributors):
            attempt, count = expected.get(contributor, (0, 0))
            accepted = self.by_rank.get(contributor)
            have = 0 if accepted is None else accepted.part_count
            if have != count or (accepted is not None and accepted.attempt != attempt):
                got = f"{have} of attempt {accepted.attempt}" if accepted is not None else "none"
                lines.append(f"{name(contributor)}: expected {count} parts of attempt {attempt}, have {got}")
        return lines


class KeptGradients:
    """Gradients of each rank that the last commit did not use, kept for another optimizer's step.

    A rank is the number of a contributor here, see ``UnitLayout.contributor``.
    A rank's contribution to the next step starts from its kept gradient. Kept gradients change at commits only, so work
    that is retried within a step starts from the same values.

    Args:
        views: Splits a buffer into segments, by segment number.
    """

    def __init__(
        self, spec: ShardSpec, memory: Memory, views: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    ) -> None:
        self._spec, self._memory, self._views = spec, memory, views
        self._by_rank: dict[int, Contribution] = {}
        """Every entry has a buffer. The buffer of some entries contains no gradient."""

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
                buffer = self._memory.pool.acquire(self._spec.size_bytes)
                self._by_rank[rank] = Contribution(_NO_LEASE, 0, buffer, self._views(buffer), _do_nothing)
        except (CapacityError, RuntimeError, MemoryError):
            for rank in lacking:
                if (kept := self._by_rank.pop(rank, None)) is not None:
                    self._memory.pool.release(kept.buffer)
            self._reserve(before)
            raise

    def _reserve(self, count: int) -> None:
        """Reserves memory for this many buffers. Raises CapacityError if there is none."""
        self._memory.reserve_kept(self._spec.memory_key, count * self._spec.size_bytes)

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
            self._memory.pool.release(kept.buffer)
        if self._by_rank:
            self._by_rank.clear()
            self._reserve(0)


def _placeholder(present: set[int]) -> Contribution:
    return Contribution(_NO_LEASE, 0, torch.empty(0, dtype=torch.uint8), (), _do_nothing, set(present))


def _do_nothing() -> None:
    pass
