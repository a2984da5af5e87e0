"""Measures whole training steps with Shardwell and with baselines: ``python -m benchmarks.train_step``.

Every mode has its own processes with one thread each. The modes take turns of a few steps, in rotating order.
docs/performance.md explains the results.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import models, report, trainers, workers
from benchmarks.report import Chart, Report, Summary, ratio, spread, summarize
from benchmarks.sampling import PeakMemory, cpu_seconds, loopback_bytes, wait_until_quiet
from benchmarks.trainers import TrainerSpec
from benchmarks.workers import Group

_NUM_RANKS = 2
_WARM_UP_STEPS = 2
_LEAD_IN_STEPS = 1
"""Uncounted steps at the start of each turn. Every later step waits for the update of the previous step."""
_MEMORY_STEPS = 2
"""Steps in which memory is sampled. They are not timed."""
_LOSS_TOLERANCE = 1e-2
"""Relative tolerance. Another order of sums changes a loss far less; other data or weights change a loss more."""

MODES = (
    "plain",
    "plain2",
    "ddp",
    "fsdp2",
    "fsdp2_prefetch",
    "shardwell_shm",
    "shardwell_socket",
    "shardwell_socket_keep",
    "shardwell_grpc",
    "shardwell_shm_backup",
    "shardwell_shm_checkpoint",
)
_DEFAULT_MODES = tuple(mode for mode in MODES if not mode.endswith(("_backup", "_checkpoint")))
_CHECKPOINT_EVERY = 20
_ALL_BYTES = 1 << 40
_FSDP2_MODES = ("fsdp2", "fsdp2_prefetch")


@dataclass
class Measured:
    """Results of all turns of one mode."""

    seconds: list[float] = field(default_factory=list)
    """Per step, the mean over the trainers. The trainers of a mode finish a step together, except in ``plain2``."""
    details: dict[str, list[float]] = field(default_factory=dict)
    """Increase of each of Shardwell's ``StepResult.totals``, per step and trainer."""
    losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """Losses by data-parallel rank and step."""
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


def _transfer_options(transport: str = "", *options: str) -> dict[str, Any]:
    """Returns the options of a mode: its transport, and ``keep_bytes`` if weights stay from forward to backward."""
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
        self.measured: dict[str, Measured] = {mode: Measured() for mode in arguments.modes}

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
        )

    def run(self) -> dict[str, str]:
        """Runs all turns and returns the reasons of failed modes."""
        num_shards = self.arguments.num_shards
        sizes = [trainers.estimated_bytes(self.spec(mode), num_shards=num_shards) for mode in self.measured]
        return workers.interleave(
            {mode: self._starter(mode) for mode in self.measured},
            rounds=self.arguments.rounds,
            resident=workers.fit_in_memory(sizes),
            warm_up=lambda mode, group: self._record_losses(mode, group.run(steps=_WARM_UP_STEPS)),
            measure=self._measure,
        )

    def _starter(self, mode: str) -> Callable[[], workers.GroupContext]:
        spec = self.spec(mode)
        if spec.mode == "shardwell":
            return functools.partial(trainers.shardwell_group, spec, num_shards=self.arguments.num_shards)
        return functools.partial(trainers.baseline_group, spec)

    def _measure(self, mode: str, group: Group) -> None:
        measured = self.measured[mode]
        pids = [*group.worker_pids, *group.server_pids]
        wait_until_quiet(pids)
        before = self._counters(group)
        answers = group.run(steps=_LEAD_IN_STEPS + self.arguments.steps)
        wait_until_quiet(pids)
        after = self._counters(group)
        measured.trainer_cpu_s += after[0] - before[0]
        measured.server_cpu_s += after[1] - before[1]
        measured.loopback_bytes += after[2] - before[2]
        measured.steps_in_counters += _LEAD_IN_STEPS + self.arguments.steps
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
        for dp_rank, answer in enumerate(answers):
            by_step = self.measured[mode].losses.setdefault(dp_rank, {})
            losses = enumerate(answer["losses"], start=answer["first_step"])
            by_step.update((step, loss) for step, loss in losses if loss is not None)


