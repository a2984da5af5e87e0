"""Measures training steps of groups that take turns: durations, resources and losses.

The workers of a group answer the command ``{"steps": n}`` as ``trainers.serve_steps`` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sampling import PeakMemory, cpu_seconds, loopback_bytes, wait_until_quiet
from benchmarks.workers import Group

_WARM_UP_STEPS = 2
_LEAD_IN_STEPS = 1
"""Uncounted steps at the start of each turn. Every later step waits for the update of the previous step."""
_MEMORY_STEPS = 2
"""Steps in which memory is sampled. They are not timed."""
_LOSS_TOLERANCE = 1e-2
"""Relative tolerance. Another order of sums changes a loss far less; other data or weights change a loss more."""


@dataclass
class Measured:
    """Results of all turns of one mode."""

    seconds: list[float] = field(default_factory=list)
    """Per step, the mean over the trainers. Trainers that communicate finish a step together."""
    details: dict[str, list[float]] = field(default_factory=dict)
    """Increase of each of Shardwell's ``StepResult.totals``, per step and trainer."""
    losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """Losses by the trainer's rank and by step."""
    steps_in_counters: int = 0
    """Number of steps in the three counters below."""
    trainer_cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    loopback_bytes: int = 0
    trainer_peak: dict[str, int] = field(default_factory=dict)
    """``rss_bytes`` and ``uss_bytes`` of the largest trainer."""
    server_peak: dict[str, int] = field(default_factory=dict)
    """Sum of ``uss_bytes`` over all servers."""

    def per_step(self, total: float) -> float:
        """Divides a counter by the number of steps."""
        return total / self.steps_in_counters


class StepMeasurement:
    """Measures the turns of several modes.

    Attributes:
        measured: Results by mode.

    Args:
        modes: Names of the modes.
        steps: Timed steps per turn.
    """

    def __init__(self, modes: Iterable[str], *, steps: int) -> None:
        self.measured = {mode: Measured() for mode in modes}
        self._steps = steps

    def warm_up(self, mode: str, group: Group) -> None:
        """Runs the first steps of a group. They are not timed."""
        self._record_losses(mode, group.run(steps=_WARM_UP_STEPS))

    def measure(self, mode: str, group: Group) -> None:
        """Runs one turn of a mode."""
        measured = self.measured[mode]
        pids = [*group.worker_pids, *group.server_pids]
        wait_until_quiet(pids)
        before = self._counters(group)
        answers = group.run(steps=_LEAD_IN_STEPS + self._steps)
        wait_until_quiet(pids)
        after = self._counters(group)
        measured.trainer_cpu_s += after[0] - before[0]
        measured.server_cpu_s += after[1] - before[1]
        measured.loopback_bytes += after[2] - before[2]
        measured.steps_in_counters += _LEAD_IN_STEPS + self._steps
        self._record_losses(mode, answers)
        per_step = list(zip(*(answer["seconds"] for answer in answers), strict=True))[_LEAD_IN_STEPS:]
        measured.seconds += [sum(seconds) / len(seconds) for seconds in per_step]
        for answer in answers:
            _record_details(measured, answer["totals"])
        if not measured.trainer_peak:
            self._measure_memory(mode, group)

    def _counters(self, group: Group) -> tuple[float, float, int]:
        return cpu_seconds(group.worker_pids), cpu_seconds(group.server_pids), loopback_bytes()

    def _measure_memory(self, mode: str, group: Group) -> None:
        measured = self.measured[mode]
        with PeakMemory([*group.worker_pids, *group.server_pids]) as memory:
            self._record_losses(mode, group.run(steps=_MEMORY_STEPS))
        in_trainers = [memory.peaks[pid] for pid in group.worker_pids]
        measured.trainer_peak = {
            "rss_bytes": max(peak.rss_bytes for peak in in_trainers),
            "uss_bytes": max(peak.uss_bytes for peak in in_trainers),
        }
        measured.server_peak = {"uss_bytes": sum(memory.peaks[pid].uss_bytes for pid in group.server_pids)}

    def _record_losses(self, mode: str, answers: Sequence[Mapping[str, Any]]) -> None:
        for rank, answer in enumerate(answers):
            by_step = self.measured[mode].losses.setdefault(rank, {})
            losses = enumerate(answer["losses"], start=answer["first_step"])
            by_step.update((step, loss) for step, loss in losses if loss is not None)


def _record_details(measured: Measured, totals: Sequence[Mapping[str, float]]) -> None:
    """Converts running totals to increases per step, without the lead-in."""
    for earlier, later in itertools.pairwise(totals[_LEAD_IN_STEPS - 1 :]):
        for name, total in later.items():
            measured.details.setdefault(name, []).append(total - earlier[name])


def check_losses(measured: Mapping[str, Measured], averages: Callable[[str], bool]) -> list[str]:
    """Reports for every rank with losses whether the modes agree on them.

    The first loss belongs to the same weights in all modes. Later losses are compared between modes that average
    gradients over the same ranks, at the last step that all these modes have taken.

    Args:
        measured: Results by mode.
        averages: Whether a mode averages gradients over the data-parallel ranks.
    """
    lines = []
    for rank in sorted({rank for each in measured.values() for rank, losses in each.losses.items() if losses}):
        known = {mode: each.losses[rank] for mode, each in measured.items() if each.losses.get(rank)}
        averaging = {mode: losses for mode, losses in known.items() if averages(mode)}
        lines.append(_agreement(known, 0, rank))
        if averaging:
            lines.append(_agreement(averaging, max(set.intersection(*map(set, averaging.values()))), rank))
    return lines


def _agreement(losses: Mapping[str, Mapping[int, float]], step: int, rank: int) -> str:
    values = {mode: by_step[step] for mode, by_step in losses.items()}
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    outcome = "agree" if values[high] - values[low] <= _LOSS_TOLERANCE * abs(values[low]) else "DISAGREE"
    return (
        f"- rank {rank}, step {step}: {len(values)} modes {outcome}: "
        f"{values[low]:.5f} ({low}) to {values[high]:.5f} ({high})"
    )
