"""``auto_wrap``: which modules of a model become units of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import nn

from shardwell.module.fully_shard import HasUnits, ShardedModule, shard_modules
from shardwell.module.guards import has_forward
from shardwell.module.parameter import owner_of
from shardwell.wrapping.default_policy import BlockPolicy
from shardwell.wrapping.memory_strategy import MemoryOptions, MemoryStrategy, prepare_session, resolve, save_less
from shardwell.wrapping.tiled_linear import Tile
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.session import Session

_READS_CHILDREN = (nn.MultiheadAttention,)
"""Their forward reads the parameters of their children without calling them."""


class WrapPolicy(Protocol):
    """Chooses the modules that become units."""

    def choose(self, candidates: Sequence[nn.Module]) -> Collection[nn.Module]:
        """Some of the candidates.

        Args:
            candidates: The modules inside the model that can be units, each after all modules inside it.
        """
        ...


@dataclass(frozen=True)
class NoWrapPolicy:
    """One unit for the whole model."""

    def choose(self, candidates: Sequence[nn.Module]) -> Collection[nn.Module]:
        return []


@dataclass(frozen=True)
class ModuleTypePolicy:
    """A unit for every module of some types, such as ``{TransformerBlock}``.

    Args:
        module_types: The types; subclasses count.
    """

    module_types: Collection[type[nn.Module]]

    def __post_init__(self) -> None:
        if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in self.module_types):
            raise UsageError(f"ModuleTypePolicy({self.module_types!r}): expected classes of modules")

    def choose(self, candidates: Sequence[nn.Module]) -> Collection[nn.Module]:
        return [module for module in candidates if isinstance(module, tuple(self.module_types))]


@dataclass(frozen=True)
class CustomPolicy:
    """A unit for every module for which a function says so.

    Args:
        function: Called with each candidate.
    """

    function: Callable[[nn.Module], bool]

    def choose(self, candidates: Sequence[nn.Module]) -> Collection[nn.Module]:
        return [module for module in candidates if self.function(module)]


@dataclass(frozen=True)
class SizePolicy:
    """A unit for every module with enough parameters that are in no inner unit.

    Parameters of smaller modules go to the unit around them.

    Args:
        min_num_params: Number of elements.
    """

    min_num_params: int

    def __post_init__(self) -> None:
        if self.min_num_params < 1:
            raise UsageError(f"SizePolicy(min_num_params={self.min_num_params}): expected at least 1")

    def choose(self, candidates: Sequence[nn.Module]) -> Collection[nn.Module]:
        chosen: list[nn.Module] = []
        taken: set[int] = set()
        for module in candidates:
            own = [parameter for parameter in module.parameters() if owner_of(parameter) is None]
            left = {id(parameter): parameter.numel() for parameter in own if id(parameter) not in taken}
            if sum(left.values()) >= self.min_num_params:
                chosen.append(module)
                taken.update(left)
        return chosen


def auto_wrap(
    model: nn.Module,
    session: HasUnits,
    policy: WrapPolicy | None = None,
    *,
    ignored_params: Collection[nn.Parameter] = (),
    memory: MemoryStrategy | MemoryOptions | None = None,
    **options: Any,
) -> Any:
    """Calls ``fully_shard`` on the modules that a policy chooses, inner ones first, and on the model.

    Units and parameters get their names in the model; the last unit, which takes what is left, is
    named for the model's class. A module that shares a parameter with one outside it is not made a
    unit: its parameters go to the unit around both. Modules that are sharded already stay as they are.
    The tiles of a ``TiledLinear`` are units under every policy.

    Args:
        model: The whole model.
        session: Where the parameters go.
        policy: ``SizePolicy``, ``ModuleTypePolicy``, ``CustomPolicy``, ``NoWrapPolicy`` or the like. None:
            the model's repeated blocks and what is as large as one, see ``default_policy.BlockPolicy``.
        ignored_params: Parameters to leave alone: they stay ordinary ones in this process.
        memory: How much time to give for memory, such as ``MemoryStrategy.STANDARD``, or
            ``MemoryStrategy.EXTREME.options(offload_to="/scratch")``. For the first model of a session.
        **options: Further ones of ``fully_shard``, for every unit, such as ``strategy`` or ``mp_policy``; they have
            precedence over ``memory``.

    Returns:
        The model.
    """
    saving = None if memory is None else resolve(memory)
    if saving is not None:
        prepare_session(cast("Session", session), saving)
        options = {**saving.of_units(options), **options}
    options["ignored_params"] = ignored_params
    chosen = choose_units(model, policy, ignored_params)
    for name, module in chosen:
        shard_modules([module], session.units, name=name, prefixes=[f"{name}."], **options)
    root = session.units.unused_name(type(model).__name__)
    shard_modules([model], session.units, name=root, prefixes=[""], **options)
    if saving is not None:
        save_less([module for _, module in chosen], saving)
    return model


def choose_units(
    model: nn.Module, policy: WrapPolicy | None = None, ignored_params: Collection[nn.Parameter] = ()
) -> list[tuple[str, nn.Module]]:
    """The modules inside a model that ``auto_wrap`` makes units, each after all inside it, with their names."""
    candidates = dict(_candidates(model, ignored_params))
    chosen = {id(module) for module in (policy or BlockPolicy(model)).choose(list(candidates.values()))}
    return [(name, module) for name, module in candidates.items() if id(module) in chosen or isinstance(module, Tile)]


def _candidates(model: nn.Module, ignored: Collection[nn.Parameter]) -> Iterator[tuple[str, nn.Module]]:
    """Modules inside a model that can be units, each after all modules inside it, with their names."""
    left_alone = {id(parameter) for parameter in ignored}
    holders = _count_holders(model)
    for name, module in _inner_first(model, "", {id(model)}):
        own = {key: count for key, count in _count_holders(module).items() if key not in left_alone}
        is_tied_to_outside = any(holders[parameter] > count for parameter, count in own.items())
        if has_forward(module) and not isinstance(module, ShardedModule) and not is_tied_to_outside:
            yield name, module


def _inner_first(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            full_name = f"{name}.{child_name}" if name else child_name
            if not isinstance(child, _READS_CHILDREN):
                yield from _inner_first(child, full_name, seen)
            yield full_name, child


def _count_holders(module: nn.Module) -> Counter[int]:
    """How many places in a module hold each parameter, by the parameter's id."""
    return Counter(
        id(parameter) for part in module.modules() for parameter in part._parameters.values() if parameter is not None
    )
