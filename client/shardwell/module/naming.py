"""Units of one ``fully_shard`` call: how its parameters are divided among them in a grid, and how they are named.

A parameter that tensor parallelism splits is stored as one part per tensor-parallel rank. All other parameters are the
same on every tensor-parallel rank, and are stored and pushed once. The two kinds are in different units. A call of
``fully_shard`` makes ``NAME`` with the whole parameters, and ``NAME@tpK`` with the parts of tensor-parallel rank ``K``.

A parameter that several pipeline stages share, such as an embedding on the first stage and the head on the last, is a
unit of its own, which is named after the parameter. The trainers of all these stages declare, gather and push it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from shardwell.module.mixed_precision import is_split
from shardwell.module.parameters import FoundParameter, Site
from shardwell_wire.errors import TiedParameterError, UsageError
from shardwell_wire.model.layout import UnitLayout

_ATTRIBUTE = "_shardwell_stage_ties"


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


@dataclass(frozen=True, slots=True)
class StageTie:
    """A parameter that several stages hold."""

    names: tuple[str, ...]
    """Its names in the whole model, in the model's order."""
    stages: tuple[int, ...]
    """Indices of the stages, rising."""

    def pp_ranks(self, pp: int, own_pp_rank: int) -> tuple[int, ...]:
        """Returns the pipeline ranks of the stages, rising.

        Args:
            pp: Size of the pipeline axis. Stage ``s`` belongs to pipeline rank ``s % pp``.
            own_pp_rank: Pipeline rank of this trainer, which holds one of the stages.

        Raises:
            TiedParameterError: Two of the stages belong to one trainer.
        """
        ranks = tuple(sorted({stage % pp for stage in self.stages}))
        if len(ranks) < len(self.stages) or own_pp_rank not in ranks:
            raise self._refusal(pp)
        return ranks

    def check_holders(self, holders: Sequence[int]) -> None:
        """Raises TiedParameterError if two of the stages belong to one trainer.

        Args:
            holders: Pipeline rank of each stage.
        """
        if len({holders[stage] for stage in self.stages}) < len(self.stages):
            raise self._refusal(len(set(holders)))

    def _refusal(self, pp: int) -> TiedParameterError:
        return TiedParameterError(
            f"parameter {self.names[0]!r} is tied over the stages {', '.join(map(str, self.stages))}, of which one "
            f"trainer runs two (pp={pp}): keep these layers in one stage, use another number of stages, or a "
            "schedule other than ZBVZeroBubble and DualPipeV",
            parameter=self.names[0],
        )


def mark_ties(model: nn.Module, stages: Sequence[nn.Module]) -> list[StageTie]:
    """Finds the parameters that several stages share, and records them in the modules that hold them.

    Modules keep the record when tensor parallelism replaces their parameters.

    Args:
        model: The whole model.
        stages: The stages, whose parameters are the model's.
    """
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)
    holders: dict[int, list[tuple[int, Site]]] = {}
    for index, stage in enumerate(stages):
        for part in stage.modules():
            for attribute, parameter in part._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), []).append((index, Site(part, attribute)))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = []
    for key, found in holders.items():
        indices = tuple(sorted({index for index, _ in found}))
        if len(indices) > 1:
            ties.append(StageTie(tuple(names[key]), indices))
            for _, site in found:
                site.module.__dict__.setdefault(_ATTRIBUTE, {})[site.name] = ties[-1]
    return ties


def tie_of(sites: Iterable[Site]) -> StageTie | None:
    """Returns the tie of the parameter that modules hold. None: one stage holds it."""
    for site in sites:
        tie: StageTie | None = site.module.__dict__.get(_ATTRIBUTE, {}).get(site.name)
        if tie is not None:
            return tie
    return None
