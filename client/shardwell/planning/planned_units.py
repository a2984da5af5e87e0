"""The units of a model that is not sharded yet, and the part of them that one trainer has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwell_wire.layout import UnitLayout
from shardwell_wire.topology import World


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One module of a unit, which a forward of the model calls once."""

    place: int
    """Among the model's modules, outer ones first: the order in which their forwards begin."""
    module: str
    """Its name; empty for the model."""
    can_recompute: bool = False
    """Whether ``checkpoint_activations`` has it compute its forward again, with all units inside it."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One unit of a model that is not sharded yet."""

    layout: UnitLayout
    block: int | None
    """Which of the model's repeated blocks it is, or is in; None for embeddings, heads and the rest."""
    around: tuple[str, ...] = ()
    """Names of the units around it: they stay gathered while it computes."""
    calls: tuple[PlannedCall, ...] = (PlannedCall(0, ""),)
    """Of its modules; by default it is the model's own unit."""

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.layout.unit

    @property
    def is_root(self) -> bool:
        """Whether it is around all others: it stays gathered from the forward to the backward."""
        return self.calls[0].module == ""

    @property
    def size_bytes(self) -> int:
        """Of its flat vector."""
        return self.layout.size_bytes


def cut_into_stages(units: Sequence[PlannedUnit], world: World) -> list[list[PlannedUnit]]:
    """The units of a trainer of each pipeline stage, cut for tensor parallelism.

    Blocks are split evenly over the stages, everything else is on the first. Every matrix is cut along its first dim,
    vectors are whole on each tensor-parallel rank.

    Raises:
        WorldError: The blocks can not be split evenly.
    """
    num_blocks = len({unit.block for unit in units if unit.block is not None})
    if world.pp > 1:
        world.check_fits(num_layers=num_blocks or 1)
    per_stage = max(1, num_blocks // world.pp)
    stages: list[list[PlannedUnit]] = [[] for _ in range(world.pp)]
    for unit in units:
        stage = 0 if unit.block is None else unit.block // per_stage
        stages[stage].append(replace(unit, layout=_cut_for_tp(unit.layout, world.tp)))
    return stages


def _cut_for_tp(layout: UnitLayout, tp: int) -> UnitLayout:
    parameters = [
        replace(parameter, shape=(math.ceil(parameter.shape[0] / tp), *parameter.shape[1:]))
        if len(parameter.shape) > 1
        else parameter
        for parameter in layout.parameters
    ]
    return UnitLayout(layout.unit, tuple(parameters))
