"""When steps were committed, and what that says about faults."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass
class InjectedFault:
    """A fault that was injected."""

    kind: str
    what: str
    """Description, such as ``shard-1 for 2.1 s``."""
    at_s: float
    until_s: float
    """When the fault was over. Equal to ``at_s`` for a kill."""
    blocks: bool = False
    """True if the run cannot continue before the fault is over, because nothing can replace what is missing."""
    recovery_s: float | None = None
    """See ``Timeline.recovery``."""


@dataclass(frozen=True)
class Period:
    """A part of the run with faults, between two measurements without faults."""

    begin_s: float
    end_s: float
    step_s: float
    """Duration of a step without faults: the mean of the measurements before and after the period."""


@dataclass
class Timeline:
    """Times of commits, read from the files of the trainers while they grow.

    Args:
        folder: Folder of the files.
    """

    folder: Path
    times: dict[int, float] = field(default_factory=dict)
    """Earliest report of each number of committed steps, in seconds of the monotonic clock."""
    last_by_trainer: dict[str, float] = field(default_factory=dict)
    """Time of the last report of each trainer."""
    _offsets: dict[Path, int] = field(default_factory=lambda: defaultdict(int))

    def read(self) -> int:
        """Reads new lines; returns the number of committed steps."""
        for path in sorted(self.folder.glob("*.commits")):
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[path] += len(complete)
            for line in complete.decode().splitlines():
                step, time_s = line.split()
                self.last_by_trainer[path.stem] = float(time_s)
                self.times[int(step)] = min(float(time_s), self.times.get(int(step), float("inf")))
        return max(self.times, default=0)

    @property
    def last_s(self) -> float:
        """Time of the last commit."""
        return max(self.times.values(), default=0.0)

    def step_s(self, since_s: float, until_s: float) -> float:
        """Returns the mean duration of the steps in a period without faults."""
        inside = sorted(time_s for time_s in self.times.values() if since_s <= time_s <= until_s)
        return (inside[-1] - inside[0]) / (len(inside) - 1)

    def recovery(self, fault: InjectedFault, next_s: float, step_s: float) -> float:
        """Returns how long a fault kept the run from committing.

        This is the longest time without a commit that begins before the next fault and ends after this one, less the
        duration of a step. For a fault that blocks, time counts from its end.

        Args:
            fault: The fault.
            next_s: Time of the next fault.
            step_s: Duration of a step without faults.
        """
        begin_s = fault.until_s if fault.blocks else fault.at_s
        moments = [begin_s, *sorted(time_s for time_s in self.times.values() if time_s > begin_s)]
        gaps = [
            after - before for before, after in pairwise(moments) if before < max(next_s, fault.until_s + 2 * step_s)
        ]
        return max(0.0, max(gaps, default=0.0) - step_s)

    def goodput(self, periods: Sequence[Period]) -> float:
        """Returns the share of the time under faults that the committed steps would have taken without faults."""
        useful_s = total_s = 0.0
        for period in periods:
            committed = sum(period.begin_s < time_s <= period.end_s for time_s in self.times.values())
            useful_s += committed * period.step_s
            total_s += period.end_s - period.begin_s
        return useful_s / total_s if total_s else 1.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(percent) // 100) - 1))]


def summary(faults: Iterable[InjectedFault]) -> str:
    """Returns a table of recovery times by kind of fault."""
    by_kind = defaultdict[str, list[float]](list)
    for fault in faults:
        if fault.recovery_s is not None:
            by_kind[fault.kind].append(fault.recovery_s)
    rows = [f"{'fault':24} {'count':>5} {'p50 s':>8} {'p99 s':>8} {'max s':>8}"]
    everything = [value for values in by_kind.values() for value in values]
    for kind, values in [*sorted(by_kind.items()), ("all", everything)]:
        if values:
            middle = statistics.median(values)
            rows.append(f"{kind:24} {len(values):5} {middle:8.2f} {percentile(values, 99):8.2f} {max(values):8.2f}")
    return "\n".join(rows)
