"""Measures what readers cost a run that trains, and checks that they never read a mixture of versions.

Run ``python -m benchmarks.readers``. docs/readers.md explains the results.

Every parameter starts at 0, and every step subtracts exactly 1, so all values of version v are -v. The trainer also
computes matrix products, as long as ``--compute-ms``. Phases with and without readers alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

import shardwell
from benchmarks import report
from benchmarks.report import Report, ratio, spread, summarize

RUN = "readers"


class Model(nn.Module):
    """Layers whose gradient is 1 everywhere."""

    def __init__(self, num_units: int, unit_bytes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(unit_bytes // 4) for _ in range(num_units)])

    def forward(self) -> torch.Tensor:
        return torch.stack([layer() for layer in self.layers]).sum()


class _Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.reader:
        read(arguments)
        return
    torch.set_num_threads(1)
    with shardwell.LocalCluster(num_shards=2) as cluster, ExitStack() as stack:
        session = stack.enter_context(shardwell.join(cluster.address, run=RUN))
        trainer = Trainer(session, arguments)
        trainer.train(2)
        readers = [stack.enter_context(reader(cluster.address, arguments)) for _ in range(arguments.readers)]
        alone, together = list[float](), list[float]()
        while len(together) < arguments.rounds * arguments.steps or sum(map(count, readers)) < arguments.gathers:
            alone += trainer.train(arguments.steps)
            for process in readers:
                send(process, "go")
            together += trainer.train(arguments.steps)
            for process in readers:
                send(process, "pause")
            print(f"{len(together)} steps, {sum(map(count, readers))} gathers, no mixture", flush=True)
        write_report(arguments, alone, together, gathers=sum(map(count, readers)))


class Trainer:
    """Trains the model in this process."""

    def __init__(self, session: shardwell.Session, arguments: argparse.Namespace) -> None:
        self._model = Model(arguments.units, arguments.unit_kilobytes << 10)
        for layer in self._model.layers:
            shardwell.fully_shard(layer, session)
        shardwell.fully_shard(self._model, session)
        self._optimizer = shardwell.optim.SGD(self._model.parameters(), lr=1.0)
        self._steps = session.steps(10**9)
        self._factor, self._compute_s = torch.randn(256, 256), arguments.compute_ms / 1000

    def train(self, num_steps: int) -> list[float]:
        """Trains for some steps; returns the seconds of each."""
        seconds = []
        for _ in range(num_steps):
            started, step = time.perf_counter(), next(self._steps)
            for _ in step.batches(lambda step, rank: torch.zeros(1)):
                self._compute()
                self._model().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        return seconds

    def _compute(self) -> None:
        until = time.thread_time() + self._compute_s
        while time.thread_time() < until:
            self._factor @ self._factor


@contextmanager
def reader(address: str, arguments: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """Starts a reader in a process of its own, paused."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.readers",
        "--reader",
        address,
        "--interval-s",
        str(arguments.interval_s),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            send(process, "pause")
            yield process
        finally:
            process.kill()


def send(process: subprocess.Popen[str], word: str) -> None:
    """Sends a word to a reader and waits for its answer."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit("a reader failed: see its error above")
    process.gathers = json.loads(answer)  # type: ignore[attr-defined]


def count(process: subprocess.Popen[str]) -> int:
    """Returns the gathers of a reader so far."""
    return int(getattr(process, "gathers", 0))


def read(arguments: argparse.Namespace) -> None:
    """Reads until the parent ends: pins the newest version, gathers every unit, and compares every value."""
    os.set_blocking(sys.stdin.fileno(), False)
    gathers, active = 0, False
    with shardwell.attach(arguments.reader, run=RUN) as source:
        while True:
            if word := sys.stdin.readline():
                active = word == "go\n"
                print(gathers, flush=True)
            if not active:
                time.sleep(0.005)
                continue
            started = time.monotonic()
            with source.pin() as pinned:
                for part in (part for stored in pinned.parameters for part in stored.parts):
                    values = part.unit.view(pinned.read(part.unit), part.index)
                    if not bool((values == -pinned.version).all()):
                        sys.exit(f"version {pinned.version}: values from {values.min()} to {values.max()}")
                    gathers += 1
            time.sleep(max(0.0, started + arguments.interval_s - time.monotonic()))


def write_report(
    arguments: argparse.Namespace, alone: Sequence[float], together: Sequence[float], *, gathers: int
) -> None:
    """Writes the results."""
    rows = [
        [name, spread(summary.scaled(1000), ".1f"), ratio(summary, summarize(alone))]
        for name, summary in (("no readers", summarize(alone)), (f"{arguments.readers} readers", summarize(together)))
    ]
    table = report.to_table(["", "ms per step", "ratio"], rows)
    Report(arguments, title="Readers of a run that trains").write(
        results={"alone_s": list(alone), "together_s": list(together), "gathers": gathers},
        sections=[table, f"{gathers} gathers of units, each of exactly one version."],
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what readers cost a run that trains.")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--unit-kilobytes", type=int, default=2048, help="size of a unit")
    parser.add_argument("--compute-ms", type=float, default=200.0, help="computing time of a step")
    parser.add_argument("--interval-s", type=float, default=1.0, help="seconds between two versions of a reader")
    parser.add_argument("--steps", type=int, default=20, help="steps of a phase")
    parser.add_argument("--rounds", type=int, default=3, help="phases of each kind, at least")
    parser.add_argument("--gathers", type=int, default=0, help="gathers of all readers together, at least")
    parser.add_argument("--reader", metavar="ADDRESS", help=argparse.SUPPRESS)
    report.add_arguments(parser, name="readers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
