"""Objects of the training script whose state the run stores: tracked objects, and the optimizers' own state.

Tracked objects are stored with every commit. The optimizer state of a parameter is on the shard servers and belongs to
one optimizer of the script. See Note: [New optimizers] in the coordinator's ``steps/proposals.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwell_wire.errors import UsageError

ParameterKey = tuple[int, int]
"""Index of a unit, and of a parameter in its layout."""


@dataclass(slots=True, eq=False)
class StateOwner:
    """One optimizer of the script."""

    generation: int
    """``OptimizerStep.generation``."""
    members: Sequence[StateOwner] = ()
    """The optimizers that it combines."""
    predecessors: Sequence[StateOwner] = ()
    """Earlier optimizers for some of the same parameters."""
    has_stepped: bool = False
    is_replaced: bool = False
    """True if a later optimizer has taken a step: the state on the servers is that of the later one."""

    def note_step(self) -> None:
        """Records that the optimizer has taken a step in this session."""
        for owner in (self, *self.members):
            owner.has_stepped = True
            for former in owner.predecessors:
                former.is_replaced = True

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
        added = StateOwner(generation, tuple(members), tuple(former))
        self._owners.update(dict.fromkeys(keys, added))
        return added


class TrackedObjects:
    """Objects whose ``state_dict`` is stored with every commit and restored when a trainer joins.

    Args:
        stored: JSON text by name, from the last commit.
    """

    def __init__(self, stored: Mapping[str, str]) -> None:
        self._stored = dict(stored)
        self._objects: dict[str, Any] = {}
        self.restored = False
        """True if an object was restored. The trainer then repeats the end of the last committed step."""

    def track(self, objects: Mapping[str, Any]) -> None:
        """Adds objects by name, and restores those whose state the run has stored.

        Raises:
            UsageError: An object has no ``state_dict`` and ``load_state_dict``, or its state is not
                made of plain numbers, strings, lists and maps with string keys.
        """
        for name, tracked in objects.items():
            if not callable(getattr(tracked, "state_dict", None)) or not callable(
                getattr(tracked, "load_state_dict", None)
            ):
                raise UsageError(f"track({name}=...): {type(tracked).__name__} has no state_dict and load_state_dict")
            self._objects[name] = tracked
            self._capture(name, tracked)
            if name in self._stored:
                self._restore(tracked, json.loads(self._stored[name]))
                self.restored = True

    def restore(self, states: Mapping[str, str]) -> None:
        """Restores objects from a former result of ``to_json``."""
        for name, tracked in self._objects.items():
            if name in states:
                self._restore(tracked, json.loads(states[name]))

    def replace(self, stored: Mapping[str, str]) -> None:
        """Restores all objects from another commit than the one with which this object was made."""
        self._stored = dict(stored)
        self.restored = any(name in self._stored for name in self._objects)
        self.restore(self._stored)

    def has_owner(self, optimizer: Any) -> bool:
        """True if an object belongs to an optimizer, such as its LR scheduler."""
        return any(getattr(tracked, "optimizer", None) is optimizer for tracked in self._objects.values())

    def to_json(self) -> dict[str, str]:
        """Returns the present state of every tracked object as JSON text by name."""
        captured = {}
        for name, tracked in self._objects.items():
            captured[name] = self._capture(name, tracked)
        return captured

    def _capture(self, name: str, tracked: Any) -> str:
        state: dict[str, Any] = {"state_dict": tracked.state_dict()}
        if (groups := _param_groups(tracked)) is not None:
            state["hyperparameters"] = [_plain_group(group) for group in groups]
        _require_plain(state["state_dict"], f"{name}.state_dict()")
        return json.dumps(state)

    def _restore(self, tracked: Any, state: dict[str, Any]) -> None:
        tracked.load_state_dict(state["state_dict"])
        # The state of an LR scheduler does not include the learning rate of its optimizer.
        for group, values in zip(_param_groups(tracked) or (), state.get("hyperparameters", ()), strict=False):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _param_groups(tracked: Any) -> list[dict[str, Any]] | None:
    groups = getattr(getattr(tracked, "optimizer", tracked), "param_groups", None)
    return groups if isinstance(groups, list) else None


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _require_plain(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{path} has the key {key!r}: keys must be strings to be stored with the run")
            _require_plain(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{path}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise UsageError(
            f"{path} is a {type(value).__name__}: only numbers, strings, lists and maps are stored with the run"
        )
