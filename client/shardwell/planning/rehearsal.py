"""Steps rehearsed with units that are sizes only: how often each is gathered, and how much is held at once.

The order of gathers and how far ahead they go are decided by the SDK's own ``Gathering``. What ``Units`` does around
it, keeping and freeing, is repeated here; a test holds the two together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwell.module.flat_vector import Memory
from shardwell.module.gathering import Gathering
from shardwell.module.prefetch import Phase
from shardwell.module.strategy import ShardingStrategy, UnitSettings
from shardwell.module.unit import UnitState
from shardwell.planning.options import PlanOptions
from shardwell.planning.planned_units import PlannedCall, PlannedUnit
from shardwell_wire.layout import UnitLayout

_NUM_STEPS = 3
"""In the first the order is learnt, in the second that of its beginning after an end; from then on all are alike."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a trainer did in some steps of one forward and backward each. Bytes of its own memory."""

    peak_bytes: int
    """Weights at most at once."""
    ahead_bytes: int
    """Of weights, the most that waited for their first use at once."""
    kept_bytes: int
    """Of weights, the most that waited for their next use in the step at once."""
    idle_bytes: int
    """Buffers that wait for the next units when weights and buffers together are at their peak, beyond
    ``peak_bytes``."""
    gathers: Mapping[str, int]
    """In the last step, by unit."""


def rehearse(units: Sequence[PlannedUnit], options: PlanOptions, in_place: Collection[str] = ()) -> Rehearsal:
    """Rehearses the steps of a trainer.

    Args:
        units: Of the trainer, in the order in which ``auto_wrap`` makes them.
        options: The run.
        in_place: Names of units that are read in memory which is not the trainer's.
    """
    trainer = _Trainer(units, options, in_place)
    for _ in range(_NUM_STEPS):
        trainer.step()
    vectors = trainer.vectors
    return Rehearsal(
        peak_bytes=vectors.peak_bytes,
        ahead_bytes=vectors.peak_ahead_bytes,
        kept_bytes=vectors.peak_kept_bytes,
        idle_bytes=vectors.peak_total_bytes - vectors.peak_bytes,
        gathers={unit.layout.unit: unit.num_gathers for unit in trainer.units},
    )


class _Vectors(Memory):
    """Counts the memory of flat vectors, and of the buffers that the pool keeps.

    Args:
        pool_bytes: How much the pool keeps.
    """

    def __init__(self, pool_bytes: int) -> None:
        super().__init__()
        self._pool_bytes = pool_bytes
        self._idle: Counter[int] = Counter()
        self._idle_bytes = self.peak_total_bytes = self.peak_ahead_bytes = self.peak_kept_bytes = 0

    def take(self, size_bytes: int) -> None:
        if size_bytes > 0 and self._idle[size_bytes]:
            self._keep_idle(size_bytes, -1)
        elif size_bytes < 0 and self._idle_bytes - size_bytes <= self._pool_bytes:
            self._keep_idle(-size_bytes, 1)
        super().take(size_bytes)
        self.peak_total_bytes = max(self.peak_total_bytes, self.live_bytes + self._idle_bytes)

    def _keep_idle(self, size_bytes: int, count: int) -> None:
        self._idle[size_bytes] += count
        self._idle_bytes += count * size_bytes

    def note_ahead(self) -> None:
        """When no unit waits for its own gather."""
        self.peak_ahead_bytes = max(self.peak_ahead_bytes, self.fetching_bytes)

    def note_kept(self) -> None:
        self.peak_kept_bytes = max(self.peak_kept_bytes, self.kept_bytes)


@dataclass(eq=False, slots=True)
class _Unit:
    """What ``Gathering`` needs of a ``Unit``."""

    planned: PlannedUnit
    index: int
    own_bytes: int
    """0 if it is read in place."""
    is_replica: bool
    vectors: _Vectors
    state: UnitState = UnitState.FREED
    settings: UnitSettings = field(default_factory=UnitSettings)
    num_gathers: int = 0
    """In this step."""

    @property
    def layout(self) -> UnitLayout:
        return self.planned.layout

    @property
    def precision(self) -> _Unit:
        """What has the layout to compute with."""
        return self

    @property
    def needs_gather(self) -> bool:
        return self.state in (UnitState.FREED, UnitState.STALE)

    def start_fetch(self) -> None:
        self.num_gathers += 1
        if self.state is UnitState.FREED:
            self.vectors.take(self.own_bytes)
        self.enter(UnitState.FETCHING)

    def unshard(self) -> None:
        self.enter(UnitState.UNSHARDED)
        self.vectors.note_ahead()

    def free(self) -> None:
        if self.state is not UnitState.FREED:
            self.vectors.take(-self.own_bytes)
            self.enter(UnitState.FREED)

    def expire(self) -> None:
        if self.is_replica and self.state is not UnitState.FREED:
            self.enter(UnitState.STALE)
        else:
            self.free()

    def enter(self, state: UnitState) -> None:
        """As ``Unit``, whose replicas' memory counts as neither fetched ahead nor kept."""
        counted, before = 0 if self.is_replica else self.own_bytes, self.state
        self.vectors.fetching_bytes += ((state is UnitState.FETCHING) - (before is UnitState.FETCHING)) * counted
        self.vectors.kept_bytes += ((state is UnitState.KEPT) - (before is UnitState.KEPT)) * counted
        self.state = state
        self.vectors.note_kept()


