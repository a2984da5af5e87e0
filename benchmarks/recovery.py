"""Measures how soon a run commits again after SIGKILL of one of its processes: ``python -m benchmarks.recovery``.

Two trainers run dp=2 on two shard servers, all with default settings. A random process of the chosen kind is killed at
a random instant. The recovery time is the time from the kill to the next commit that a surviving trainer observes. Part
of it is the computation of the lost work item, which the survivor reports. The table contains both, and the rest. The
killed process is started again, and the next kill follows when all processes take part in steps again, and all backups
are in sync. After the last step, the weights are compared with those of an undisturbed run, bit for bit.

A run fails if a survivor ends, or commits nothing for 60 seconds. The error names the seed of the run and the kill, and
the logs of all processes are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardwell
from benchmarks import report
from benchmarks.recovery_trainer import RUN
from benchmarks.workers import ROOT
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2

NAMES = ("a", "b")
_STALLED_AFTER_S = 60.0
STARTED_AFTER_S = 300.0
"""Longest time until a process that was started again takes part in steps. Most of it is the import of torch."""
_PAUSE_S = (0.3, 1.0)
"""Shortest and longest time between two kills, while all processes take part."""


class Stalled(Exception):
    """A trainer ended, or committed nothing for too long."""


class Trainer:
    """A trainer process and what it has reported. Reads its output in a thread.

    Args:
        address: Address of the coordinator.
        name: Name of the trainer.
        steps: Steps of the run.
        join_options: Options of ``join`` as JSON.
        logs: Folder for the trainer's log.
        tp: Trainers of a replica.
    """

    def __init__(self, address: str, name: str, steps: int, join_options: str, logs: Path, *, tp: int = 1) -> None:
        self.name, self.sha256 = name, ""
        self.formed: list[float] = []
        """Times at which the replica was complete. Only with ``tp`` > 1."""
        self._commits: list[tuple[int, float]] = []
        self._items: list[tuple[float, float]] = []
        self._log_path = logs / f"trainer-{name}.log"
        self._changed = threading.Condition()
        command = [sys.executable, "-m", "benchmarks.recovery_trainer", "--address", address, "--trainer", name]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--steps", str(steps), "--tp", str(tp), "--join-options", join_options],
                stdout=subprocess.PIPE,
                stderr=log,
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
                elif "formed_at" in fields:
                    self.formed.append(fields["formed_at"])
                else:
                    self.sha256 = fields["sha256"]
                self._changed.notify_all()

    @property
    def step(self) -> int:
        """The last step whose commit the trainer observed. -1: none."""
        return self._commits[-1][0] if self._commits else -1

    def wait_for_commit(self, after_s: float, limit_s: float = _STALLED_AFTER_S) -> float:
        """Returns the time of the first commit that the trainer observed after a time.

        Infinity if the run ended before. Raises Stalled if the trainer ended otherwise, or after ``limit_s``.
        """
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not self._commits or self._commits[-1][1] <= after_s:
                if self.sha256:
                    return float("inf")
                self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))
                if (code := self.process.poll()) is not None and code:
                    raise Stalled(f"trainer {self.name!r} ended with exit code {code}:\n{self.log()}")
                if time.monotonic() > deadline:
                    raise Stalled(f"trainer {self.name!r} committed nothing for {limit_s:.0f} s:\n{self.log()}")
            return next(at for _, at in self._commits if at > after_s)

    def wait_for_item(self, after_s: float) -> float:
        """Returns the time of the first item that the trainer finished in a replica that was formed after a time.

        Infinity if the run ended before. Raises Stalled if there is none after ``STARTED_AFTER_S``.
        """
        deadline = time.monotonic() + STARTED_AFTER_S
        with self._changed:
            while time.monotonic() < deadline and not self.sha256 and self.process.poll() is None:
                formed = next((at for at in self.formed if at > after_s), float("inf"))
                if finished := [at for at, _ in self._items if at > formed]:
                    return finished[0]
                self._changed.wait(1.0)
        if self.sha256 or not self.process.poll():
            return float("inf")
        raise Stalled(f"trainer {self.name!r} did not compute again:\n{self.log()}")

    def last_item_s(self, start_s: float, stop_s: float) -> float:
        """Returns how long the last of several items in a time span took. 0: the trainer finished at most one."""
        items = [seconds for at, seconds in self._items if start_s < at <= stop_s]
        return items[-1] if len(items) > 1 else 0.0

    def committed_since(self, after_s: float) -> bool:
        """True if the trainer observed a commit after a time."""
        return bool(self._commits) and self._commits[-1][1] > after_s

    def intervals(self) -> list[float]:
        """Returns the times between successive commits."""
        times = [at for _, at in self._commits]
        return [after - before for before, after in itertools.pairwise(times)]

    def finish(self) -> str:
        """Waits for the end of the process. Returns the hash of the weights."""
        if code := self.process.wait(10 * _STALLED_AFTER_S):
            raise Stalled(f"trainer {self.name!r} ended with exit code {code}:\n{self.log()}")
        self._reader.join()
        return self.sha256

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")[-3000:]


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
    """One run under kills of one kind.

    Args:
        arguments: The command line.
        seed: Decides what is killed and when.
        result: Gets the times.
        logs: Folder for the logs of this run.
    """

    def __init__(self, arguments: argparse.Namespace, seed: int, result: Result, logs: Path) -> None:
        self._arguments, self._result, self._seed, self._logs = arguments, result, seed, logs
        self._random = random.Random(seed)
        self._what = "the start"

    def run(self) -> str:
        """Kills processes until few steps are left. Returns the hash of the weights.

        Raises:
            Stalled: The message names the kill after which the run did not go on.
        """
        try:
            return self._run()
        except Stalled as error:
            where = f"run with seed {self._seed}, after {self._what}"
            raise Stalled(f"{where}: {error}\nlogs of all processes: {self._logs}") from error

    def _run(self) -> str:
        steps, options = self._arguments.steps, self._arguments.join_options
        with ExitStack() as stack:
            cluster = stack.enter_context(shardwell.LocalCluster(num_shards=2, log_dir=self._logs))
            coordinator = stack.enter_context(closing(CoordinatorClient(cluster.address)))
            trainers: dict[str, Trainer] = {}

            def start(name: str) -> None:
                trainers[name] = Trainer(cluster.address, name, steps, options, self._logs)
                stack.callback(trainers[name].kill)

            for name in NAMES:
                start(name)
            while True:
                now = time.monotonic()
                ended = max(trainer.wait_for_commit(now, STARTED_AFTER_S) for trainer in trainers.values())
                if not self._result.kind or ended == float("inf"):
                    break
                self._wait_for_backups(coordinator)
                if max(at.step for at in trainers.values()) > steps - 60:
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

    def _wait_for_backups(self, coordinator: CoordinatorClient) -> None:
        """Waits until every shard has the wanted number of backups in sync."""
        wanted = json.loads(self._arguments.join_options).get("backups", 0)
        deadline = time.monotonic() + STARTED_AFTER_S
        while time.monotonic() < deadline:
            try:
                listed = coordinator.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=RUN), timeout_s=10.0)
            except ShardwellError:
                continue
            states = [backup.state for unit in listed.units for backup in unit.backups]
            if states.count(coordinator_pb2.BACKUP_STATE_IN_SYNC) >= wanted * sum(
                len(unit.shards) for unit in listed.units
            ):
                return
            time.sleep(0.1)
        raise Stalled(f"the backups are not in sync after {STARTED_AFTER_S:.0f} s")

    def _kill(self, cluster: shardwell.LocalCluster, trainers: dict[str, Trainer], start: Any) -> None:
        name, kind = self._random.choice(NAMES), self._result.kind
        survivor = next(trainer for trainer in trainers.values() if trainer.name != name)
        shard = self._random.choice(cluster.shards)
        what = {"trainer": f"trainer {name!r}", "coordinator": "the coordinator", "server": shard.name}[kind]
        killed_s = time.monotonic()
        clock = time.strftime("%H:%M:%S")
        self._what = f"kill {len(self._result.recovery_s) + 1}, of {what} in step {survivor.step + 1} at {clock}"
        if kind == "trainer":
            trainers[name].process.kill()
        elif kind == "server":
            os.kill(shard.pid, signal.SIGKILL)  # the cluster starts it again
        else:
            os.kill(cluster.coordinator.pid, signal.SIGKILL)
            cluster.restart_coordinator()
        committed_s = survivor.wait_for_commit(killed_s)
        if committed_s == float("inf"):
            return  # the run ended before
        self._result.recovery_s.append(committed_s - killed_s)
        self._result.item_s.append(survivor.last_item_s(killed_s, committed_s) if kind == "trainer" else 0.0)
        if kind == "trainer":
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
    parser.add_argument("--logs", type=Path, help="folder for logs, kept (default: temporary, kept after a failure)")
    parser.add_argument("--join-options", default="{}", help='options of join as JSON, such as {"backups": 1}')
    arguments = parser.parse_args()
    if arguments.logs:
        Path(arguments.logs).mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="shardwell-recovery-", dir=arguments.logs))
    try:
        measure(arguments, logs)
    except Stalled as error:
        sys.exit(f"FAILED: {error}")
    if arguments.logs is None:
        shutil.rmtree(logs)


def measure(arguments: argparse.Namespace, logs: Path) -> None:
    """Measures all kinds, and prints the table."""

    def new_round(seed: int, result: Result) -> Round:
        folder = logs / f"{result.kind or 'undisturbed'}-{seed}"
        folder.mkdir()
        return Round(arguments, seed, result, folder)

    undisturbed = new_round(arguments.seed, Result(""))
    expected = undisturbed.run()
    print(f"undisturbed: {arguments.steps} steps of {1000 * undisturbed.step_s:.0f} ms", flush=True)
    results = []
    for kind in arguments.kinds:
        results.append(result := Result(kind))
        while len(result.recovery_s) < arguments.kills:
            before = len(result.recovery_s)
            result.equal += new_round(arguments.seed + result.rounds, result).run() == expected
            result.rounds += 1
            times = " ".join(f"{value:.2f}" for value in result.recovery_s[before:])
            print(f"{kind}, run {result.rounds}: {result.equal} equal; recovery times {times} s", flush=True)
    print(report.to_table(HEADER, to_rows(results)))
    if any(result.equal < result.rounds for result in results):
        sys.exit("FAILED: a run ended with other bits than the undisturbed run")


if __name__ == "__main__":
    main()
