"""Decisions of the residency policy: what to prefetch, keep and free."""

from __future__ import annotations

import ast
import gc
import inspect
import weakref
from typing import Any

import pytest

from shardwell import BackwardPrefetch, ShardingStrategy
from shardwell.memory.buffers import VectorMemory
from shardwell.module import residency, strategy
from shardwell.module.residency import MAX_UNITS_AHEAD, Phase, ResidencyPolicy, ResidentUnit, UnitState

SIZE = 100


class FakeUnit(ResidentUnit):
    """A unit of ``SIZE`` bytes without values."""

    def __init__(self, index: int, memory: VectorMemory) -> None:
        super().__init__(memory, size_bytes=SIZE, own_bytes=SIZE)
        self.index = index

    def enter(self, state: UnitState) -> None:
        self._set_state(state)


def make(count: int = 4, **options: Any) -> tuple[ResidencyPolicy[FakeUnit], list[FakeUnit]]:
    """Returns a policy, and units whose order it has observed in two steps."""
    memory = VectorMemory()
    limits = {"prefetch_bytes": 0, "keep_bytes": 0, "backward_prefetch": BackwardPrefetch.PRE, **options}
    policy: ResidencyPolicy[FakeUnit] = ResidencyPolicy(memory, **limits)
    units = [FakeUnit(index, memory) for index in range(count)]
    for _ in range(2):
        for unit in units:
            policy.order.observe(unit, Phase.FORWARD)
        for unit in reversed(units):
            policy.order.observe(unit, Phase.BACKWARD)
    policy.order.observe(units[0], Phase.FORWARD)
    return policy, units


def prefetched(policy: ResidencyPolicy[FakeUnit], unit: FakeUnit, phase: Phase = Phase.FORWARD) -> list[int]:
    """Starts all prefetches, as the caller of the policy does, and returns the indices."""
    indices = []
    for following, displaced in policy.prefetches(unit, phase):
        for kept in displaced:
            kept.enter(UnitState.FREED)
        following.enter(UnitState.FETCHING)
        indices.append(following.index)
    return indices


def test_prefetch_stays_within_its_bytes() -> None:
    for prefetch_bytes, expected in ((0, []), (SIZE, [1]), (2 * SIZE + 1, [1, 2]), (1 << 30, [1, 2, 3])):
        policy, units = make(prefetch_bytes=prefetch_bytes)
        assert prefetched(policy, units[0]) == expected
        assert prefetched(policy, units[0]) == []


def test_units_that_are_not_predicted_do_not_change_the_prediction_of_others() -> None:
    """Whichever experts run in the first layer, the second layer comes next, and no expert is gathered ahead."""
    policy, units = make(2, prefetch_bytes=1 << 30)
    memory = VectorMemory()
    experts = [FakeUnit(index, memory) for index in range(2, 6)]
    for expert in experts:
        expert.settings.predicted = False
    for expert in experts:
        policy.order.observe(units[0], Phase.FORWARD)
        assert not policy.order.observe(expert, Phase.FORWARD)
        assert list(policy.order.upcoming()) == [units[1]]
        policy.order.observe(units[1], Phase.FORWARD)
        policy.order.observe(units[1], Phase.BACKWARD)
        assert not policy.order.observe(expert, Phase.BACKWARD)
        assert list(policy.order.upcoming()) == [units[0]]
        policy.order.observe(units[0], Phase.BACKWARD)
    assert policy.order.forward == [0, 1]


@pytest.mark.parametrize(("keep_bytes", "expected"), [(None, 2), (SIZE, 3)])
def test_room_ahead_counts_gathers_and_kept_units_of_the_window(keep_bytes: int | None, expected: int) -> None:
    policy, units = make(6, prefetch_bytes=3 * SIZE, keep_bytes=keep_bytes)
    units[0].enter(UnitState.UNSHARDED)
    units[0].enter(UnitState.KEPT)
    gathered = 0
    while policy.has_room_ahead(units[1 + gathered]):
        units[1 + gathered].enter(UnitState.FETCHING)
        gathered += 1
    assert gathered == expected


def begin_use(policy: ResidencyPolicy[FakeUnit], unit: FakeUnit, phase: Phase) -> list[int]:
    """Begins a use as the caller of the policy does; returns the indices of the units that are gathered."""
    gathered = []
    if policy.begin_use(unit, phase):
        if unit.needs_gather:
            gathered.append(unit.index)
            unit.enter(UnitState.FETCHING)
        gathered += prefetched(policy, unit, phase)
    unit.enter(UnitState.UNSHARDED)
    return gathered


