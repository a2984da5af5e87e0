"""``fully_shard``: what is done to a module, in order, to move its parameters to the servers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from torch import nn

from shardwell.module import guards
from shardwell.module.collect import collect_parameters
from shardwell.module.hooks import hooked_method
from shardwell.module.initialization import InitFunction, ValueSource, fill_ignored, plan_values
from shardwell.module.meta import made_real
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy, attach_casts, cast_buffers, casting_method
from shardwell.module.sharded_module import ShardedModule, Sharding, make_sharded, sharding_of
from shardwell.module.strategy import ReplicaOptions, ShardingStrategy, check_strategy
from shardwell_wire.layout import UnitLayout

if TYPE_CHECKING:
    from shardwell.module.units import Units

Placement = Literal["flat", "tensor"]

Shardable = TypeVar("Shardable", bound=nn.Module | Sequence[nn.Module])


class HasUnits(Protocol):
    """What ``fully_shard`` needs of a session."""

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

    Call it bottom-up, as FSDP2's: all parameters in the module that no earlier call took become one
    unit, gathered and freed together. Buffers stay. Every trainer calls it for the same modules in the
    same order, whatever values they hold: all get those of the first rank.

    The parameter objects stay. While freed they have shape, dtype, gradient and hooks, and raise
    ``FreedParameterError`` when their values are used. A gradient that was pushed is on the servers:
    ``parameter.grad`` is None then. Values change by ``optimizer.step()`` only; a write in between
    raises. A backward gathers a unit again wherever the graph reads its parameters, also for a penalty
    computed between ``unshard`` and ``reshard``, or a tensor that left the forward in a list or by a hook. Where that
    cannot be noticed, such as for a product with ``parameter.detach()``, the backward raises ``FreedParameterError``.
    Under
    ``torch.autocast`` autograd keeps a cast copy of every weight until the backward, which no freeing
    of parameters can avoid: use ``mp_policy``.

    Args:
        module: A module, or several that share one unit, such as an embedding and the head tied to it.
        session: Where the parameters go.
        reshard_after_forward: Whether to free the parameters after the forward. The default is to do so,
            except for the unit around all others when gradients are needed: its backward comes at once.
        strategy: How long the weights stay in this trainer; ``set_sharding_strategy`` changes it later. The default
            is what ``reshard_after_forward`` says.
        replica: With ``ShardingStrategy.NO_SHARD``: how gradients travel.
        mp_policy: What to compute in; the values on the servers keep their dtype.
        ignored_params: Parameters to leave alone.
        name: The unit's name in the run, under which parameters are inspected; by default the class
            and a count, such as ``Block-0``. ``auto_wrap`` gives the names in the model.
        placement: How the unit is cut over servers. ``flat``: evenly. ``tensor``: between parameters, as the
            optimizers need that work on whole tensors, such as ``Muon``.
        source: Where values come from that the run starts with: ``shardwell.from_safetensors(model, path)``,
            ``shardwell.init.drawn(model)``, or a function that initialises a module's own parameters and buffers in
            place. By default parameters keep the values they hold, and modules on the meta device are
            initialised by their ``reset_parameters``, with the run's seed.
        device: Where the module is computed with, for what is on the meta device.

    Returns:
        What was passed: its class is changed in place to a subclass with the methods of ``ShardedModule``.

    Raises:
        TiedParameterError: A parameter is shared with another unit.
        UsageError: The module can not be sharded; the message says why.
        ShardwellError: The run refused the unit.
    """
    guards.check_session(session)
    guards.check_batch_norm([module] if isinstance(module, nn.Module) else list(module), session)
    modules = [module] if isinstance(module, nn.Module) else list(module)
    unit_name = name or session.units.next_name("+".join(type(part).__name__ for part in modules))
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
    """``fully_shard`` with the names decided, but for ``units.name_prefix``, which all begin with.

    A module's parameters are named by its prefix and their names in the module.
    """
    guards.install(units)
    guards.check_ignored(ignored_params)
    guards.check_modules(modules, ignored_params)
    check_strategy(name, strategy, replica, reshard_after_forward)
    found = collect_parameters(modules, [f"{units.name_prefix}{prefix}" for prefix in prefixes], ignored_params)
    meta_device = torch.device(device)
    guards.check_parameters([(entry.names[0], entry.parameter) for entry in found], meta_device)
    unit = None
    # The block of `with torch.device("meta")` may still be open.
    with meta_device, made_real(found, modules, meta_device) as blanks:
        layout = UnitLayout(f"{units.name_prefix}{name}", tuple(entry.describe() for entry in found), placement)
        values = plan_values(source, layout, found, modules, blanks, units.naming)
        if found:
            unit = units.add(layout, found, modules, values, mp_policy)
            unit.settings.reshard_after_forward = reshard_after_forward
        else:
            values.initialize()
    if unit is not None and strategy is not None:
        units.set_strategy(unit, strategy, replica)
    fill_ignored(source, modules)
    units.contain(modules, unit, name, prefixes)
    attach_casts(modules, mp_policy)
    if mp_policy.buffer_dtype is not None:
        cast_buffers(modules, mp_policy.buffer_dtype, lambda part: isinstance(part, ShardedModule))
    for module in modules:
        make_sharded(module, Sharding(units, unit, mp_policy))
        guards.guard_state_dict(module)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Has a method other than ``forward`` gather and free a sharded module's parameters too.

    Args:
        module: A sharded module.
        method_name: Such as ``generate``.
    """
    sharding = sharding_of(module)
    method = getattr(module, method_name)
    if sharding.unit is not None:
        method = hooked_method(sharding.unit, sharding.units, module, method_name)
    setattr(module, method_name, casting_method(method, sharding.policy))
