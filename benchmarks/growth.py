"""What a step costs beside its computation, as things grow: ``python -m benchmarks.growth``.

Every point has a cluster and trainers of its own; the model is linear layers, one unit each. "Overhead" is a step's
time beyond the same forward and backward without Shardwell. A part of it is fixed, however few units there are: telling
the coordinator that the work is finished, and the commit. Both are shown, and what is left per unit. Processes share
this machine's CPUs, so more trainers need more time as soon as the CPUs are full: CPU time per unit and trainer tells
the two apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil

import shardwell
from benchmarks import report, workers
from benchmarks.growth_trainer import BATCH_SIZE
from benchmarks.report import Chart, Report, Summary, summarize, to_table
from benchmarks.sampling import cpu_seconds, wait_until_quiet
from benchmarks.workers import Group

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


@contextmanager
def started_for(point: Point) -> Iterator[Group]:
    """The cluster and the trainers of one point."""
    with shardwell.LocalCluster(point.servers, min_shard_bytes=MIN_SHARD_BYTES, log_level="warning") as cluster:
        shape = {"address": cluster.address, "trainers": point.trainers, "layers": point.units, "width": point.width}
        arguments = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
        server_pids = [cluster.coordinator.pid, *(shard.pid for shard in cluster.shards)]
        command_lines = [arguments] * point.trainers
        with workers.started("benchmarks.growth_trainer", command_lines, server_pids=server_pids) as group:
            yield group


def measure_point(point: Point, steps: int) -> dict[str, Any]:
    """Starts what a point needs, measures it and ends it."""
    with started_for(point) as group:
        pids = [*group.worker_pids, *group.server_pids]
        take_steps(group, "plain", WARMUP_STEPS)
        plain = take_steps(group, "plain", PLAIN_STEPS)
        take_steps(group, "sharded", WARMUP_STEPS)
        wait_until_quiet(pids)
        cpu_s = cpu_seconds(pids)
        sharded = take_steps(group, "sharded", steps)
        wait_until_quiet(pids)
        return summarize_point(point, plain, sharded, (cpu_seconds(pids) - cpu_s) / steps)


def take_steps(group: Group, what: str, number: int) -> list[list[dict[str, float]]]:
    """Every trainer's steps, taken at the same time."""
    return [answer["times"] for answer in group.run(what=what, steps=number)]


def summarize_point(
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
    finish_s, commit_s = median(sharded, "finish_wait_s"), median(sharded, "commit_wait_s")
    overhead = summarize([(step["step_s"] - compute_s) / point.units for trainer in sharded for step in trainer])
    moved_bytes = median(sharded, "gathered_bytes") + median(sharded, "pushed_bytes")
    return {
        **asdict(point),
        "parameters": point.parameters,
        "step_ms": 1e3 * step_s,
        "compute_ms": 1e3 * compute_s,
        "finish_ms": 1e3 * finish_s,
        "commit_ms": 1e3 * commit_s,
        "overhead_ms_per_unit": 1e3 * (step_s - compute_s) / point.units,
        "overhead_s_per_unit": asdict(overhead),
        "unit_ms": 1e3 * (step_s - compute_s - finish_s - commit_s) / point.units,
        "cpu_ms_per_unit_and_trainer": 1e3
        * max(0.0, cpu_s - point.trainers * compute_s)
        / point.units
        / point.trainers,
        "moved_mb_per_s": moved_bytes / 1e6 / step_s,
    }


COLUMNS = {
    "step_ms": "step",
    "compute_ms": "of which computation",
    "finish_ms": "waiting for everybody's work",
    "commit_ms": "waiting for the commit",
    "overhead_ms_per_unit": "overhead per unit",
    "unit_ms": "the same without both waits",
    "cpu_ms_per_unit_and_trainer": "CPU time per unit and trainer",
}
"""Milliseconds, by key of a point's result."""
COMPARED = ("commit_ms", "overhead_ms_per_unit", "unit_ms", "cpu_ms_per_unit_and_trainer")
"""Shown with the ratio to the sweep's first point: 1.0 throughout is flat."""


def to_section(name: str, results: Sequence[dict[str, Any]]) -> str:
    """The table of one sweep."""
    varied = SWEEPS[name].varied
    rows = []
    for result in results:
        cells = [f"{result[varied]:,}"]
        for key in COLUMNS:
            ratio = f" ({result[key] / results[0][key]:.1f})" if key in COMPARED and results[0][key] > 0 else ""
            cells.append(f"{result[key]:.2f}{ratio}")
        rows.append([*cells, f"{result['moved_mb_per_s']:.0f}"])
    return f"## More {name}\n\n{to_table([varied, *COLUMNS.values(), 'moved, MB/s'], rows)}"


def to_chart(sweeps: Mapping[str, Sequence[dict[str, Any]]]) -> Chart:
    """The overhead per unit of every point."""
    bars = {
        f"{result[SWEEPS[name].varied]:,} {name}": Summary(**result["overhead_s_per_unit"]).scaled(1e3)
        for name, results in sweeps.items()
        for result in results
    }
    return Chart(axis="overhead per unit, ms", bars=bars, lines={})


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A step's overhead as trainers, servers, units and parameters grow.")
    parser.add_argument("--sweeps", choices=SWEEPS, nargs="+", default=list(SWEEPS), help="default: all")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured at each point")
    parser.add_argument("--full", action="store_true", help="also a billion parameters")
    report.add_arguments(parser, name="growth")
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
            results.append(measure_point(point, steps))
            print(f"{results[-1][sweep.varied]:,} {name}: {results[-1]['step_ms']:.1f} ms per step", file=sys.stderr)
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


def main() -> None:
    options = parse_arguments()
    written = Report(options, title="A step's overhead as things grow")
    sweeps, skipped = measure(options.sweeps, options.steps, full=options.full)
    written.write(
        results={"sweeps": sweeps, "skipped": skipped},
        sections=[
            f"Linear layers, one unit each, batch {BATCH_SIZE}, SGD, one thread per process; medians of "
            f"{options.steps} steps of all trainers. Times are milliseconds; in parentheses: against the first "
            "row, 1.0 is flat. Computation is the same forward and backward without Shardwell.",
            *(to_section(name, results) for name, results in sweeps.items()),
            *(f"Not measured: {text}." for text in skipped),
        ],
        chart=to_chart(sweeps),
    )


if __name__ == "__main__":
    main()
