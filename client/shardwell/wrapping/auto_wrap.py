"""``auto_wrap`` applies ``fully_shard`` to a whole model; ``unwrap`` makes the model an ordinary one again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from shardwell.memory.buffers import trim
from shardwell.module.fully_shard import ShardedModule, fully_shard, make_plain, shard_modules, sharding_of
from shardwell.module.gradients import with_gradients
from shardwell.module.guards import check_batch_norm, check_ignored, check_modules, check_session
from shardwell.module.unit import Unit
from shardwell.session.session import Session, settle
from shardwell.wrapping.experts import experts_of
from shardwell.wrapping.policies import (
    BlockPolicy,
    Candidates,
    CustomPolicy,
    GroupPolicy,
    MemoryOptions,
    MemoryStrategy,
    ModuleTypePolicy,
    Ties,
    WrapPolicy,
    configure_session,
    named_candidates,
    resolve,
    wrap_activations,
)
from shardwell.wrapping.tiled_linear import Tile
from shardwell_wire.errors import TiedParameterError, UsageError

Model = TypeVar("Model", bound=nn.Module)


def unwrap(module: Model, *, device: torch.device | str | None = None) -> Model:
    """Makes a sharded model an ordinary module again, which holds the committed values.

    Reverts ``auto_wrap`` and ``fully_shard`` in place: the parameter objects stay in their modules and become ordinary
    parameters with memory of their own, in the dtype of the servers. The modules get their classes back, and lose the
    hooks, the wrapped forwards of ``memory=`` and the methods of ``register_forward_method``. Tied parameters stay
    tied, and buffers keep their values. The model can be evaluated, copied, saved, exported and compiled, also after
    the session is closed.

    Units are gathered one after another: beside the model itself, the memory of one unit is needed. A model that
    tensor parallelism splits stays split: its parameters stay ``DTensor`` objects, for the same mesh. Of a pipeline,
    each trainer unwraps its own stages.

    The run is not changed. To go on training in the same session, wrap the model again in the same way: its parameters
    then get the run's values, and what was written to them is lost. Optimizers of the model can be used again.

    Args:
        module: A sharded module, or a model with sharded modules inside.
        device: The device to move the model to. None: parameters stay on the device on which they compute.

    Returns:
        The argument.

    Raises:
        UsageError: No part of the module is sharded; a unit also has modules elsewhere; or the model is in the middle
            of a step.
        ShardwellError: The values cannot be gathered. The units before the failed one are ordinary already; the call
            can be repeated.
    """
    parts = [part for part in module.modules() if isinstance(part, ShardedModule)]
    if not parts:
        raise UsageError(f"{type(module).__name__} has no sharded module: there is nothing to unwrap")
    sharded = {unit: sharding_of(part).units for part in parts for unit in sharding_of(part).own_units}
    sharded = {unit: units for unit, units in sharded.items() if units.has(unit)}  # a repeated call finds the others
    _check_complete(module, sharded)
    settle(parameter for unit in sharded for parameter in unit.parameters[:1])
    for unit in sharded:
        _check_idle(unit)
    for unit, units in sharded.items():
        unit.detach_parameters(device)
        units.remove(unit)
        trim()  # transfers fragment the heap, which would add up over the units
    for part in parts:
        sharding_of(part).units.forget_module(part)
        make_plain(part)
    return module if device is None else module.to(device)


def _check_complete(module: nn.Module, units: Iterable[Unit]) -> None:
    """Raises UsageError if a unit has modules outside the given one."""
    inside = {id(part) for part in module.modules()}
    for unit in units:
        outside = [type(part).__name__ for part in unit.modules if id(part) not in inside]
        if outside:
            raise UsageError(
                f"unit {unit.name!r} also has the modules {', '.join(outside)}, which are outside "
                f"{type(module).__name__}: unwrap a module that contains all modules of the unit",
                unit=unit.name,
            )


def _check_idle(unit: Unit) -> None:
    """Raises UsageError if a unit is in use, or has gradients that are not committed."""
    if unit.usage or unit.pushed or with_gradients([unit]):
        raise UsageError(
            f"unit {unit.name!r} is in the middle of a step: call unwrap after optimizer.step(), or after "
            "optimizer.zero_grad() to drop the step's gradients",
            unit=unit.name,
        )


def auto_wrap(
    model: nn.Module,
    session: Any,
    policy: WrapPolicy | None = None,
    *,
    ignored_params: Collection[nn.Parameter] = (),
    memory: MemoryStrategy | MemoryOptions | None = None,
    experts: Collection[type[nn.Module]] = (),
    **options: Any,
) -> Any:
    """Calls ``fully_shard`` on the modules that a policy chooses, inner modules first, and then on the model.

    Units and parameters are named after the modules in the model. The last unit takes all remaining parameters and is
    named after the model's class, followed by ``:pp`` and the stage if the run has several pipeline stages. If an
    earlier model of the session has one of these names, the name of the last unit precedes them all. A module
    that shares a parameter or a submodule with a module outside it does not become a unit: its parameters belong to the
    unit around both. Modules that are already sharded do not change. The tiles of a ``TiledLinear`` and the experts of
    ``split_experts`` become units under every policy.

    Args:
        model: The whole model.
        session: The session that stores the parameters.
        policy: ``SizePolicy``, ``ModuleTypePolicy``, ``CustomPolicy``, ``NoWrapPolicy`` or another ``WrapPolicy``.
            None: ``BlockPolicy``, which chooses the model's repeated blocks and modules of at least their size.
        ignored_params: Parameters that stay ordinary parameters of this process.
        memory: How much memory to save at the cost of time, such as ``MemoryStrategy.STANDARD`` or
            ``MemoryStrategy.EXTREME.options(offload_to="/scratch")``. Only for the first model of a session.
        experts: Classes of modules that run for some inputs only. Each becomes a unit under every policy, and is
            gathered only when it runs (``set_predicted(False)``).
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
    _check_experts(model, experts, is_whole=session.units.place.pp == 1)
    saving = None if memory is None else resolve(memory)
    chosen = choose_units(model, policy, ignored_params, experts)
    on_demand = {id(module) for module in experts_of(model, experts)}
    holds_units = any(isinstance(module, ShardedModule) for module in model.modules())
    if not chosen and isinstance(policy, ModuleTypePolicy | CustomPolicy) and not holds_units:
        _warn_of_one_unit(model, policy)
    if saving is not None:
        configure_session(cast("Session", session), saving)
        options = {**saving.unit_arguments(options), **options}
    options["ignored_params"] = ignored_params
    root = session.units.unused_name(session.units.place.root_name(type(model).__name__))
    is_free = session.units.place.pp > 1 or session.units.names_are_free(model, [unit.name for unit in chosen])
    prefix = "" if is_free else f"{root}."
    for unit in chosen:
        prefixes = [f"{prefix}{name}." for name in unit.modules]
        shard_modules(list(unit.modules.values()), session.units, name=prefix + unit.name, prefixes=prefixes, **options)
        for module in unit.modules.values():
            if id(module) in on_demand:
                cast("ShardedModule", module).set_predicted(False)
    shard_modules([model], session.units, name=root, prefixes=[prefix], **options)
    if saving is not None:
        wrap_activations([module for unit in chosen for module in unit.modules.values()], saving)
    for part in model.modules():
        if hasattr(part, "layers_are_rescaled"):
            # RWKV of Transformers divides weights in place when it is evaluated, so that float16 does not overflow.
            # Such writes would be lost. Its results are now those with `config.rescale_every = 0`.
            vars(part)["_rescale_layers"] = lambda: None
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
            raise UsageError(
                f"auto_wrap({name}=...): expected one of {', '.join(sorted(known))}, policy, memory or experts"
            )


