"""Measures what one unit costs in a step: time and CPU time beyond trainers that do not communicate.

Run ``python -m benchmarks.unit_cost``. The model has linear layers, one unit each. The variants are Shardwell over one
transport, DDP, trainers with empty hooks, and the floor: the same bytes and wake-ups without Shardwell
(``benchmarks.unit_floor``). The processes of a variant stay alive, and the variants of a point take turns. CPU time is
read from the kernel, of trainers, shard servers and the coordinator apart. It depends less on other programs than the
duration of a step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import shardwell
from benchmarks import report, workers
from benchmarks.report import Report, failure_row, to_table
from benchmarks.sampling import cpu_seconds, wait_until_quiet
from benchmarks.unit_cost_trainer import BASELINES, BATCH_SIZE, DDP, HOOKS, PLAIN, UnitSpec
from benchmarks.unit_floor import start_floor
from benchmarks.workers import Group
from shardwell.transport.server_connection import TRANSPORT_NAMES

FLOORS = {"floor_shm": True, "floor_socket": False}
"""Variants of ``benchmarks.unit_floor``, and whether they share memory."""
REFERENCES = (HOOKS, DDP, *FLOORS)
_WARM_UP_STEPS = 5
_MIN_STEPS, _UNITS_PER_TURN = 10, 2000
"""A turn has at least this many steps, and the steps of this many units: the kernel counts CPU time in 10 ms."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a variant."""

    seconds: Sequence[float]
    """Duration of each step, the mean over the trainers."""
    trainers_cpu_s: float
    shards_cpu_s: float
    coordinator_cpu_s: float

    def cpu_ms(self, *, units: int, trainers: int) -> dict[str, float]:
        """Returns milliseconds of CPU time per step, unit and trainer, by kind of process."""
        scale = 1e3 / (len(self.seconds) * units * trainers)
        return {
            "trainers": scale * self.trainers_cpu_s,
            "shards": scale * self.shards_cpu_s,
            "coordinator": scale * self.coordinator_cpu_s,
        }


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model and a number of trainers. All variants are measured on it."""

    units: int
    width: int
    dp: int
    servers: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    """By variant."""

    @property
    def steps(self) -> int:
        """Steps per turn."""
        return max(_MIN_STEPS, _UNITS_PER_TURN // self.units)

    def costs(self, variant: str) -> dict[str, float]:
        """Returns medians over the turns, in milliseconds per unit (and trainer, for CPU time) beyond plain trainers.

        Returns:
            ``wall``, ``trainers``, ``shards``, ``coordinator``, ``cpu`` (their sum) and ``ratio`` (of step durations).
        """
        step_s = {
            name: statistics.median(itertools.chain(*(turn.seconds for turn in turns)))
            for name, turns in self.turns.items()
        }
        costs = {"wall": 1e3 * (step_s[variant] - step_s[PLAIN]) / self.units}
        plain_ms = self._cpu_ms(PLAIN)["trainers"]
        cpu = self._cpu_ms(variant)
        cpu["trainers"] -= plain_ms
        return {**costs, **cpu, "cpu": sum(cpu.values()), "ratio": step_s[variant] / step_s[PLAIN]}

    def _cpu_ms(self, variant: str) -> dict[str, float]:
        turns = [turn.cpu_ms(units=self.units, trainers=self.dp) for turn in self.turns[variant]]
        return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


@contextmanager
def start_variant(point: Point, variant: str) -> Iterator[Group]:
    """Starts the trainers of a variant, and a cluster for them."""
    spec = UnitSpec(units=point.units, width=point.width, dp=point.dp, variant=variant)
    if variant in FLOORS:
        with start_floor(spec, servers=point.servers, shared=FLOORS[variant]) as group:
            yield group
    elif variant in BASELINES:
        with tempfile.TemporaryDirectory() as folder:
            address = f"file://{folder}/store"
            with _start_trainers([replace(spec, rank=rank, address=address) for rank in range(point.dp)]) as group:
                yield group
    else:
        with shardwell.LocalCluster(point.servers, log_level="warning") as cluster:
            server_pids = [cluster.coordinator.pid, *(shard.pid for shard in cluster.shards)]
            with _start_trainers([replace(spec, address=cluster.address)] * point.dp, server_pids) as group:
                yield group


def _start_trainers(specs: Sequence[UnitSpec], server_pids: Sequence[int] = ()) -> workers.GroupContext:
    command_lines = [[spec.to_json()] for spec in specs]
    return workers.start_group("benchmarks.unit_cost_trainer", command_lines, server_pids=server_pids)


def measure_point(point: Point, variants: Sequence[str], *, rounds: int) -> dict[str, str]:
    """Measures plain trainers and all variants by turns; returns the reasons of failed variants."""

    def measure(variant: str, group: Group) -> None:
        pids = [*group.worker_pids, *group.server_pids]
        parts = [group.worker_pids, group.server_pids[1:], group.server_pids[:1]]
        wait_until_quiet(pids)
        before = [cpu_seconds(part) for part in parts]
        answers = group.run(steps=point.steps)
        wait_until_quiet(pids)  # servers update after the commit
        used = [cpu_seconds(part) - start for part, start in zip(parts, before, strict=True)]
        seconds = [statistics.fmean(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)]
        point.turns.setdefault(variant, []).append(
            Turn(seconds=seconds, trainers_cpu_s=used[0], shards_cpu_s=used[1], coordinator_cpu_s=used[2])
        )

    return workers.interleave(
        {variant: partial(start_variant, point, variant) for variant in (PLAIN, *variants)},
        rounds=rounds,
        resident=True,
        warm_up=lambda _, group: group.run(steps=_WARM_UP_STEPS),
        measure=measure,
    )


COLUMNS = {
    "wall": "wall",
    "cpu": "CPU",
    "trainers": "CPU of the trainer",
    "shards": "CPU of the shard servers",
    "coordinator": "CPU of the coordinator",
    "ratio": "step of plain",
}
"""Column titles by key of ``Point.costs``."""


def to_section(point: Point, variants: Sequence[str], failures: Mapping[str, str]) -> str:
    """Returns the table of one point."""
    header, rows = ["variant", *COLUMNS.values()], []
    for variant in variants:
        if variant in failures or PLAIN in failures:
            reason = failures.get(variant, failures.get(PLAIN, ""))
            rows.append(failure_row(variant, reason, len(header)))
            continue
        costs = point.costs(variant)
        rows.append([variant, *(f"{costs[key]:.2f}" for key in COLUMNS)])
    return f"## {point.units} units of width {point.width}, {point.dp} trainers\n\n{to_table(header, rows)}"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what one unit costs in a step.")
    parser.add_argument("--units", type=int, nargs="+", default=[10, 100], help="default: 10 100")
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2, 4], help="numbers of trainers (default: 1 2 4)")
    parser.add_argument("--width", type=int, default=64, help="width of the layers (default: %(default)s)")
    parser.add_argument("--servers", type=int, default=2, help="shard servers (default: %(default)s)")
    parser.add_argument("--transports", choices=TRANSPORT_NAMES, nargs="*", default=list(TRANSPORT_NAMES))
    parser.add_argument(
        "--references",
        choices=REFERENCES,
        nargs="*",
        default=list(REFERENCES),
        help="empty hooks, DDP over gloo, and the same bytes and wake-ups without Shardwell (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant (default: %(default)s)")
    report.add_arguments(parser, name="unit_cost")
    arguments = parser.parse_args(argv)
    for name in ("units", "dp"):
        if min(getattr(arguments, name)) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected numbers of at least 1")
    for name in ("width", "servers", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected at least 1")
    return arguments


def main() -> None:
    options = parse_arguments()
    document = Report(options, title="What a unit costs in a step")
    sections, results = [], list[dict[str, Any]]()
    for units, dp in itertools.product(options.units, options.dp):
        point = Point(units=units, width=options.width, dp=dp, servers=options.servers)
        variants = [*options.transports, *options.references]
        failures = measure_point(point, variants, rounds=options.rounds)
        costs = {name: point.costs(name) for name in variants if not failures.keys() & {name, PLAIN}}
        results.append({**asdict(point), "costs": costs, "failures": failures})
        sections.append(to_section(point, variants, failures))
    document.write(
        results={"points": results},
        sections=[
            f"Linear layers, one unit each, batch {BATCH_SIZE}, SGD, {options.servers} shard servers, one thread per "
            "trainer. Milliseconds per unit and step beyond plain trainers, which do not communicate. CPU time is also "
            f"per trainer. Medians of {options.rounds} turns. The last column is the duration of a step relative to "
            "plain trainers.",
            *sections,
        ],
    )


if __name__ == "__main__":
    main()
