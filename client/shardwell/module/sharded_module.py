"""The methods that ``fully_shard`` gives to a module, and what they are about; names and meanings are FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from shardwell.module import guards
from shardwell.module.mixed_precision import MixedPrecisionPolicy
from shardwell.module.strategy import ReplicaOptions, ShardingStrategy, check_strategy
from shardwell.module.unit import Unit
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.module.units import Units

_STATE = "_shardwell_sharding"


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a sharded module knows of itself."""

    units: Units
    unit: Unit | None
    """None if all its parameters belong to nested units, or it has none."""
    policy: MixedPrecisionPolicy


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
        unit = sharding_of(self).unit
        if unit is None:
            return None
        sharding_of(self).units.graphs.begin()
        sharding_of(self).units.gathering.start(unit)
        if async_op:
            return UnshardHandle(unit)
        unit.unshard()
        return None

    def reshard(self) -> None:
        """Frees this module's parameters, unless a forward or backward is using them."""
        sharding = sharding_of(self)
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
            sharding_of(self).units.set_strategy(unit, strategy, replica)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after a backward; the end of a step frees them anyway."""
        for unit in _units_in(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward frees what was gathered ahead and not used."""
        sharding_of(self).units.is_last_backward = is_last_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Sharded modules to gather ahead while this one computes forward, instead of those observed to follow."""
        self._require_unit().settings.forward_prefetch = _prefetch_list(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Sharded modules to gather ahead while this one computes backward, instead of those observed to follow."""
        self._require_unit().settings.backward_prefetch = _prefetch_list(modules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that are still here, and those that earlier steps left for another optimizer's.

        Raises:
            UsageError: Some of this step are on the servers already: ``optimizer.zero_grad()`` drops those too.
        """
        guards.refuse_zero_grad_after_push(list(_units_in(self, recurse=True)))
        super().zero_grad(set_to_none)
        for unit in _units_in(self, recurse=True):
            unit.precision.drop()
            unit.drop_kept_gradients()

    def _require_unit(self) -> Unit:
        unit = sharding_of(self).unit
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


def make_sharded(module: nn.Module, sharding: Sharding) -> None:
    """Changes a module's class in place to a subclass with the methods of ``ShardedModule``."""
    setattr(module, _STATE, sharding)
    module.__class__ = _sharded_class(type(module))


def sharding_of(module: nn.Module) -> Sharding:
    """What a sharded module knows of itself.

    Raises:
        UsageError: It is not sharded.
    """
    sharding: Sharding | None = getattr(module, _STATE, None)
    if sharding is None:
        raise UsageError(f"{type(module).__name__} is not sharded: call fully_shard on it first")
    return sharding


_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _sharded_classes:
        name, namespace = f"Sharded{original.__name__}", {"__module__": original.__module__}
        _sharded_classes[original] = type(name, (ShardedModule, original), namespace)
    return _sharded_classes[original]


def _units_in(module: nn.Module, recurse: bool) -> Iterator[Unit]:
    """The units of a sharded module and, if asked, of those inside it; each once."""
    found: dict[Unit, None] = {}
    for part in module.modules() if recurse else [module]:
        if isinstance(part, ShardedModule) and (unit := sharding_of(part).unit) is not None:
            found[unit] = None
    return iter(found)


def _prefetch_list(modules: Sequence[nn.Module]) -> tuple[Unit, ...]:
    units = (sharding_of(module).unit for module in modules)
    return tuple(unit for unit in units if unit is not None)
