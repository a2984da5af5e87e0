"""The residency policy: which units to gather, prefetch, keep and free, and when.

Pure bookkeeping, without torch and without I/O: events go in, decisions come out. ``passes.py`` carries out
the decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from shardwell.memory.buffers import VectorMemory
from shardwell.module.strategy import BackwardPrefetch, ReplicaOptions, ShardingStrategy

MAX_UNITS_AHEAD = 64
"""Limit of the look-ahead in units. Half of it is requested at once, so it also limits how many small units share a
message. See Note: [Prefetch window]."""

# Note: [Prefetch window]
# The units that are gathered ahead of their use form a window in the order of use. When half of the window is used, it
# is filled up, and all units that this takes are requested together. A message costs each side as much time as the
# bytes of several small units. A window of few large units is filled up at every use, or nearly so.
#
# Near the end of a forward, few units are left to gather ahead. The units that are released then stay gathered in the
# window, because the backward needs them first. Kept units that are used soon count as gathered ahead. The others are
# freed when the window needs their room, the first released first: a backward uses units in reverse order.


class UnitState(enum.Enum):
    """Lifecycle of a unit, and the memory that it holds in this process.

    Gradients that are not pushed yet are in ``parameter.grad``, in any state.
    """

    FREED = enum.auto()
    """No memory. Using a parameter raises ``FreedParameterError``."""
    FETCHING = enum.auto()
    """The flat vector is allocated, and a gather is running or done. Using a parameter still raises."""
    UNSHARDED = enum.auto()
    """The flat vector is complete and the parameters are usable."""
    KEPT = enum.auto()
    """The flat vector is complete and kept for the unit's next use in the step. Using a parameter raises."""
    STALE = enum.auto()
    """The flat vector of a replica keeps its memory, with an older version in it. Using a parameter raises."""


