"""``auto_wrap``: which modules of a model become units of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shardwell.fully_shard import HasUnits, shard_modules
from shardwell_wire.errors import UsageError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_READS_CHILDREN = (nn.MultiheadAttention,)
"""Their forward reads the parameters of their children without calling them."""


class WrapPolicy(Protocol):
    """Chooses the modules that become units."""

    def choose(self, model: nn.Module) -> Collection[nn.Module]:
        """Modules inside ``model``, without ``model`` itself, which is the last unit always."""
        ...


@dataclass(frozen=True)
class NoWrapPolicy:
    """One unit for the whole model."""

    def choose(self, model: nn.Module) -> Collection[nn.Module]:
        return []


@dataclass(frozen=True)
class ModuleTypePolicy:
    """A unit for every module of some types, such as ``{TransformerBlock}``.

    Args:
        module_types: The types; subclasses count.
    """

    module_types: Collection[type[nn.Module]]

    def choose(self, model: nn.Module) -> Collection[nn.Module]:
        types = tuple(self.module_types)
        if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in types):
            raise UsageError(f"ModuleTypePolicy({self.module_types!r}): expected classes of modules")
        return [module for _, module in _candidates(model) if isinstance(module, types)]


@dataclass(frozen=True)
class CustomPolicy:
    """A unit for every module for which a function says so.

    Args:
        function: Called with each module.
    """

    function: Callable[[nn.Module], bool]

    def choose(self, model: nn.Module) -> Collection[nn.Module]:
        return [module for _, module in _candidates(model) if self.function(module)]


@dataclass(frozen=True)
class SizePolicy:
    """A unit for every module with that many parameters which are in no inner unit; inner modules first.

    Args:
        min_num_params: Number of elements.
    """

    min_num_params: int

    def __post_init__(self) -> None:
        if self.min_num_params < 1:
            raise UsageError(f"SizePolicy(min_num_params={self.min_num_params}): expected at least 1")

    def choose(self, model: nn.Module) -> Collection[nn.Module]:
        chosen: list[nn.Module] = []
        taken: set[int] = set()
        for _, module in _candidates(model):
            own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
            if sum(own.values()) >= self.min_num_params:
                chosen.append(module)
                taken.update(own)
        return chosen


def auto_wrap(model: nn.Module, session: HasUnits, policy: WrapPolicy, **options: Any) -> Any:
    """Calls ``fully_shard`` on the modules that a policy chooses, inner ones first, and on the model.

    Units and parameters get their names in the model; the last unit, which takes what is left, is
    named for the model's class. A module that shares a parameter with one outside it is not made a
    unit: its parameters go to the unit around both.

    Args:
        model: The whole model.
        session: Where the parameters go.
        policy: ``SizePolicy``, ``ModuleTypePolicy``, ``CustomPolicy``, ``NoWrapPolicy`` or the like.
        **options: ``reshard_after_forward`` and ``ignored_params`` of ``fully_shard``, for every unit.

    Returns:
        The model.
    """
    chosen = {id(module) for module in policy.choose(model)}
    tied = _tied_across(model)
    for name, module in _candidates(model):
        if id(module) in chosen and id(module) not in tied:
            shard_modules([module], session.units, name=name, prefixes=[f"{name}."], **options)
    root = session.units.unused_name(type(model).__name__)
    shard_modules([model], session.units, name=root, prefixes=[""], **options)
    return model


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can be units of their own, each after all modules inside it, with their names."""
    yield from _inner_first(model, "", set())


def _inner_first(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        full_name = f"{name}.{child_name}" if name else child_name
        if not isinstance(child, _READS_CHILDREN):
            yield from _inner_first(child, full_name, seen)
        if not isinstance(child, _CONTAINERS) and type(child).forward is not nn.Module.forward:
            yield full_name, child


def _tied_across(model: nn.Module) -> set[int]:
    """Modules that hold a parameter which a module outside them holds too."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    shared = {parameter for parameter, count in holders.items() if count > 1}
    return {
        id(module)
        for module in model.modules()
        if any(_count_holders(module, parameter) < holders[parameter] for parameter in _held(module) & shared)
    }


def _held(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _count_holders(module: nn.Module, parameter_id: int) -> int:
    return sum(
        id(parameter) == parameter_id
        for part in module.modules()
        for parameter in part._parameters.values()
        if parameter is not None
    )
