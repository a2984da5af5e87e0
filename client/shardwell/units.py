"""All units of one session: what is fetched ahead, when gradients are pushed, what is freed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd import Variable

from shardwell.allocator import keep_freed_memory
from shardwell.buffer_pool import BufferPool
from shardwell.collect import FoundParameter
from shardwell.flat_vector import Memory
from shardwell.hooks import NO_TASK, ForwardCall, attach, backward_task
from shardwell.initialization import Naming, NewValues
from shardwell.mixed_precision import AS_STORED, MixedPrecisionPolicy
from shardwell.parameter import owner_of
from shardwell.prefetch import Order, Phase
from shardwell.store import ParameterStore
from shardwell.unit import Unit, UnitState
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout


@dataclass(slots=True)
class _Backward:
    """One running backward; reentrant checkpoints run further ones inside it."""

    calls: dict[ForwardCall, None] = field(default_factory=dict)
    """Forward calls whose backward has begun and is not over."""
    units: dict[Unit, None] = field(default_factory=dict)
    """All units that it used."""


class Units:
    """The units of one session, and the rules by which they are gathered, pushed and freed.

    Used by one training thread; autograd's threads call in while that thread waits in a backward.

    Args:
        store: Holds the parameters.
        prefetch_bytes: How much may be gathered ahead of its use, beyond the units in use; so much memory of
            freed units is kept for the next ones.
        keep_bytes: How much may stay between its uses in a step.
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
        name_prefix: str = "",
        init_seed: int = 0,
    ) -> None:
        self.name_prefix = name_prefix
        self.naming = Naming(init_seed, name_prefix)
        self._store = store
        self._prefetch_bytes, self._keep_bytes = prefetch_bytes, keep_bytes
        self._by_name: dict[str, Unit] = {}
        self._memory = Memory(BufferPool(prefetch_bytes))
        self._order = Order()
        self._backwards: dict[int, _Backward] = {}
        self._outermost: list[Unit] = []
        self._pushed = False
        self.generation = 0
        """How often graphs made before became unusable."""
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
        if layout.unit in self._by_name:
            raise UsageError(
                f"this session has a unit named {layout.unit!r} already: choose another name", unit=layout.unit
            )
        unit = Unit(layout, found, modules, self._store, self._memory, values, policy)
        self._by_name[unit.name] = unit
        attach(unit, self)
        self._outermost.append(unit)
        return unit

    def contain(self, modules: Sequence[nn.Module], new: Unit | None) -> None:
        """Notes that units inside these modules, which are sharded too, are not outermost any more."""
        inside = {id(part) for module in modules for part in module.modules()}
        self._outermost = [
            unit for unit in self._outermost if unit is new or not any(id(part) in inside for part in unit.modules)
        ]

    @property
    def _root(self) -> Unit | None:
        """The unit around all others; None if there is no single one."""
        return self._outermost[0] if len(self._outermost) == 1 else None

    def next_name(self, class_name: str) -> str:
        """A name for a unit that was given none: the class and how many came before, the same on every trainer."""
        names = (f"{class_name}-{number}" for number in itertools.count())
        return next(name for name in names if f"{self.name_prefix}{name}" not in self._by_name)

    def unused_name(self, name: str) -> str:
        """The name, or with a count if a unit has it."""
        return self.next_name(name) if f"{self.name_prefix}{name}" in self._by_name else name

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def locate(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Which parameter of which unit a tensor is: ``(unit index, parameter index)``; None if of none."""
        owner = owner_of(parameter)
        if owner is None or self._by_name.get(owner.unit.name) is not owner.unit:
            return None
        return owner.unit.index, owner.index

    @property
    def live_bytes(self) -> int:
        """Memory of all flat vectors now."""
        return self._memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that ``live_bytes`` has been."""
        return self._memory.peak_bytes

    @property
    def fetching_bytes(self) -> int:
        """Memory of units that are on their way here, or wait for their first use."""
        return self._memory.fetching_bytes

    @property
    def kept_bytes(self) -> int:
        """Memory of units that wait for their next use in the step."""
        return self._memory.kept_bytes

    @property
    def idle_bytes(self) -> int:
        """Memory of freed units that is kept for the next ones."""
        return self._memory.pool.idle_bytes

    def forward_order(self) -> list[int]:
        """Indices of the units in the order in which the last forward first used them."""
        return self._order.forward

    # What the session calls.

    def finish_item(self) -> None:
        """Ends a work item: pushes every gradient that is still local and frees all units that need not be kept.

        Graphs made in the item can not be used any more. Does not wait for the pushes.

        Raises:
            UsageError: A parameter was written; ``zero_grad`` withdraws what was computed with it.
            VersionGoneError: Bytes that are read in place have changed in use.
        """
        for unit in self:
            unit.check_version()
            self._push(unit)
        written = self._written()
        self._pushed = self._pushed and bool(written)
        self._end_graphs(written, self._put_away)

    def invalidate(self) -> None:
        """Frees all units, whose values a commit has made stale, and makes older graphs raise when used."""
        for unit in self:
            unit.pushed = False
        self._end_graphs(self._written(), Unit.free)

    def zero_grad(self) -> None:
        """Drops the gradients of the current work item, here and on the servers.

        Also cleans up after an exception in a forward or backward.
        """
        for unit in self:
            unit.drop_gradients()
            unit.pushed = False
        if self._pushed:
            self._store.discard()
            self._pushed = False
        failed = self._backwards or any(unit.usage.forward_calls for unit in self)
        if failed and backward_task() == NO_TASK:
            self._abandon(Unit.free)

    def _written(self) -> list[tuple[Unit, str]]:
        return [(unit, name) for unit in self if (name := unit.written_parameter() or unit.written_page())]

    def _end_graphs(self, written: Sequence[tuple[Unit, str]], leave: Callable[[Unit], None]) -> None:
        self.generation += 1
        self._abandon(Unit.free if written else leave)
        self._order.end_forward()
        for unit, name in written:
            _raise_written(unit, name)

    def _abandon(self, leave: Callable[[Unit], None]) -> None:
        """Frees or puts away everything, whatever it was in use for."""
        self._backwards.clear()
        for unit in self:
            unit.usage.clear()
            leave(unit)

    def _put_away(self, unit: Unit) -> None:
        """Keeps what will be needed again in the step, as far as there is room; frees the rest."""
        if unit.state is UnitState.UNSHARDED and self._memory.kept_bytes + unit.own_bytes <= self._keep_bytes:
            unit.keep()
        elif unit.state is not UnitState.KEPT:
            unit.free()

    # What the hooks call.

    def enter_forward(self, unit: Unit) -> None:
        """A forward of the unit begins."""
        if backward_task() == NO_TASK:
            self._forget_failed_backward()
            self._use(unit, Phase.FORWARD)
        else:  # activation checkpointing computes it again: its backward comes next
            self._current_backward().units[unit] = None
            self._use(unit, Phase.BACKWARD)

    def leave_forward(self, unit: Unit) -> None:
        """A forward of the unit is over, with or without an exception."""
        if backward_task() == NO_TASK and self._frees_after_forward(unit):
            self.free_unused(unit)

    def enter_backward(self, call: ForwardCall, node_number: int) -> None:
        """A node that made a result of a forward call is about to run: the call's backward begins, if it has not."""
        backward = self._current_backward()
        for other in [other for other in backward.calls if other.first_node_number > node_number]:
            del backward.calls[other]
            other.unit.usage.backward_calls.discard(other)
            self._finish_backward(other.unit)
        if call not in backward.calls:
            backward.calls[call] = None
            backward.units[call.unit] = None
            call.unit.usage.backward_calls.add(call)
            # With create_graph=True the graph of the backward keeps using the weights, without hooks.
            call.unit.usage.pinned |= torch.is_grad_enabled()
        self._use(call.unit, Phase.BACKWARD)

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

    def _frees_after_forward(self, unit: Unit) -> bool:
        choice = unit.settings.reshard_after_forward
        if choice is None:  # the backward begins with the root
            return unit is not self._root or not torch.is_grad_enabled()
        return choice

    def _forget_failed_backward(self) -> None:
        if self._backwards:
            self._backwards.clear()
            for unit in self:
                unit.usage.backward_calls.clear()

    def _current_backward(self) -> _Backward:
        task = backward_task()
        if task not in self._backwards:
            keep_freed_memory()
            self._backwards[task] = _Backward()
            Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        return self._backwards[task]

    def _end_backward(self, task: int) -> None:
        """Finishes the calls that no older call followed, and gradients that came late, as of tied parameters."""
        backward = self._backwards.pop(task, _Backward())
        for call in backward.calls:
            call.unit.usage.backward_calls.discard(call)
        for unit in reversed(backward.units):
            self._finish_backward(unit)
        if not self._backwards and self.is_last_backward:
            for unit in self:
                if unit.state is UnitState.FETCHING:
                    unit.free()

    def _finish_backward(self, unit: Unit) -> None:
        if unit.settings.requires_gradient_sync:
            self._push(unit)
        else:
            unit.put_gradients_by()
        if unit.settings.reshard_after_backward:
            self.free_unused(unit)

    def _push(self, unit: Unit) -> None:
        gradients = unit.take_gradients()
        if gradients:
            self._pushed = unit.pushed = True
            self._store.push(unit.index, gradients)

    # Gathering ahead.

    def _use(self, unit: Unit, phase: Phase) -> None:
        """Gathers a unit and starts to gather those that come next."""
        unit.start_fetch()
        self._order.observe(unit, phase)
        self._prefetch(unit, phase)
        unit.unshard()

    def _prefetch(self, unit: Unit, phase: Phase) -> None:
        chosen = unit.settings.forward_prefetch if phase is Phase.FORWARD else unit.settings.backward_prefetch
        if chosen is not None:
            for following in chosen:
                following.start_fetch()
            return
        ahead = self._memory.fetching_bytes - (
            unit.precision.layout.size_bytes if unit.state is UnitState.FETCHING else 0
        )
        for following in self._order.upcoming():
            if following.state is not UnitState.FREED:
                continue
            ahead += following.precision.layout.size_bytes
            if ahead > self._prefetch_bytes:
                return
            following.start_fetch()


def _raise_written(unit: Unit, name: str) -> None:
    raise UsageError(
        f"parameter {name!r} of unit {unit.name!r} was written in place; the values live on the shard servers, so the "
        "write is lost: change parameters before fully_shard",
        unit=unit.name,
        parameter=name,
    )
