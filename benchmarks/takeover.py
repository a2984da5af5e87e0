"""Measures how soon a run commits again after SIGKILL of the coordinator that leads: ``python -m benchmarks.takeover``.

Two coordinators keep their state in a real etcd cluster of three members on loopback. Two trainers run dp=2 on two
shard servers, all with default settings. The leader is killed at random instants, and started again as a stand-by.
Afterwards each member of etcd is killed once, and started again. The takeover time is the time from the kill until the
other coordinator serves, the recovery time that until both trainers have observed another commit. No trainer may fail,
and the weights must have the bits of an undisturbed run. Needs ``etcd`` on PATH.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import shardwell
from benchmarks import report
from benchmarks.recovery import NAMES, STARTED_AFTER_S, Trainer, percentile
from benchmarks.workers import ROOT
from tests.support.etcd import etcd_cluster
from tests.support.ports import reserved_ports

_PAUSE_S = (0.3, 1.0)
"""Shortest and longest time between two kills, while both coordinators run."""
_LIMIT_S = 60.0


class CoordinatorProcess:
    """A coordinator at a fixed port, which leads or stands by.

    Args:
        port: Port on 127.0.0.1.
        options: Further options.
        log: File for its log.
    """

    def __init__(self, port: int, options: Sequence[str], log: Path) -> None:
        self.address, self._options, self._log = f"127.0.0.1:{port}", options, log
        self.start()

    def start(self) -> None:
        self.leads = threading.Event()
        command = [sys.executable, "-m", "shardwell_server", "coordinator", "--listen", self.address, *self._options]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)
        self._reader = threading.Thread(target=self._read, args=(self.process, self.leads), daemon=True)
        self._reader.start()

    @staticmethod
    def _read(process: subprocess.Popen[bytes], leads: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for _ in lines:
                leads.set()

    def wait_standing_by(self) -> None:
        """Returns when the process listens, which it does as a stand-by."""
        deadline = time.monotonic() + _LIMIT_S
        command = [sys.executable, "-m", "shardwell_server", "health", self.address]
        while subprocess.run(command, capture_output=True, check=False, cwd=ROOT).stdout != b"NOT_SERVING\n":
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]

    def kill(self) -> None:
        """Sends SIGKILL. Harmless to repeat."""
        self.process.kill()
        self.process.wait()
        self._reader.join()


def undisturbed(steps: int, logs: Path) -> str:
    """Returns the hash of the weights of a run without kills."""
    with shardwell.LocalCluster(num_shards=2) as cluster:
        trainers = [Trainer(cluster.address, name, steps, "{}", logs) for name in NAMES]
        return {trainer.finish() for trainer in trainers}.pop()


class Run:
    """One run under kills.

    Args:
        arguments: The command line.
        folder: For logs and data.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._random = random.Random(arguments.seed)
        self.takeover_s: list[float] = []
        self.recovery_s: list[float] = []
        self.etcd_s: list[float] = []
        """Times from the kill of a member of etcd to the next commit."""

    def run(self) -> str:
        """Returns the hash of the weights."""
        with ExitStack() as stack:
            members = stack.enter_context(etcd_cluster(self._folder, 3))
            state = f"etcd://{','.join(member.address for member in members)}/shardwell"
            first = stack.enter_context(reserved_ports(2))
            options = ["--state", state, "--min-servers", "2"]
            coordinators = [
                CoordinatorProcess(first + index, options, self._folder / f"coordinator-{index}.log")
                for index in range(2)
            ]
            for each in coordinators:
                stack.callback(each.kill)
            address = ",".join(each.address for each in coordinators)
            for name in ("shard-0", "shard-1"):
                self._start_shard(stack, name, address)
            self._trainers = [Trainer(address, name, self._arguments.steps, "{}", self._folder) for name in NAMES]
            for trainer in self._trainers:
                stack.callback(trainer.kill)
            self._wait_for_commits(time.monotonic(), STARTED_AFTER_S)
            for _ in range(self._arguments.kills):
                self._kill_leader(coordinators)
            for member in members if self._arguments.etcd else ():
                time.sleep(self._random.uniform(*_PAUSE_S))
                killed_s = time.monotonic()
                member.kill()
                self.etcd_s.append(self._wait_for_commits(killed_s) - killed_s)
                member.start()
                member.wait_ready()
                time.sleep(3.0)  # until the member has caught up
            return {trainer.finish() for trainer in self._trainers}.pop()

    def _start_shard(self, stack: ExitStack, name: str, address: str) -> None:
        command = [sys.executable, "-m", "shardwell_server", "shard", "--coordinator", address, "--id", name]
        with (self._folder / f"{name}.log").open("ab") as log:
            command += ["--listen", "127.0.0.1:0", "--memory-budget", "500MiB"]
            shard = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ})
        stack.callback(shard.wait)
        stack.callback(shard.terminate)

    def _kill_leader(self, coordinators: Sequence[CoordinatorProcess]) -> None:
        leader, other = sorted(coordinators, key=lambda each: not each.leads.is_set())
        other.wait_standing_by()
        time.sleep(self._random.uniform(*_PAUSE_S))
        killed_s = time.monotonic()
        leader.kill()
        assert other.leads.wait(_LIMIT_S), f"{other.address} did not take over, see {self._folder}"
        self.takeover_s.append(time.monotonic() - killed_s)
        self.recovery_s.append(self._wait_for_commits(killed_s) - killed_s)
        leader.start()

    def _wait_for_commits(self, after_s: float, limit_s: float = _LIMIT_S) -> float:
        """Returns the time at which the last trainer has observed a commit after a time."""
        found = max(trainer.wait_for_commit(after_s, limit_s) for trainer in self._trainers)
        if found == float("inf"):
            sys.exit("FAILED: the run ended before all kills: pass more --steps")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills of the leader")
    parser.add_argument("--steps", type=int, default=1200, help="steps of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--etcd", action=argparse.BooleanOptionalAction, default=True, help="kill members of etcd, too")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardwell-takeover-"))
    expected = undisturbed(arguments.steps, folder)
    run = Run(arguments, folder)
    found = run.run()
    named = {"takeover": run.takeover_s, "next commit": run.recovery_s, "commit after SIGKILL of etcd": run.etcd_s}
    rows = [
        [name, str(len(values)), *(f"{percentile(values, share):.2f}" for share in (0.5, 0.9, 1.0))]
        for name, values in named.items()
        if values
    ]
    print(report.to_table(("time until", "kills", "p50 s", "p90 s", "most s"), rows))
    print("times to the next commit:", " ".join(f"{value:.2f}" for value in run.recovery_s))
    if found != expected:
        sys.exit(f"FAILED: the run ended with other bits than the undisturbed run, see {folder}")
    print("equal bits")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
