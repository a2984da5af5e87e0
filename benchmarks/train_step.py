"""Measures whole training steps with Shardwell and with baselines: ``python -m benchmarks.train_step``.

Every mode has its own processes with one thread each. The modes take turns of a few steps, in rotating order.
docs/performance.md explains the results.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks import models, report, step_tables, trainers, workers
from benchmarks.measured_steps import Measured, StepMeasurement, check_losses
from benchmarks.report import Chart, Report, Summary, ratio, spread, summarize
from benchmarks.trainers import TrainerSpec

_NUM_RANKS = 2
MODES = (
    "plain",
    "plain2",
    "ddp",
    "fsdp2",
    "fsdp2_prefetch",
    "shardwell",
    "shardwell_shm",
    "shardwell_socket",
    "shardwell_socket_keep",
    "shardwell_grpc",
    "shardwell_shm_backup",
    "shardwell_shm_checkpoint",
    "shardwell_shm_tls",
    "shardwell_socket_tls",
    "shardwell_socket_encrypted",
    "shardwell_socket_keep_encrypted",
    "shardwell_grpc_tls",
)
_DEFAULT_MODES = tuple(mode for mode in MODES if not mode.endswith(("_backup", "_checkpoint", "_tls", "_encrypted")))
_CHECKPOINT_EVERY = 20
_ALL_BYTES = 1 << 40
_FSDP2_MODES = ("fsdp2", "fsdp2_prefetch")


def _transfer_options(transport: str = "", *options: str) -> dict[str, Any]:
    """Returns a mode's options: its only transport, and ``keep_bytes`` if weights stay from forward to backward."""
    return ({"transports": transport} if transport else {}) | ({"keep_bytes": _ALL_BYTES} if "keep" in options else {})


def _join_options(*options: str) -> dict[str, Any]:
    """Returns the arguments of ``join`` of a mode with backups or checkpoints."""
    checkpoints = {"checkpoint_every": _CHECKPOINT_EVERY, "keep": 1} if "checkpoint" in options else {}
    return checkpoints | ({"backups": 1} if "backup" in options else {})


class TrainStepBenchmark:
    """Measures the modes by turns.

    Args:
        arguments: The parsed command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.config = models.config_from(arguments)
        self._measurement = StepMeasurement(arguments.modes, steps=arguments.steps)
        self.measured = self._measurement.measured

    def spec(self, mode: str) -> TrainerSpec:
        """Returns the task of a mode's trainers."""
        kind, *options = mode.split("_") if mode.startswith("shardwell") else [mode]
        return TrainerSpec(
            mode="plain" if mode == "plain2" else kind,
            model=self.config,
            batch_size=self.arguments.batch_size,
            length=self.arguments.length,
            dp=1 if mode == "plain" else _NUM_RANKS,
            transfers=_transfer_options(*options),
            join=_join_options(*options),
            encrypt="always" if "encrypted" in options else "off-host" if "tls" in options else "",
        )

    def run(self) -> dict[str, str]:
        """Runs all turns and returns the reasons of failed modes."""
        num_shards = self.arguments.num_shards
        sizes = [trainers.estimated_bytes(self.spec(mode), num_shards=num_shards) for mode in self.measured]
        return workers.interleave(
            {mode: self._starter(mode) for mode in self.measured},
            rounds=self.arguments.rounds,
            resident=workers.fit_in_memory(sizes),
            warm_up=self._measurement.warm_up,
            measure=self._measurement.measure,
        )

    def _starter(self, mode: str) -> Callable[[], workers.GroupContext]:
        spec = self.spec(mode)
        if spec.mode == "shardwell":
            return functools.partial(trainers.shardwell_group, spec, num_shards=self.arguments.num_shards)
        return functools.partial(trainers.baseline_group, spec)


# ---- the report ----


def main() -> None:
    arguments = parse_arguments()
    document = Report(arguments, title=_title(arguments))
    benchmark = TrainStepBenchmark(arguments)
    failures = benchmark.run()
    measured = {mode: each for mode, each in benchmark.measured.items() if mode not in failures}
    steps = {mode: summarize(each.seconds) for mode, each in measured.items()}
    agreement = check_losses(measured, lambda mode: not mode.startswith("plain"))
    document.write(
        results={
            "settings": {name: str(value) for name, value in vars(arguments).items() if name != "results"},
            "parameters": models.count_parameters(benchmark.config),
            "failures": failures,
            "step_s": {mode: asdict(summary) for mode, summary in steps.items()},
            "measured": {mode: asdict(each) for mode, each in measured.items()},
            "losses": agreement,
        },
        sections=[
            _step_table(arguments, measured, steps, failures),
            step_tables.cost_table(measured),
            *step_tables.waits_section(measured),
            "Losses:\n\n" + "\n".join(agreement),
        ],
        chart=_chart(steps),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures whole training steps with Shardwell and with baselines.")
    models.add_arguments(parser)
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=_DEFAULT_MODES, metavar="MODE", help=" ".join(MODES)
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each mode per round")
    parser.add_argument("--num-shards", type=int, default=2, help="shard servers of each Shardwell mode")
    report.add_arguments(parser, name="train_step")
    return parser.parse_args()


def _title(arguments: argparse.Namespace) -> str:
    parameters = models.count_parameters(models.config_from(arguments)) / 1e6
    return (
        f"A training step: GPT of {parameters:.1f} M parameters, batch {arguments.batch_size} x {arguments.length} "
        f"tokens per trainer, {arguments.num_shards} shard servers"
    )


def _step_table(
    arguments: argparse.Namespace,
    measured: Mapping[str, Measured],
    steps: Mapping[str, Summary],
    failures: Mapping[str, str],
) -> str:
    header = ["mode", "step, ms (quartiles)", "mean, ms", "steps", "tokens/s", "/ FSDP2's better", "/ DDP", "/ plain2"]
    rows = []
    for mode in arguments.modes:
        if mode in failures:
            rows.append(report.failure_row(mode, failures[mode], len(header)))
            continue
        step = steps[mode]
        tokens = len(measured[mode].losses) * arguments.batch_size * arguments.length
        bases = (_better_fsdp2(steps), steps.get("ddp"), steps.get("plain2"))
        mean_ms = statistics.fmean(measured[mode].seconds) * 1e3
        timed = [spread(step.scaled(1e3), ".1f"), f"{mean_ms:.1f}", str(step.count)]
        row = [mode, *timed, f"{step.inverse(tokens).median:.0f}"]
        rows.append(row + [ratio(step, base) for base in bases])
    return report.to_table(header, rows)


def _better_fsdp2(steps: Mapping[str, Summary]) -> Summary | None:
    return min((steps[mode] for mode in _FSDP2_MODES if mode in steps), key=lambda step: step.median, default=None)


def _chart(steps: Mapping[str, Summary]) -> Chart:
    bars = {mode: step.scaled(1e3) for mode, step in steps.items()}
    bound = {"two trainers that do not communicate": bars["plain2"].median} if "plain2" in bars else {}
    return Chart(axis="ms per step, median and quartiles; less is better", bars=bars, lines=bound)


if __name__ == "__main__":
    main()
