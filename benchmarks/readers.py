"""Measures what readers cost a run that trains, and checks that they never read a mixture of versions.

Run ``python -m benchmarks.readers``. docs/readers.md explains the results.

Every parameter starts at 0, and every step subtracts exactly 1, so all values of version v are -v. The trainer also
computes matrix products, as long as ``--compute-ms``. Phases with and without readers alternate. The time of a read is
compared with that of a copy of the same bytes in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

import shardwell
from benchmarks import readers_network, report
from benchmarks.report import Report, ratio, spread, summarize
from benchmarks.sampling import cpu_seconds, wait_until_quiet
from shardwell_wire.errors import DeadlineError

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
    if arguments.network:
        readers_network.measure(arguments)
        return
    torch.set_num_threads(1)
    with shardwell.LocalCluster(num_shards=2) as cluster, ExitStack() as stack:
        session = stack.enter_context(shardwell.join(cluster.address, run=RUN))
        trainer = Trainer(session, arguments)
        trainer.train(2)
        readers = [stack.enter_context(reader(cluster.address, arguments)) for _ in range(arguments.readers)]
        alone, together = list[float](), list[float]()
        servers = [server.pid for server in (cluster.coordinator, *cluster.shards)]
        cpu = {phase: {"trainer": 0.0, "servers": 0.0} for phase in ("alone", "together")}

        @contextmanager
        def counted(phase: str) -> Iterator[None]:
            wait_until_quiet(servers)
            before = cpu_seconds([os.getpid()]), cpu_seconds(servers)
            yield
            wait_until_quiet(servers)
            cpu[phase]["trainer"] += cpu_seconds([os.getpid()]) - before[0]
            cpu[phase]["servers"] += cpu_seconds(servers) - before[1]

        copies = measure_read(cluster.address, arguments.reads) | measure_pause(cluster.address, arguments)
        while len(together) < arguments.rounds * arguments.steps or sum(map(count, readers)) < arguments.gathers:
            with counted("alone"):
                alone += trainer.train(arguments.steps)
            for process in readers:
                send(process, "go")
            with counted("together"):
                together += trainer.train(arguments.steps)
            for process in readers:
                send(process, "pause")
            print(f"{len(together)} steps, {sum(map(count, readers))} gathers, no mixture", flush=True)
        write_report(arguments, alone, together, cpu, copies, gathers=sum(map(count, readers)))


def measure_read(address: str, rounds: int) -> dict[str, list[float]]:
    """Measures reads of the newest version in this process.

    Returns:
        Seconds of each round: until the version is pinned, of a read of all units into fresh memory with it, and of a
        copy of the same bytes into fresh memory.
    """
    seconds: dict[str, list[float]] = {"pin": [], "pin and read": [], "copy to fresh memory": []}
    with shardwell.attach(address, run=RUN) as source:
        for number in range(rounds + 1):
            started = time.perf_counter()
            with source.pin() as pinned:
                pinned_s = time.perf_counter() - started
                units = {part.unit.layout.unit: part.unit for stored in pinned.parameters for part in stored.parts}
                read = [pinned.read(unit) for unit in units.values()]
                read_s, started = time.perf_counter() - started, time.perf_counter()
            copies = [flat.clone() for flat in read]
            copy_s = time.perf_counter() - started
            assert len(copies) == len(read)
            for name, value in zip(seconds, (pinned_s, read_s, copy_s), strict=True):
                seconds[name] += [value] if number else []  # the first read opens the connections
            del read, copies
    return seconds


def measure_pause(address: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measures how long an engine of this host may not use its model while a new version is loaded.

    Returns:
        Seconds of each round: of ``follow``, of its part in which the model is written, and of a copy of the same bytes
        between the same tensors.
    """
    seconds: dict[str, list[float]] = {"follow": [], "pause": [], "copy within the process": []}
    model, other = (Model(arguments.units, arguments.unit_kilobytes << 10) for _ in range(2))

    @contextmanager
    def paused() -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds["pause"].append(time.perf_counter() - started)

    for _ in range(arguments.reads + 1):
        with shardwell.attach(address, run=RUN) as source:  # which reads everything
            started = time.perf_counter()
            source.follow(model, writing=paused())
            seconds["follow"].append(time.perf_counter() - started)
        started = time.perf_counter()
        with torch.no_grad():
            for target, value in zip(other.parameters(), model.parameters(), strict=True):
                target.copy_(value)
        seconds["copy within the process"].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}  # the first round touches the memory


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
        *(["--every-version"] if arguments.every_version else []),
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
    gathers, active, version = 0, False, -1
    with shardwell.attach(arguments.reader, run=RUN) as source:
        while True:
            if word := sys.stdin.readline():
                active = word == "go\n"
                print(gathers, flush=True)
            if not active:
                time.sleep(0.005)
                continue
            started = time.monotonic()
            try:
                if arguments.every_version:
                    source.wait_for(version + 1, 1.0)
            except DeadlineError:
                continue
            with source.pin() as pinned:
                version = pinned.version
                for part in (part for stored in pinned.parameters for part in stored.parts):
                    values = part.unit.view(pinned.read(part.unit), part.index)
                    if not bool((values == -pinned.version).all()):
                        sys.exit(f"version {pinned.version}: values from {values.min()} to {values.max()}")
                    gathers += 1
            if not arguments.every_version:
                time.sleep(max(0.0, started + arguments.interval_s - time.monotonic()))


def write_report(
    arguments: argparse.Namespace,
    alone: Sequence[float],
    together: Sequence[float],
    cpu: Mapping[str, Mapping[str, float]],
    copies: Mapping[str, Sequence[float]],
    *,
    gathers: int,
) -> None:
    """Writes the results."""
    rows = [
        [
            name,
            spread(summarize(seconds).scaled(1000), ".1f"),
            ratio(summarize(seconds), summarize(alone)),
            *(f"{used / len(seconds) * 1000:.1f}" for used in cpu[phase].values()),
        ]
        for name, phase, seconds in (
            ("no readers", "alone", alone),
            (f"{arguments.readers} readers", "together", together),
        )
    ]
    table = report.to_table(["", "ms per step", "ratio", "CPU ms per step: trainer", "servers"], rows)
    size = f"{arguments.units * arguments.unit_kilobytes / 1024:.0f} MiB"
    reads = [[name, spread(summarize(seconds).scaled(1000), ".1f")] for name, seconds in copies.items()]
    Report(arguments, title="Readers of a run that trains").write(
        results={
            "alone_s": list(alone),
            "together_s": list(together),
            "cpu_s": cpu,
            "reads": copies,
            "gathers": gathers,
        },
        sections=[
            table,
            report.to_table([size, "ms"], reads),
            f"{gathers} gathers of units, each of exactly one version.",
        ],
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what readers cost a run that trains.")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--unit-kilobytes", type=int, default=2048, help="size of a unit")
    parser.add_argument("--compute-ms", type=float, default=200.0, help="computing time of a step")
    parser.add_argument("--interval-s", type=float, default=1.0, help="seconds between two versions of a reader")
    parser.add_argument("--every-version", action="store_true", help="readers read each version as soon as it exists")
    parser.add_argument("--reads", type=int, default=5, help="reads that are compared with copies")
    parser.add_argument("--steps", type=int, default=20, help="steps of a phase")
    parser.add_argument("--rounds", type=int, default=3, help="phases of each kind, at least")
    parser.add_argument("--gathers", type=int, default=0, help="gathers of all readers together, at least")
    parser.add_argument("--reader", metavar="ADDRESS", help=argparse.SUPPRESS)
    readers_network.add_arguments(parser)
    report.add_arguments(parser, name="readers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
