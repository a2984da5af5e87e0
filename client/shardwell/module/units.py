"""All units of one session: their names, and operations between forwards and backwards, such as the end of a step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwell.memory.buffers import BufferPool, VectorMemory
from shardwell.module.gradients import GradientPushes, with_gradients
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy
from shardwell.module.new_units import GridPlace
from shardwell.module.parameter_store import NewValues, ParameterStore
from shardwell.module.parameters import FoundParameter
from shardwell.module.passes import ForwardBackward, raise_written
from shardwell.module.residency import ResidencyPolicy, UnitState
from shardwell.module.strategy import BackwardPrefetch, ReplicaOptions, ShardingStrategy
from shardwell.module.unit import Unit, check_versions, owner_of
from shardwell_wire.errors import CapacityError, UsageError
from shardwell_wire.model.layout import UnitLayout

ONE_REPLICA = GridPlace()
"""Place of all trainers in a world that has a data axis only."""


class Units:
    """The units of one session.

    Used by one training thread, and by autograd's threads while the training thread waits in a backward.

    Attributes:
        memory: Memory of all flat vectors in this process.
        policy: Decides what to gather, keep and free.
        passes: Runs forwards and backwards.
        by_name: The units by name.
        named_modules: The sharded modules, inner ones first, each with the prefix of its parameters and buffers.

    Args:
        store: Holds the parameters.
        prefetch_bytes: Bytes that may be gathered ahead of their use, beyond the units in use. Up to this many bytes
            of freed units are also kept for reuse and, unless the limit is 0, the memory of one larger unit.
        keep_bytes: Bytes that may stay between two uses in a step. None: what the prefetch window leaves free.
        max_gathers_in_flight: Limit of gathers that run at once; 0: no limit.
        backward_prefetch: When the next unit of a backward is gathered.
        place: Place of this trainer's units in the grid.
        init_seed: Seed of random initial values, which also depend on names.
    """

    def __init__(
        self,
        store: ParameterStore,
        *,
        prefetch_bytes: int = 128 << 20,
        keep_bytes: int | None = 0,
        max_gathers_in_flight: int = 0,
        backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE,
        place: GridPlace = ONE_REPLICA,
        init_seed: int = 0,
    ) -> None:
        self.place, self.init_seed = place, init_seed
        self.named_modules: list[tuple[str, nn.Module]] = []
        self.memory = VectorMemory(pool=BufferPool(prefetch_bytes, one_larger=True))
        self.policy: ResidencyPolicy[Unit] = ResidencyPolicy(
            self.memory, prefetch_bytes=prefetch_bytes, keep_bytes=keep_bytes, backward_prefetch=backward_prefetch
        )
        self._store = store
        self._pushes = GradientPushes(store.gradients)
        self.by_name: dict[str, Unit] = {}
        self._used_names: dict[str, tuple[nn.Module, ...]] = {}
        """Modules of each ``fully_shard`` call, by its name."""
        self._unwrapped: set[str] = set()
        """Names of the units that were removed."""
        self._outermost: list[Unit] = []
        self.passes = ForwardBackward(
            self.by_name, self.policy, self._pushes, store, max_gathers_in_flight=max_gathers_in_flight
        )

    def set_limits(
        self,
        *,
        prefetch_bytes: int | None = None,
        keep_bytes: int | None = None,
        backward_prefetch: BackwardPrefetch | None = None,
    ) -> None:
        """Changes limits of ``policy`` from the next use of a unit on. None: no change."""
        if prefetch_bytes is not None:
            self.policy.prefetch_bytes = prefetch_bytes
            self.memory.pool.set_limit(prefetch_bytes)
        if keep_bytes is not None:
            self.policy.keep_bytes = keep_bytes
        if backward_prefetch is not None:
            self.policy.backward_prefetch = backward_prefetch

    # Units.

    def add(
        self,
        layout: UnitLayout,
        found: Sequence[FoundParameter],
        modules: Sequence[nn.Module],
        values: NewValues,
        policy: MixedPrecisionPolicy = AS_STORED,
    ) -> Unit:
        """Makes a unit and uploads its values.

        Raises:
            UsageError: The session has a unit with this name.
        """
        if self.passes.before_use is not None:
            self.passes.before_use()
        if layout.unit in self.by_name:
            raise UsageError(
                f"this session has a unit named {layout.unit!r} already: choose another name", unit=layout.unit
            )
        with self.passes.guard:
            unit = Unit(layout, found, modules, self._store, self.memory, values, policy, self.passes.guard.reading)
        unit.siblings = weakref.ref(self)
        unit.pushes = layout.tp_rank == self.place.tp_rank
        unit.tp_replicated = self.place.tp > 1 and not layout.holds_parts
        self.by_name[unit.name] = unit
        self._unwrapped.discard(unit.name)
        self._set_outermost([*self._outermost, unit])
        return unit

    def register_modules(
        self, modules: Sequence[nn.Module], new: Sequence[Unit], name: str, prefixes: Sequence[str]
    ) -> None:
        """Registers sharded modules. Units of modules inside them are no longer outermost.

        Args:
            modules: The modules of one ``fully_shard`` call.
            new: Their units, if they have parameters of their own.
            name: Name of the call, also if there is no unit.
            prefixes: Prefix of the names of each module's parameters and buffers.
        """
        self._used_names[name] = tuple(modules)
        self.named_modules += zip(prefixes, modules, strict=True)
        inside = {id(part) for module in modules for part in module.modules()}
        self._set_outermost(
            [unit for unit in self._outermost if unit in new or not any(id(part) in inside for part in unit.modules)]
        )

    def remove(self, removed: Unit) -> None:
        """Removes a unit whose parameters have become ordinary ones.

        Args:
            removed: The unit. It is not in use, and its gradients are committed or dropped.
        """
        removed.settings.strategy = None
        self._pushes.follow_strategy(removed)
        del self.by_name[removed.name]
        self._unwrapped.add(removed.name)
        self.policy.forget(removed)
        for unit in self:
            unit.settings.drop_prefetch(removed)
        self._set_outermost([unit for unit in self._outermost if unit is not removed])

    def set_model_names(self, names: Mapping[str, tuple[str, ...]]) -> None:
        """Makes errors show the names in the model.

        Args:
            names: ``Parameter.model_names`` by the names in the run, where they differ.
        """
        for unit in self:
            present = {parameter.name: names.get(parameter.name, ()) for parameter in unit.layout.parameters}
            unit.layout = unit.held.layout = unit.layout.named(present)

    def forget_module(self, module: nn.Module) -> None:
        """Removes a module that is not sharded any more."""
        self.named_modules = [(prefix, other) for prefix, other in self.named_modules if other is not module]
        self._used_names = {
            name: held for name, held in self._used_names.items() if not any(other is module for other in held)
        }

    def require_all(self) -> None:
        """Raises UsageError if units were removed: without them, the trainer cannot compute a step."""
        if self._unwrapped:
            raise UsageError(
                f"{len(self._unwrapped)} units of this trainer's model were unwrapped, such as "
                f"{min(self._unwrapped)!r}: to go on training, wrap the model again with auto_wrap or fully_shard, "
                "which gives it the run's values",
                unit=min(self._unwrapped),
            )

    def _set_outermost(self, units: list[Unit]) -> None:
        self._outermost = units
        self.passes.roots = tuple(units) if len({unit.modules for unit in units}) == 1 else ()

    def set_strategy(self, unit: Unit, strategy: ShardingStrategy | None, replica: ReplicaOptions | None) -> None:
        """Changes the strategy of a unit from its next use on.

        Raises:
            UsageError: A forward or backward is using the unit.
            CapacityError: The strategy is ``HYBRID_SHARD``, and this host has too little shared memory for the unit.
        """
        if unit.usage:
            raise UsageError(
                f"the strategy of unit {unit.name!r} cannot change while a forward or backward uses the unit: call "
                "set_sharding_strategy between steps",
                unit=unit.name,
            )
        with self.passes.guard:
            self.passes.free_unused(unit)
            unit.free()
        unit.settings.strategy, unit.settings.replica = strategy, replica or ReplicaOptions()
        self._pushes.follow_strategy(unit)
        if strategy is ShardingStrategy.HYBRID_SHARD:
            self._share_on_host(unit)

    def _share_on_host(self, unit: Unit) -> None:
        if not unit.share_on_host():
            unit.settings.strategy = None
            raise CapacityError(
                f"HYBRID_SHARD: unit {unit.name!r} has {unit.layout.size_bytes} bytes, for which this host has no "
                "shared memory (see the log for the reason): enlarge /dev/shm (docker: shm_size), or use FULL_SHARD",
                unit=unit.name,
            )
        self._forget_graphs([unit])  # graphs have views of the weights' previous memory

    def next_name(self, class_name: str) -> str:
        """Returns a default unit name: the class and the lowest free number, the same on every trainer."""
        names = (f"{class_name}-{number}" for number in itertools.count())
        return next(name for name in names if not self._is_used(name))

    def unused_name(self, name: str) -> str:
        """Returns the name, with a number appended if a unit has the name."""
        return self.next_name(name) if self._is_used(name) else name

    def names_are_free(self, model: nn.Module, unit_names: Iterable[str]) -> bool:
        """True if nothing else in this session has the names of a model's new units, parameters and buffers."""
        if any(map(self._is_used, unit_names)):
            return False
        inside = {id(part) for part in model.modules()}
        used = {
            f"{prefix}{name}"
            for prefix, module in self.named_modules
            if id(module) not in inside
            for name, _ in (*module.named_parameters(), *module.named_buffers())
        }
        new = [name for name, parameter in model.named_parameters() if owner_of(parameter) is None]
        return used.isdisjoint([*new, *(name for name, _ in model.named_buffers())])

    def _is_used(self, name: str) -> bool:
        return name in self.by_name or name in self._used_names

    def has(self, unit: Unit) -> bool:
        """True if a unit belongs to this session."""
        return self.by_name.get(unit.name) is unit

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def locate(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Returns ``(unit index, parameter index)`` of a tensor; None if it belongs to no unit of this session."""
        owner = owner_of(parameter)
        if owner is None or not self.has(owner.unit):
            return None
        return owner.unit.index, owner.index

    @property
    def live_bytes(self) -> int:
        """Memory of all flat vectors now."""
        return self.memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Maximum of ``live_bytes`` so far."""
        return self.memory.peak_bytes

    @property
    def used(self) -> bool:
        """True if a forward has begun since the last commit, or gradients exist that were set without a forward."""
        return self.passes.entered or self.have_gradients

    @property
    def have_gradients(self) -> bool:
        """True if there are uncommitted gradients, in this process or on the servers."""
        return any(unit.pushed for unit in self) or bool(with_gradients(self))

    def forward_order(self) -> list[int]:
        """Returns the indices of the units in the order in which the last forward first used them."""
        return self.policy.order.forward

    def push_mean(self, unit: Unit, num_backwards: int) -> None:
        """Pushes the mean of a unit's gradients over several backwards, and frees the unit.

        Args:
            unit: A unit of this session.
            num_backwards: What to divide the sum of the gradients by.
        """
        if num_backwards != 1:
            unit.gradients.divide(num_backwards)
        self._pushes.push(unit)
        self.passes.free_unused(unit)

    def close(self) -> None:
        """Frees all units. Their modules raise from now on."""
        with self.passes.guard:
            self.passes.abort(Unit.free)
            self.passes.graphs.clear()
        self.passes.before_use = _refuse_use

    # The end of work items and steps.

    def finish_item(self, *, keeps_graphs: bool = False) -> None:
        """Ends a work item: pushes all local gradients and frees all units that need not be kept.

        Does not wait for the pushes.

        Args:
            keeps_graphs: True if graphs that were made in the item stay usable.

        Raises:
            UsageError: A parameter was written, or a graph that was declared static has changed. ``zero_grad``
                withdraws the gradients.
            VersionGoneError: Bytes that are read in place changed while in use.
        """
        with self.passes.guard:
            # Check before the push: gradients of weights that changed in use must not reach the servers.
            check_versions(self)
            self._pushes.finish_item(self)
            written, not_static = self._written(), self._pushes.coverage.end_item(self)
            if not written and not_static is None:
                self._pushes.end_item()
            self._end_graphs(written, self.passes.release, () if keeps_graphs else self.by_name.values())
            if not_static is not None:
                raise not_static

    def invalidate(self, updated: Collection[int] | None = None) -> None:
        """Frees all units after a commit, and makes the graphs of updated units unusable.

        Args:
            updated: Indices of the units whose values the commit changed; None: all.
        """
        units = self.by_name.values()
        with self.passes.guard:
            self.passes.entered = False
            for unit in units:
                unit.pushed = unit.is_current = False
            stale = units if updated is None else [unit for unit in units if unit.index in updated]
            self._end_graphs(self._written(), self._expire, stale)

    def zero_grad(self) -> None:
        """Drops the gradients of the current work item, in this process and on the servers.

        Also cleans up after an exception in a forward or backward.
        """
        with self.passes.guard:
            self._pushes.withdraw(self)
            self.passes.clean_up()

    def drop_gradients(self, parameters: Mapping[int, Collection[int]]) -> None:
        """Drops the local gradients of some parameters, and cleans up as ``zero_grad`` does.

        Args:
            parameters: Indices of parameters by unit index.
        """
        with self.passes.guard:
            for unit in self:
                if unit.index in parameters:
                    unit.gradients.drop(parameters[unit.index])
            self.passes.clean_up()

    def _expire(self, unit: Unit) -> None:
        if self.policy.state_after_commit(unit) is UnitState.STALE:
            unit.expire()
        else:
            unit.free()

    def _written(self) -> list[tuple[Unit, str]]:
        """Returns the units with a written parameter, and the parameter's name."""
        in_place, found = self._store.wrote_in_place(), []
        for unit in self.by_name.values():
            if in_place or unit.state is UnitState.UNSHARDED:
                name = unit.written_parameter() or (unit.written_page() if in_place else None)
                if name:
                    found.append((unit, name))
        return found

    def _end_graphs(
        self, written: Sequence[tuple[Unit, str]], leave: Callable[[Unit], None], stale: Collection[Unit]
    ) -> None:
        # `written` was computed before: forget_graphs takes new fingerprints of the parameters, which hides writes.
        self._forget_graphs(stale)
        self.passes.abort(Unit.free if written else leave)
        self.policy.order.end_forward()
        for unit, name in written:
            raise_written(unit, name)

    def _forget_graphs(self, stale: Collection[Unit]) -> None:
        if not self.passes.graphs.exist:
            return
        for unit in stale:
            unit.forget_graphs()
        if len(stale) == len(self.by_name):
            self.passes.graphs.clear()


def _refuse_use() -> None:
    raise UsageError(
        "this module belongs to a model that ended when the replica of its trainer was formed again: build the model "
        "in the function that session.run_replica(train) calls, and keep no reference to it"
    )
