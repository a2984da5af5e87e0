"""``fully_shard``: moves a module's parameters to the servers, and gives the module methods with FSDP2's names.

``shard_modules`` has the steps. ``ShardedModule`` has the methods. ``Accumulation`` keeps units gathered for several
forwards and backwards, as a pipeline schedule needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwell.module import guards, torch_patches
from shardwell.module.hooks import hook_modules, hooked_method, keep_attribute
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy, attach_casts, cast_buffers, casting_method
from shardwell.module.new_units import (
    InitFunction,
    ValueSource,
    fill_ignored,
    materialized,
    plan_units,
    plan_values,
    tie_of,
)
from shardwell.module.outside_reads import gather_for_reader
from shardwell.module.parameters import FoundParameter, Site, divided
from shardwell.module.passes import ForwardBackward, ThreadGuard
from shardwell.module.residency import UnitSettings
from shardwell.module.strategy import ReplicaOptions, ShardingStrategy, check_strategy
from shardwell.module.unit import Unit, owner_of
from shardwell.module.units import Units
from shardwell_wire.errors import TiedParameterError, UsageError

_STATE = "_shardwell_sharding"

Placement = Literal["flat", "tensor"]

Shardable = TypeVar("Shardable", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: Shardable,
    session: Any,
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
        name: The unit's name in the run. The default is the class and a number, such as ``Block-0``. ``auto_wrap`` uses
            the names in the model. Required in a run with several pipeline stages. Parameters are inspected by their
            names in the module of the outermost call.
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
    units: Units = session.units
    modules = [module] if isinstance(module, nn.Module) else list(module)
    guards.check_batch_norm(modules, session)
    class_name = "+".join(type(part).__name__ for part in modules)
    units.place.require_unique(name, class_name)
    unit_name = name or units.next_name(class_name)
    shard_modules(
        modules,
        units,
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
    torch_patches.watch(units.passes)
    guards.check_ignored(ignored_params)
    guards.check_modules(modules, ignored_params)
    check_strategy(name, strategy, replica, reshard_after_forward)
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise UsageError(
            f"mp_policy={mp_policy!r}: expected a policy of Shardwell, such as "
            "shardwell.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    meta_device = torch.device(device)
    made: list[Unit] = []
    handles: list[RemovableHandle] = []
    # Overrides an enclosing `with torch.device("meta")`.
    with meta_device, divided(modules, ignored_params) as divided_parameters:
        found = collect_parameters(modules, prefixes, ignored_params)
        guards.check_parameters([(entry.names[0], entry.parameter) for entry in found], meta_device)
        planned = plan_units(name, found, placement, units.place)
        found = [entry for unit in planned for entry in unit.found]
        with materialized(found, modules, meta_device) as blanks:
            values = plan_values(source, name, planned, modules, blanks, units.init_seed)
            for each, new_values in zip(planned, values.units, strict=True):
                unit = units.add(each.layout, each.found, modules, new_values, mp_policy)
                handles += hook_modules(unit, units.passes)
                unit.gather_for_reader = functools.partial(gather_for_reader, units.passes)
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
    sharding_of(modules[0]).undo.extend(parts.merge for parts in divided_parameters)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method other than ``forward`` gather and free a sharded module's parameters.

    Args:
        module: A sharded module.
        method_name: Name of the method, such as ``generate``.
    """
    sharding = sharding_of(module)
    sharding.undo.append(keep_attribute(module, method_name))
    for unit in sharding.own_units:
        setattr(module, method_name, hooked_method(unit, sharding.units.passes, module, method_name))
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
        if (tie := tie_of([site])) is not None:
            raise tie.refusal()
        raise TiedParameterError(
            f"parameter {name!r} is tied to {owner.name!r} of unit {owner.unit.name!r}: "
            "put both modules into one unit, fully_shard([a, b], session)",
            parameter=name,
            unit=owner.unit.name,
        )
    holders = [module for module in owner.unit.modules if any(part is site.module for part in module.modules())]
    if any(id(module) in inside for module in holders):
        return
    if (tie := tie_of([site])) is not None:
        raise tie.refusal()
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


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a module is sharded."""

    units: Units
    own_units: tuple[Unit, ...]
    """Units of the module's own parameters. Empty if all its parameters belong to nested units, or it has none. Two if
    tensor parallelism splits some of them."""
    policy: MixedPrecisionPolicy
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Each removes a hook or an attribute that sharding has added, in the order in which they were added."""


