"""Measures training steps of grids with Shardwell and with baselines: ``python -m benchmarks.grid``.

Two grids of four trainers: two replicas of a pipeline (1F1B), and two replicas of tensor parallelism. The modes of a
grid take turns of a few steps, in rotating order. docs/performance.md explains the results.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import shardwell
from benchmarks import models, report, step_tables, workers
from benchmarks.grid_traffic import GridTraffic, pipeline_traffic, tensor_traffic
from benchmarks.grid_trainer import GridSpec
from benchmarks.measured_steps import Measured, StepMeasurement, check_losses
from benchmarks.report import Chart, Report, Summary, ratio, spread, summarize
from benchmarks.workers import Group
from examples.gpt import GPTConfig

MODES = ("resident", "all_reduce", "fsdp2", "fsdp2_prefetch", "shardwell_shm", "shardwell_socket")
_FSDP2_MODES = ("fsdp2", "fsdp2_prefetch")
_NUM_SHARDS = 2
_PIPELINE = GPTConfig(vocab_size=4096, context=64, num_layers=8, num_heads=8, width=512, tied=False)
_TENSOR = GPTConfig(vocab_size=4096, context=128, num_layers=4, num_heads=8, width=512, tied=False)
_TINY = GPTConfig(vocab_size=64, context=16, num_layers=4, num_heads=2, width=16, tied=False)
_INTERPRETER_BYTES = 200 << 20
_BYTES_PER_PARAMETER = 20
"""Weights, gradient, two moments and one copy, such as gathered weights or contributions."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A world and what it trains."""

    name: str
    title: str
    spec: GridSpec
    """The task of a trainer, without mode, rank and address."""
    traffic: GridTraffic


def pipeline_grid(model: GPTConfig = _PIPELINE, *, length: int = 64) -> Grid:
    """Returns two replicas of a pipeline of two stages, with 4 micro-batches of one sequence."""
    return Grid(
        name="pp",
        title=f"dp 2 x pp 2, 1F1B, 4 micro-batches of 1 x {length} tokens",
        spec=GridSpec(model=model, batch_size=4, length=length, num_micro_batches=4, dp=2, tp=1, pp=2),
        traffic=pipeline_traffic(model, dp=2, pp=2, batch_size=4, length=length),
    )


def tensor_grid(model: GPTConfig = _TENSOR, *, length: int = 128) -> Grid:
    """Returns two replicas of two tensor-parallel ranks, with two sequences."""
    return Grid(
        name="tp",
        title=f"dp 2 x tp 2, 2 x {length} tokens",
        spec=GridSpec(model=model, batch_size=2, length=length, num_micro_batches=1, dp=2, tp=2, pp=1),
        traffic=tensor_traffic(model, dp=2, tp=2, batch_size=2, length=length),
    )


GRIDS = {"pp": pipeline_grid, "tp": tensor_grid}


def make_grid(name: str, *, tiny: bool = False) -> Grid:
    """Returns a grid by name.

    Args:
        name: One of ``GRIDS``.
        tiny: Use a tiny model.
    """
    return GRIDS[name](_TINY, length=_TINY.context) if tiny else GRIDS[name]()


# ---- groups ----


@contextmanager
def start_mode(grid: Grid, mode: str) -> Iterator[Group]:
    """Starts the trainers of a mode and, for Shardwell, a cluster."""
    if not mode.startswith("shardwell"):
        with tempfile.TemporaryDirectory() as directory:
            address = (Path(directory) / "rendezvous").as_uri()
            with _trainers(replace(grid.spec, mode=mode, address=address)) as group:
                yield group
        return
    with shardwell.LocalCluster(num_shards=_NUM_SHARDS) as cluster:
        server_pids = [cluster.coordinator.pid, *(shard.pid for shard in cluster.shards)]
        spec = replace(grid.spec, mode="shardwell", address=cluster.address, transports=mode.rpartition("_")[2])
        with _trainers(spec, server_pids=server_pids) as group:
            yield group


def _trainers(spec: GridSpec, *, server_pids: list[int] | None = None) -> workers.GroupContext:
    command_lines = [[replace(spec, rank=rank).to_json()] for rank in range(spec.world.size)]
    return workers.start_group("benchmarks.grid_trainer", command_lines, server_pids=server_pids or ())


def estimated_bytes(grid: Grid, mode: str) -> int:
    """Estimates the memory of a mode's processes, to decide whether all modes can be alive at once."""
    parameters = models.count_parameters(grid.spec.model)
    if mode.startswith("shardwell"):
        in_trainers = parameters * grid.spec.dp * _BYTES_PER_PARAMETER // 2
        num_processes = grid.spec.world.size + _NUM_SHARDS + 1
        return parameters * _BYTES_PER_PARAMETER + in_trainers + num_processes * _INTERPRETER_BYTES
    return grid.spec.dp * parameters * _BYTES_PER_PARAMETER + grid.spec.world.size * _INTERPRETER_BYTES


