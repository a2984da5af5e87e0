"""Measures how soon a run commits again after SIGKILL of one of its processes: ``python -m benchmarks.recovery``.

Two trainers run dp=2 on two shard servers, all with default settings. A random process of the chosen kind is killed at
a random instant. The recovery time is the time from the kill to the next commit that a surviving trainer observes. Part
of it is the computation of the lost work item, which the survivor reports. The table contains both, and the rest. The
killed process is started again, and the next kill follows when all processes take part in steps again. After the last
step, the weights are compared with those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardwell
from benchmarks import report
from benchmarks.workers import ROOT

NAMES = ("a", "b")
_STALLED_AFTER_S = 60.0
_PAUSE_S = (0.3, 1.0)
"""Shortest and longest time between two kills, while all processes take part."""


class Trainer:
    """A trainer process and what it has reported. Reads its output in a thread."""

    def __init__(self, address: str, name: str, steps: int, join_options: str) -> None:
        self.name, self.sha256 = name, ""
        self._commits: list[tuple[int, float]] = []
        self._items: list[tuple[float, float]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.recovery_trainer",
                "--address",
                address,
                "--trainer",
                name,
                "--steps",
                str(steps),
                "--join-options",
                join_options,
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            fields = json.loads(line)
            with self._changed:
                if "committed_at" in fields:
                    self._commits.append((fields["step"], fields["committed_at"]))
                elif "item_s" in fields:
                    self._items.append((time.monotonic(), fields["item_s"]))
                else:
                    self.sha256 = fields["sha256"]
                self._changed.notify_all()

    @property
    def step(self) -> int:
        """The last step whose commit the trainer observed. -1: none."""
        return self._commits[-1][0] if self._commits else -1

    def wait_for_commit(self, after_s: float) -> float:
        """Returns the time of the first commit that the trainer observed after a time."""
        deadline = time.monotonic() + _STALLED_AFTER_S
        with self._changed:
            while not self._commits or self._commits[-1][1] <= after_s:
                if self.process.poll() is not None or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"trainer {self.name!r} committed nothing:\n{self.log()}")
            return next(at for _, at in self._commits if at > after_s)

    def last_item_s(self, start_s: float, stop_s: float) -> float:
        """Returns how long the last of several items in a time span took. 0: the trainer finished at most one."""
        items = [seconds for at, seconds in self._items if start_s < at <= stop_s]
        return items[-1] if len(items) > 1 else 0.0

    def intervals(self) -> list[float]:
        """Returns the times between successive commits."""
        times = [at for _, at in self._commits]
        return [after - before for before, after in itertools.pairwise(times)]

    def finish(self) -> str:
        """Waits for the end of the process. Returns the hash of the weights."""
        if self.process.wait(10 * _STALLED_AFTER_S):
            raise AssertionError(f"trainer {self.name!r} failed:\n{self.log()}")
        self._reader.join()
        return self.sha256

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]


@dataclass
class Result:
    """What kills of one kind cost."""

    kind: str
    recovery_s: list[float] = field(default_factory=list)
    """Time from each kill to the next commit."""
    item_s: list[float] = field(default_factory=list)
    """Time to compute the lost work item, within the recovery time. 0: no item was lost."""
    rounds: int = 0
    equal: int = 0
    """Rounds that ended with the bits of the undisturbed run."""

    @property
    def beyond_s(self) -> list[float]:
        """Recovery times without the computation of the lost item."""
        return [total - item for total, item in zip(self.recovery_s, self.item_s, strict=True)]


class Round:
    """One run under kills of one kind."""

    def __init__(self, arguments: argparse.Namespace, seed: int, result: Result) -> None:
        self._arguments, self._result = arguments, result
        self._random = random.Random(seed)

    def run(self) -> str:
        """Kills processes until few steps are left. Returns the hash of the weights."""
        steps, options = self._arguments.steps, self._arguments.join_options
        with ExitStack() as stack:
            cluster = stack.enter_context(shardwell.LocalCluster(num_shards=2, log_dir=self._arguments.logs))
            trainers: dict[str, Trainer] = {}

            def start(name: str) -> None:
                trainers[name] = Trainer(cluster.address, name, steps, options)
                stack.callback(trainers[name].kill)

            for name in NAMES:
                start(name)
            while True:
                now = time.monotonic()
                for trainer in trainers.values():
                    trainer.wait_for_commit(now)
                if not self._result.kind or max(at.step for at in trainers.values()) > steps - 60:
                    break
                time.sleep(self._random.uniform(*_PAUSE_S))
                self._kill(cluster, trainers, start)
            hashes = {trainer.finish() for trainer in trainers.values()}
            assert len(hashes) == 1, f"the trainers read different weights: {hashes}"
            self._step_s = statistics.median(trainers[NAMES[0]].intervals())
            return hashes.pop()

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return self._step_s

    def _kill(self, cluster: shardwell.LocalCluster, trainers: dict[str, Trainer], start: Any) -> None:
        name = self._random.choice(NAMES)
        survivor = next(trainer for trainer in trainers.values() if trainer.name != name)
        server = cluster.coordinator if self._result.kind == "coordinator" else self._random.choice(cluster.shards)
        killed_s = time.monotonic()
        if self._result.kind == "trainer":
            trainers[name].process.kill()
        else:
            os.kill(server.pid, 9)
            server.restart(time.monotonic() + _STALLED_AFTER_S)
        committed_s = survivor.wait_for_commit(killed_s)
        self._result.recovery_s.append(committed_s - killed_s)
        lost = self._result.kind == "trainer"
        self._result.item_s.append(survivor.last_item_s(killed_s, committed_s) if lost else 0.0)
        if lost:
            trainers[name].kill()
            start(name)


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def to_rows(results: Sequence[Result]) -> list[list[str]]:
    rows = []
    for result in results:
        cells = [f"SIGKILL of a {result.kind}", str(len(result.recovery_s))]
        for values in (result.recovery_s, result.beyond_s):
            cells += [f"{percentile(values, share):.2f}" for share in (0.5, 0.99, 1.0)]
        rows.append([*cells, f"{result.equal} of {result.rounds}"])
    return rows


HEADER = ("event", "kills", "p50 s", "p99 s", "most s", "beyond p50", "beyond p99", "beyond most", "equal bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("trainer", "coordinator", "server"), default=["trainer"])
    parser.add_argument("--kills", type=int, default=60, help="least number of kills of each kind")
    parser.add_argument("--steps", type=int, default=600, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the logs of the servers")
    parser.add_argument("--join-options", default="{}", help='options of join as JSON, such as {"backups": 1}')
    arguments = parser.parse_args()
    undisturbed = Round(arguments, 0, Result(""))
    expected = undisturbed.run()
    print(f"undisturbed: {arguments.steps} steps of {1000 * undisturbed.step_s:.0f} ms", flush=True)
    results = []
    for kind in arguments.kinds:
        results.append(result := Result(kind))
        while len(result.recovery_s) < arguments.kills:
            before = len(result.recovery_s)
            result.equal += Round(arguments, arguments.seed + result.rounds, result).run() == expected
            result.rounds += 1
            times = " ".join(f"{value:.2f}" for value in result.recovery_s[before:])
            print(f"{kind}, run {result.rounds}: {result.equal} equal; recovery times {times} s", flush=True)
    print(report.to_table(HEADER, to_rows(results)))


if __name__ == "__main__":
    main()
