"""From names in a run to names in the model. Pure arithmetic."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.topology import World

_OF_A_RANK = re.compile(r"(pp\d+\.tp)\d+\.")
"""What sessions put before the names of ranks that hold different units."""


def name_on(tp_rank: int, name: str) -> str:
    """What a unit or parameter is called on another rank of the tensor group."""
    found = _OF_A_RANK.match(name)
    return f"{found[1]}{tp_rank}.{name[found.end() :]}" if found else name


def names_in_model(world: World, layouts: Sequence[UnitLayout], run: str) -> dict[str, str]:
    """Every parameter's name in the model by its name in the run.

    Pipeline stages lose what tells them apart, unless names would be the same then.

    Raises:
        UsageError: Ranks hold parts of parameters, and only their trainers know which.
    """
    names = [parameter.name for layout in layouts for parameter in layout.parameters]
    if world.tp > 1:
        raise UsageError(
            f"run {run!r} is split by tensor parallelism over {world.tp} ranks, and only its trainers know along which "
            "dims: have one of them call shardwell.save_safetensors(model, folder) or save_dcp"
        )
    if world.pp == 1:
        return {name: name for name in names}
    bare = {name: _stripped(name) for name in names}
    return bare if max(Counter(bare.values()).values(), default=1) == 1 else {name: name for name in names}


def _stripped(name: str) -> str:
    found = _OF_A_RANK.match(name)
    return name[found.end() :] if found else name


def buffer_name(name: str, layouts: Sequence[UnitLayout], names: Mapping[str, str]) -> str:
    """A buffer's name in the model.

    The run names a buffer by its unit and its place in the unit's module. That is its name in the model where the
    unit's parameters are named so too; the parameters of ``auto_wrap``'s last unit are not.

    Args:
        name: In the run.
        layouts: Of all units.
        names: What ``names_in_model`` returned.
    """
    holders = [layout for layout in layouts if name.startswith(f"{layout.unit}.")]
    if not holders:
        return name
    unit = max(holders, key=lambda layout: len(layout.unit))
    stage = name.removesuffix(_stripped(name))
    if all(parameter.name.startswith(f"{unit.unit}.") for parameter in unit.parameters):
        found = name
    else:
        found = stage + name.removeprefix(f"{unit.unit}.")
    keeps_stage = any(own == model for own, model in names.items() if stage)
    return found if keeps_stage else found.removeprefix(stage)
