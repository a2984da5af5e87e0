"""What the performance monitor measures: the parts of a step, bytes, memory and rates. The clock and the counters are
the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from shardwell.monitor import step_times
from shardwell.monitor.step_times import (
    CommitFacts,
    CounterSample,
    LastFinished,
    ServerUpdate,
    StepMonitor,
    StepPart,
    StepTimes,
)
from shardwell_wire.errors import UsageError

STATS = [
    "gather_wait_s",
    "push_wait_s",
    "push_copy_s",
    "finish_wait_s",
    "norm_wait_s",
    "commit_wait_s",
    "partition_update_s",
    "in_place_bytes",
    "gather_count",
    "push_count",
    "freed_unit_bytes",
]


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Counters:
    """Counters of a session that a test changes, and its clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.values = dict.fromkeys(STATS, 5.0)
        self.moved: dict[str, tuple[int, int]] = {}
        self.waits: list[tuple[float, float]] = []
        self.peak_bytes = 0

    def spend(self, name: str, seconds: float) -> None:
        """Passes time that a counter counts."""
        started = self.clock.now
        self.clock.now += seconds
        self.values[name] += seconds
        if name == "gather_wait_s":
            self.waits.append((started, self.clock.now))


class Monitor(StepMonitor):
    """Takes the samples of the test's counters."""

    def __init__(self, counters: Counters) -> None:
        super().__init__("me")
        self.counters = counters

    def begin(self) -> None:
        self.begin_work(self.counters.values["gather_wait_s"])

    def end(self, step: int, facts: CommitFacts) -> None:
        at = self.counters
        sample = CounterSample(dict(at.values), dict(at.moved), at.peak_bytes)
        waits, at.waits = at.waits, []
        self.end_step(step, facts, sample, waits)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    clock = Clock()
    monkeypatch.setattr(step_times, "time", clock)
    return Counters(clock)


def started(counters: Counters) -> Monitor:
    """Returns a monitor after the first step, which is not measured."""
    monitor = Monitor(counters)
    counters.clock.now += 1000.0
    monitor.end(0, CommitFacts())
    assert monitor.steps(9) == ()
    return monitor


def end(monitor: Monitor, **facts: Any) -> StepTimes:
    monitor.end(1, CommitFacts(**facts))
    return monitor.steps(1)[0]


def spent(step: StepTimes) -> dict[str, float]:
    """Returns the parts that took time."""
    return {part.value: round(seconds, 6) for part, seconds in step.parts.items() if seconds}


def test_every_part_is_measured_and_compute_is_the_rest(counters: Counters) -> None:
    monitor = started(counters)
    counters.clock.now += 0.5
    monitor.begin()
    monitor.add(StepPart.DATA, 1.0)
    monitor.add(StepPart.PIPELINE_BUBBLE, 1.0)
    monitor.add(StepPart.PIPELINE_BUBBLE, 0.5)
    counters.clock.now += 2.5 + 7.0
    for name, seconds in (
        ("gather_wait_s", 1.0),
        ("push_wait_s", 2.0),
        ("push_copy_s", 0.25),
        ("finish_wait_s", 3.0),
        ("norm_wait_s", 4.0),
        ("commit_wait_s", 6.0),
    ):
        counters.spend(name, seconds)
    counters.values["partition_update_s"] += 1.5  # within the commit
    step = end(monitor, last_finished=LastFinished(1, "other", 0.5))
    assert spent(step) == {
        "between_steps": 0.5,
        "data": 1.0,
        "pipeline_bubble": 1.5,
        "compute": 7.0,
        "gather_wait": 1.0,
        "push": 2.25,
        "finish_wait": 3.0,
        "commit_wait": 8.5,
        "optimizer": 1.5,
    }
    assert sum(step.parts.values()) == pytest.approx(step.duration_s) == pytest.approx(26.25)


