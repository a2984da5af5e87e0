"""Which units come next: learnt from the order in which they came before."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwell.module.unit import Unit

MAX_UNITS_AHEAD = 8
"""A longer look-ahead hides no more latency, and each unit would walk the rest of the model."""


class Phase(enum.IntEnum):
    """What a unit was gathered for."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()


Event = tuple["Unit", Phase]


@dataclass(slots=True)
class Order:
    """The order of the events seen so far.

    An event is predicted from the two before it. That is exact for a model that runs the same way
    each time, also where a unit is used several times, and needs no notion of where a step begins.
    """

    _following: dict[tuple[Event | None, Event], Event] = field(default_factory=dict)
    _before: Event | None = None
    _latest: Event | None = None
    _forward: list[int] = field(default_factory=list)
    _forward_is_over: bool = False

    def observe(self, unit: Unit, phase: Phase) -> None:
        """Notes that a unit is needed now; the same event again is not news."""
        event = (unit, phase)
        if event == self._latest:
            return
        if self._latest is not None:
            self._following[self._before, self._latest] = event
        self._before, self._latest = self._latest, event
        self._note_forward(unit, phase)

    def upcoming(self) -> Iterator[Unit]:
        """The units that the current phase is expected to need next, nearest first."""
        before, event = self._before, self._latest
        for _ in range(MAX_UNITS_AHEAD):
            if event is None:
                return
            before, event = event, self._following.get((before, event))
            if event is None or event[1] is not before[1]:
                return
            yield event[0]

    def _note_forward(self, unit: Unit, phase: Phase) -> None:
        if phase is Phase.BACKWARD:
            self._forward_is_over = True
            return
        if self._forward_is_over:
            self._forward, self._forward_is_over = [], False
        if unit.index not in self._forward:
            self._forward.append(unit.index)

    def end_forward(self) -> None:
        """The next forward begins a new list."""
        self._forward_is_over = True

    @property
    def forward(self) -> list[int]:
        """The indices of the units of the last forward, by first use."""
        return list(self._forward)