def use(policy: ResidencyPolicy[FakeUnit], unit: FakeUnit, phase: Phase = Phase.FORWARD) -> list[int]:
    """Uses and frees a unit; returns the indices of the units that are gathered."""
    gathered = begin_use(policy, unit, phase)
    unit.enter(UnitState.FREED)
    return gathered


def start_over(policy: ResidencyPolicy[FakeUnit], units: list[FakeUnit]) -> None:
    """Ends the step that ``make`` has begun."""
    for unit in units[1:]:
        policy.order.observe(unit, Phase.FORWARD)
    for unit in reversed(units):
        policy.order.observe(unit, Phase.BACKWARD)


def test_half_of_the_window_is_requested_at_once() -> None:
    count = 3 * MAX_UNITS_AHEAD
    policy, units = make(count, prefetch_bytes=1 << 30)
    start_over(policy, units)
    half = MAX_UNITS_AHEAD // 2
    for phase, in_order in ((Phase.FORWARD, units), (Phase.BACKWARD, units[::-1])):
        messages = [use(policy, unit, phase) for unit in in_order]
        sent = [(number, len(message)) for number, message in enumerate(messages) if message]
        assert sent == [
            (0, MAX_UNITS_AHEAD + 1),
            *((number, half) for number in range(half, 2 * MAX_UNITS_AHEAD, half)),
            (2 * MAX_UNITS_AHEAD, half - 1),
        ]
        assert [index for message in messages for index in message] == [unit.index for unit in in_order]


def test_window_that_bytes_limit_is_filled_at_half() -> None:
    policy, units = make(12, prefetch_bytes=4 * SIZE)
    start_over(policy, units)
    assert [len(use(policy, unit)) for unit in units] == [5, 0, 2, 0, 2, 0, 2, 0, 1, 0, 0, 0]


def test_window_of_two_units_is_filled_at_every_use() -> None:
    policy, units = make(5, prefetch_bytes=2 * SIZE)
    start_over(policy, units)
    assert [use(policy, unit) for unit in units] == [[0, 1, 2], [3], [4], [], []]


def test_wrong_prediction_fills_the_window_at_once() -> None:
    policy, units = make(20, prefetch_bytes=1 << 30)
    start_over(policy, units)
    assert len(use(policy, units[0])) == 20
    units[3].enter(UnitState.FREED)
    units[7].enter(UnitState.FREED)
    assert [use(policy, unit) for unit in units[1:4]] == [[], [], [3, 7]]


def test_unit_that_is_used_twice_is_gathered_ahead_of_both_uses() -> None:
    memory = VectorMemory()
    policy = ResidencyPolicy[FakeUnit](
        memory, prefetch_bytes=1 << 30, keep_bytes=0, backward_prefetch=BackwardPrefetch.PRE
    )
    units = [FakeUnit(index, memory) for index in range(20)]
    forward = [*units[:9], units[2], *units[9:]]
    for _ in range(2):
        for unit in forward:
            policy.order.observe(unit, Phase.FORWARD)
        policy.order.observe(units[0], Phase.BACKWARD)
    gathered = [use(policy, unit) for unit in forward]
    assert (len(gathered[0]), gathered[3]) == (20, [2])
    assert not any(gathered[4:])


def test_gathers_that_find_no_room_are_started_at_the_next_use() -> None:
    policy, units = make(8, prefetch_bytes=1 << 30)
    start_over(policy, units)
    assert policy.begin_use(units[0], Phase.FORWARD)
    next(policy.prefetches(units[0], Phase.FORWARD))[0].enter(UnitState.FETCHING)  # the caller stops here
    assert use(policy, units[1]) == [2, 3, 4, 5, 6, 7]


def test_unit_gathered_for_its_own_use_does_not_count_as_prefetched() -> None:
    policy, units = make(prefetch_bytes=SIZE)
    units[0].enter(UnitState.FETCHING)
    assert prefetched(policy, units[0]) == [1]


def test_replicas_do_not_count_as_prefetched() -> None:
    policy, units = make(prefetch_bytes=SIZE)
    units[1].settings.strategy = ShardingStrategy.NO_SHARD
    assert prefetched(policy, units[0]) == [1, 2]


def test_chosen_units_replace_the_prediction() -> None:
    policy, units = make(prefetch_bytes=0)
    units[0].settings.forward_prefetch = (units[3], units[2])
    units[2].enter(UnitState.UNSHARDED)
    assert prefetched(policy, units[0]) == [3]


