"""From a buffer's name in a run to its name in the model. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_wire.layout import UnitLayout


def buffer_name(name: str, layouts: Sequence[UnitLayout]) -> str:
    """A buffer's name in the model.

    The run names a buffer by its unit and its place in the unit's module. That is its name in the model where the
    unit's parameters are named so too; the parameters of ``auto_wrap``'s last unit are not.

    Args:
        name: In the run.
        layouts: Of all units.
    """
    holders = [layout for layout in layouts if name.startswith(f"{layout.unit}.")]
    if not holders:
        return name
    unit = max(holders, key=lambda layout: len(layout.unit))
    prefix = f"{unit.unit}."
    is_named_so = all(parameter.name.startswith(prefix) for parameter in unit.parameters)
    return name if is_named_so else name.removeprefix(prefix)