def test_next_step_starts_with_nothing(counters: Counters) -> None:
    monitor = started(counters)
    monitor.begin()
    monitor.add(StepPart.DATA, 1.0)
    monitor.count(tokens=3, samples=2)
    counters.clock.now += 4.0
    first = end(monitor)
    assert (first.tokens, first.samples) == (3, 2)
    counters.clock.now += 2.0
    monitor.begin()
    counters.clock.now += 1.0
    second = end(monitor)
    assert (second.tokens, second.samples) == (0, 0)
    assert spent(second) == {"between_steps": 2.0, "compute": 1.0}


def test_only_the_first_loop_over_batches_ends_the_time_between_steps(counters: Counters) -> None:
    monitor = started(counters)
    for _ in range(2):
        counters.clock.now += 2.0
        monitor.begin()
    assert spent(end(monitor)) == {"between_steps": 2.0, "compute": 2.0}


def test_gathers_between_steps_are_gather_waits(counters: Counters) -> None:
    """An evaluation gathers weights, too."""
    monitor = started(counters)
    counters.clock.now += 1.0
    counters.spend("gather_wait_s", 3.0)
    monitor.begin()
    assert spent(end(monitor)) == {"between_steps": 1.0, "gather_wait": 3.0}


def test_gather_waits_during_the_servers_update_are_update_waits(counters: Counters) -> None:
    monitor = started(counters)
    counters.spend("gather_wait_s", 1.0)
    counters.clock.now += 1.0
    counters.spend("gather_wait_s", 4.0)  # the update ends after the first second of this wait
    counters.clock.now += 1.0
    counters.spend("gather_wait_s", 2.0)
    step = end(monitor, previous_update=ServerUpdate("s", 3.0))
    assert spent(step) == {"compute": 2.0, "update_wait": 2.0, "gather_wait": 5.0}


def test_without_a_reported_update_every_gather_wait_is_one(counters: Counters) -> None:
    monitor = started(counters)
    counters.spend("gather_wait_s", 1.0)
    assert spent(end(monitor)) == {"gather_wait": 1.0}


@pytest.mark.parametrize(
    ("last", "part"),
    [
        (None, "commit_wait"),
        (LastFinished(1, "other", 0.5), "finish_wait"),
        (LastFinished(0, "me", 0.5), "commit_wait"),
    ],
)
def test_a_trainer_that_waits_for_nobody_waits_for_the_coordinator(
    counters: Counters, last: LastFinished | None, part: str
) -> None:
    monitor = started(counters)
    counters.spend("finish_wait_s", 2.0)
    assert spent(end(monitor, last_finished=last)) == {part: 2.0}


def test_bytes_counts_and_memory_are_those_of_the_step(counters: Counters) -> None:
    counters.moved = {"socket": (1000, 2000)}
    monitor = started(counters)
    counters.moved = {"socket": (1300, 2040), "shm": (0, 7)}
    for name, number in {"gather_count": 4, "push_count": 3, "in_place_bytes": 50, "freed_unit_bytes": 60}.items():
        counters.values[name] += number
    counters.peak_bytes = 70
    counters.clock.now += 1.0
    step = end(monitor)
    assert (step.received_bytes, step.sent_bytes) == ({"socket": 300, "shm": 0}, {"socket": 40, "shm": 7})
    assert (step.gather_count, step.push_count, step.in_place_bytes) == (4, 3, 50)
    assert (step.freed_bytes, step.peak_gathered_bytes) == (60, 70)


def test_the_last_steps_are_kept(counters: Counters) -> None:
    monitor = started(counters)
    for number in range(1, step_times.MAX_STEPS + 3):
        counters.clock.now += 1.0
        monitor.end(number, CommitFacts())
    assert [step.step for step in monitor.steps(2)] == [step_times.MAX_STEPS + 1, step_times.MAX_STEPS + 2]
    assert len(monitor.steps(10**6)) == step_times.MAX_STEPS


@pytest.mark.parametrize("numbers", [{"tokens": -1}, {"samples": -1}])
def test_negative_counts_are_rejected(counters: Counters, numbers: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="not negative"):
        started(counters).count(**numbers)
