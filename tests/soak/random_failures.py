"""Trains under random failures and compares the final weights with plain PyTorch's, bit for bit.

``python -m tests.soak.random_failures --minutes 10 --seed 1`` repeats rounds until the time is over. A round is one run
of dp=2 with three trainers (one is a spare) on a coordinator and two shard servers. Every second or two it injects one
fault: SIGKILL or SIGSTOP of a trainer, SIGKILL or SIGSTOP of the coordinator, SIGSTOP of a shard server, or (as root,
if iptables is installed) dropped packets between one trainer and one shard server. Trainers that end are restarted.
A round fails if the final weights differ, or if no step is committed for 90 seconds. The seed determines the faults and
their times, but not the instruction at which a fault hits the run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import shardwell
from shardwell.session.coordinator_client import CoordinatorClient
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.processes import ROOT
from tests.support.reference import undisturbed_sha256

RUN = "soak"
LEASE_S = 2.0
STALLED_AFTER_S = 90.0
TRANSPORTS = ("grpc", "socket,grpc", "shm,socket,grpc")
TRAINERS = ("a", "b", "c")
MOST_LASTING = 2


class Trainers:
    """The trainer processes. A trainer that has ended is restarted."""

    def __init__(self, address: str, folder: Path, *arguments: object) -> None:
        self._address, self._folder, self._arguments = address, folder, tuple(map(str, arguments))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start_missing()

    def start_missing(self) -> int:
        """Starts every trainer that does not run; returns the number of started trainers."""
        missing = [name for name in TRAINERS if name not in self.processes or self.processes[name].poll() is not None]
        for name in missing:
            self.processes[name] = self._start(name)
        return len(missing)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.trainer", "--address", self._address, "--run", RUN]
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                [*command, "--dp", "2", "--min-trainers", "2", "--trainer", name, *self._arguments],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def finish(self) -> set[str]:
        """Waits for the end of all trainers; returns the printed hashes."""
        deadline = time.monotonic() + STALLED_AFTER_S
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        lines = [line for name in TRAINERS for line in self.log(name).read_text().splitlines()]
        return {line.split('"sha256": "')[1].split('"')[0] for line in lines if '"sha256": "' in line}

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class Faults:
    """Injects random faults and ends each after its duration."""

    def __init__(self, cluster: shardwell.LocalCluster, trainers: Trainers, rng: random.Random) -> None:
        self._cluster, self._trainers, self._rng = cluster, trainers, rng
        self._lasting: list[tuple[float, Callable[[], None]]] = []
        self._stopped: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[], None]] = {
            "kill trainer": self._kill_trainer,
            "stop trainer": lambda: self._stop(self._any_trainer().pid, longest_s=3 * LEASE_S),
            "kill coordinator": self._kill_coordinator,
            "stop coordinator": lambda: self._stop(self._cluster.coordinator.pid, longest_s=LEASE_S),
            "stop shard server": lambda: self._stop(rng.choice(self._cluster.shards).pid, longest_s=2 * LEASE_S),
        }
        if os.geteuid() == 0 and shutil.which("iptables"):
            self._kinds["cut connection"] = self._cut

    def draw(self) -> None:
        """Injects another random fault, unless enough faults are active."""
        if len(self._lasting) >= MOST_LASTING:
            return
        kind = self._rng.choice(list(self._kinds))
        self._kinds[kind]()
        self.counts[kind] += 1

    def end(self, *, now: float) -> None:
        """Ends the faults whose duration is over."""
        over = [undo for until, undo in self._lasting if until <= now]
        self._lasting = [(until, undo) for until, undo in self._lasting if until > now]
        for undo in over:
            undo()

    def end_all(self) -> None:
        self.end(now=float("inf"))

    def _any_trainer(self) -> subprocess.Popen[bytes]:
        return self._rng.choice(list(self._trainers.processes.values()))

    def _kill_trainer(self) -> None:
        process = self._any_trainer()
        process.kill()
        process.wait()

    def _kill_coordinator(self) -> None:
        if self._cluster.coordinator.pid not in self._stopped:
            self._cluster.restart_coordinator()

    def _stop(self, pid: int, *, longest_s: float) -> None:
        if pid in self._stopped:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped.add(pid)
            self._last(self._rng.uniform(0.2, longest_s), lambda: self._continue(pid))

    def _continue(self, pid: int) -> None:
        self._stopped.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _cut(self) -> None:
        """Drops the packets that one trainer sends to one shard server on its open connections."""
        server = self._rng.choice(self._cluster.shards).pid
        with suppress(psutil.Error):
            ports = {at.laddr.port for at in psutil.Process(server).net_connections("tcp") if at.status == "LISTEN"}
            found = psutil.Process(self._any_trainer().pid).net_connections("tcp")
            pairs = [(at.laddr.port, at.raddr.port) for at in found if at.raddr and at.raddr.port in ports]
            rules = [_rule(*pair) for pair in pairs]
            for rule in rules:
                subprocess.run(["iptables", "-w", "-I", *rule], check=True)
            self._last(self._rng.uniform(0.5, 3 * LEASE_S), lambda: _remove(rules))

    def _last(self, seconds: float, undo: Callable[[], None]) -> None:
        self._lasting.append((time.monotonic() + seconds, undo))


def _rule(source_port: int, destination_port: int) -> list[str]:
    ports = ["--sport", str(source_port), "--dport", str(destination_port)]
    return ["OUTPUT", "-o", "lo", "-p", "tcp", *ports, "-j", "DROP"]


def _remove(rules: list[list[str]]) -> None:
    for rule in rules:
        subprocess.run(["iptables", "-w", "-D", *rule], check=True)


def committed_steps(cluster: shardwell.LocalCluster, former: int) -> int:
    """Returns the run's committed steps, or ``former`` if the coordinator does not answer."""
    client = CoordinatorClient(cluster.address)
    try:
        request: Any = coordinator_pb2.DescribeRunRequest(run=RUN)
        return int(client.call("DescribeRun", request, timeout_s=2.0).summary.committed_step)
    except ShardwellError:
        return former
    finally:
        client.close()


