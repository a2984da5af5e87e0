"""Names of units in a grid, and how the parameters of one ``fully_shard`` call become units.

A parameter that tensor parallelism splits is stored as one part per tensor-parallel rank. All other parameters are the
same on every tensor-parallel rank, and are stored and pushed once. The two kinds are in different units. A call of
``fully_shard`` makes ``NAME`` with the whole parameters, and ``NAME@tpK`` with the parts of tensor-parallel rank ``K``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell.module.tensors import is_split
from shardwell.module.unit_parameters import FoundParameter
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPlace:
    """The place of a trainer's units on the tensor and pipeline axes of its run."""

    tp: int = 1
    """Size of the tensor axis."""
    pp: int = 1
    """Size of the pipeline axis."""
    tp_rank: int = 0
    pp_rank: int = 0

    def require_unique(self, name: str | None, class_name: str) -> None:
        """Raises UsageError for a unit without a given name, if other pipeline stages may use the same default name."""
        if name is None and self.pp > 1:
            raise UsageError(
                f"the unit of {class_name} has no name, but this run has {self.pp} pipeline stages, over which the "
                "names of units and parameters must be unique: pass fully_shard(..., name=) with the module's name in "
                "the whole model, or use auto_wrap, which does so"
            )

    def root_name(self, name: str) -> str:
        """Returns the name of a stage's root unit, which ``auto_wrap`` names after the model's class."""
        return f"{name}:pp{self.pp_rank}" if self.pp > 1 else name

    def buffers_name(self, number: int) -> str:
        """Returns the name of a unit of buffers.

        Args:
            number: Number of such units that the trainer has declared before.
        """
        return f"buffers:pp{self.pp_rank}:{number}" if self.pp > 1 else f"buffers:{number}"


@dataclass(frozen=True, slots=True)
class NewUnit:
    """A unit that a ``fully_shard`` call is about to make."""

    layout: UnitLayout
    found: Sequence[FoundParameter]
    """Its parameters, in layout order."""


def plan_units(name: str, found: Sequence[FoundParameter], placement: str, place: GridPlace) -> list[NewUnit]:
    """Divides the parameters of one ``fully_shard`` call into units: at most two, and none without parameters.

    Args:
        name: Name of the modules.
        found: All parameters.
        placement: Placement of the units, as in ``UnitLayout``.
        place: Place of the trainer in the grid.
    """
    divided = [(name, 0, list(found))]
    if place.tp > 1:
        split = [entry for entry in found if is_split(entry.parameter)]
        whole = [entry for entry in found if not is_split(entry.parameter)]
        divided = [(name, 0, whole), (f"{name}@tp{place.tp_rank}", place.tp_rank, split)]
    return [
        NewUnit(
            UnitLayout(
                unit_name,
                tuple(entry.describe() for entry in entries),
                placement,
                tp_rank=tp_rank,
                pp_rank=place.pp_rank,
            ),
            entries,
        )
        for unit_name, tp_rank, entries in divided
        if entries
    ]
