"""``auto_wrap`` applies ``fully_shard`` to a whole model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from shardwell.module.fully_shard import HasUnits, fully_shard, shard_modules
from shardwell.module.guards import check_batch_norm, check_ignored, check_modules, check_session
from shardwell.module.sharded_module import ShardedModule
from shardwell.session.session import Session
from shardwell.wrapping.candidates import Candidates, Ties, named_candidates
from shardwell.wrapping.memory_strategy import (
    MemoryOptions,
    MemoryStrategy,
    configure_session,
    resolve,
    wrap_activations,
)
from shardwell.wrapping.policies import BlockPolicy, CustomPolicy, GroupPolicy, ModuleTypePolicy, WrapPolicy
from shardwell.wrapping.tiled_linear import Tile
from shardwell_wire.errors import TiedParameterError, UsageError


def auto_wrap(
    model: nn.Module,
    session: HasUnits,
    policy: WrapPolicy | None = None,
    *,
    ignored_params: Collection[nn.Parameter] = (),
    memory: MemoryStrategy | MemoryOptions | None = None,
    **options: Any,
) -> Any:
    """Calls ``fully_shard`` on the modules that a policy chooses, inner modules first, and then on the model.

    Units and parameters are named after the modules in the model. The last unit takes all remaining parameters and is
    named after the model's class, followed by ``:pp`` and the stage if the run has several pipeline stages. A module
    that shares a parameter or a submodule with a module outside it does not become a unit: its parameters belong to the
    unit around both. Modules that are already sharded do not change. The tiles of a ``TiledLinear`` become units under
    every policy.

    Args:
        model: The whole model.
        session: The session that stores the parameters.
        policy: ``SizePolicy``, ``ModuleTypePolicy``, ``CustomPolicy``, ``NoWrapPolicy`` or another ``WrapPolicy``.
            None: ``BlockPolicy``, which chooses the model's repeated blocks and modules of at least their size.
        ignored_params: Parameters that stay ordinary parameters of this process.
        memory: How much memory to save at the cost of time, such as ``MemoryStrategy.STANDARD`` or
            ``MemoryStrategy.EXTREME.options(offload_to="/scratch")``. Only for the first model of a session.
        **options: Further arguments of ``fully_shard`` for every unit, such as ``strategy`` or ``mp_policy``. They take
            precedence over ``memory``.

    Returns:
        The model.

    Raises:
        UsageError: The model is already sharded or cannot be sharded; the message says why.
    """
    ignored_params = list(ignored_params)
    check_ignored(ignored_params)
    check_modules([model], ignored_params)
    check_session(session)
    check_batch_norm([model], session)
    _check_policy(policy)
    _check_options(options)
    saving = None if memory is None else resolve(memory)
    chosen = choose_units(model, policy, ignored_params)
    if not chosen and isinstance(policy, ModuleTypePolicy | CustomPolicy) and not _holds_units(model):
        _warn_of_one_unit(model, policy)
    if saving is not None:
        configure_session(cast("Session", session), saving)
        options = {**saving.unit_arguments(options), **options}
    options["ignored_params"] = ignored_params
    for unit in chosen:
        prefixes = [f"{name}." for name in unit.modules]
        shard_modules(list(unit.modules.values()), session.units, name=unit.name, prefixes=prefixes, **options)
    root = session.units.unused_name(session.units.place.root_name(type(model).__name__))
    shard_modules([model], session.units, name=root, prefixes=[""], **options)
    if saving is not None:
        wrap_activations([module for unit in chosen for module in unit.modules.values()], saving)
    return model


def _check_policy(policy: object) -> None:
    if policy is not None and (isinstance(policy, type) or not callable(getattr(policy, "choose", None))):
        raise UsageError(
            f"policy={policy!r}: expected a policy such as SizePolicy(min_num_params=1_000_000), "
            "ModuleTypePolicy({Block}), CustomPolicy(function) or NoWrapPolicy(), or None for the default policy"
        )


def _check_options(options: Mapping[str, object]) -> None:
    known = inspect.signature(fully_shard).parameters.keys() - {"module", "session", "name", "ignored_params"}
    for name in options:
        if name not in known:
            raise UsageError(f"auto_wrap({name}=...): expected one of {', '.join(sorted(known))}, policy or memory")


def _holds_units(model: nn.Module) -> bool:
    return any(isinstance(module, ShardedModule) for module in model.modules())


def _warn_of_one_unit(model: nn.Module, policy: WrapPolicy) -> None:
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in model.modules() if module is not model))
    warnings.warn(
        f"{policy} chooses no module of {type(model).__name__}, so the whole model is one unit, which trainers gather "
        f"as a whole. The model has {kinds or 'no modules'}. If you want one unit, use NoWrapPolicy(). Without a "
        "policy, auto_wrap finds the model's blocks",
        stacklevel=3,
    )


@dataclass(frozen=True)
class ChosenUnit:
    """Modules that become one unit."""

    name: str
    modules: Mapping[str, nn.Module]
    """Modules by their names in the model."""


def choose_units(
    model: nn.Module, policy: WrapPolicy | None = None, ignored_params: Collection[nn.Parameter] = ()
) -> list[ChosenUnit]:
    """Returns the units that ``auto_wrap`` makes inside a model. Every unit comes after all units inside it.

    Raises:
        UsageError: The policy groups modules that cannot form one unit.
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
                    "name for the outer module only, which includes all modules inside it",
                    unit=name,
                )
        if ties.lead_outside(modules):
            kinds = ", ".join(type(module).__name__ for module in modules)
            raise TiedParameterError(
                f"the unit {name!r} of {kinds} shares a parameter with a module outside it: return {name!r} for that "
                "module too",
                unit=name,
            )


def _inner_first(units: Sequence[ChosenUnit], order: Sequence[str]) -> list[ChosenUnit]:
    """Returns units in the order of their modules, but every unit after all units inside it."""
    position = {name: number for number, name in enumerate(order)}
    ordered = sorted(units, key=lambda unit: min(position[name] for name in unit.modules))
    done: dict[str, ChosenUnit] = {}
    for unit in ordered:
        _add(unit, ordered, done)
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
    """Removes units with a submodule that is also in another module, unless the submodule is a unit itself."""
    kept: list[ChosenUnit] = []
    taken: set[int] = set()
    for unit in units:
        modules = list(unit.modules.values())
        if not ties.shared_outside(modules, taken):
            kept.append(unit)
            taken.update(id(parameter) for module in modules for parameter in module.parameters())
    return kept
