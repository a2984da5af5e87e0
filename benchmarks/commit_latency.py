"""Measures what trainers wait for between two steps: ``python -m benchmarks.commit_latency``.

The model is small, and the processes share the machine. ``FinishWork`` and ``CommitStep`` also last while a trainer
waits for the others. The trainer that comes last waits for the coordinator alone: its wait is the shortest of the step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import shardwell
from benchmarks import report, workers
from benchmarks.commit_latency_trainer import FIRST_WEIGHTS, WAITS, TrainerSpec
from benchmarks.report import Report, failure_row, spread, summarize, to_table
from benchmarks.workers import Group

_WARM_UP_STEPS = 10
_SYNC_BYTES, _SYNCS_PER_TURN = 16 << 10, 40
"""A commit record changes a few pages of the coordinator's file."""

_COLUMNS = (*WAITS.values(), *(f"{rpc}, last trainer" for rpc in WAITS.values()), FIRST_WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A number of trainers, and what was measured with it."""

    dp: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Waits of all steps, by column."""

    def add(self, answers: Sequence[dict[str, list[dict[str, float]]]]) -> None:
        """Adds the waits of a turn, of which every trainer has answered its own."""
        for step in zip(*(answer["waits"] for answer in answers), strict=True):
            for name in (*WAITS.values(), FIRST_WEIGHTS):
                self.seconds.setdefault(name, []).extend(waits[name] for waits in step)
            for rpc in WAITS.values():
                self.seconds.setdefault(f"{rpc}, last trainer", []).append(min(waits[rpc] for waits in step))

    def to_row(self) -> list[str]:
        """Returns the point's row of the table."""
        cells = (spread(summarize(self.seconds[name]).scaled(1e3), ".2f") for name in _COLUMNS)
        return [str(self.dp), *cells]


@contextmanager
def start(dp: int, options: argparse.Namespace, folder: Path) -> Iterator[Group]:
    """Starts a cluster, whose coordinator stores its state in a folder, and its trainers."""
    with shardwell.LocalCluster(options.servers, state_dir=folder / str(dp), log_level="warning") as cluster:
        spec = TrainerSpec(units=options.units, width=options.width, dp=dp, address=cluster.address)
        with workers.start_group("benchmarks.commit_latency_trainer", [[spec.to_json()]] * dp) as group:
            yield group


def sync_seconds(folder: Path, count: int) -> list[float]:
    """Returns how long ``fdatasync`` takes after a small write within a file."""
    seconds, data = [], os.urandom(_SYNC_BYTES)
    with (folder / "synced").open("wb", buffering=0) as file:
        file.write(bytes(64 * _SYNC_BYTES))
        os.fdatasync(file.fileno())
        for number in range(count):
            file.seek(number % 64 * _SYNC_BYTES)
            file.write(data)
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - started)
    return seconds


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what trainers wait for between two steps.")
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2, 4, 8], help="trainers (default: 1 2 4 8)")
    parser.add_argument("--units", type=int, default=10, help="linear layers, one unit each (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="width of the layers (default: %(default)s)")
    parser.add_argument("--servers", type=int, default=2, help="shard servers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps per turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns (default: %(default)s)")
    report.add_arguments(parser, name="commit_latency")
    arguments = parser.parse_args(argv)
    for name in ("units", "width", "servers", "steps", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected at least 1")
    if min(arguments.dp) < 1:
        parser.error(f"--dp {arguments.dp}: expected numbers of at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_arguments(argv)
    document = Report(options, title="What trainers wait for between two steps")
    points, syncs = {str(dp): Point(dp=dp) for dp in options.dp}, list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def measure(dp: str, group: Group) -> None:
            points[dp].add(group.run(steps=options.steps))
            syncs.extend(sync_seconds(folder, _SYNCS_PER_TURN))

        failures = workers.interleave(
            {dp: partial(start, point.dp, options, folder) for dp, point in points.items()},
            rounds=options.rounds,
            resident=True,
            warm_up=lambda _, group: group.run(steps=_WARM_UP_STEPS),
            measure=measure,
        )
    header = ["trainers", *_COLUMNS]
    rows = [
        failure_row(dp, failures[dp], len(header)) if dp in failures else point.to_row() for dp, point in points.items()
    ]
    sync = f"fdatasync of {_SYNC_BYTES >> 10} kB on the coordinator's disk: "
    sync += f"{spread(summarize(syncs).scaled(1e3), '.2f')} ms." if syncs else "not measured."
    document.write(
        results={"points": list(map(asdict, points.values())), "fdatasync_s": syncs, "failures": failures},
        sections=[
            f"{options.units} linear layers of width {options.width}, one unit each, SGD, {options.servers} shard "
            f"servers. Milliseconds: median (quartiles) over the steps of {options.rounds} turns.",
            to_table(header, rows),
            sync,
        ],
    )


if __name__ == "__main__":
    main()
