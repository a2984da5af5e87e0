"""Measures what a lost member of a replica costs: ``python -m benchmarks.replica_recovery``.

Four trainers run a grid of dp=2 x tp=2 on two shard servers, and a fifth is a spare. A random trainer of the grid is
lost at a random instant, by SIGKILL or by SIGSTOP. Two times are measured from there:

- the next commit, for which the other replica computes the work items of both replicas,
- the first work item that the replica of the lost trainer finishes again. With ``--restart``, there is no spare: the
  lost trainer is started again, which imports torch.

A stopped trainer is killed after that. After the last step, the weights are compared with those of an undisturbed run,
bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import shardwell
from benchmarks import report
from benchmarks.recovery import STARTED_AFTER_S, Stalled, Trainer, percentile
from benchmarks.recovery_trainer import RUN
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2

TP, WORLD_SIZE = 2, 4
_LAST_STEPS = 100
"""No trainer is lost in these steps."""
_PAUSE_S = (0.3, 1.0)
"""Shortest and longest time between two losses, while both replicas compute."""


@dataclass
class Result:
    """What losses of one kind cost."""

    number: signal.Signals
    """What the lost trainer gets."""
    commit_s: list[float] = field(default_factory=list)
    """Time from each loss to the next commit."""
    complete_s: list[float] = field(default_factory=list)
    """Time from each loss to the first work item that the replica finishes again."""
    rounds: int = 0
    equal: int = 0
    """Rounds that ended with the bits of the undisturbed run."""


class Round:
    """One run in which trainers are lost.

    Args:
        arguments: The command line.
        seed: Decides which trainers are lost, and when.
        result: Gets the times. None: no trainer is lost.
        logs: Folder for the logs of this run.
    """

    def __init__(self, arguments: argparse.Namespace, seed: int, result: Result | None, logs: Path) -> None:
        self._arguments, self._result, self._logs = arguments, result, logs
        self._random = random.Random(seed)
        self._names = (f"trainer{number}" for number in itertools.count())
        self._trainers: dict[str, Trainer] = {}
        self._address = ""

    def run(self) -> str:
        """Loses trainers until few steps are left. Returns the hash of the weights."""
        with ExitStack() as stack:
            cluster = stack.enter_context(shardwell.LocalCluster(num_shards=2, log_dir=self._logs))
            coordinator = stack.enter_context(closing(CoordinatorClient(cluster.address)))
            stack.callback(self._kill_all)
            self._address = cluster.address
            for _ in range(WORLD_SIZE):
                self._start(next(self._names))
            for trainer in self._trainers.values():
                trainer.wait_for_commit(0.0, STARTED_AFTER_S)
            if self._result is not None:
                self._lose_trainers(self._result, coordinator)
            hashes = {trainer.finish() for trainer in self._trainers.values() if trainer.step >= 0}
            assert len(hashes) == 1, f"the trainers read different weights: {hashes}"
            return hashes.pop()

    def _lose_trainers(self, result: Result, coordinator: CoordinatorClient) -> None:
        self._wait_until_all_compute(coordinator)
        if not self._arguments.restart:
            self._start(next(self._names))  # the spare
        while self._wait_until_all_compute(coordinator) < self._arguments.steps - _LAST_STEPS:
            time.sleep(self._random.uniform(*_PAUSE_S))
            self._lose(result, read_replicas(coordinator))

    def _start(self, name: str) -> None:
        arguments = (self._address, name, self._arguments.steps, "{}", self._logs)
        self._trainers[name] = Trainer(*arguments, tp=TP)

    def _kill_all(self) -> None:
        for trainer in self._trainers.values():
            trainer.kill()

    def _wait_until_all_compute(self, coordinator: CoordinatorClient) -> int:
        """Waits until spares have joined and all trainers of the grid commit. Returns the step."""
        deadline = time.monotonic() + STARTED_AFTER_S
        request = coordinator_pb2.DescribeRunRequest(run=RUN)
        while not self._trainers.keys() <= {
            at.trainer for at in coordinator.call("DescribeRun", request, timeout_s=10.0).trainers if at.live
        }:
            if time.monotonic() > deadline:
                raise Stalled(f"not all of {list(self._trainers)} joined in {STARTED_AFTER_S:.0f} s")
            time.sleep(0.05)
        now = time.monotonic()
        while sum(trainer.committed_since(now) for trainer in self._trainers.values()) < WORLD_SIZE:
            if time.monotonic() > deadline:
                raise Stalled(f"{WORLD_SIZE} trainers did not compute together for {STARTED_AFTER_S:.0f} s")
            time.sleep(0.05)
        return max(trainer.step for trainer in self._trainers.values())

    def _lose(self, result: Result, replicas: list[list[str]]) -> None:
        """Loses a random trainer of the grid, measures, and replaces the trainer."""
        replica, other = self._random.sample(replicas, 2)
        name, survivor = self._random.sample(replica, 2)
        lost, lost_s = self._trainers.pop(name), time.monotonic()
        os.kill(lost.process.pid, result.number)
        if self._arguments.restart:
            lost.kill()
            self._start(name)
        result.commit_s.append(self._trainers[other[0]].wait_for_commit(lost_s) - lost_s)
        result.complete_s.append(self._trainers[survivor].wait_for_item(lost_s) - lost_s)
        lost.kill()
        if not self._arguments.restart:
            self._start(next(self._names))  # the next spare


def read_replicas(coordinator: CoordinatorClient) -> list[list[str]]:
    """Returns the names of the trainers of each replica."""
    request = coordinator_pb2.DescribeWorldRequest(run=RUN)
    world = coordinator.call("DescribeWorld", request, timeout_s=10.0)
    return [list(replica.trainers) for replica in world.replicas]


def to_row(result: Result, replacement: str) -> list[str]:
    cells = [result.number.name, replacement, str(len(result.commit_s))]
    for values in (result.commit_s, result.complete_s):
        cells += [f"{percentile(values, share):.2f}" for share in (0.5, 0.99, 1.0)]
    return [*cells, f"{result.equal} of {result.rounds}"]


HEADER = ("signal", "replaced by", "count", "commit p50 s", "p99", "most", "item p50 s", "p99", "most", "equal bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", choices=("SIGKILL", "SIGSTOP"), default="SIGKILL", help="how a trainer is lost")
    parser.add_argument("--restart", action="store_true", help="start lost trainers again, without a spare")
    parser.add_argument("--losses", type=int, default=30, help="least number of lost trainers")
    parser.add_argument("--steps", type=int, default=600, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.restart and arguments.signal == "SIGSTOP":
        parser.error("--restart needs --signal SIGKILL: a stopped process is not restarted")
    logs = Path(tempfile.mkdtemp(prefix="shardwell-recovery-"))
    try:
        measure(arguments, logs)
    except Stalled as error:
        sys.exit(f"FAILED: {error}\nlogs of all processes: {logs}")
    shutil.rmtree(logs)


def measure(arguments: argparse.Namespace, logs: Path) -> None:
    """Measures, and prints the table."""

    def run(seed: int, result: Result | None) -> str:
        folder = logs / ("undisturbed" if result is None else str(seed))
        folder.mkdir()
        return Round(arguments, seed, result, folder).run()

    expected = run(arguments.seed, None)
    result = Result(signal.Signals[arguments.signal])
    while len(result.commit_s) < arguments.losses:
        before = len(result.commit_s)
        result.equal += run(arguments.seed + result.rounds, result) == expected
        result.rounds += 1
        for what, values in (("commit", result.commit_s), ("item", result.complete_s)):
            times = " ".join(f"{value:.2f}" for value in values[before:])
            print(f"run {result.rounds}: {result.equal} equal; {what} after {times} s", flush=True)
    replacement = "restarted process" if arguments.restart else "spare"
    print(report.to_table(HEADER, [to_row(result, replacement)]))
    if result.equal < result.rounds:
        sys.exit("FAILED: a run ended with other bits than the undisturbed run")


if __name__ == "__main__":
    main()
