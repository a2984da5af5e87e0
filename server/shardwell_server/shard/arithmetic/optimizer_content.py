"""The state of a shard's optimizer between two updates: as it is saved, taken up, exported and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwell_server.shard.arithmetic.algorithms.engines import State


@dataclass(frozen=True, slots=True)
class RestoredPart:
    """Optimizer state of one part, which another shard had before."""

    algorithm: str | None = None
    """The optimizer of the last update. None: the part has had no update."""
    step_count: int = 0
    """Number of updates by this optimizer."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """State tensors by torch's names."""
    average: torch.Tensor | None = None
    """Moving average. None: the part has none."""


@dataclass(slots=True)
class PartContent:
    """The state of one part between two updates."""

    algorithm: str | None
    step_count: int
    state: State
    average: torch.Tensor | None
    fresh_algorithm: str | None
    """Optimizer for whose first update state is allocated. None: no state is allocated."""
    initializers: Mapping[str, object]
    """The settings that determined the initial values of ``fresh_state``."""
    fresh_state: State
    fresh_average: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        averages = (self.average, self.fresh_average)
        return [*self.state.values(), *self.fresh_state.values(), *(each for each in averages if each is not None)]


@dataclass(frozen=True, slots=True)
class OptimizerContent:
    """The state of an optimizer between two updates, with the memory that is allocated for the next one."""

    parts: Sequence[PartContent] = ()
    averages_started: bool = False