@pytest.mark.parametrize("mode", BackwardPrefetch)
def test_backward_prefetch_mode_decides_when_units_are_gathered(mode: BackwardPrefetch) -> None:
    policy, units = make(prefetch_bytes=1 << 30, backward_prefetch=mode)
    for unit in units[1:]:
        policy.order.observe(unit, Phase.FORWARD)
    policy.order.observe(units[3], Phase.BACKWARD)
    assert policy.gathers_before_push(units[2]) is (mode is BackwardPrefetch.POST)
    assert prefetched(policy, units[3], Phase.BACKWARD) == ([2, 1, 0] if mode is BackwardPrefetch.PRE else [])


@pytest.mark.parametrize(
    ("chosen", "is_root", "expects_backward", "frees"),
    [
        (None, False, True, True),
        (None, True, True, False),
        (None, True, False, True),
        (ShardingStrategy.SHARD_GRAD_OP, False, True, False),
        (ShardingStrategy.SHARD_GRAD_OP, False, False, True),
        (ShardingStrategy.NO_SHARD, False, False, False),
    ],
)
def test_strategy_and_root_decide_whether_a_forward_frees_the_unit(
    chosen: ShardingStrategy | None, is_root: bool, expects_backward: bool, frees: bool
) -> None:
    policy, (unit,) = make(1)
    unit.settings.strategy = chosen
    assert policy.frees_after_forward(unit, is_root=is_root, expects_backward=expects_backward) is frees


@pytest.mark.parametrize("choice", [True, False])
def test_reshard_after_forward_overrides_the_default(choice: bool) -> None:
    policy, (unit,) = make(1)
    unit.settings.reshard_after_forward = choice
    for is_root in (True, False):
        assert policy.frees_after_forward(unit, is_root=is_root, expects_backward=not choice) is choice


def test_released_units_are_kept_within_keep_bytes() -> None:
    policy, units = make(keep_bytes=2 * SIZE)
    states = []
    for unit in units:
        unit.enter(UnitState.UNSHARDED)
        unit.enter(policy.state_after_release(unit))
        states.append(unit.state)
    assert states == [UnitState.KEPT, UnitState.KEPT, UnitState.FREED, UnitState.FREED]
    assert policy.state_after_release(units[0]) is UnitState.KEPT


def run_in_window(policy: ResidencyPolicy[FakeUnit], units: list[FakeUnit], phase: Phase) -> list[int]:
    """Uses and releases units that share a window of four; returns the indices of those that are gathered."""
    gathered: list[int] = []
    for unit in units:
        gathered += begin_use(policy, unit, phase)
        for kept in policy.displaced_by_release(unit):
            kept.enter(UnitState.FREED)
        unit.enter(policy.state_after_release(unit))
        assert sum(other.state is not UnitState.FREED for other in units) <= 4
    return gathered


@pytest.mark.parametrize("passes", [1, 3])
def test_units_that_a_backward_needs_first_stay_in_the_prefetch_window(passes: int) -> None:
    policy, units = make(12, prefetch_bytes=4 * SIZE, keep_bytes=None)
    start_over(policy, units)
    assert run_in_window(policy, units, Phase.FORWARD) == list(range(12))
    for _ in range(passes):
        assert run_in_window(policy, units[::-1], Phase.BACKWARD) == [7, 6, 5, 4, 3, 2, 1, 0]
        assert run_in_window(policy, units, Phase.FORWARD) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [unit.index for unit in units if unit.state is UnitState.KEPT] == [8, 9, 10, 11]
    run_in_window(policy, units[::-1], Phase.BACKWARD)
    for unit in units:
        unit.enter(policy.state_after_commit(unit))
    assert run_in_window(policy, units, Phase.FORWARD) == list(range(12))


def keep(policy: ResidencyPolicy[FakeUnit], units: list[FakeUnit]) -> None:
    for unit in units:
        unit.enter(UnitState.UNSHARDED)
        unit.enter(policy.state_after_release(unit))
        assert unit.state is UnitState.KEPT


def test_units_of_a_prefetch_list_displace_kept_units() -> None:
    policy, units = make(8, prefetch_bytes=4 * SIZE, keep_bytes=None)
    keep(policy, units[:4])
    units[4].settings.forward_prefetch = (units[5], units[3], units[6])
    assert policy.begin_use(units[4], Phase.FORWARD)
    units[4].enter(UnitState.FETCHING)
    assert prefetched(policy, units[4]) == [5, 6]
    assert [unit.index for unit in units if unit.state is UnitState.KEPT] == [2, 3]
    units[4].settings.forward_prefetch = tuple(units)  # more than the window: the user decides
    assert prefetched(policy, units[4]) == [0, 1, 7]


