"""Identity of a shard: its run, unit and range, and the segments of parameters in its bytes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from shardwell_wire.encoding.streams import RangePlans
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import Segment, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import shard_pb2

_INDICES_KEPT = 8
"""Most sets of parameters of a shard whose segments are kept: pushes name the same ones in every step."""


class Role(enum.Enum):
    """What a server does with a shard."""

    PRIMARY = "primary"
    """Serves the shard to trainers."""
    BACKUP = "backup"
    """Keeps a copy, which the primary brings to every step."""
    RETIRED = "retired"
    """Belongs to another server now. The memory is about to be released."""


ROLES = {Role.PRIMARY: shard_pb2.SHARD_ROLE_PRIMARY, Role.BACKUP: shard_pb2.SHARD_ROLE_BACKUP}
"""Roles as messages name them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """Identity of a shard: its run, its unit and its range in the unit."""

    run: RunIdentity
    layout: UnitLayout
    """Layout of the unit."""
    index: int
    """Index of the unit in the run."""
    start_bytes: int
    """Start of the shard's half-open range in the unit's flat vector."""
    stop_bytes: int
    """End of the range."""
    dp: int
    """Number of logical data ranks."""
    placement: int = 0
    """Number of the placement that the shard belongs to."""
    reduction_groups: tuple[int, ...] = ()
    """Sizes of the run's reduction groups, as ``SumOrder`` takes them."""
    asynchronous: bool = False
    """True if each data rank reads its own version, and a step applies the contribution of one rank."""
    keep_versions: int = 0
    """Number of older versions that readers can read."""

    @property
    def unit(self) -> str:
        """Name of the unit."""
        return self.layout.unit

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def max_contributions(self) -> int:
        """Number of contributions in one step: one per data rank, context-parallel rank and pipeline rank."""
        return self.dp * self.layout.contributors_per_item

    def contributors_of(self, dp_rank: int) -> range:
        """Returns the numbers of a data rank's contributors: the trainers of a replica that push the unit."""
        count = self.layout.contributors_per_item
        return range(dp_rank * count, (dp_rank + 1) * count)

    def dp_rank_of(self, contributor: int) -> int:
        """Returns the data rank of a contributor."""
        return contributor // self.layout.contributors_per_item

    def name_of(self, contributor: int) -> str:
        """Names a contributor in errors."""
        dp_rank, place = divmod(contributor, self.layout.contributors_per_item)
        cp_rank, stage = divmod(place, len(self.layout.pp_ranks))
        context = f", context-parallel rank {cp_rank}" if self.layout.cp > 1 else ""
        pipeline = f", pipeline rank {self.layout.pp_ranks[stage]}" if len(self.layout.pp_ranks) > 1 else ""
        return f"rank {dp_rank}{context}{pipeline}"

    @property
    def held_versions(self) -> int:
        """Number of older versions that are held at once: those for readers, and in an asynchronous run one per rank,
        while a step is prepared for one of them."""
        by_items = self.dp if self.asynchronous and self.dp > 1 and not self.layout.holds_buffers else 0
        return self.keep_versions + by_items

    @property
    def memory_key(self) -> tuple[str, str, int]:
        """Key of the shard's memory reservation: run, unit and start of the range."""
        return str(self.run), self.unit, self.start_bytes

    def is_beside(self, other: ShardSpec, *, any_placement: bool) -> bool:
        """True if both are shards of one unit, and their ranges do not overlap.

        Args:
            any_placement: Whether shards of different placements may be beside each other.
        """
        own = (self.run, self.layout, self.index, self.dp, self.reduction_groups)
        alike = own == (other.run, other.layout, other.index, other.dp, other.reduction_groups)
        return alike and (any_placement or self.placement == other.placement) and not self.overlaps(other)

    def overlaps(self, other: ShardSpec) -> bool:
        """True if the ranges of two shards have bytes in common, or start at the same byte."""
        if self.start_bytes == other.start_bytes:
            return True
        return max(self.start_bytes, other.start_bytes) < min(self.stop_bytes, other.stop_bytes)

    @property
    def reference(self) -> tuple[str, int, int]:
        """Unit and range."""
        return self.unit, self.start_bytes, self.stop_bytes

    @property
    def what(self) -> str:
        """Names the shard in errors."""
        return f"unit {self.unit!r} of run {self.run.name!r}"


class Segments:
    """The parts of parameters in one shard. Everything that is kept by segment number has the order of ``segments``."""

    def __init__(self, spec: ShardSpec) -> None:
        self._spec = spec
        self.plans = RangePlans(spec.layout, spec.start_bytes, spec.stop_bytes)
        self.segments = self.plans.segments(None)
        self.segment_of = {segment.parameter_index: number for number, segment in enumerate(self.segments)}
        """Segment numbers by layout index of the parameter."""
        self.numbers_of = lru_cache(_INDICES_KEPT)(self._find_numbers)
        """Returns the numbers of the segments of the parameters that a field of a request lists by layout index. Takes
        the field's name and the indices. Raises InvalidRequestError unless the indices exist and rise."""

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Splits a buffer of the shard's bytes into segments, by segment number."""
        return segment_views(buffer, self._spec.layout, self.segments, self._spec.start_bytes)

    def _find_numbers(self, name: str, indices: tuple[int, ...]) -> frozenset[int]:
        count = len(self._spec.layout.parameters)
        if any(one >= other for one, other in pairwise(indices)) or (indices and indices[-1] >= count):
            raise InvalidRequestError(
                f"{self._spec.what}: {name} is {list(indices[:10])}, expected strictly rising numbers below {count}"
            )
        if name == "parameter_indices" and not self._spec.layout.holds_buffers:
            for parameter in (self._spec.layout.parameters[index] for index in indices):
                if not parameter.is_trainable:
                    raise InvalidRequestError(
                        f"{self._spec.what}: parameter {parameter.name!r} is {parameter.dtype}, which has no gradient"
                    )
        return frozenset(self.segment_of[index] for index in indices if index in self.segment_of)


def segment_views(
    buffer: torch.Tensor, layout: UnitLayout, segments: Sequence[Segment], start_bytes: int
) -> list[torch.Tensor]:
    """Splits a shard's buffer into segments, each in the dtype of its parameter.

    Args:
        buffer: The shard's bytes. uint8. [stop_bytes - start_bytes]
        start_bytes: Start of the shard in the flat vector.

    Returns:
        One view per segment. Each [stop_element - start_element].
    """
    dtypes = [getattr(torch, layout.parameters[segment.parameter_index].dtype) for segment in segments]
    if len(set(dtypes)) != 1:
        bounds = [(segment.start_bytes - start_bytes, segment.stop_bytes - start_bytes) for segment in segments]
        return [buffer[start:stop].view(dtype) for (start, stop), dtype in zip(bounds, dtypes, strict=True)]
    typed = buffer.view(dtypes[0])  # one operation less per segment
    size = dtypes[0].itemsize
    return [
        typed[(segment.start_bytes - start_bytes) // size : (segment.stop_bytes - start_bytes) // size]
        for segment in segments
    ]


def shaped(part: torch.Tensor, layout: UnitLayout, segment: Segment) -> torch.Tensor:
    """Returns a segment in the shape of its parameter if it is the whole parameter, else unchanged."""
    parameter = layout.parameters[segment.parameter_index]
    return part.view(parameter.shape) if part.numel() == parameter.numel else part
