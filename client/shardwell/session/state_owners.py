"""Which optimizer of the training script the optimizer state of a parameter belongs to.

See Note: [New optimizers] in the coordinator's ``optimizer_generations.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ParameterKey = tuple[int, int]
"""Index of a unit, and of a parameter in its layout."""


@dataclass(slots=True, eq=False)
class StateOwner:
    """One optimizer of the script."""

    generation: int
    """``OptimizerStep.generation``."""
    members: Sequence[StateOwner] = ()
    """The optimizers that it combines."""
    has_stepped: bool = False
    successors: list[StateOwner] = field(default_factory=list)
    """Later optimizers for some of the same parameters."""

    @property
    def is_replaced(self) -> bool:
        """True if a later optimizer has taken a step: the state on the servers is that of the later one."""
        return any(later.has_stepped for later in self.successors)

    def note_step(self) -> None:
        """Records that the optimizer has taken a step in this session."""
        for owner in (self, *self.members):
            owner.has_stepped = True

    def continue_state(self) -> None:
        """Makes the optimizer continue with the state on the servers."""
        self.generation = 0


class StateOwners:
    """The optimizers of one model in the order in which the script makes them.

    Args:
        generations: Numbers that have taken a step, from ``RunState`` at the time of the join.
    """

    def __init__(self, generations: Iterable[int]) -> None:
        self._joined, self._last = max(generations, default=0), 0
        self._owners: dict[ParameterKey, StateOwner] = {}

    def extend(self, owner: StateOwner, parameters: Iterable[ParameterKey]) -> None:
        """Adds parameters to an optimizer. Those of another one keep their state."""
        for key in parameters:
            self._owners.setdefault(key, owner)

    def add(self, parameters: Iterable[ParameterKey], members: Sequence[StateOwner] = ()) -> StateOwner:
        """Adds an optimizer. If it replaces an earlier one, it gets a number, and its first step starts anew.

        Args:
            parameters: Its parameters.
            members: The optimizers that it combines.
        """
        keys = set(parameters)
        former = {owner for key in keys if (owner := self._owners.get(key)) is not None and owner not in members}
        generation = 0
        if former or any(member.generation for member in members):
            # An earlier optimizer that has taken steps in this session may have continued the state of any number that
            # the run had then.
            continued = self._joined if any(owner.has_stepped for owner in former) else 0
            generation = self._last = 1 + max(self._last, continued)
        added = StateOwner(generation, tuple(members))
        for owner in former:
            owner.successors.append(added)
        self._owners.update(dict.fromkeys(keys, added))
        return added
