"""``fully_shard`` and the methods that it gives to modules; names and meanings are FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar

import torch
from torch import nn

from shardwell.module import guards
from shardwell.module.collect import collect_parameters
from shardwell.module.hooks import hooked_method
from shardwell.module.initialization import InitFunction, ValueSource, fill_ignored, plan_values
from shardwell.module.meta import made_real
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy, attach_casts, cast_buffers, casting_method
from shardwell.module.strategy import ReplicaOptions, ShardingStrategy, check_strategy
from shardwell.module.unit import Unit
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout

if TYPE_CHECKING:
    from shardwell.module.units import Units

Placement = Literal["flat", "tensor"]

Shardable = TypeVar("Shardable", bound=nn.Module | Sequence[nn.Module])

_STATE = "_shardwell_sharding"


class HasUnits(Protocol):
    """What ``fully_shard`` needs of a session."""

    @property
    def units(self) -> Units: ...


@dataclass(frozen=True, slots=True)
class _Sharding:
    """What a sharded module knows of itself."""

    units: Units
    unit: Unit | None
    """None if all its parameters belong to nested units, or it has none."""
    policy: MixedPrecisionPolicy = AS_STORED


class UnshardHandle:
    """A gather that ``module.unshard(async_op=True)`` started."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Waits until the parameters are usable."""
        self._unit.unshard()


class ShardedModule(nn.Module):
    """What ``fully_shard`` adds to a module's class. Not made by hand."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters; they stay until ``reshard`` or the end of a forward or backward.

        Args:
            async_op: Return at once, with a handle to wait on.
        """
        unit = _sharding(self).unit
        if unit is None:
            return None
        _sharding(self).units.gathering.start(unit)
        if async_op:
            return UnshardHandle(unit)
        unit.unshard()
        return None

    def reshard(self) -> None:
        """Frees this module's parameters, unless a forward or backward is using them."""
        sharding = _sharding(self)
        if sharding.unit is not None:
            sharding.units.free_unused(sharding.unit, thorough=True)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether gradients are pushed at the end of each backward, or kept and summed here until one that is.

        What is still here at the end of a step is pushed then.
        """
        for unit in _units_in(self, recurse):
            unit.settings.requires_gradient_sync = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As of DDP and FSDP1: gradients of backwards in it are kept here, and pushed with the next ones after it."""
        before = {unit: unit.settings.requires_gradient_sync for unit in _units_in(self, recurse=True)}
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, requires_gradient_sync in before.items():
                unit.settings.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool | None, recurse: bool = True) -> None:
        """Whether parameters are freed after a forward and gathered again for the backward; None: as by default.

        Raises:
            UsageError: A unit has a strategy that says otherwise; nothing is changed.
        """
        units = list(_units_in(self, recurse))
        for unit in units:
            check_strategy(unit.name, unit.settings.strategy, None, reshard_after_forward)
        for unit in units:
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_sharding_strategy(
        self,
        strategy: ShardingStrategy | None,
        recurse: bool = True,
        *,
        replica: ReplicaOptions | None = None,
    ) -> None:
        """Changes between steps how long weights stay in this trainer; the results are the same bits.

        Trainers need not agree on it.

        Args:
            strategy: None: what ``fully_shard`` does when it is not told.
            recurse: Also for the units inside this module.
            replica: With ``NO_SHARD``: how gradients travel.

        Raises:
            UsageError: ``reshard_after_forward`` was chosen and says otherwise, or a forward or backward is running.
            CapacityError: ``HYBRID_SHARD``, and the host has too little shared memory.
        """
        units = list(_units_in(self, recurse))
        for unit in units:
            check_strategy(unit.name, strategy, replica, unit.settings.reshard_after_forward)
        for unit in units:
            _sharding(self).units.set_strategy(unit, strategy, replica)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after a backward; the end of a step frees them anyway."""
        for unit in _units_in(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward frees what was gathered ahead and not used."""
        _sharding(self).units.is_last_backward = is_last_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Sharded modules to gather ahead while this one computes forward, instead of those observed to follow."""
        self._require_unit().settings.forward_prefetch = _prefetch_list(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Sharded modules to gather ahead while this one computes backward, instead of those observed to follow."""
        self._require_unit().settings.backward_prefetch = _prefetch_list(modules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that are still here.

        Raises:
            UsageError: Some are on the servers already: ``optimizer.zero_grad()`` drops those too.
        """
        guards.refuse_zero_grad_after_push(list(_units_in(self, recurse=True)))
        super().zero_grad(set_to_none)
        for unit in _units_in(self, recurse=True):
            unit.precision.drop()

    def _require_unit(self) -> Unit:
        unit = _sharding(self).unit
        if unit is None:
            raise UsageError(f"{type(self).__name__} has no parameters of its own to gather: all are in nested units")
        return unit

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Raises: ``fully_shard`` has made modules on the meta device real, and buffers would lose their values."""
        raise UsageError(
            "to_empty after fully_shard: fully_shard(..., device=...) has made modules on the meta device real, with "
            "the values of their reset_parameters or of source=..."
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedModule:
        with guards.converted(list(_units_in(self, recurse)), fn):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        guards.refuse_copy(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        guards.refuse_copy(self)


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
    raises. A forward may hand out results as return values, by changing arguments and as attributes of
    its modules; a tensor handed out in another way must not be differentiated. Under
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
    units.contain(modules, unit)
    attach_casts(modules, mp_policy)
    if mp_policy.buffer_dtype is not None:
        cast_buffers(modules, mp_policy.buffer_dtype, lambda part: isinstance(part, ShardedModule))
    for module in modules:
        setattr(module, _STATE, _Sharding(units, unit, mp_policy))
        module.__class__ = _sharded_class(type(module))
        guards.guard_state_dict(module)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Has a method other than ``forward`` gather and free a sharded module's parameters too.

    Args:
        module: A sharded module.
        method_name: Such as ``generate``.
    """
    sharding = _sharding(module)
    method = getattr(module, method_name)
    if sharding.unit is not None:
        method = hooked_method(sharding.unit, sharding.units, module, method_name)
    setattr(module, method_name, casting_method(method, sharding.policy))


_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _sharded_classes:
        name, namespace = f"Sharded{original.__name__}", {"__module__": original.__module__}
        _sharded_classes[original] = type(name, (ShardedModule, original), namespace)
    return _sharded_classes[original]


def _sharding(module: nn.Module) -> _Sharding:
    sharding: _Sharding | None = getattr(module, _STATE, None)
    if sharding is None:
        raise UsageError(f"{type(module).__name__} is not sharded: call fully_shard on it first")
    return sharding


def _units_in(module: nn.Module, recurse: bool) -> Iterator[Unit]:
    """The units of a sharded module and, if asked, of those inside it; each once."""
    found: dict[Unit, None] = {}
    for part in module.modules() if recurse else [module]:
        if isinstance(part, ShardedModule) and (unit := _sharding(part).unit) is not None:
            found[unit] = None
    return iter(found)


def _prefetch_list(modules: Sequence[nn.Module]) -> tuple[Unit, ...]:
    units = (_sharding(module).unit for module in modules)
    return tuple(unit for unit in units if unit is not None)
