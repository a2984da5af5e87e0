"""Who needs a unit's memory now: forwards, and their backwards."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardwell.module.unit import Unit

_MAX_CALLS = 1 << 15


class ForwardCall:
    """One call of a unit's forward, as its part of the autograd graph remembers it.

    Also stands for operations outside of every forward that read the unit's weights.

    Args:
        unit: The unit.
        generation: ``Unit.generation`` when the call was made: a graph does not outlive the unit's values.
        first_node_number: Nodes made during the call have this number or a higher one; by default the next one.
    """

    __slots__ = ("first_node_number", "generation", "has_backward", "outer", "stop_node_number", "unit")

    def __init__(self, unit: Unit, generation: int, first_node_number: int | None = None) -> None:
        self.unit = unit
        self.generation = generation
        if first_node_number is None:
            first_node_number = torch._C._autograd._get_sequence_nr()
        self.first_node_number: int = first_node_number
        self.stop_node_number: float = math.inf
        """Nodes made during the call have a lower number."""
        self.has_backward = False
        """Whether a result has a graph through the call."""
        self.outer: ForwardCall | None = None
        """The call inside of which this one was made."""


class ForwardCalls:
    """All forward calls with gradients of one generation: which of them made a node."""

    def __init__(self) -> None:
        self._calls: list[ForwardCall] = []
        self._open: list[ForwardCall] = []

    def begin(self, call: ForwardCall) -> None:
        """A call begins, inside of those that have not ended."""
        call.outer = self._open[-1] if self._open else None
        self._open.append(call)
        self._calls.append(call)
        if len(self._calls) > _MAX_CALLS:  # a loop of forwards without a commit
            del self._calls[: _MAX_CALLS // 2]

    def end(self, call: ForwardCall) -> None:
        """A call ends."""
        call.stop_node_number = torch._C._autograd._get_sequence_nr()
        if call in self._open:
            del self._open[self._open.index(call) :]

    def made(self, node_number: int) -> ForwardCall | None:
        """The innermost call that made a node; None if the node was made outside of all."""
        place = bisect_right(self._calls, node_number, key=lambda call: call.first_node_number)
        call = self._calls[place - 1] if place else None
        while call is not None and call.stop_node_number <= node_number:
            call = call.outer
        return call

    def clear(self) -> None:
        """Graphs that were made so far become unusable."""
        self._calls.clear()
        self._open.clear()


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