@pytest.mark.parametrize("state", [UnitState.FREED, UnitState.FETCHING, UnitState.STALE])
def test_units_that_cannot_be_kept_displace_no_kept_unit(state: UnitState) -> None:
    policy, units = make(6, prefetch_bytes=4 * SIZE + 1, keep_bytes=None)
    keep(policy, units[:4])
    if state is UnitState.STALE:
        units[5].settings.strategy = ShardingStrategy.NO_SHARD
    units[5].enter(state)
    assert not policy.displaced_by_release(units[5])


def test_decisions_do_not_read_all_units_that_were_kept() -> None:
    reads = 0

    class CountingUnit(FakeUnit):
        @property
        def state(self) -> UnitState:
            nonlocal reads
            reads += 1
            return self._state

        @state.setter
        def state(self, value: UnitState) -> None:
            self._state = value

    count, memory = 2000, VectorMemory()
    policy: ResidencyPolicy[FakeUnit] = ResidencyPolicy(
        memory, prefetch_bytes=count // 2 * SIZE, keep_bytes=None, backward_prefetch=BackwardPrefetch.PRE
    )
    units: list[FakeUnit] = [CountingUnit(index, memory) for index in range(count)]
    for _ in range(2):
        reads = 0
        for phase in Phase:
            for unit in units if phase is Phase.FORWARD else reversed(units):
                if policy.begin_use(unit, phase):
                    unit.enter(UnitState.FETCHING)
                    prefetched(policy, unit, phase)
                unit.enter(UnitState.UNSHARDED)
                for kept in policy.displaced_by_release(unit):
                    kept.enter(UnitState.FREED)
                unit.enter(policy.state_after_release(unit))
        assert reads < 60 * count
        for unit in units:
            unit.enter(policy.state_after_commit(unit))


def test_removed_units_are_forgotten() -> None:
    policy, units = make(keep_bytes=None, prefetch_bytes=4 * SIZE)
    keep(policy, units)
    removed = weakref.ref(unit := units.pop())
    policy.forget(unit)
    del unit
    gc.collect()  # uses refer to each other
    assert removed() is None


def test_units_beyond_the_prefetch_window_are_not_kept() -> None:
    policy, units = make(12, prefetch_bytes=SIZE - 1, keep_bytes=None)
    start_over(policy, units)
    for _ in range(2):
        assert run_in_window(policy, units, Phase.FORWARD) == list(range(12))


def test_commit_makes_replicas_stale_and_frees_other_units() -> None:
    policy, units = make()
    units[0].settings.strategy = units[1].settings.strategy = ShardingStrategy.NO_SHARD
    for unit in units[1:]:
        unit.enter(UnitState.UNSHARDED)
    for unit in units:
        unit.enter(policy.state_after_commit(unit))
    assert [unit.state for unit in units] == [UnitState.FREED, UnitState.STALE, UnitState.FREED, UnitState.FREED]
    assert policy.gathers_at_step_start(units) == [units[1]]


def test_stale_replicas_are_gathered_in_the_order_of_the_last_forward() -> None:
    policy, units = make()
    for unit in (units[2], units[0]):
        policy.order.observe(unit, Phase.BACKWARD)
    for unit in (units[3], units[1]):
        policy.order.observe(unit, Phase.FORWARD)
    for unit in units:
        unit.enter(UnitState.STALE)
    assert [unit.index for unit in policy.gathers_at_step_start(units)] == [3, 1, 0, 2]


def test_prefetches_that_a_backward_did_not_use_are_freed_except_replicas() -> None:
    policy, units = make()
    units[0].settings.strategy = ShardingStrategy.NO_SHARD
    units[0].enter(UnitState.FETCHING)
    units[1].enter(UnitState.FETCHING)
    units[2].enter(UnitState.UNSHARDED)
    assert list(policy.unused_prefetches(units)) == [units[1]]


@pytest.mark.parametrize("module", [residency, strategy])
def test_policy_imports_neither_torch_nor_io(module: Any) -> None:
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= {"__future__", "collections", "dataclasses", "enum", "typing", "shardwell", "shardwell_wire"}


def test_recent_peak_starts_again_and_freed_bytes_add_up() -> None:
    memory = VectorMemory()

    def take_recent_peak() -> int:
        peak_bytes, memory.recent_peak_bytes = memory.recent_peak_bytes, memory.live_bytes
        return peak_bytes

    memory.add(5)
    memory.add(3)
    memory.add(-5)
    assert (take_recent_peak(), memory.peak_bytes, memory.freed_bytes) == (8, 8, 5)
    memory.add(2)
    assert (take_recent_peak(), memory.peak_bytes) == (5, 8)
    memory.add(-5)
    assert (take_recent_peak(), take_recent_peak(), memory.freed_bytes) == (5, 0, 10)
