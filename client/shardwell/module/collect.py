"""Which parameters of some modules a new unit takes, and under which names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwell.module.parameter import owner_of
from shardwell.module.tensors import local_part
from shardwell_wire.errors import TiedParameterError, UsageError
from shardwell_wire.layout import Parameter


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a module holds a parameter."""

    module: nn.Module
    name: str


@dataclass(slots=True)
class FoundParameter:
    """A parameter with all its names and all places that hold it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def describe(self) -> Parameter:
        """As declared; of a ``DTensor`` this process's part."""
        dtype = str(self.parameter.dtype).removeprefix("torch.")
        shape = tuple(local_part(self.parameter).shape)
        return Parameter(self.names[0], shape, dtype, aliases=tuple(self.names[1:]))


def collect_parameters(
    modules: Sequence[nn.Module], prefixes: Sequence[str], ignored: Collection[nn.Parameter]
) -> list[FoundParameter]:
    """The parameters in some modules that no unit has taken, each once, in the order of the modules.

    Args:
        modules: The modules of one ``fully_shard`` call.
        prefixes: What each module's parameter names begin with.
        ignored: Parameters to leave alone.

    Raises:
        TiedParameterError: One of them is a parameter of another unit too.
        UsageError: They belong to a unit of a module that contains these.
    """
    inside = {id(part) for module in modules for part in module.modules()}
    left_alone = {id(parameter) for parameter in ignored}
    found: dict[int, FoundParameter] = {}
    for name, site, parameter in _named_sites(modules, prefixes):
        if id(parameter) in left_alone:
            continue
        if owner_of(parameter) is not None:
            _check_nested(parameter, site, name, modules, inside)
            continue
        entry = found.setdefault(id(parameter), FoundParameter(parameter))
        entry.names.append(name)
        if site not in entry.sites:
            entry.sites.append(site)
    return list(found.values())


def _named_sites(modules: Sequence[nn.Module], prefixes: Sequence[str]) -> Iterator[tuple[str, Site, nn.Parameter]]:
    for module, prefix in zip(modules, prefixes, strict=True):
        for part_name, part in module.named_modules(remove_duplicate=False):
            for own_name, parameter in part._parameters.items():
                if parameter is not None:
                    name = f"{part_name}.{own_name}" if part_name else own_name
                    yield f"{prefix}{name}", Site(part, own_name), parameter


def _check_nested(
    parameter: nn.Parameter, site: Site, name: str, modules: Sequence[nn.Module], inside: set[int]
) -> None:
    """Raises unless a unit's parameter is found where that unit holds it, below the modules at hand."""
    owner = owner_of(parameter)
    assert owner is not None
    if site not in owner.unit.sites[owner.index]:
        raise TiedParameterError(
            f"parameter {name!r} is tied to {owner.name!r} of unit {owner.unit.name!r}: "
            "put both modules into one unit, fully_shard([a, b], session)",
            parameter=name,
            unit=owner.unit.name,
        )
    holders = [module for module in owner.unit.modules if any(part is site.module for part in module.modules())]
    if any(id(module) in inside for module in holders):
        return
    within = {id(part) for module in holders for part in module.modules()}
    if any(id(module) in within for module in modules):
        advice = "call fully_shard bottom-up, for inner modules before the modules that contain them"
    else:
        kind = type(site.module).__name__
        advice = f"its {kind} is in several modules, so call fully_shard on that {kind} before the modules around it"
    raise UsageError(
        f"parameter {name!r} is in unit {owner.unit.name!r} already: {advice}",
        parameter=name,
        unit=owner.unit.name,
    )