class Phase(enum.IntEnum):
    """The pass that a unit is gathered for."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclass(slots=True)
class UnitSettings:
    """What a user has chosen for one unit. None leaves the choice to ``ResidencyPolicy``."""

    strategy: ShardingStrategy | None = None
    replica: ReplicaOptions = field(default_factory=ReplicaOptions)
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    forward_prefetch: tuple[ResidentUnit, ...] | None = None
    backward_prefetch: tuple[ResidentUnit, ...] | None = None
    predicted: bool = True
    """Whether the unit may be gathered because it was used at this place before. False for experts."""

    def drop_prefetch(self, removed: ResidentUnit) -> None:
        """Removes a unit that no longer exists from the units to prefetch."""
        if self.forward_prefetch is not None:
            self.forward_prefetch = tuple(unit for unit in self.forward_prefetch if unit is not removed)
        if self.backward_prefetch is not None:
            self.backward_prefetch = tuple(unit for unit in self.backward_prefetch if unit is not removed)


class ResidentUnit:
    """The part of a unit that the policy reads. Subclasses move its bytes.

    Args:
        memory: Counts the memory of all units.
        size_bytes: Size of the flat vector, wherever it is stored.
        own_bytes: Memory of this process that the flat vector takes while gathered; 0 if it is read in place.
    """

    index: int
    """Number of the unit in the run."""

    def __init__(self, memory: VectorMemory, size_bytes: int, own_bytes: int) -> None:
        self.state = UnitState.FREED
        self.settings = UnitSettings()
        self.size_bytes, self.own_bytes = size_bytes, own_bytes
        self._memory = memory

    @property
    def is_replica(self) -> bool:
        """True if the weights stay in this process."""
        return self.settings.strategy is ShardingStrategy.NO_SHARD

    @property
    def needs_gather(self) -> bool:
        """True if the current values are neither in this process nor being fetched."""
        return self.state in (UnitState.FREED, UnitState.STALE)

    def _set_state(self, state: UnitState) -> None:
        before, self.state = self.state, state
        size_bytes = self.own_bytes
        if size_bytes and self.settings.strategy is not ShardingStrategy.NO_SHARD:
            self._memory.fetching_bytes += ((state is UnitState.FETCHING) - (before is UnitState.FETCHING)) * size_bytes
            self._memory.kept_bytes += ((state is UnitState.KEPT) - (before is UnitState.KEPT)) * size_bytes


UnitT = TypeVar("UnitT", bound=ResidentUnit)


class _Use(Generic[UnitT]):
    """A unit and the phase that it is used in."""

    __slots__ = ("next", "phase", "unit")

    def __init__(self, unit: UnitT, phase: Phase) -> None:
        self.unit, self.phase = unit, phase
        self.next: dict[_Use[UnitT] | None, _Use[UnitT]] = {}
        """The use that last followed this one, by the use before this one."""


class UsageOrder(Generic[UnitT]):
    """The order in which units were used, from which the next uses are predicted.

    A use is predicted from the two uses before it. The prediction is exact for a model that runs the same way every
    time, also where a unit is used several times. It does not depend on where a step begins.
    """

    def __init__(self) -> None:
        self._uses: dict[Phase, dict[UnitT, _Use[UnitT]]] = {phase: {} for phase in Phase}
        self._previous: _Use[UnitT] | None = None
        self._latest: _Use[UnitT] | None = None
        self._forward: dict[int, None] = {}
        self._forward_ended = False

    def observe(self, unit: UnitT, phase: Phase) -> bool:
        """Records that a unit is used now.

        Returns:
            False for uses that are ignored: a repetition of the latest use, and units that are not predicted.
        """
        if not unit.settings.predicted:
            return False
        use, latest = self._uses[phase].get(unit), self._latest
        if use is None:
            use = self._uses[phase][unit] = _Use(unit, phase)
        if use is latest:
            return False
        if latest is not None:
            latest.next[self._previous] = use
        self._previous, self._latest = latest, use
        if phase is Phase.BACKWARD:
            self._forward_ended = True
            return True
        if self._forward_ended:
            self._forward, self._forward_ended = {}, False
        self._forward[unit.index] = None  # an index that is in the dict already keeps its place
        return True

    def upcoming(self) -> Iterator[UnitT]:
        """Yields the units that the current phase is expected to use next, nearest first."""
        previous, use = self._previous, self._latest
        for _ in range(MAX_UNITS_AHEAD):
            if use is None:
                return
            previous, use = use, use.next.get(previous)
            if use is None or use.phase is not previous.phase:
                return
            yield use.unit

    def end_forward(self) -> None:
        """Ends the current forward: the next one starts a new list in ``forward``."""
        self._forward_ended = True

    @property
    def forward(self) -> list[int]:
        """Indices of the units of the last forward, by first use."""
        return list(self._forward)


def _counted(unit: ResidentUnit) -> int:
    """Returns the bytes that a unit takes of the limits while it is fetched or kept. A replica has its own memory."""
    return 0 if unit.settings.strategy is ShardingStrategy.NO_SHARD else unit.own_bytes


class ResidencyPolicy(Generic[UnitT]):
    """Decides when the units of one trainer are gathered, kept and freed.

    Attributes:
        prefetch_bytes: Bytes that may be gathered ahead of their use, beyond the units in use.
        keep_bytes: Bytes that may stay between two uses in a step. None: what the prefetch window leaves free.
        backward_prefetch: When the next unit of a backward is gathered.
        order: The order of uses seen so far.

    Args:
        memory: The memory that the units take now.
    """

    def __init__(
        self, memory: VectorMemory, *, prefetch_bytes: int, keep_bytes: int | None, backward_prefetch: BackwardPrefetch
    ) -> None:
        self.prefetch_bytes, self.keep_bytes, self.backward_prefetch = prefetch_bytes, keep_bytes, backward_prefetch
        self.order: UsageOrder[UnitT] = UsageOrder()
        self._memory = memory
        self._released: dict[UnitT, None] = {}
        """The kept units, in the order of their release, and units that are not kept any more."""
        self._uses_before_fill = 0
        """Uses until the prefetch window is filled up. Not above 0: at the next use."""

    def begin_use(self, unit: UnitT, phase: Phase) -> bool:
        """Records that a unit is used now, before it is gathered for this use.

        Returns:
            True if units are to be gathered now: this one, or those of ``prefetches``.
        """
        if self.order.observe(unit, phase):
            self._uses_before_fill -= 1
        if unit.state is UnitState.FREED or unit.state is UnitState.STALE:  # failed prediction, or another phase begins
            self._uses_before_fill = 0
        return self._uses_before_fill <= 0 or self._chosen(unit, phase) is not None

    def _chosen(self, unit: UnitT, phase: Phase) -> tuple[UnitT, ...] | None:
        settings = unit.settings
        chosen = settings.forward_prefetch if phase is Phase.FORWARD else settings.backward_prefetch
        return cast("tuple[UnitT, ...] | None", chosen)

    def prefetches(self, unit: UnitT, phase: Phase) -> Iterator[tuple[UnitT, Sequence[UnitT]]]:
        """Yields the units to gather while a unit computes, nearest first. Call it if ``begin_use`` returned True.

        The caller frees the kept units that are yielded with each unit and starts its gather, before it asks for the
        next unit. It stops when no more gathers may run.
        """
        if (chosen := self._chosen(unit, phase)) is not None:
            for following in chosen:
                if following.needs_gather:
                    excess_bytes = self._excess_bytes(unit, self._ahead_bytes(unit) + _counted(following))
                    yield following, self._displaced(excess_bytes, {unit, *chosen})
            return
        if phase is Phase.BACKWARD and self.backward_prefetch is not BackwardPrefetch.PRE:
            return
        ahead_bytes, kept_ahead_bytes = self._ahead_bytes(unit), 0
        number, first_uses = 0, {unit: 0}
        fill_after = MAX_UNITS_AHEAD
        for number, following in enumerate(self.order.upcoming(), 1):
            first_use = first_uses.setdefault(following, number)
            if first_use < number:  # the unit is used twice, and can be gathered again after its first use
                fill_after = min(fill_after, first_use + 1)
            if not following.needs_gather:
                if first_use == number and self.keep_bytes is None and following.state is UnitState.KEPT:
                    kept_ahead_bytes += _counted(following)
                continue
            ahead_bytes += 0 if following.is_replica else following.size_bytes
            if ahead_bytes + kept_ahead_bytes > self.prefetch_bytes:
                break
            yield following, self._displaced(self._excess_bytes(unit, ahead_bytes), first_uses)
        self._uses_before_fill = min(fill_after, number // 2)

    def has_room_ahead(self, unit: UnitT) -> bool:
        """Returns whether a unit that is known to be used soon may be gathered ahead, next to kept units."""
        ahead_bytes = self._memory.fetching_bytes + self._memory.kept_bytes * (self.keep_bytes is None)
        return ahead_bytes + _counted(unit) <= self.prefetch_bytes

    def _ahead_bytes(self, unit: UnitT) -> int:
        """Returns the bytes that are gathered ahead while a unit begins a use."""
        return self._memory.fetching_bytes - (_counted(unit) if unit.state is UnitState.FETCHING else 0)

    def _excess_bytes(self, unit: UnitT, ahead_bytes: int) -> int:
        """Returns by how much bytes gathered ahead and kept units exceed the window while a unit begins a use."""
        in_use_bytes = _counted(unit) if unit.state is UnitState.KEPT else 0
        return ahead_bytes + self._memory.kept_bytes - in_use_bytes - self.prefetch_bytes

    def _displaced(self, excess_bytes: int, staying: Collection[UnitT]) -> Sequence[UnitT]:
        """Returns kept units that take at least so many bytes, or all if they take less; the first released first.

        Args:
            excess_bytes: Bytes to free.
            staying: Units that are not freed.
        """
        displaced: list[UnitT] = []
        used: list[UnitT] = []
        for unit in self._released if self.keep_bytes is None else ():
            if excess_bytes <= 0:
                break
            if unit.state is not UnitState.KEPT:
                used.append(unit)
            elif unit not in staying:
                displaced.append(unit)
                excess_bytes -= unit.own_bytes
        for unit in used:  # it enters again when it is kept again
            del self._released[unit]
        return displaced

    def gathers_before_push(self, unit: UnitT) -> bool:
        """True if a unit is gathered for its backward before the gradients of the previous unit are pushed."""
        return self.backward_prefetch is BackwardPrefetch.POST and unit.needs_gather

    def frees_after_forward(self, unit: UnitT, *, is_root: bool, expects_backward: bool) -> bool:
        """True if a unit is released after its forward.

        Args:
            unit: The unit.
            is_root: True if the unit contains all others: its backward begins immediately.
            expects_backward: True if a result of the forward has a graph, and the module is in training mode.
        """
        strategy, choice = unit.settings.strategy, unit.settings.reshard_after_forward
        if strategy is ShardingStrategy.NO_SHARD:
            return False
        if choice is not None:
            return choice
        stays = strategy is ShardingStrategy.SHARD_GRAD_OP or is_root
        return not (stays and expects_backward)

    def frees_after_backward(self, unit: UnitT) -> bool:
        """True if a unit is released after its backward."""
        return unit.settings.reshard_after_backward and unit.settings.strategy is not ShardingStrategy.NO_SHARD

    def displaced_by_release(self, unit: UnitT) -> Sequence[UnitT]:
        """Returns the kept units to free before a unit is released: the released unit is expected to be used earlier.

        Call ``state_after_release`` next.
        """
        if self.keep_bytes is not None or unit.state is not UnitState.UNSHARDED:
            return ()
        if unit.settings.strategy is ShardingStrategy.NO_SHARD:
            return ()
        memory = self._memory
        excess_bytes = memory.fetching_bytes + memory.kept_bytes + unit.own_bytes - self.prefetch_bytes
        if excess_bytes <= 0:
            return ()
        displaced = self._displaced(excess_bytes, set(self.order.upcoming()))
        return displaced if sum(other.own_bytes for other in displaced) >= excess_bytes else ()

    def state_after_release(self, unit: UnitT) -> UnitState:
        """Returns the state that a released unit enters: KEPT if there is room for it, otherwise FREED."""
        if unit.state is UnitState.KEPT:
            return UnitState.KEPT
        if unit.state is UnitState.UNSHARDED:
            own_bytes = unit.own_bytes
            if not own_bytes or unit.settings.strategy is ShardingStrategy.NO_SHARD:
                return UnitState.KEPT
            room_bytes = (
                self.prefetch_bytes - self._memory.fetching_bytes if self.keep_bytes is None else self.keep_bytes
            )
            if self._memory.kept_bytes + own_bytes <= room_bytes:
                self._released.pop(unit, None)
                self._released[unit] = None
                return UnitState.KEPT
        return unit.state if unit.is_replica else UnitState.FREED

    def state_after_commit(self, unit: UnitT) -> UnitState:
        """Returns the state that a unit enters when a commit makes its values outdated."""
        self._released.pop(unit, None)
        return UnitState.STALE if unit.is_replica and unit.state is not UnitState.FREED else UnitState.FREED

    def forget(self, removed: UnitT) -> None:
        """Forgets a unit that no longer exists, and the order of uses."""
        self._released.pop(removed, None)
        self.order = UsageOrder()

    def unused_prefetches(self, units: Iterable[UnitT]) -> list[UnitT]:
        """Returns the prefetched units that the finished backward did not use."""
        found = []
        for unit in units:
            if unit.state is UnitState.FETCHING and not unit.is_replica:
                found.append(unit)
        return found

    def gathers_at_step_start(self, units: Iterable[UnitT]) -> list[UnitT]:
        """Returns the replicas whose new version is fetched when a step starts, in the order of the last forward."""
        rank = {index: number for number, index in enumerate(self.order.forward)}
        stale = [unit for unit in units if unit.state is UnitState.STALE]
        return sorted(stale, key=lambda unit: rank.get(unit.index, len(rank)))
