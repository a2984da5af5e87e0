"""``fully_shard``: the steps that move a module's parameters to the servers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwell.module import guards, torch_patches
from shardwell.module.hooks import hook_modules, hooked_method, keep_attribute
from shardwell.module.initialization import InitFunction, ValueSource, fill_ignored, plan_values
from shardwell.module.materialization import materialized
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy, attach_casts, cast_buffers, casting_method
from shardwell.module.naming import plan_units
from shardwell.module.sharded_module import ShardedModule, Sharding, make_sharded, sharding_of
from shardwell.module.strategy import ReplicaOptions, ShardingStrategy, check_strategy
from shardwell.module.unit import Unit, owner_of
from shardwell.module.unit_parameters import FoundParameter, Site
from shardwell.module.units import Units
from shardwell_wire.errors import TiedParameterError, UsageError

Placement = Literal["flat", "tensor"]

Shardable = TypeVar("Shardable", bound=nn.Module | Sequence[nn.Module])


class HasUnits(Protocol):
    """The part of a session that ``fully_shard`` uses."""

    @property
    def units(self) -> Units: ...


def fully_shard(
    module: Shardable,
    session: HasUnits,
    *,
    reshard_after_forward: bool | None = None,
    strategy: ShardingStrategy | None = None,
    replica: ReplicaOptions | None = None,
    mp_policy: MixedPrecisionPolicy = AS_STORED,
    ignored_params: Collection[nn.Parameter] = (),
    name: str | None = None,
    placement: Placement = "flat",
    source: ValueSource | InitFunction | None = None,
    device: torch.device | str = "cpu",
) -> Shardable:
    """Moves a module's parameters to the shard servers; they are gathered when the module runs.

    Call this function bottom-up, as in FSDP2: all parameters in the module that no earlier call took become one unit,
    which is gathered and freed as a whole. Buffers stay in the trainer. Every trainer calls this function for the same
    modules in the same order. All trainers get the initial values of the first rank.

    Split a module by tensor parallelism before this call. The parts of its split parameters become a second unit, whose
    name ends with ``@tp`` and the tensor-parallel rank. Plain parameters must be equal on all tensor-parallel ranks.

    The parameter objects stay in the module. While freed, they have shape, dtype, gradient and hooks, and raise
    ``FreedParameterError`` if their values are used. After a gradient was pushed to the servers, ``parameter.grad`` is
    None. Only ``optimizer.step()`` changes values; a write in between raises. A backward gathers a unit again wherever
    the graph reads its parameters, also for a penalty that was computed between ``unshard`` and ``reshard``, and for a
    tensor that left the forward in a list or by a hook. Some reads cannot be noticed, such as a product with
    ``parameter.detach()``: the backward then raises ``FreedParameterError``.

    Any thread may use the module, one at a time: a use that overlaps another thread's use or step raises.

    Under ``torch.autocast``, autograd keeps a cast copy of every weight until the backward, which freeing parameters
    does not avoid: use ``mp_policy``.

    Args:
        module: A module, or several that become one unit, such as an embedding and the head that is tied to it.
        session: The session that holds the parameters.
        reshard_after_forward: Whether to free the parameters after the forward. By default they are freed, except those
            of the root unit when gradients are needed: its backward follows immediately.
        strategy: How long the weights stay in this trainer; ``set_sharding_strategy`` changes it later. The default
            follows ``reshard_after_forward``.
        replica: With ``ShardingStrategy.NO_SHARD``: how gradients are pushed.
        mp_policy: The dtypes to compute in; the values on the servers keep their dtype.
        ignored_params: Parameters to leave alone.
        name: The unit's name in the run, under which parameters are inspected. The default is the class and a number,
            such as ``Block-0``. ``auto_wrap`` uses the names in the model. Required in a run with several pipeline
            stages.
        placement: How the unit is divided among servers. ``flat``: evenly. ``tensor``: between parameters, for
            optimizers that need whole tensors, such as ``Muon``.
        source: Source of the values that a new run starts with: ``shardwell.from_safetensors(model, path)``,
            ``shardwell.init.drawn(model)``, or a function that initialises a module's own parameters and buffers in
            place. By default parameters keep their values, and modules on the meta device are initialised by their
            ``reset_parameters``, with the run's seed.
        device: The device to compute on, for modules on the meta device.

    Returns:
        The argument: its class is changed in place to a subclass with the methods of ``ShardedModule``.

    Raises:
        TiedParameterError: A parameter is shared with another unit.
        UsageError: The module cannot be sharded; the message gives the reason.
        ShardwellError: The run refused the unit.
    """
    guards.check_session(session)
    guards.check_batch_norm([module] if isinstance(module, nn.Module) else list(module), session)
    modules = [module] if isinstance(module, nn.Module) else list(module)
    class_name = "+".join(type(part).__name__ for part in modules)
    session.units.place.require_unique(name, class_name)
    unit_name = name or session.units.next_name(class_name)
    shard_modules(
        modules,
        session.units,
        name=unit_name,
        prefixes=[f"{unit_name}."] if len(modules) == 1 else [f"{unit_name}.{index}." for index in range(len(modules))],
        ignored_params=ignored_params,
        reshard_after_forward=reshard_after_forward,
        strategy=strategy,
        replica=replica,
        mp_policy=mp_policy,
        placement=placement,
        source=source,
        device=device,
    )
    return module


def shard_modules(
    modules: Sequence[nn.Module],
    units: Units,
    *,
    name: str,
    prefixes: Sequence[str],
    ignored_params: Collection[nn.Parameter] = (),
    reshard_after_forward: bool | None = None,
    strategy: ShardingStrategy | None = None,
    replica: ReplicaOptions | None = None,
    mp_policy: MixedPrecisionPolicy = AS_STORED,
    placement: Placement = "flat",
    source: ValueSource | InitFunction | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Implements ``fully_shard`` for given names of the unit and its modules.

    Args:
        name: Name of the unit.
        prefixes: Prefix of each module's parameter names.
    """
    torch_patches.watch(units)
    guards.check_ignored(ignored_params)
    guards.check_modules(modules, ignored_params)
    check_strategy(name, strategy, replica, reshard_after_forward)
    found = collect_parameters(modules, prefixes, ignored_params)
    meta_device = torch.device(device)
    guards.check_parameters([(entry.names[0], entry.parameter) for entry in found], meta_device)
    planned = plan_units(name, found, placement, units.place)
    found = [entry for unit in planned for entry in unit.found]
    made: list[Unit] = []
    handles: list[RemovableHandle] = []
    # Overrides an enclosing `with torch.device("meta")`.
    with meta_device, materialized(found, modules, meta_device) as blanks:
        values = plan_values(source, name, planned, modules, blanks, units.init_seed)
        for each, new_values in zip(planned, values.units, strict=True):
            unit = units.add(each.layout, each.found, modules, new_values, mp_policy)
            handles += hook_modules(unit, units)
            unit.settings.reshard_after_forward = reshard_after_forward
            made.append(unit)
        if not planned:
            values.initialize_buffers()
    if strategy is not None:
        for unit in made:
            units.set_strategy(unit, strategy, replica)
    fill_ignored(source, modules)
    units.register_modules(modules, made, name, prefixes)
    handles += attach_casts(modules, mp_policy)
    if mp_policy.buffer_dtype is not None:
        cast_buffers(modules, mp_policy.buffer_dtype, lambda part: isinstance(part, ShardedModule))
    for module in modules:
        own = [*handles, *guards.guard_state_dict(module)]
        make_sharded(module, Sharding(units, tuple(made), mp_policy, [handle.remove for handle in own]))


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method other than ``forward`` gather and free a sharded module's parameters.

    Args:
        module: A sharded module.
        method_name: Name of the method, such as ``generate``.
    """
    sharding = sharding_of(module)
    sharding.undo.append(keep_attribute(module, method_name))
    for unit in sharding.own_units:
        setattr(module, method_name, hooked_method(unit, sharding.units, module, method_name))
    method = getattr(module, method_name)
    setattr(module, method_name, casting_method(method, sharding.policy))


def collect_parameters(
    modules: Sequence[nn.Module], prefixes: Sequence[str], ignored: Collection[nn.Parameter]
) -> list[FoundParameter]:
    """Returns the parameters of modules, without those that belong to a unit; each once, in the order of the modules.

    Args:
        modules: The modules of one ``fully_shard`` call.
        prefixes: Prefix of each module's parameter names.
        ignored: Parameters to leave alone.

    Raises:
        TiedParameterError: A parameter also belongs to another unit.
        UsageError: The parameters belong to the unit of a module that contains these modules.
    """
    inside = {id(part) for module in modules for part in module.modules()}
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, FoundParameter] = {}
    for name, site, parameter in _named_sites(modules, prefixes):
        if id(parameter) in ignored_ids:
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
    """Raises unless a sharded parameter belongs to the unit of a module inside the given modules."""
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
        f"parameter {name!r} already belongs to unit {owner.unit.name!r}: {advice}",
        parameter=name,
        unit=owner.unit.name,
    )
