"""What a policy comes to: the units inside a model, in the order in which they have to be made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwell.wrapping.candidates import Candidates, Ties, named_candidates
from shardwell.wrapping.default_policy import BlockPolicy
from shardwell.wrapping.policies import GroupPolicy, WrapPolicy
from shardwell.wrapping.tiled_linear import Tile
from shardwell_wire.errors import TiedParameterError, UsageError


@dataclass(frozen=True)
class ChosenUnit:
    """Modules that become one unit."""

    name: str
    modules: Mapping[str, nn.Module]
    """By their names in the model."""


def choose_units(
    model: nn.Module, policy: WrapPolicy | None = None, ignored_params: Collection[nn.Parameter] = ()
) -> list[ChosenUnit]:
    """The units inside a model that ``auto_wrap`` makes, each after all inside it.

    Raises:
        UsageError: A policy groups modules that can not be one unit.
    """
    named = dict(named_candidates(model))
    ties = Ties(model, ignored_params)
    policy = policy or BlockPolicy(model)
    groups = policy.group(list(named.values())) if isinstance(policy, GroupPolicy) else {}
    _check_groups(groups, ties)
    grouped = {id(module) for modules in groups.values() for module in modules}
    alone = [module for module in named.values() if id(module) not in grouped and not ties.lead_outside([module])]
    chosen = {id(module) for module in policy.choose(Candidates(alone, ignored_params))}
    chosen |= {id(module) for module in alone if isinstance(module, Tile)}
    names = {id(module): name for name, module in named.items()}
    units = [ChosenUnit(name, {names[id(part)]: part for part in modules}) for name, modules in groups.items()]
    units += [ChosenUnit(name, {name: module}) for name, module in named.items() if id(module) in chosen]
    return _without_shared(_inner_first(units, list(named)), ties)


def _check_groups(groups: Mapping[str, Sequence[nn.Module]], ties: Ties) -> None:
    for name, modules in groups.items():
        for outer in modules:
            inside = {id(part) for part in outer.modules() if part is not outer}
            if any(id(module) in inside for module in modules):
                raise UsageError(
                    f"the policy puts {type(outer).__name__} and a module inside it into one unit {name!r}: return the "
                    "name for the outer module alone, which brings all in it",
                    unit=name,
                )
        if ties.lead_outside(modules):
            kinds = ", ".join(type(module).__name__ for module in modules)
            raise TiedParameterError(
                f"the unit {name!r} of {kinds} shares a parameter with a module that is not in it: return {name!r} for "
                "that module too",
                unit=name,
            )


def _inner_first(units: Sequence[ChosenUnit], order: Sequence[str]) -> list[ChosenUnit]:
    """Units in the order of their modules, but each after those with a module inside it."""
    place = {name: number for number, name in enumerate(order)}
    left = sorted(units, key=lambda unit: min(place[name] for name in unit.modules))
    done: dict[str, ChosenUnit] = {}
    for unit in left:
        _add(unit, left, done)
    return list(done.values())


def _add(unit: ChosenUnit, units: Sequence[ChosenUnit], done: dict[str, ChosenUnit]) -> None:
    for inner in _inside(unit, units):
        if inner.name not in done:
            _add(inner, units, done)
    done.setdefault(unit.name, unit)


def _inside(unit: ChosenUnit, units: Sequence[ChosenUnit]) -> Iterator[ChosenUnit]:
    parts = {id(part) for module in unit.modules.values() for part in module.modules()}
    for other in units:
        if other is not unit and any(id(module) in parts for module in other.modules.values()):
            yield other


def _without_shared(units: Sequence[ChosenUnit], ties: Ties) -> list[ChosenUnit]:
    """Leaves out units with a module that is also in another module, unless it is in a unit of its own."""
    kept: list[ChosenUnit] = []
    taken: set[int] = set()
    for unit in units:
        modules = list(unit.modules.values())
        if not ties.shared_outside(modules, taken):
            kept.append(unit)
            taken.update(id(parameter) for module in modules for parameter in module.parameters())
    return kept
