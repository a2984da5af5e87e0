"""Names of units in a grid, and how the parameters of one ``fully_shard`` call become units.

A parameter that tensor parallelism splits is stored as one part per tensor-parallel rank. All other parameters are the
same on every tensor-parallel rank, and are stored and pushed once. The two kinds are in different units. A call of
``fully_shard`` makes ``NAME`` with the whole parameters, and ``NAME@tpK`` with the parts of tensor-parallel rank ``K``.

A parameter that several pipeline stages share is a unit of its own, which is named after the parameter. The trainers of
all these stages declare, gather and push it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell.module.stage_ties import StageTie, tie_of
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
    """Divides the parameters of one ``fully_shard`` call into units without empty ones.

    Without parameters that stages share, there are at most two units.

    Args:
        name: Name of the modules.
        found: All parameters.
        placement: Placement of the units, as in ``UnitLayout``.
        place: Place of the trainer in the grid.

    Raises:
        TiedParameterError: Stages that share a parameter belong to one trainer.
    """
    ties = {id(entry): tie for entry in found if place.pp > 1 and (tie := tie_of(entry.sites)) is not None}
    own = [entry for entry in found if id(entry) not in ties]
    units = _plan(name, own, placement, place, (place.pp_rank,))
    for entry in found:
        if (tie := ties.get(id(entry))) is not None:
            units += _plan_tied(entry, tie, placement, place)
    return units


def _plan_tied(entry: FoundParameter, tie: StageTie, placement: str, place: GridPlace) -> list[NewUnit]:
    entry.names = list(tie.names)  # the same in all stages
    return _plan(tie.names[0], [entry], placement, place, tie.pp_ranks(place.pp, place.pp_rank))


def _plan(
    name: str, found: Sequence[FoundParameter], placement: str, place: GridPlace, pp_ranks: tuple[int, ...]
) -> list[NewUnit]:
    """Returns a unit of the parameters that are whole, and one of those that tensor parallelism splits."""
    divided = [(name, 0, list(found))]
    if place.tp > 1:
        split = [entry for entry in found if is_split(entry.parameter)]
        whole = [entry for entry in found if not is_split(entry.parameter)]
        divided = [(name, 0, whole), (f"{name}@tp{place.tp_rank}", place.tp_rank, split)]
    return [
        NewUnit(
            UnitLayout(
                unit_name, tuple(entry.describe() for entry in entries), placement, tp_rank=tp_rank, pp_ranks=pp_ranks
            ),
            entries,
        )
        for unit_name, tp_rank, entries in divided
        if entries
    ]
