"""The report of ``session.report()``: where the time of the last steps went, bottlenecks and advice."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwell.monitor.bottlenecks import Bottleneck, find_bottlenecks
from shardwell.monitor.step_times import MonitoredSetup, StepPart, StepTimes
from shardwell.tables import format_seconds, format_size, report_table, report_text
from shardwell.transport.route_stats import ROUTES, RouteTotals


@dataclass(frozen=True, slots=True)
class PerformanceReport:
    """Where the time of a trainer's last steps went; ``print`` shows tables.

    Times are seconds of the training thread, as means per step.
    """

    trainer: str
    """Name of this trainer."""
    steps: tuple[StepTimes, ...]
    """The measured steps, oldest first. Empty before the second commit."""
    model_bytes: int
    """Size of all weights."""
    bottlenecks: tuple[Bottleneck, ...]
    """What slows the steps down, the most severe first."""
    unit_routes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Route of each unit's gradient, and why, by the unit's name; see ``TransferOptions.gradient_reduction``."""
    corrupt_transfers: Mapping[str, int] = field(default_factory=dict)
    """Transfers since ``join`` that were repeated because of a wrong checksum, by the servers' addresses."""

    @property
    def step_s(self) -> float:
        """Duration of a step; 0 without steps."""
        return self._mean([step.duration_s for step in self.steps])

    @property
    def parts(self) -> dict[StepPart, float]:
        """Seconds of each part of a step. They add up to ``step_s``."""
        return {part: self._mean([step.parts[part] for step in self.steps]) for part in StepPart}

    @property
    def tokens_per_s(self) -> float:
        """Tokens that this trainer has counted with ``session.count``, per second."""
        return self._rate(sum(step.tokens for step in self.steps))

    @property
    def samples_per_s(self) -> float:
        """Samples of this trainer per second: those of datasets, and those counted with ``session.count``."""
        return self._rate(sum(step.samples for step in self.steps))

    @property
    def received_bytes(self) -> dict[str, float]:
        """Bytes of weights that arrived in a step, in wire dtypes, by transport."""
        return {
            name: self._mean([step.received_bytes.get(name, 0) for step in self.steps]) for name in self._transports
        }

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes of gradients that left in a step, in wire dtypes, by transport."""
        return {name: self._mean([step.sent_bytes.get(name, 0) for step in self.steps]) for name in self._transports}

    @property
    def in_place_bytes(self) -> float:
        """Bytes of weights that were read in the servers' memory in a step, and not copied."""
        return self._mean([step.in_place_bytes for step in self.steps])

    @property
    def peak_gathered_bytes(self) -> int:
        """Maximum of the memory that gathered weights took in this process."""
        return max((step.peak_gathered_bytes for step in self.steps), default=0)

    @property
    def freed_bytes(self) -> float:
        """Memory of gathered weights that was released in a step."""
        return self._mean([step.freed_bytes for step in self.steps])

    @property
    def routes(self) -> dict[str, dict[str, float]]:
        """What each route of gradients carried in a step: ``count``, ``pushed_bytes``, ``peer_bytes``, ``seconds``."""
        names = [name for name in ROUTES if any(name in step.routes for step in self.steps)]
        return {
            name: {
                item.name: self._mean([getattr(step.routes.get(name, RouteTotals()), item.name) for step in self.steps])
                for item in fields(RouteTotals)
            }
            for name in names
        }

    @property
    def staleness(self) -> dict[int, int]:
        """Number of steps by staleness: commits of other work items between the version that a step read and its own
        commit. Empty in a synchronous run."""
        return dict(sorted(Counter(at for step in self.steps if (at := step.facts.staleness) is not None).items()))

    @property
    def _transports(self) -> list[str]:
        return sorted({name for step in self.steps for name in (*step.received_bytes, *step.sent_bytes)})

    def _mean(self, numbers: Sequence[float]) -> float:
        return sum(numbers) / len(numbers) if numbers else 0.0

    def _rate(self, count: int) -> float:
        duration_s = sum(step.duration_s for step in self.steps)
        return count / duration_s if duration_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers, strings, lists and maps, which ``json.dumps`` accepts."""
        return {
            "trainer": self.trainer,
            "num_steps": len(self.steps),
            "step_s": self.step_s,
            "parts": {part.value: seconds for part, seconds in self.parts.items()},
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "in_place_bytes": self.in_place_bytes,
            "routes": self.routes,
            "unit_routes": {name: dict(at) for name, at in self.unit_routes.items()},
            "corrupt_transfers": dict(self.corrupt_transfers),
            "model_bytes": self.model_bytes,
            "peak_gathered_bytes": self.peak_gathered_bytes,
            "freed_bytes": self.freed_bytes,
            "staleness": {str(commits): count for commits, count in self.staleness.items()},
            "bottlenecks": [
                {**dataclasses.asdict(bottleneck), "severity": bottleneck.severity.name.lower()}
                for bottleneck in self.bottlenecks
            ],
            "steps": [
                {**dataclasses.asdict(step), "parts": {part.value: step.parts[part] for part in StepPart}}
                for step in self.steps
            ],
        }

    def __rich__(self) -> RenderableType:
        if not self.steps:
            return Text("No step is measured yet. The first step after join is not measured: commit another one.")
        parts = [self._parts_table(), *([self._staleness_table()] if self.staleness else [])]
        tables = [line for part in parts for line in (part, "")]
        return Group(Text(self._headline()), "", *tables, *self._traffic(), "", *self._advice())

    def __str__(self) -> str:
        return report_text(self)

    def _headline(self) -> str:
        first, last = self.steps[0].step, self.steps[-1].step
        rates = [
            f"{rate:,.1f} {what}/s"
            for rate, what in ((self.tokens_per_s, "tokens"), (self.samples_per_s, "samples"))
            if rate
        ]
        times = f"{format_seconds(self.step_s)} per step"
        return f"trainer {self.trainer!r}, steps {first} to {last}: {', '.join([times, *rates])}"

    def _parts_table(self) -> Table:
        rows = [
            (
                part.value.replace("_", " "),
                format_seconds(seconds),
                f"{seconds / self.step_s if self.step_s else 0.0:.1%}",
            )
            for part, seconds in self.parts.items()
            if seconds or part is StepPart.COMPUTE
        ]
        return report_table(("PART", "PER STEP", "SHARE"), rows, numbers=("PER STEP", "SHARE"))

    def _staleness_table(self) -> Table:
        total = sum(self.staleness.values())
        rows = [(str(commits), str(count), f"{count / total:.1%}") for commits, count in self.staleness.items()]
        return report_table(("STALENESS", "STEPS", "SHARE"), rows, numbers=("STEPS", "SHARE"))

    def _traffic(self) -> list[RenderableType]:
        received, sent = self.received_bytes, self.sent_bytes
        lines = [
            f"{name}: {format_size(round(received[name]))} received and {format_size(round(sent[name]))} sent per step"
            for name in self._transports
        ]
        lines += [
            f"gradients, {name}: {format_size(round(at['pushed_bytes']))} pushed and "
            f"{format_size(round(at['peer_bytes']))} to other trainers per step, "
            f"{at['count']:.1f} pushes of {format_seconds(at['seconds'] / at['count'])} each"
            for name, at in self.routes.items()
        ]
        chosen = Counter((at["route"], at["reason"]) for at in self.unit_routes.values())
        lines += [f"{count} units {route}: {reason}" for (route, reason), count in sorted(chosen.items())]
        lines += [
            f"damaged: {count} transfers with {server} since join had a wrong checksum and were repeated: check the "
            "memory and the network interfaces of both hosts"
            for server, count in sorted(self.corrupt_transfers.items())
        ]
        if self.in_place_bytes:
            lines.append(f"in place: {format_size(round(self.in_place_bytes))} of weights read per step")
        lines.append(
            f"memory: gathered weights take at most {format_size(self.peak_gathered_bytes)} of "
            f"{format_size(self.model_bytes)}; {format_size(round(self.freed_bytes))} freed per step"
        )
        return [Text(line) for line in lines]

    def _advice(self) -> list[RenderableType]:
        return [Text(str(bottleneck)) for bottleneck in self.bottlenecks] or [Text("no bottlenecks")]


def make_report(steps: Sequence[StepTimes], setup: MonitoredSetup) -> PerformanceReport:
    """Makes the report of measured steps.

    Args:
        steps: The steps, oldest first.
        setup: Options and sizes of their session.
    """
    return PerformanceReport(
        setup.trainer,
        tuple(steps),
        setup.model_bytes,
        find_bottlenecks(steps, setup),
        setup.routes,
        setup.corrupt_transfers,
    )
