"""Simulates training steps with units that have sizes but no data: counts gathers and tracks the memory in use.

``ResidencyPolicy`` decides, as it does for a sharded model. This module only replays the order in which a model calls
its units. A test compares the result with sharded models in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shardwell.module.residency import Phase, ResidencyPolicy, ResidentBytes, ResidentUnit, UnitState
from shardwell.planning.options import PlanOptions
from shardwell_wire.model.layout import UnitLayout

_NUM_STEPS = 3
"""The first step records the order of units, the second one the transition between steps. Later steps are equal."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One module of a unit. A forward of the model calls the module once."""

    position: int
    """Position among the model's modules, outer ones first: the order in which their forwards begin."""
    module: str
    """Name of the module; empty for the model."""
    can_recompute: bool = False
    """True if ``checkpoint_activations`` recomputes the module's forward, including all units inside."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One unit of a model that is not sharded yet."""

    layout: UnitLayout
    outer_units: tuple[str, ...] = ()
    """Names of the units that contain this unit. They stay gathered while it computes."""
    calls: tuple[PlannedCall, ...] = (PlannedCall(0, ""),)
    """Calls of the unit's modules; by default the call of the whole model, as for the root unit."""
    is_split: bool = False
    """True if each tensor-parallel rank has a part of its own. The layout is that of one part."""

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.layout.unit

    @property
    def is_root(self) -> bool:
        """True if the unit contains all others: it stays gathered from the forward to the backward."""
        return self.calls[0].module == ""

    @property
    def size_bytes(self) -> int:
        """Size of the flat vector."""
        return self.layout.size_bytes


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Memory and gathers of a trainer in several steps, each of one forward and backward. Shared memory is excluded."""

    peak_bytes: int
    """Peak of the weights."""
    ahead_bytes: int
    """Maximum of prefetched weights that have not been used yet. Part of the weights."""
    kept_bytes: int
    """Maximum of weights that are kept for their next use in the step. Part of the weights."""
    idle_bytes: int
    """Idle buffers at the peak of weights and idle buffers together, beyond ``peak_bytes``."""
    gathers: Mapping[str, int]
    """Gathers in the last step, by unit."""


def rehearse(units: Sequence[PlannedUnit], options: PlanOptions, in_place: Collection[str] = ()) -> Rehearsal:
    """Rehearses the steps of a trainer.

    Args:
        units: Units of the trainer, in the order in which ``auto_wrap`` makes them.
        options: The run.
        in_place: Names of the units that are read in shared memory and take no memory of the trainer.
    """
    trainer = _Trainer(units, options, in_place)
    for _ in range(_NUM_STEPS):
        trainer.step()
    memory = trainer.memory
    return Rehearsal(
        peak_bytes=memory.peak_bytes,
        ahead_bytes=memory.peak_ahead_bytes,
        kept_bytes=memory.peak_kept_bytes,
        idle_bytes=memory.peak_total_bytes - memory.peak_bytes,
        gathers={unit.planned.name: unit.num_gathers for unit in trainer.units},
    )


def rehearse_schedule(units: Sequence[PlannedUnit], in_place: Collection[str] = ()) -> Rehearsal:
    """Returns what a pipeline schedule gathers: every unit once, until the stage has computed all micro-batches.

    Args:
        units: Units of the trainer.
        in_place: Names of the units that are read in shared memory and take no memory of the trainer.
    """
    return Rehearsal(
        peak_bytes=sum(unit.size_bytes for unit in units if unit.name not in in_place),
        ahead_bytes=0,
        kept_bytes=0,
        idle_bytes=0,
        gathers={unit.name: 1 for unit in units},
    )


class _Memory(ResidentBytes):
    """Counts the memory of flat vectors, and that of the idle buffers of a ``BufferPool``.

    Args:
        pool_bytes: Limit of the pool.
    """

    def __init__(self, pool_bytes: int) -> None:
        super().__init__()
        self._pool_bytes = pool_bytes
        self._idle: Counter[int] = Counter()
        self._idle_bytes = self.peak_total_bytes = self.peak_ahead_bytes = self.peak_kept_bytes = 0

    def add(self, size_bytes: int) -> None:
        # As in BufferPool: an allocation reuses an idle buffer of its size, a release keeps the buffer up to the limit.
        if size_bytes > 0 and self._idle[size_bytes]:
            self._add_idle(size_bytes, -1)
        elif size_bytes < 0 and self._idle_bytes - size_bytes <= self._pool_bytes:
            self._add_idle(-size_bytes, 1)
        super().add(size_bytes)
        self.peak_total_bytes = max(self.peak_total_bytes, self.live_bytes + self._idle_bytes)

    def _add_idle(self, size_bytes: int, count: int) -> None:
        self._idle[size_bytes] += count
        self._idle_bytes += count * size_bytes


class _Unit(ResidentUnit):
    """A unit without values. Its methods have the names and effects of ``Unit``'s."""

    def __init__(self, planned: PlannedUnit, index: int, own_bytes: int, memory: _Memory) -> None:
        super().__init__(memory, size_bytes=planned.size_bytes, own_bytes=own_bytes)
        self.planned, self.index, self.num_gathers = planned, index, 0
        self._counts = memory

    def start_gather(self) -> None:
        if self.needs_gather:
            self.num_gathers += 1
            if self.state is UnitState.FREED:
                self._counts.add(self.own_bytes)
            self._set_state(UnitState.FETCHING)

    def unshard(self) -> None:
        self._set_state(UnitState.UNSHARDED)
        # No unit waits for its own gather at this point, so all units in the state FETCHING were prefetched.
        self._counts.peak_ahead_bytes = max(self._counts.peak_ahead_bytes, self._counts.fetching_bytes)

    def enter(self, state: UnitState) -> None:
        """Enters the state that the policy has chosen: KEPT, STALE or FREED."""
        if state is UnitState.FREED and self.state is not UnitState.FREED:
            self._counts.add(-self.own_bytes)
        self._set_state(state)
        self._counts.peak_kept_bytes = max(self._counts.peak_kept_bytes, self._counts.kept_bytes)


