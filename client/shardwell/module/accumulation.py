"""Units that stay gathered for several forwards and backwards, and are pushed once."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shardwell.module.residency import UnitSettings
from shardwell.module.sharded_module import ShardedModule, sharding_of
from shardwell.module.unit import Unit
from shardwell.module.units import Units


class Accumulation:
    """The units inside a module, while a schedule runs the module on several micro-batches.

    Each unit is gathered once and pushed once, in whatever order the micro-batches' forwards and backwards run.

    Args:
        module: A module, in which units may be at any depth. It may have none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units: dict[Unit, Units] = {}
        for part in module.modules():
            if isinstance(part, ShardedModule):
                sharding = sharding_of(part)
                self._units.update(dict.fromkeys(sharding.own_units, sharding.units))
        self._before: dict[Unit, UnitSettings] = {}
        """The settings to restore. Not empty between ``begin`` and ``finish``."""

    def __bool__(self) -> bool:
        return bool(self._units)

    def begin(self) -> None:
        """Keeps units gathered and gradients in this process until ``finish``.

        After a schedule that failed, the call starts again.
        """
        for unit, units in self._units.items():
            unit.settings = replace(
                self._before.setdefault(unit, unit.settings),
                requires_gradient_sync=False,
                reshard_after_forward=False,
                reshard_after_backward=False,
                backward_prefetch=(),  # a backward needs no gather, and must not gather units that are pushed already
            )
            # The end of a backward must not free what is prefetched for another stage of this process.
            units.passes.is_last_backward = False

    def add(self) -> None:
        """Adds gradients that were set without a backward through the units to the sums in the reduce dtype."""
        for unit in self._units:
            unit.gradients.accumulate()

    def finish(self, num_backwards: int) -> None:
        """Pushes the mean gradient of every unit and frees the unit, last used units first.

        Args:
            num_backwards: What to divide the sums of the gradients by.
        """
        for unit in self._by_last_use():
            unit.settings, units = self._before.pop(unit, unit.settings), self._units[unit]
            units.passes.is_last_backward = True
            units.push_mean(unit, num_backwards)

    def abandon(self) -> None:
        """Frees the units after an error in the schedule. Their gradients stay until ``zero_grad``."""
        for unit, units in self._units.items():
            unit.settings = self._before.pop(unit, unit.settings)
            units.passes.is_last_backward = True
            unit.usage.clear()
            unit.free()

    def _by_last_use(self) -> list[Unit]:
        order = {index: number for units in self._units.values() for number, index in enumerate(units.forward_order())}
        return sorted(self._units, key=lambda unit: order.get(unit.index, -1), reverse=True)