@dataclass(eq=False, slots=True)
class _Call:
    """A module of a unit, with those directly inside it that are units too, in the order of the forward."""

    unit: _Unit
    planned: PlannedCall
    inner: list[_Call] = field(default_factory=list)

    def inside(self) -> list[_Call]:
        """All that is inside it, in the order of the forward."""
        return [found for call in self.inner for found in (call, *call.inside())]


class _Trainer:
    """Gathers, keeps and frees as ``Units`` does."""

    def __init__(self, planned: Sequence[PlannedUnit], options: PlanOptions, in_place: Collection[str]) -> None:
        self._options = options
        self.vectors = _Vectors(options.prefetch_bytes)
        is_replica = options.strategy is ShardingStrategy.NO_SHARD
        self.units = [
            _Unit(unit, index, 0 if unit.name in in_place else unit.size_bytes, is_replica, self.vectors)
            for index, unit in enumerate(planned)
        ]
        self._outermost = _nest(self.units)
        self._gathering: Any = Gathering(  # of units that are not quite ones
            self.vectors,
            prefetch_bytes=options.prefetch_bytes,
            max_in_flight=0,
            backward_prefetch=options.backward_prefetch,
        )
        self._in_backward: list[_Call] = []

    def step(self) -> None:
        for unit in self.units:
            unit.num_gathers = 0
        for unit in self.units:
            if unit.state is UnitState.STALE:
                self._gathering.start_ahead(unit)
        for call in self._outermost:
            self._forward(call)
        for call in reversed(self._outermost):
            self._backward(call)
        self._end_backward()
        self._gathering.order.end_forward()
        for unit in self.units:
            unit.expire()

    def _forward(self, call: _Call) -> None:
        self._gathering.use(call.unit, Phase.FORWARD)
        for inner in call.inner:
            self._forward(inner)
        if self._frees_after_forward(call.unit):
            self._put_away(call.unit)

    def _frees_after_forward(self, unit: _Unit) -> bool:
        strategy = self._options.strategy
        if strategy is ShardingStrategy.NO_SHARD:
            return False
        if self._options.reshard_after_forward is not None:
            return self._options.reshard_after_forward
        return not (strategy is ShardingStrategy.SHARD_GRAD_OP or unit.planned.is_root)

    def _backward(self, call: _Call) -> None:
        over = [other for other in self._in_backward if call not in other.inside()]
        self._in_backward = [other for other in self._in_backward if other not in over]
        for other in over:
            self._put_away(other.unit)
        self._in_backward.append(call)
        self._gathering.use(call.unit, Phase.BACKWARD)
        if self._options.checkpoint_activations and call.planned.can_recompute:
            for inner in call.inside():
                self._gathering.use(inner.unit, Phase.BACKWARD)
        for inner in reversed(call.inner):
            self._backward(inner)

    def _end_backward(self) -> None:
        for call in self._in_backward:
            self._put_away(call.unit)
        self._in_backward = []
        for unit in self.units:
            if unit.state is UnitState.FETCHING and not unit.is_replica:
                unit.free()

    def _put_away(self, unit: _Unit) -> None:
        if unit.is_replica or self.vectors.kept_bytes + unit.own_bytes <= self._options.keep_bytes:
            unit.enter(UnitState.KEPT)
        else:
            unit.free()


def _nest(units: Sequence[_Unit]) -> list[_Call]:
    """The calls that are in no other one, in the order of the forward."""
    outermost: list[_Call] = []
    opened: list[_Call] = []
    calls = [_Call(unit, call) for unit in units for call in unit.planned.calls]
    for call in sorted(calls, key=lambda call: call.planned.place):
        while opened and not _is_inside(call.planned.module, opened[-1].planned.module):
            opened.pop()
        (opened[-1].inner if opened else outermost).append(call)
        opened.append(call)
    return outermost


def _is_inside(module: str, outer: str) -> bool:
    return not outer or module.startswith(f"{outer}.")