@dataclass(eq=False, slots=True)
class _Call:
    """A module of a unit, with the modules directly inside it that are units too, in the order of the forward."""

    unit: _Unit
    planned: PlannedCall
    inner: list[_Call] = field(default_factory=list)

    def inside(self) -> list[_Call]:
        """Returns all calls inside this call, in the order of the forward."""
        return [found for call in self.inner for found in (call, *call.inside())]


class _Trainer:
    """Replays the calls of a model, and carries out the policy's decisions as ``ForwardBackward`` does."""

    def __init__(self, planned: Sequence[PlannedUnit], options: PlanOptions, in_place: Collection[str]) -> None:
        self._recomputes = options.checkpoint_activations
        self.memory = _Memory(options.prefetch_bytes)
        self.units = [
            _Unit(unit, index, 0 if unit.name in in_place else unit.size_bytes, self.memory)
            for index, unit in enumerate(planned)
        ]
        for unit in self.units:
            unit.settings.strategy = options.strategy
            unit.settings.reshard_after_forward = options.reshard_after_forward
        self._policy: ResidencyPolicy[_Unit] = ResidencyPolicy(
            self.memory,
            prefetch_bytes=options.prefetch_bytes,
            keep_bytes=options.keep_bytes,
            backward_prefetch=options.backward_prefetch,
        )
        self._outermost = _nest(self.units)
        self._in_backward: list[_Call] = []

    def step(self) -> None:
        for unit in self.units:
            unit.num_gathers = 0
        for unit in self._policy.gathers_at_step_start(self.units):
            unit.start_gather()
        for call in self._outermost:
            self._forward(call)
        for call in reversed(self._outermost):
            self._backward(call)
        self._end_backward()
        self._policy.order.end_forward()
        for unit in self.units:
            unit.enter(self._policy.state_after_commit(unit))

    def _forward(self, call: _Call) -> None:
        self._use(call.unit, Phase.FORWARD)
        for inner in call.inner:
            self._forward(inner)
        if self._policy.frees_after_forward(call.unit, is_root=call.unit.planned.is_root, expects_backward=True):
            self._release(call.unit)

    def _backward(self, call: _Call) -> None:
        # Autograd runs calls in reverse order, so a call has ended when one begins that is not inside it.
        ended = [other for other in self._in_backward if call not in other.inside()]
        self._in_backward = [other for other in self._in_backward if other not in ended]
        for other in ended:
            self._end_call(other)
        self._in_backward.append(call)
        self._use(call.unit, Phase.BACKWARD)
        if self._recomputes and call.planned.can_recompute:
            for inner in call.inside():
                self._use(inner.unit, Phase.BACKWARD)
        for inner in reversed(call.inner):
            self._backward(inner)

    def _end_backward(self) -> None:
        for call in self._in_backward:
            self._end_call(call)
        self._in_backward = []
        for unit in self._policy.unused_prefetches(self.units):
            unit.enter(UnitState.FREED)

    def _end_call(self, call: _Call) -> None:
        if self._policy.frees_after_backward(call.unit):
            self._release(call.unit)

    def _use(self, unit: _Unit, phase: Phase) -> None:
        if self._policy.begin_use(unit, phase):
            unit.start_gather()
            for following, displaced in self._policy.prefetches(unit, phase):
                for kept in displaced:
                    kept.enter(UnitState.FREED)
                following.start_gather()
        unit.unshard()

    def _release(self, unit: _Unit) -> None:
        for kept in self._policy.displaced_by_release(unit):
            kept.enter(UnitState.FREED)
        unit.enter(self._policy.state_after_release(unit))


def _nest(units: Sequence[_Unit]) -> list[_Call]:
    """Returns the calls that are inside no other call, in the order of the forward."""
    outermost: list[_Call] = []
    opened: list[_Call] = []
    calls = [_Call(unit, call) for unit in units for call in unit.planned.calls]
    for call in sorted(calls, key=lambda call: call.planned.position):
        while opened and not _is_inside(call.planned.module, opened[-1].planned.module):
            opened.pop()
        (opened[-1].inner if opened else outermost).append(call)
        opened.append(call)
    return outermost


def _is_inside(module: str, outer: str) -> bool:
    """True if one module is in the other, or is the same: the two units of a module compute together."""
    return not outer or module == outer or module.startswith(f"{outer}.")
