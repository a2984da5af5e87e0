"""Which partitions of a step are staged, and who stands in for a trainer that is gone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PartitionBook:
    """Of one step."""

    staged: dict[int, tuple[int, int]] = field(default_factory=dict)
    """``(epoch, attempts)`` under which a rank's partitions were staged last, by dp rank."""
    stand_ins: dict[int, str] = field(default_factory=dict)
    """Trainers that update the partitions of ranks whose own trainer is gone, by dp rank."""
