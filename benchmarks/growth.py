"""What a step costs beside its computation, as trainers, servers, units and parameters grow.

Every point has a cluster and trainers of its own; the model is linear layers, one unit each. "Overhead" is a step's
time beyond the same forward and backward without Shardwell. All processes share this machine's CPUs, so more
trainers need more time as soon as the CPUs are full: CPU time per unit and trainer tells the two apart.

    python benchmarks/growth.py [--sweeps trainers servers units parameters] [--steps 10] [--full]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import shardwell  # noqa: E402
from benchmarks.growth_trainer import BATCH_SIZE  # noqa: E402
from benchmarks.line_process import LineProcess  # noqa: E402 (the benchmarks are not installed)

RESULTS = ROOT / "benchmarks" / "results"
TRAINER = ROOT / "benchmarks" / "growth_trainer.py"
WARMUP_STEPS, PLAIN_STEPS = 3, 5
MIN_SHARD_BYTES = 4096
"""So small that a unit of these models is cut over all servers."""
PARAMETER_BYTES = 4
COPIES_AT_PEAK = 3
"""Of all parameters, in the servers: the values, the gradients that are kept apart, what is being received."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement."""

    trainers: int = 1
    servers: int = 1
    units: int = 10
    width: int = 64

    @property
    def parameters(self) -> int:
        return self.units * self.width * (self.width + 1)

    @property
    def needed_bytes(self) -> int:
        """Memory that the servers need for it, roughly."""
        return (COPIES_AT_PEAK + self.trainers - 1) * PARAMETER_BYTES * self.parameters


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Points that differ in one number."""

    varied: str
    points: tuple[Point, ...]
    full_points: tuple[Point, ...] = ()
    """Measured with ``--full`` only."""


SWEEPS = {
    "trainers": Sweep(varied="trainers", points=tuple(Point(trainers=n, servers=2) for n in (1, 2, 4, 8))),
    "servers": Sweep(varied="servers", points=tuple(Point(servers=n, width=256) for n in (1, 2, 4))),
    "units": Sweep(varied="units", points=tuple(Point(units=n) for n in (10, 100, 1000))),
    "parameters": Sweep(
        varied="parameters",
        points=tuple(Point(servers=2, units=12, width=width) for width in (1600, 2900, 5000)),
        full_points=(Point(servers=2, units=12, width=9130),),
    ),
}


class Measurement:
    """The cluster and the trainers of one point; a context manager."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self._stack = ExitStack()
        self._trainers: list[LineProcess] = []

    def __enter__(self) -> Measurement:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self, steps: int) -> dict[str, Any]:
        """Measures the point."""
        self._ask("plain", WARMUP_STEPS)
        plain = self._ask("plain", PLAIN_STEPS)
        self._ask("sharded", WARMUP_STEPS)
        cpu_s = self._cpu_s()
        sharded = self._ask("sharded", steps)
        return summarize(self._point, plain, sharded, (self._cpu_s() - cpu_s) / steps)

    def _start(self) -> None:
        point = self._point
        logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="growth-")))
        cluster = self._stack.enter_context(
            shardwell.LocalCluster(point.servers, min_shard_bytes=MIN_SHARD_BYTES, log_level="warning")
        )
        self._pids = [cluster.coordinator.pid, *(shard.pid for shard in cluster.shards)]
        shape = {"address": cluster.address, "trainers": point.trainers, "layers": point.units, "width": point.width}
        arguments = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
        for number in range(point.trainers):
            trainer = LineProcess([sys.executable, str(TRAINER), *arguments], logs / f"trainer-{number}.log")
            self._stack.callback(trainer.close)
            self._trainers.append(trainer)
        self._pids += [trainer.pid for trainer in self._trainers]

    def _ask(self, what: str, number: int) -> list[list[dict[str, float]]]:
        """Every trainer's steps, taken at the same time."""
        for trainer in self._trainers:
            trainer.send(f"{what} {number}")
        return [trainer.receive() for trainer in self._trainers]

    def _cpu_s(self) -> float:
        """CPU time of all processes so far."""
        times = [psutil.Process(pid).cpu_times() for pid in self._pids]
        return sum(used.user + used.system for used in times)


def summarize(
    point: Point,
    plain: Sequence[Sequence[dict[str, float]]],
    sharded: Sequence[Sequence[dict[str, float]]],
    cpu_s: float,
) -> dict[str, Any]:
    """Medians over all trainers' steps.

    Args:
        point: What was measured.
        plain: Steps without Shardwell, by trainer.
        sharded: Steps with it, by trainer.
        cpu_s: CPU time of one step, of all processes.
    """

    def median(steps: Sequence[Sequence[dict[str, float]]], name: str) -> float:
        return statistics.median(step[name] for trainer in steps for step in trainer)

    step_s, compute_s = median(sharded, "step_s"), median(plain, "step_s")
    moved_bytes = median(sharded, "gathered_bytes") + median(sharded, "pushed_bytes")
    return {
        **asdict(point),
        "parameters": point.parameters,
        "step_ms": 1e3 * step_s,
        "compute_ms": 1e3 * compute_s,
        "commit_ms": 1e3 * median(sharded, "commit_wait_s"),
        "overhead_ms_per_unit": 1e3 * (step_s - compute_s) / point.units,
        "cpu_ms_per_unit_and_trainer": 1e3
        * max(0.0, cpu_s - point.trainers * compute_s)
        / point.units
        / point.trainers,
        "moved_mb_per_s": moved_bytes / 1e6 / step_s,
    }


