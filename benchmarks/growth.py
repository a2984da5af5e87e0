"""Measures the overhead of a step for growing numbers of trainers, servers, units and parameters.

Run ``python -m benchmarks.growth``. Every point has its own cluster and trainers. The model has linear layers, one unit
each. The overhead is a step's time beyond the same forward and backward without Shardwell. It has two parts that do not
depend on the number of units: reporting finished work to the coordinator, and the commit. The table shows both, and the
rest per unit. All processes share this machine's CPUs, so more trainers need more time when the CPUs are busy. The CPU
time per unit and trainer shows the cost without this effect.
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
"""Small enough to cut every unit of these models over all servers."""
PARAMETER_BYTES = 4
COPIES_AT_PEAK = 3
"""Copies of all parameters in the servers: values, separate contributions, and data in flight."""


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
        """Estimated memory of the servers."""
        return (COPIES_AT_PEAK + self.trainers - 1) * PARAMETER_BYTES * self.parameters


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Points that differ in one field."""

    varied: str
    points: tuple[Point, ...]
    full_points: tuple[Point, ...] = ()
    """Points that are measured with ``--full`` only."""


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
def start_point(point: Point) -> Iterator[Group]:
    """Starts the cluster and the trainers of a point."""
    with shardwell.LocalCluster(point.servers, min_shard_bytes=MIN_SHARD_BYTES, log_level="warning") as cluster:
        shape = {"address": cluster.address, "trainers": point.trainers, "layers": point.units, "width": point.width}
        arguments = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
        server_pids = [cluster.coordinator.pid, *(shard.pid for shard in cluster.shards)]
        command_lines = [arguments] * point.trainers
        with workers.start_group("benchmarks.growth_trainer", command_lines, server_pids=server_pids) as group:
            yield group


def measure_point(point: Point, steps: int) -> dict[str, Any]:
    """Starts the processes of a point, measures it and ends them."""
    with start_point(point) as group:
        pids = [*group.worker_pids, *group.server_pids]
        run_steps(group, "plain", WARMUP_STEPS)
        plain = run_steps(group, "plain", PLAIN_STEPS)
        run_steps(group, "sharded", WARMUP_STEPS)
        wait_until_quiet(pids)
        cpu_s = cpu_seconds(pids)
        sharded = run_steps(group, "sharded", steps)
        wait_until_quiet(pids)
        return summarize_point(point, plain, sharded, (cpu_seconds(pids) - cpu_s) / steps)


def run_steps(group: Group, kind: str, number: int) -> list[list[dict[str, float]]]:
    """Runs steps on all trainers at the same time and returns their durations."""
    return [answer["times"] for answer in group.run(kind=kind, steps=number)]


def summarize_point(
    point: Point,
    plain: Sequence[Sequence[dict[str, float]]],
    sharded: Sequence[Sequence[dict[str, float]]],
    cpu_s: float,
) -> dict[str, Any]:
    """Returns medians over the steps of all trainers.

    Args:
        point: The measured point.
        plain: Steps without Shardwell, by trainer.
        sharded: Steps with Shardwell, by trainer.
        cpu_s: CPU time of one step, summed over all processes.
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
    "compute_ms": "computation",
    "finish_ms": "waiting for all work",
    "commit_ms": "waiting for the commit",
    "overhead_ms_per_unit": "overhead per unit",
    "unit_ms": "overhead per unit without both waits",
    "cpu_ms_per_unit_and_trainer": "CPU time per unit and trainer",
}
"""Column titles by key of a point's result, in milliseconds."""
COMPARED = ("commit_ms", "overhead_ms_per_unit", "unit_ms", "cpu_ms_per_unit_and_trainer")
"""Keys that are shown with the ratio to the sweep's first point. A ratio of 1.0 means that the value is constant."""


def to_section(name: str, results: Sequence[dict[str, Any]]) -> str:
    """Returns the table of one sweep."""
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
    """Returns a chart with the overhead per unit of every point."""
    bars = {
        f"{result[SWEEPS[name].varied]:,} {name}": Summary(**result["overhead_s_per_unit"]).scaled(1e3)
        for name, results in sweeps.items()
        for result in results
    }
    return Chart(axis="overhead per unit, ms", bars=bars, lines={})


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures a step's overhead for growing numbers of trainers, servers, units and parameters."
    )
    parser.add_argument("--sweeps", choices=SWEEPS, nargs="+", default=list(SWEEPS), help="default: all")
    parser.add_argument("--steps", type=int, default=10, help="measured steps per point")
    parser.add_argument("--full", action="store_true", help="also measure a billion parameters")
    report.add_arguments(parser, name="growth")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: expected at least 1")
    return arguments


def measure(names: Sequence[str], steps: int, *, full: bool) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Returns the results of the sweeps, and the reasons of skipped points."""
    sweeps: dict[str, list[dict[str, Any]]] = {}
    skipped = []
    for name in names:
        sweep, results = SWEEPS[name], []
        for point in (*sweep.points, *(sweep.full_points if full else ())):
            available = psutil.virtual_memory().available
            if reason := skip_reason(point, available):
                skipped.append(reason)
                continue
            results.append(measure_point(point, steps))
            print(f"{results[-1][sweep.varied]:,} {name}: {results[-1]['step_ms']:.1f} ms per step", file=sys.stderr)
        sweeps[name] = results
    return sweeps, skipped


def skip_reason(point: Point, available_bytes: int) -> str | None:
    """Returns the reason why this machine cannot measure a point, or None."""
    if point.needed_bytes <= available_bytes:
        return None
    return (
        f"{point.parameters:,} parameters need about {point.needed_bytes / 1e9:.1f} GB in the servers, "
        f"of which {available_bytes / 1e9:.1f} GB are free"
    )


def main() -> None:
    options = parse_arguments()
    document = Report(options, title="Overhead of a step for growing runs")
    sweeps, skipped = measure(options.sweeps, options.steps, full=options.full)
    document.write(
        results={"sweeps": sweeps, "skipped": skipped},
        sections=[
            f"Linear layers, one unit each, batch {BATCH_SIZE}, SGD, one thread per process; medians of "
            f"{options.steps} steps of all trainers. Times are milliseconds, in parentheses relative to the first row. "
            "Computation is the same forward and backward without Shardwell.",
            *(to_section(name, results) for name, results in sweeps.items()),
            *(f"Not measured: {text}." for text in skipped),
        ],
        chart=to_chart(sweeps),
    )


if __name__ == "__main__":
    main()
