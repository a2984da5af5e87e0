"""The methods that ``fully_shard`` adds to a module. Names and meanings are FSDP2's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import nn

from shardwell.module import guards
from shardwell.module.forward_backward import ForwardBackward
from shardwell.module.mixed_precision import MixedPrecisionPolicy
from shardwell.module.strategy import ReplicaOptions, ShardingStrategy, check_strategy
from shardwell.module.thread_guard import ThreadGuard
from shardwell.module.unit import Unit
from shardwell.module.units import Units
from shardwell_wire.errors import UsageError

_STATE = "_shardwell_sharding"


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


class ShardedModule(nn.Module):
    """Methods that ``fully_shard`` adds to a module's class. Not constructed directly."""

    _shardwell_sharding: Sharding

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:  # around all hooks of the module
        return self._shardwell_sharding.units.passes.call(super()._call_impl, args, kwargs)

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
        self,
        strategy: ShardingStrategy | None,
        recurse: bool = True,
        *,
        replica: ReplicaOptions | None = None,
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops local gradients, and gradients of earlier steps that the servers keep for another optimizer.

        Raises:
            UsageError: Gradients of this step are on the servers: ``optimizer.zero_grad()`` drops these too.
        """
        guards.refuse_zero_grad_after_push(list(_units_in(self, recurse=True)))
        super().zero_grad(set_to_none)
        for unit in _units_in(self, recurse=True):
            unit.precision.drop()
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
        name, namespace = f"Sharded{original.__name__}", {"__module__": original.__module__}
        _sharded_classes[original] = type(name, (ShardedModule, original), namespace)
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