COLUMNS = {
    "step_ms": "step",
    "compute_ms": "of which computation",
    "commit_ms": "waiting for the commit",
    "overhead_ms_per_unit": "overhead per unit",
    "cpu_ms_per_unit_and_trainer": "CPU time per unit and trainer",
}
"""Milliseconds, by key of a point's result."""
COMPARED = ("commit_ms", "overhead_ms_per_unit", "cpu_ms_per_unit_and_trainer")
"""Shown with the ratio to the sweep's first point: 1.0 throughout is flat."""


def to_markdown(report: dict[str, Any]) -> str:
    lines = [
        f"Linear layers, one unit each, batch {BATCH_SIZE}, SGD, one thread per process, {report['cpus']} CPUs "
        f"for all processes; medians of {report['steps']} steps; load average before "
        f"{report['load_average_before']:.1f}. In parentheses: against the first row; 1.0 is flat.",
    ]
    for name, results in report["sweeps"].items():
        lines += ["", f"### More {name}", "", *_table(SWEEPS[name].varied, results)]
    lines += [f"\nNot measured: {text}." for text in report["skipped"]]
    return "\n".join(lines) + "\n"


def _table(varied: str, results: Sequence[dict[str, Any]]) -> list[str]:
    header = [varied, *COLUMNS.values(), "moved"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for result in results:
        cells = [f"{result[varied]:,}"]
        for key in COLUMNS:
            ratio = f" ({result[key] / results[0][key]:.1f})" if key in COMPARED and results[0][key] > 0 else ""
            cells.append(f"{result[key]:.2f} ms{ratio}")
        cells.append(f"{result['moved_mb_per_s']:.0f} MB/s")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel per sweep: what should stay flat."""
    sweeps = report["sweeps"]
    figure = Figure(figsize=(4 * len(sweeps), 3.2), layout="constrained")
    for axes, (name, results) in zip(figure.subplots(1, len(sweeps), squeeze=False)[0], sweeps.items(), strict=True):
        varied = [result[SWEEPS[name].varied] for result in results]
        for key in COMPARED:
            axes.plot(varied, [result[key] for result in results], marker="o", label=COLUMNS[key])
        axes.set(xscale="log", xlabel=name, ylabel="ms", ylim=(0, None))
        axes.set_xticks(varied, [f"{number:,}" for number in varied])
        axes.set_xticks([], minor=True)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A step's overhead as trainers, servers, units and parameters grow.")
    parser.add_argument("--sweeps", choices=SWEEPS, nargs="+", default=list(SWEEPS), help="default: all")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured at each point")
    parser.add_argument("--full", action="store_true", help="also a billion parameters")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the results go")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: expected at least 1")
    return arguments


def measure(names: Sequence[str], steps: int, *, full: bool) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Results of the sweeps, and what was left out for want of memory."""
    sweeps: dict[str, list[dict[str, Any]]] = {}
    skipped = []
    for name in names:
        sweep, results = SWEEPS[name], []
        for point in (*sweep.points, *(sweep.full_points if full else ())):
            available = psutil.virtual_memory().available
            if reason := why_skipped(point, available):
                skipped.append(reason)
                continue
            with Measurement(point) as measurement:
                results.append(measurement.take(steps))
            say(f"{name}: {results[-1][sweep.varied]:,} in {results[-1]['step_ms']:.1f} ms per step")
        sweeps[name] = results
    return sweeps, skipped


def why_skipped(point: Point, available_bytes: int) -> str | None:
    """Why this machine cannot measure a point; None if it can."""
    if point.needed_bytes <= available_bytes:
        return None
    return (
        f"{point.parameters:,} parameters need about {point.needed_bytes / 1e9:.1f} GB in the servers, "
        f"of which {available_bytes / 1e9:.1f} GB are free"
    )


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main() -> None:
    options = parse_arguments()
    load_average = os.getloadavg()[0]
    sweeps, skipped = measure(options.sweeps, options.steps, full=options.full)
    report = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_before": load_average,
        "steps": options.steps,
        "sweeps": sweeps,
        "skipped": skipped,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "growth.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.output / "growth.md").write_text(to_markdown(report))
    plot(report, options.output / "growth.png")
    print(to_markdown(report), end="")


if __name__ == "__main__":
    main()