def _check_experts(model: nn.Module, experts: Collection[type[nn.Module]], *, is_whole: bool) -> None:
    """Raises UsageError if no module is an expert. A stage of a pipeline may have none."""
    if not (
        isinstance(experts, Collection)
        and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in experts)
    ):
        raise UsageError(f"auto_wrap(experts={experts!r}): expected classes of modules, such as experts={{Expert}}")
    if experts and is_whole and not experts_of(model, experts):
        names = ", ".join(kind.__name__ for kind in experts)
        raise UsageError(
            f"auto_wrap(experts=...): {type(model).__name__} has no module of the class {names}; pass the class of one "
            "expert. If one module holds the parameters of all experts, call "
            "shardwell.wrapping.split_experts(model) instead"
        )


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
    model: nn.Module,
    policy: WrapPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    experts: Collection[type[nn.Module]] = (),
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
    inner = {id(module) for module in experts_of(model, experts)}
    chosen |= {id(module) for module in alone if isinstance(module, Tile) or id(module) in inner}
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

    def add(unit: ChosenUnit) -> None:
        parts = {id(part) for module in unit.modules.values() for part in module.modules()}
        for inner in ordered:
            is_inside = any(id(module) in parts for module in inner.modules.values())
            if is_inside and inner is not unit and inner.name not in done:
                add(inner)
        done.setdefault(unit.name, unit)

    for unit in ordered:
        add(unit)
    return list(done.values())


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
