"""Parameters that several pipeline stages share, such as an embedding on the first stage and the head on the last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from shardwell.module.unit_parameters import Site
from shardwell_wire.errors import TiedParameterError

_ATTRIBUTE = "_shardwell_stage_ties"


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