@dataclass
class GridResult:
    """Results of the modes of one grid."""

    grid: Grid
    measured: dict[str, Measured]
    """Without the modes that failed."""
    failures: dict[str, str]

    @property
    def steps(self) -> dict[str, Summary]:
        """Seconds per step of each mode."""
        return {mode: summarize(each.seconds) for mode, each in self.measured.items()}

    @property
    def losses(self) -> list[str]:
        """Whether the modes agree on the losses. The replicas of ``resident`` do not average their gradients."""
        return check_losses(self.measured, lambda mode: mode != "resident")


def measure_grid(grid: Grid, arguments: argparse.Namespace) -> GridResult:
    """Measures the modes of a grid by turns."""
    measurement = StepMeasurement(arguments.modes, steps=arguments.steps)
    failures = workers.interleave(
        {mode: functools.partial(start_mode, grid, mode) for mode in arguments.modes},
        rounds=arguments.rounds,
        resident=workers.fit_in_memory(estimated_bytes(grid, mode) for mode in arguments.modes),
        warm_up=measurement.warm_up,
        measure=measurement.measure,
    )
    measured = {mode: each for mode, each in measurement.measured.items() if mode not in failures}
    return GridResult(grid, measured, failures)


# ---- the report ----


def main() -> None:
    arguments = parse_arguments()
    document = Report(arguments, title="Training steps of grids: four trainers, two shard servers, AdamW")
    results = [measure_grid(make_grid(name, tiny=arguments.tiny), arguments) for name in arguments.grids]
    document.write(
        results={"grids": {result.grid.name: to_plain(result) for result in results}},
        sections=[section for result in results for section in to_sections(result)],
        chart=Chart(
            axis="ms per step, median and quartiles; less is better",
            bars={
                f"{result.grid.name} {mode}": step.scaled(1e3)
                for result in results
                for mode, step in result.steps.items()
            },
            lines={},
        ),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures training steps of grids with Shardwell and with baselines.")
    parser.add_argument("--grids", nargs="+", choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=" ".join(MODES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each mode per round")
    parser.add_argument("--tiny", action="store_true", help="use tiny models, to check that the benchmark works")
    report.add_arguments(parser, name="grid")
    return parser.parse_args()


def to_plain(result: GridResult) -> dict[str, object]:
    """Returns the results of a grid for the JSON file."""
    return {
        "title": result.grid.title,
        "parameters": models.count_parameters(result.grid.spec.model),
        "failures": result.failures,
        "step_s": {mode: asdict(step) for mode, step in result.steps.items()},
        "measured": {mode: asdict(each) for mode, each in result.measured.items()},
        "theoretical_bytes": {mode: result.grid.traffic.bytes_per_step(mode) for mode in result.measured},
        "losses": result.losses,
    }


def to_sections(result: GridResult) -> list[str]:
    """Returns the Markdown of a grid."""
    parameters = models.count_parameters(result.grid.spec.model) / 1e6
    return [
        f"## {result.grid.title}, GPT of {parameters:.1f} M parameters",
        _step_table(result),
        _traffic_table(result),
        step_tables.cost_table(result.measured),
        *step_tables.waits_section(result.measured),
        "Losses:\n\n" + "\n".join(result.losses),
    ]


def _step_table(result: GridResult) -> str:
    header = ["mode", "step, ms (quartiles)", "steps", "/ FSDP2's better", "/ all_reduce", "/ resident"]
    steps, rows = result.steps, []
    bases = (better_fsdp2(steps), steps.get("all_reduce"), steps.get("resident"))
    for mode, step in steps.items():
        cells = [mode, spread(step.scaled(1e3), ".1f"), str(step.count)]
        rows.append(cells + [ratio(step, base) for base in bases])
    rows += [report.failure_row(mode, reason, len(header)) for mode, reason in result.failures.items()]
    return report.to_table(header, rows)


def better_fsdp2(steps: Mapping[str, Summary]) -> Summary | None:
    """Returns the faster of FSDP2's modes."""
    return min((steps[mode] for mode in _FSDP2_MODES if mode in steps), key=lambda step: step.median, default=None)


def _traffic_table(result: GridResult) -> str:
    rows = []
    for mode, each in result.measured.items():
        moved, theory = each.per_step(each.loopback_bytes), result.grid.traffic.bytes_per_step(mode)
        rows.append([mode, f"{moved / 1e6:.2f}", f"{theory / 1e6:.2f}", f"{moved / theory - 1:+.1%}"])
    header = ["mode", "loopback, MB/step", "payload in theory, MB/step", "deviation"]
    return report.to_table(header, rows)


if __name__ == "__main__":
    main()
