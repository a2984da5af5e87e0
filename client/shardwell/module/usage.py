"""Who needs a unit's memory now: forwards, and their backwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardwell.module.unit import Unit


class ForwardCall:
    """One call of a unit's forward, as its part of the autograd graph remembers it.

    Args:
        unit: The unit.
        generation: ``Unit.generation`` when the call was made: a graph does not outlive the unit's values.
    """

    __slots__ = ("first_node_number", "generation", "unit")

    def __init__(self, unit: Unit, generation: int) -> None:
        self.unit = unit
        self.generation = generation
        self.first_node_number: int = torch._C._autograd._get_sequence_nr()
        """Nodes made during the call have this number or a higher one."""


@dataclass(slots=True)
class Usage:
    """Who needs the unit's memory now; it is freed only when nobody does."""

    forward_calls: list[ForwardCall] = field(default_factory=list)
    """Forwards that are running, innermost last."""
    backward_calls: set[ForwardCall] = field(default_factory=set)
    """Forwards whose backward is running."""
    pinned: bool = False
    """Whether a graph of a backward (``create_graph=True``) needs it until the end of the work item."""

    def clear(self) -> None:
        """Nobody needs it any more."""
        self.forward_calls.clear()
        self.backward_calls.clear()
        self.pinned = False

    def __bool__(self) -> bool:
        return bool(self.forward_calls or self.backward_calls or self.pinned)