class ShardedModule(nn.Module):
    """Methods that ``fully_shard`` adds to a module's class. Not constructed directly."""

    _shardwell_sharding: Sharding

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward with its hooks. No forward stays open, however the call ends."""
        # As `ForwardBackward.call`, without its call: every forward comes here.
        passes = self._shardwell_sharding.units.passes
        guard, num_running = passes.guard, len(passes.running)
        entered = not guard.lock._is_owned() and guard.enter()  # type: ignore[attr-defined]
        try:
            if entered and passes.before_use is not None:
                passes.before_use()
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            passes.abandon(num_running)
            raise
        finally:
            if entered:
                guard.lock.release()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters. They stay until ``reshard`` or the end of a forward or backward.

        Args:
            async_op: Return at once, with a handle whose ``wait`` completes the gather.
        """
        units = sharding_of(self).own_units
        if not units:
            return None
        passes = sharding_of(self).units.passes
        passes.unshard_by_hand(units)
        handle = UnshardHandle(units, passes.guard)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's parameters, unless a forward or backward is using them."""
        sharding = sharding_of(self)
        with sharding.units.passes.guard:
            for unit in sharding.own_units:
                sharding.units.passes.free_unused(unit, thorough=True)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether each backward pushes its gradients, or accumulates them in this process.

        Accumulated gradients are pushed with the next backward that pushes, or at the end of the step.
        """
        for unit in _units_in(self, recurse):
            unit.settings.requires_gradient_sync = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards accumulate gradients in this process. The next backward after it pushes them."""
        before = {unit: unit.settings.requires_gradient_sync for unit in _units_in(self, recurse=True)}
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, requires_gradient_sync in before.items():
                unit.settings.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool | None, recurse: bool = True) -> None:
        """Sets whether parameters are freed after a forward and gathered again for the backward; None: the default.

        Raises:
            UsageError: A unit has a contradicting strategy; nothing is changed.
        """
        units = list(_units_in(self, recurse))
        for unit in units:
            check_strategy(unit.name, unit.settings.strategy, None, reshard_after_forward)
        for unit in units:
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_sharding_strategy(
        self, strategy: ShardingStrategy | None, recurse: bool = True, *, replica: ReplicaOptions | None = None
    ) -> None:
        """Changes how long weights stay in this trainer. Call it between steps. Results stay bit-identical.

        Trainers may use different strategies.

        Args:
            strategy: None: the default of ``fully_shard``.
            recurse: Include the units inside this module.
            replica: With ``NO_SHARD``: how gradients are pushed.

        Raises:
            UsageError: ``reshard_after_forward`` contradicts the strategy, or a forward or backward is running.
            CapacityError: ``HYBRID_SHARD``, and the host has too little shared memory.
        """
        units = list(_units_in(self, recurse))
        for unit in units:
            check_strategy(unit.name, strategy, replica, unit.settings.reshard_after_forward)
        for unit in units:
            sharding_of(self).units.set_strategy(unit, strategy, replica)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether parameters are freed after a backward. The end of a step always frees them."""
        for unit in _units_in(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether the end of the next backward frees units that were prefetched and not used."""
        sharding_of(self).units.passes.is_last_backward = is_last_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Sets the sharded modules to prefetch during this module's forward, instead of the predicted modules."""
        for unit in self._require_units():
            unit.settings.forward_prefetch = _prefetch_list(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Sets the sharded modules to prefetch during this module's backward, instead of the predicted modules."""
        for unit in self._require_units():
            unit.settings.backward_prefetch = _prefetch_list(modules)

    def set_predicted(self, predicted: bool, *, recurse: bool = True) -> None:
        """Sets whether parameters may be gathered ahead because the module ran at this place of an earlier step.

        Set it to False for modules that run for some inputs only, such as experts: they are gathered when they run.
        """
        for unit in _units_in(self, recurse):
            unit.settings.predicted = predicted

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops local gradients, and gradients of earlier steps that the servers keep for another optimizer.

        Raises:
            UsageError: Gradients of this step are on the servers: ``optimizer.zero_grad()`` drops these too.
        """
        guards.refuse_zero_grad_after_push(list(_units_in(self, recurse=True)))
        super().zero_grad(set_to_none)
        for unit in _units_in(self, recurse=True):
            unit.gradients.sums.clear()
            unit.gradients.deferred.clear()
            unit.drop_kept_gradients()

    def _require_units(self) -> tuple[Unit, ...]:
        units = sharding_of(self).own_units
        if not units:
            raise UsageError(
                f"{type(self).__name__} has no parameters of its own to gather: all belong to nested units"
            )
        return units

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Always raises: ``fully_shard`` has already materialized the module, and buffers would lose their values."""
        raise UsageError(
            "to_empty after fully_shard would erase values: fully_shard(..., device=...) has already moved modules "
            "from the meta device, with the values of their reset_parameters or of source=.... Remove the call"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedModule:
        with guards.hidden_parameters(list(_units_in(self, recurse)), fn):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        guards.refuse_copy(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        guards.refuse_copy(self)


class UnshardHandle:
    """Handle of a gather that ``module.unshard(async_op=True)`` started."""

    def __init__(self, units: Sequence[Unit], guard: ThreadGuard) -> None:
        self._units, self._guard = units, guard

    def wait(self) -> None:
        """Waits until the parameters are usable."""
        with self._guard:
            for unit in self._units:
                unit.unshard()
                unit.watch_gradients()


def make_sharded(module: nn.Module, sharding: Sharding) -> None:
    """Changes a module's class in place to a subclass with the methods of ``ShardedModule``."""
    _exclude_from_compilation()
    setattr(module, _STATE, sharding)
    module.__class__ = _sharded_class(type(module))


@functools.cache
def _exclude_from_compilation() -> None:
    """Makes ``torch.compile`` compile what a call of a sharded module calls, and not the call.

    Not done at import, because it imports the compiler, which takes seconds.
    """
    import torch._dynamo.decorators

    for function in (ShardedModule._call_impl, ForwardBackward.call):
        torch._dynamo.decorators.skip(function)


def make_plain(module: nn.Module) -> None:
    """Gives a sharded module the class that it had before, and removes what sharding has added.

    Its parameters must belong to no unit.
    """
    for undo in reversed(sharding_of(module).undo):
        undo()
    module.__class__ = type(module).__bases__[-1]
    delattr(module, _STATE)


def sharding_of(module: nn.Module) -> Sharding:
    """Returns how a module is sharded.

    Raises:
        UsageError: The module is not sharded.
    """
    sharding: Sharding | None = getattr(module, _STATE, None)
    if sharding is None:
        raise UsageError(f"{type(module).__name__} is not sharded: call fully_shard on it first")
    return sharding


# One class for all modules of a class, so that `type(a) is type(b)` stays true for two blocks.
_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _sharded_classes:
        # Libraries read the names: Transformers and PEFT write them to config.json, and choose losses by them.
        copied = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        _sharded_classes[original] = type(original.__name__, (ShardedModule, original), copied)
    return _sharded_classes[original]


def _units_in(module: nn.Module, recurse: bool) -> Iterator[Unit]:
    """Returns the units of a sharded module and, if ``recurse``, of the modules inside it; each once."""
    found: dict[Unit, None] = {}
    for part in module.modules() if recurse else [module]:
        if isinstance(part, ShardedModule):
            found.update(dict.fromkeys(sharding_of(part).own_units))
    return iter(found)


def _prefetch_list(modules: Sequence[nn.Module]) -> tuple[Unit, ...]:
    return tuple(unit for module in modules for unit in sharding_of(module).own_units)


class Accumulation:
    """The units inside a module, while a schedule runs the module on several micro-batches.

    Each unit is gathered once and pushed once, in whatever order the micro-batches' forwards and backwards run.

    Args:
        module: A module, in which units may be at any depth. It may have none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units: dict[Unit, Units] = {}
        for part in module.modules():
            if isinstance(part, ShardedModule):
                sharding = sharding_of(part)
                self._units.update(dict.fromkeys(sharding.own_units, sharding.units))
        self._before: dict[Unit, UnitSettings] = {}
        """The settings to restore. Not empty between ``begin`` and ``finish``."""

    def __bool__(self) -> bool:
        return bool(self._units)

    @property
    def is_open(self) -> bool:
        """True between ``begin`` and ``finish``."""
        return bool(self._before)

    def begin(self) -> None:
        """Keeps units gathered and gradients in this process until ``finish``.

        After a schedule that failed, the call starts again.
        """
        for unit, units in self._units.items():
            unit.settings = replace(
                self._before.setdefault(unit, unit.settings),
                requires_gradient_sync=False,
                reshard_after_forward=False,
                reshard_after_backward=False,
                backward_prefetch=(),  # a backward needs no gather, and must not gather units that are pushed already
            )
            # The end of a backward must not free what is prefetched for another stage of this process.
            units.passes.is_last_backward = False

    def add(self) -> None:
        """Adds gradients that were set without a backward through the units to the sums in the reduce dtype."""
        for unit in self._units:
            unit.gradients.accumulate()

    def finish(self, num_backwards: int) -> None:
        """Pushes the mean gradient of every unit and frees the unit, last used units first.

        Args:
            num_backwards: What to divide the sums of the gradients by.
        """
        for unit in self._by_last_use():
            unit.settings, units = self._before.pop(unit, unit.settings), self._units[unit]
            units.passes.is_last_backward = True
            units.push_mean(unit, num_backwards)

    def defer(self, num_backwards: int) -> None:
        """Keeps the mean gradient of every unit for the push of a later ``finish``, which adds it to its own mean.

        Args:
            num_backwards: What to divide the sums of the gradients by.
        """
        for unit in self._units:
            unit.gradients.divide(num_backwards)
            unit.gradients.defer()

    def close(self) -> None:
        """Ends what ``begin`` started, after forwards without backwards: keeps or frees the units."""
        for unit in self._by_last_use():
            unit.settings, units = self._before.pop(unit, unit.settings), self._units[unit]
            units.passes.is_last_backward = True
            units.passes.free_unused(unit)

    def abandon(self) -> None:
        """Frees the units after an error in the schedule. Their gradients stay until ``zero_grad``."""
        for unit, units in self._units.items():
            unit.settings = self._before.pop(unit, unit.settings)
            units.passes.is_last_backward = True
            unit.usage.clear()
            unit.free()

    def _by_last_use(self) -> list[Unit]:
        order = {index: number for units in self._units.values() for number, index in enumerate(units.forward_order())}
        return sorted(self._units, key=lambda unit: order.get(unit.index, -1), reverse=True)