def _record_details(measured: Measured, totals: Sequence[Mapping[str, float]]) -> None:
    """Converts running totals to increases per step, without the lead-in."""
    for earlier, later in itertools.pairwise(totals[_LEAD_IN_STEPS - 1 :]):
        for name, total in later.items():
            measured.details.setdefault(name, []).append(total - earlier[name])


def check_losses(measured: Mapping[str, Measured]) -> list[str]:
    """Reports for every rank whether the modes agree on its losses.

    The first loss belongs to the same weights in all modes. Later losses are compared between modes that average
    gradients over the same ranks, at the last step that all these modes have taken.
    """
    lines = []
    for dp_rank in range(_NUM_RANKS):
        known = {mode: each.losses[dp_rank] for mode, each in measured.items() if each.losses.get(dp_rank)}
        averaging = {mode: losses for mode, losses in known.items() if not mode.startswith("plain")}
        if known:
            lines.append(_agreement(known, 0, dp_rank))
        if averaging:
            lines.append(_agreement(averaging, max(set.intersection(*map(set, averaging.values()))), dp_rank))
    return lines


def _agreement(losses: Mapping[str, Mapping[int, float]], step: int, dp_rank: int) -> str:
    values = {mode: by_step[step] for mode, by_step in losses.items()}
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    outcome = "agree" if values[high] - values[low] <= _LOSS_TOLERANCE * abs(values[low]) else "DISAGREE"
    return (
        f"- rank {dp_rank}, step {step}: {len(values)} modes {outcome}: "
        f"{values[low]:.5f} ({low}) to {values[high]:.5f} ({high})"
    )


# ---- the report ----


def main() -> None:
    arguments = parse_arguments()
    document = Report(arguments, title=_title(arguments))
    benchmark = TrainStepBenchmark(arguments)
    failures = benchmark.run()
    measured = {mode: each for mode, each in benchmark.measured.items() if mode not in failures}
    steps = {mode: summarize(each.seconds) for mode, each in measured.items()}
    agreement = check_losses(measured)
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
            _cost_table(measured),
            *_details_section(measured),
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


def _cost_table(measured: Mapping[str, Measured]) -> str:
    header = [
        "mode",
        "peak USS per trainer, MB",
        "peak RSS per trainer, MB",
        "peak USS of all servers, MB",
        "CPU of trainers, s/step",
        "CPU of servers, s/step",
        "loopback, MB/step",
    ]
    rows = [
        [
            mode,
            f"{each.trainer_peak['uss_bytes'] / 1e6:.0f}",
            f"{each.trainer_peak['rss_bytes'] / 1e6:.0f}",
            f"{each.server_peak['uss_bytes'] / 1e6:.0f}",
            f"{each.per_step(each.trainer_cpu_s):.3f}",
            f"{each.per_step(each.server_cpu_s):.3f}",
            f"{each.per_step(each.loopback_bytes) / 1e6:.1f}",
        ]
        for mode, each in measured.items()
    ]
    return report.to_table(header, rows)


def _details_section(measured: Mapping[str, Measured]) -> list[str]:
    """Returns the table of waits and transferred bytes of Shardwell's modes; empty if none of them ran."""
    columns = {
        "gather_wait_s": ("weights, ms", 1e3),
        "push_wait_s": ("gradients in flight, ms", 1e3),
        "finish_wait_s": ("the other trainer's work, ms", 1e3),
        "commit_wait_s": ("the commit, ms", 1e3),
        "received_bytes": ("received, MB", 1e-6),
        "sent_bytes": ("sent, MB", 1e-6),
    }
    rows = [
        [mode, *(spread(summarize(each.details[name]).scaled(factor), ".1f") for name, (_, factor) in columns.items())]
        for mode, each in measured.items()
        if each.details
    ]
    if not rows:
        return []
    header = ["mode", *(title for title, _ in columns.values())]
    introduction = "What the training thread waits for and what the transports carry, per step and trainer (quartiles):"
    return [f"{introduction}\n\n{report.to_table(header, rows)}"]


def _chart(steps: Mapping[str, Summary]) -> Chart:
    bars = {mode: step.scaled(1e3) for mode, step in steps.items()}
    bound = {"two trainers that do not communicate": bars["plain2"].median} if "plain2" in bars else {}
    return Chart(axis="ms per step, median and quartiles; less is better", bars=bars, lines=bound)


if __name__ == "__main__":
    main()
