"""All units of one session, and by which rules they are gathered, kept and freed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwell.memory.buffer_pool import BufferPool
from shardwell.module.collect import FoundParameter
from shardwell.module.flat_vector import Memory
from shardwell.module.gathering import Gathering
from shardwell.module.gradient_pushes import GradientPushes
from shardwell.module.hooks import NO_TASK, attach, backward_task
from shardwell.module.initialization import Naming, NewValues
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy
from shardwell.module.parameter import owner_of
from shardwell.module.prefetch import Phase
from shardwell.module.running_backwards import RunningBackwards
from shardwell.module.store import ParameterStore
from shardwell.module.strategy import BackwardPrefetch, ReplicaOptions, ShardingStrategy
from shardwell.module.unit import Unit, UnitState
from shardwell.module.usage import ForwardCall
from shardwell.module.watched_graphs import WatchedGraphs
from shardwell_wire.errors import CapacityError, UsageError
from shardwell_wire.layout import UnitLayout


class Units:
    """The units of one session, and the rules by which they are gathered, pushed and freed.

    Attributes:
        memory: What their flat vectors take here.
        gathering: Gathers them, and says how far ahead.
        keep_bytes: How much may stay between its uses in a step.

    Used by one training thread; autograd's threads call in while that thread waits in a backward.

    Args:
        store: Holds the parameters.
        prefetch_bytes: How much may be gathered ahead of its use, beyond the units in use; so much memory of
            freed units is kept for the next ones, and, unless it is 0, that of one larger unit.
        keep_bytes: How much may stay between its uses in a step.
        max_gathers_in_flight: How many gathers may be under way at once; 0: any number.
        backward_prefetch: When the next unit of a backward is gathered.
        name_prefix: Begins the names of all units and parameters; tells those of one pipeline stage or
            tensor-parallel rank from another's, which are made by the same code.
        init_seed: What random initial values depend on, beside names without that prefix.
    """

    def __init__(
        self,
        store: ParameterStore,
        *,
        prefetch_bytes: int = 128 << 20,
        keep_bytes: int = 0,
        max_gathers_in_flight: int = 0,
        backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE,
        name_prefix: str = "",
        init_seed: int = 0,
    ) -> None:
        self.name_prefix = name_prefix
        self.naming = Naming(init_seed, name_prefix)
        self.keep_bytes = keep_bytes
        self._store = store
        self._pushes = GradientPushes(store)
        self._by_name: dict[str, Unit] = {}
        self._used_names: set[str] = set()
        self.named_modules: list[tuple[str, nn.Module]] = []
        """What is sharded, inner modules first, by what the names of its parameters and buffers begin with."""
        self.memory = Memory(BufferPool(prefetch_bytes, one_larger=True))
        self.gathering = Gathering(
            self.memory,
            prefetch_bytes=prefetch_bytes,
            max_in_flight=max_gathers_in_flight,
            backward_prefetch=backward_prefetch,
        )
        self._backwards = RunningBackwards(self._end_backward)
        self._outermost: list[Unit] = []
        self.graphs = WatchedGraphs(self._before_node)
        self._entered = False
        self.before_use: Callable[[], None] = _nothing
        """Called before a forward and before a unit is made; may commit a step."""
        self.is_last_backward = True
        """Whether the end of a backward frees what was gathered ahead and not used."""

    # Units.

    def add(
        self,
        layout: UnitLayout,
        found: Sequence[FoundParameter],
        modules: Sequence[nn.Module],
        values: NewValues,
        policy: MixedPrecisionPolicy = AS_STORED,
    ) -> Unit:
        """Uploads a unit's values and hooks its modules.

        Raises:
            UsageError: The session has a unit of that name.
        """
        self.before_use()
        if layout.unit in self._by_name:
            raise UsageError(
                f"this session has a unit named {layout.unit!r} already: choose another name", unit=layout.unit
            )
        unit = Unit(layout, found, modules, self._store, self.memory, values, policy)
        self._by_name[unit.name] = unit
        attach(unit, self)
        self._outermost.append(unit)
        return unit

    def contain(self, modules: Sequence[nn.Module], new: Unit | None, name: str, prefixes: Sequence[str]) -> None:
        """Notes modules that are sharded; units inside them, which are sharded too, are not outermost any more.

        Args:
            modules: Those of one ``fully_shard``.
            new: Their unit, if they have parameters of their own.
            name: Of the unit, also if there is none.
            prefixes: What the names of each module's parameters and buffers begin with.
        """
        self._used_names.add(f"{self.name_prefix}{name}")
        self.named_modules += zip((f"{self.name_prefix}{prefix}" for prefix in prefixes), modules, strict=True)
        inside = {id(part) for module in modules for part in module.modules()}
        self._outermost = [
            unit for unit in self._outermost if unit is new or not any(id(part) in inside for part in unit.modules)
        ]

    def set_strategy(self, unit: Unit, strategy: ShardingStrategy | None, replica: ReplicaOptions | None) -> None:
        """Has a unit be kept, freed and pushed as a strategy says, from its next use on.

        Raises:
            UsageError: A forward or backward is using the unit.
            CapacityError: ``HYBRID_SHARD``, and this host has no room to share for the unit.
        """
        if unit.usage:
            raise UsageError(
                f"the strategy of unit {unit.name!r} can not change while a forward or backward uses it: call "
                "set_sharding_strategy between steps",
                unit=unit.name,
            )
        self.free_unused(unit)
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
                "shared memory (the log says why): enlarge /dev/shm (docker: shm_size), or use FULL_SHARD",
                unit=unit.name,
            )
        self._forget_graphs([unit])  # they hold views of where the weights were

    @property
    def _root(self) -> Unit | None:
        """The unit around all others; None if there is no single one."""
        return self._outermost[0] if len(self._outermost) == 1 else None

    def next_name(self, class_name: str) -> str:
        """A name for a unit that was given none: the class and how many came before, the same on every trainer."""
        names = (f"{class_name}-{number}" for number in itertools.count())
        return next(name for name in names if not self._is_taken(name))

    def unused_name(self, name: str) -> str:
        """The name, or with a count if a unit has it."""
        return self.next_name(name) if self._is_taken(name) else name

    def _is_taken(self, name: str) -> bool:
        whole = f"{self.name_prefix}{name}"
        return whole in self._by_name or whole in self._used_names

    def has(self, unit: Unit) -> bool:
        """Whether a unit is one of these."""
        return self._by_name.get(unit.name) is unit

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def locate(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Which parameter of which unit a tensor is: ``(unit index, parameter index)``; None if of none."""
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
        """The most that ``live_bytes`` has been."""
        return self.memory.peak_bytes

    @property
    def used(self) -> bool:
        """Whether a forward began since the last commit, or there are gradients that came without one."""
        return self._entered or self.have_gradients

    @property
    def have_gradients(self) -> bool:
        """Whether there are gradients that are not committed, here or on the servers."""
        return any(unit.pushed or unit.gradients.exist for unit in self)

    def forward_order(self) -> list[int]:
        """Indices of the units in the order in which the last forward first used them."""
        return self.gathering.order.forward

    # What the session calls.

    def finish_item(self, *, keeps_graphs: bool = False) -> None:
        """Ends a work item: pushes every gradient that is still local and frees all units that need not be kept.

        Does not wait for the pushes.

        Args:
            keeps_graphs: Whether graphs made in the item can still be used.

        Raises:
            UsageError: A parameter was written, or a graph that was declared static is not; ``zero_grad`` withdraws
                the gradients.
            VersionGoneError: Bytes that are read in place have changed in use.
        """
        for unit in self:
            unit.check_version()
            self._pushes.push(unit)
        written, not_static = self._written(), self._pushes.coverage.end_item(self)
        if not written and not_static is None:
            self._pushes.end_item()
        self._end_graphs(written, self._put_away, () if keeps_graphs else self)
        if not_static is not None:
            raise not_static

    def invalidate(self, updated: Collection[int] | None = None) -> None:
        """Frees all units after a commit. Graphs made before can not be used any more with units that were updated.

        Args:
            updated: Indices of the units whose values the commit changed; None: all.
        """
        self._entered = False
        for unit in self:
            unit.pushed = unit.is_current = False
        stale = self if updated is None else [unit for unit in self if unit.index in updated]
        self._end_graphs(self._written(), Unit.expire, stale)

    def begin_step(self) -> None:
        """Starts to fetch what the committed step made of the replicas, in the order of the forward."""
        first_use = {index: place for place, index in enumerate(self.gathering.order.forward)}
        stale = [unit for unit in self if unit.state is UnitState.STALE]
        for unit in sorted(stale, key=lambda unit: first_use.get(unit.index, len(first_use))):
            self.gathering.start_ahead(unit)

    def zero_grad(self) -> None:
        """Drops the gradients of the current work item, here and on the servers.

        Also cleans up after an exception in a forward or backward.
        """
        self._pushes.withdraw(self)
        self._clean_up()

    def drop_gradients(self, parameters: Mapping[int, Collection[int]]) -> None:
        """Drops the gradients that are here, of some parameters. Cleans up as ``zero_grad`` does.

        Args:
            parameters: Indices of parameters by unit index.
        """
        for unit in self:
            if unit.index in parameters:
                unit.gradients.drop(parameters[unit.index])
        self._clean_up()

    def _clean_up(self) -> None:
        """After an exception in a forward or backward."""
        failed = self._backwards or any(unit.usage.forward_calls for unit in self)
        if failed and backward_task() == NO_TASK:
            self._abandon(Unit.free)

    def _written(self) -> list[tuple[Unit, str]]:
        return [(unit, name) for unit in self if (name := unit.written_parameter() or unit.written_page())]

    def _end_graphs(
        self, written: Sequence[tuple[Unit, str]], leave: Callable[[Unit], None], stale: Iterable[Unit]
    ) -> None:
        self._forget_graphs(list(stale))
        self._abandon(Unit.free if written else leave)
        self.gathering.order.end_forward()
        for unit, name in written:
            _raise_written(unit, name)

    def _forget_graphs(self, stale: Collection[Unit]) -> None:
        for unit in stale:
            unit.forget_graphs()
        if len(stale) == len(self):
            self.graphs.forget()

    def _abandon(self, leave: Callable[[Unit], None]) -> None:
        """Frees or puts away everything, whatever it was in use for."""
        self._backwards.forget()
        for unit in self:
            unit.usage.clear()
            leave(unit)

    def _put_away(self, unit: Unit) -> None:
        """Keeps what will be needed again in the step, as far as there is room; frees the rest."""
        stays = unit.is_replica or self.memory.kept_bytes + unit.own_bytes <= self.keep_bytes
        if unit.state is UnitState.UNSHARDED and stays:
            unit.keep()
        elif unit.state is not UnitState.KEPT and not unit.is_replica:
            unit.free()

    # What the hooks call.

    def enter_forward(self, unit: Unit) -> None:
        """A forward of the unit begins."""
        in_backward = backward_task() != NO_TASK
        if not in_backward:
            self.before_use()
            self._entered = True
            self.graphs.begin()
        call = ForwardCall(unit, unit.generation)
        unit.usage.forward_calls.append(call)
        if not in_backward:
            if torch.is_grad_enabled():
                self.graphs.calls.begin(call)
            self._forget_failed_backward()
            self.gathering.use(unit, Phase.FORWARD)
        else:  # activation checkpointing computes it again: its backward comes next
            self._backwards.current().units[unit] = None
            self.gathering.use(unit, Phase.BACKWARD)

    def leave_forward(self, call: ForwardCall) -> None:
        """A forward of the unit is over, with or without an exception."""
        unit = call.unit
        self.graphs.calls.end(call)
        if backward_task() == NO_TASK and self._frees_after_forward(call):
            self.free_unused(unit)
        else:
            unit.check_version()

    def _before_node(self, call: ForwardCall, node_number: int, gradients: object) -> None:
        """A node runs that was made during a forward call, or reads the unit's weights."""
        if call.generation != call.unit.generation:
            raise UsageError(
                f"backward through unit {call.unit.name!r} with a graph that was made before the last "
                "optimizer.step() or in another work item: its weights are gone; run the forward again",
                unit=call.unit.name,
            )
        self.enter_backward(call, node_number)

    def enter_backward(self, call: ForwardCall, node_number: int) -> None:
        """A node that made a result of a forward call is about to run: the call's backward begins, if it has not."""
        backward = self._backwards.current()
        over = backward.end_calls_after(node_number)
        if self.gathering.backward_prefetch is BackwardPrefetch.POST and call.unit.needs_gather:
            for other in over:
                self._free_after_backward(other.unit)
            self.gathering.start(call.unit)
        for other in over:
            self._finish_backward(other.unit)
        backward.begin(call)
        self.gathering.use(call.unit, Phase.BACKWARD)

    def free_unused(self, unit: Unit, *, thorough: bool = False) -> None:
        """Frees a unit unless something is using it.

        Args:
            unit: The unit.
            thorough: Look also for writes that torch does not count, which takes longer; else
                ``finish_item`` finds them.

        Raises:
            UsageError: A parameter was written in place; the write would be lost.
            VersionGoneError: Bytes that are read in place have changed in use.
        """
        if unit.usage:
            return
        written = unit.written_parameter() or (unit.written_page() if thorough else None)
        if written:
            unit.free()
            _raise_written(unit, written)
        unit.check_version()
        self._put_away(unit)

    def _frees_after_forward(self, call: ForwardCall) -> bool:
        unit = call.unit
        strategy, choice = unit.settings.strategy, unit.settings.reshard_after_forward
        if strategy is ShardingStrategy.NO_SHARD:
            return False
        if choice is not None:
            return choice
        # The backward begins with the root.
        stays = strategy is ShardingStrategy.SHARD_GRAD_OP or unit is self._root
        expects_backward = call.has_backward and any(module.training for module in unit.modules)
        return not (stays and expects_backward)

    def _forget_failed_backward(self) -> None:
        if self._backwards:
            self._backwards.forget()
            for unit in self:
                unit.usage.backward_calls.clear()

    def _end_backward(self, units: Iterable[Unit]) -> None:
        """Finishes the calls that no older call followed, and gradients that came late, as of tied parameters.

        Checks all units that are read in place: the backward may have read those that it did not use as units, too.
        """
        for unit in self:
            unit.check_version()
        for unit in units:
            self._finish_backward(unit, is_over=True)
        if not self._backwards and self.is_last_backward:
            for unit in self:
                if unit.state is UnitState.FETCHING and not unit.is_replica:
                    unit.free()

    def _finish_backward(self, unit: Unit, *, is_over: bool = False) -> None:
        self._pushes.after_backward(unit, is_over=is_over)
        self._free_after_backward(unit)

    def _free_after_backward(self, unit: Unit) -> None:
        if unit.settings.reshard_after_backward and not unit.is_replica:
            self.free_unused(unit)


def _nothing() -> None:
    pass


def _raise_written(unit: Unit, name: str) -> None:
    raise UsageError(
        f"parameter {name!r} of unit {unit.name!r} was written in place; the values live on the shard servers, so the "
        "write is lost: change parameters before fully_shard",
        unit=unit.name,
        parameter=name,
    )
