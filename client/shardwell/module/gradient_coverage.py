"""Which parameters of replicas got a gradient in a work item, for units whose ``ReplicaOptions`` ask for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.module.unit import Unit

logger = logging.getLogger(__name__)


class GradientCoverage:
    """Names unused parameters (``find_unused_parameters``) and compares work items (``static_graph``)."""

    def __init__(self) -> None:
        self._used: dict[Unit, set[int]] = {}
        """Parameters with a gradient in the current work item."""
        self._first: dict[Unit, frozenset[int]] = {}
        """The same of the first work item, for units with a static graph."""
        self._logged: dict[Unit, frozenset[int]] = {}

    def note(self, unit: Unit, indices: Iterable[int]) -> None:
        """These parameters of a unit got a gradient."""
        self._used.setdefault(unit, set()).update(indices)

    def drop(self) -> None:
        """The gradients of the current work item are dropped."""
        self._used.clear()

    def end_item(self, units: Iterable[Unit]) -> UsageError | None:
        """Looks at the gradients of the work item that ends; one without any is not looked at.

        Returns:
            What to raise if a unit's graph was declared static and is not.
        """
        error = None
        for unit in units if self._used else ():
            options, used = unit.settings.replica, frozenset(self._used.get(unit, ()))
            if options.find_unused_parameters:
                self._log_unused(unit, used)
            if options.static_graph and (changed := used ^ self._first.setdefault(unit, used)):
                error = _not_static(unit, changed, used)
        self._used.clear()
        return error

    def _log_unused(self, unit: Unit, used: frozenset[int]) -> None:
        names = [
            parameter.name
            for index, parameter in enumerate(unit.layout.parameters)
            if index not in used and unit.parameters[index].requires_grad
        ]
        if names and self._logged.get(unit) != used:
            logger.warning("unit %r: %d parameters got no gradient: %s", unit.name, len(names), ", ".join(names))
        self._logged[unit] = used


def _not_static(unit: Unit, changed: frozenset[int], used: frozenset[int]) -> UsageError:
    changes = ", ".join(
        f"{unit.layout.parameters[index].name!r} {'got a' if index in used else 'got no'} gradient"
        for index in sorted(changed)
    )
    return UsageError(
        f"unit {unit.name!r} was declared with ReplicaOptions(static_graph=True), but differently from the first work "
        f"item {changes}. Call optimizer.zero_grad() to drop this work item's gradients, or leave static_graph out",
        unit=unit.name,
    )