def train_under_faults(
    cluster: shardwell.LocalCluster, trainers: Trainers, faults: Faults, rng: random.Random, *, steps: int
) -> bool:
    """Injects faults until all steps are committed. False if no step was committed for ``STALLED_AFTER_S``."""
    committed, moved_s = 0, time.monotonic()
    while committed < steps:
        time.sleep(rng.uniform(1.0, 4.0))
        before, committed = committed, committed_steps(cluster, committed)
        now = time.monotonic()
        if committed > before:
            moved_s = now
        elif now - moved_s > STALLED_AFTER_S:
            return False
        faults.end(now=now)
        if committed < steps:
            faults.draw()
            trainers.start_missing()
    return True


@contextmanager
def round_folder(keep: Path, name: str) -> Iterator[Path]:
    """Yields a folder for logs. Removes the folder unless the round fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=keep))
    yield folder
    shutil.rmtree(folder)


def run_round(number: int, rng: random.Random, logs: Path, *, steps: int, expected: str) -> None:
    """Trains one run under random faults.

    Raises:
        AssertionError: The weights differ, or the run stalled. The logs are kept.
    """
    transports = rng.choice(TRANSPORTS)
    started = time.monotonic()
    with round_folder(logs, f"round-{number}") as folder, ExitStack() as stack:
        cluster = stack.enter_context(
            shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=LEASE_S, log_dir=folder)
        )
        trainers = Trainers(cluster.address, folder, "--steps", steps, "--transports", transports)
        stack.callback(trainers.kill)
        faults = Faults(cluster, trainers, rng)
        stack.callback(faults.end_all)
        finished = train_under_faults(cluster, trainers, faults, rng, steps=steps)
        faults.end_all()
        counted = ", ".join(f"{count} x {kind}" for kind, count in sorted(faults.counts.items()))
        what = f"round {number} ({transports}; {time.monotonic() - started:.0f} s; {counted}; logs in {folder})"
        assert finished, f"{what}: no step was committed for {STALLED_AFTER_S:.0f} s"
        trainers.start_missing()  # a trainer that was killed at the end reads the final weights
        hashes = trainers.finish()
        assert hashes == {expected}, f"{what}: weights are {hashes}, plain PyTorch's are {expected}"
        print(f"{what}: equal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no further round after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="decides which faults are drawn")
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--logs", type=Path, help="where the logs of failed rounds stay (default: a temporary folder)")
    options = parser.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="shardwell-soak-"))
    logs.mkdir(parents=True, exist_ok=True)
    expected = undisturbed_sha256(dp=2, steps=options.steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no process and no firewall rule behind
    rng, number, failures = random.Random(options.seed), 0, []
    deadline = time.monotonic() + 60 * options.minutes
    while number == 0 or time.monotonic() < deadline:
        try:
            run_round(number, rng, logs, steps=options.steps, expected=expected)
        except AssertionError as error:
            failures.append(str(error))
            print(f"FAILED: {error}", flush=True)
        number += 1
    print(f"{number} rounds, {len(failures)} failed")
    if not failures and options.logs is None:
        shutil.rmtree(logs)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
