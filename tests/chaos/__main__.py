"""``python -m tests.chaos``: trains under faults, and reports goodput, recovery times and the hash of the weights.

The run trains dp=2 with three trainers (one is a spare) on three shard servers, and on two more of one command.
Trainers that do not use the servers' shared memory read weights through a relay. With ``--reduction hierarchical`` no
trainer uses that memory, and the relay also adds their gradients. Faults are injected one after the other, sometimes
two at once. Whatever ends is started again. At the end the weights are compared with plain PyTorch's, bit for bit.

Goodput: the steps committed under faults, times the duration of a step without faults, divided by the time under
faults. The duration without faults is measured in the same run, in blocks of steps before the first fault, after every
20 faults and after the last one, when all processes run. The steps between two blocks are compared with the mean of
both. Everything else that happens under faults counts as loss, such as the processor time of processes that start.

Recovery time: how long a fault kept the run from committing, less the duration of a step (``Timeline.recovery``).
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.cluster import ChaosCluster, Network
from tests.chaos.faults import Faults
from tests.chaos.timeline import InjectedFault, Period, Timeline, summary
from tests.support.long_trainer import Plan
from tests.support.reference import undisturbed_sha256

TRAINERS = {"a": "socket,grpc", "b": "shm,socket,grpc", "c": "grpc"}
DP = 2
STALLED_AFTER_S = 60.0
_STARTED_AFTER_S = 300.0
"""Longest time until all processes run again. Most of it is the import of torch."""
_FAULTS_PER_PERIOD = 20
"""Number of faults between two measurements without faults."""
DOUBLE_FAULT = 0.15
"""Chance that another fault follows at once."""


class Stalled(Exception):
    """No step was committed for ``STALLED_AFTER_S``."""


class ChaosRun:
    """One chaos run.

    Args:
        cluster: The cluster, started.
        options: The options of the command line.
    """

    def __init__(self, cluster: ChaosCluster, options: argparse.Namespace) -> None:
        self._cluster, self._options = cluster, options
        self._rng = random.Random(options.seed)
        self._timeline = Timeline(cluster.folder)
        self.injected: list[InjectedFault] = []
        self._faults = Faults(cluster, self._rng, lease_s=options.lease_s, replaceable_servers=options.backups > 0)
        self._step_s = 0.0
        """Duration of a step in the last block without faults."""
        self._begun_s = 0.0
        self._period_begun_s = 0.0
        self._periods: list[Period] = []

    def run(self) -> bool:
        """Trains under faults; returns whether the weights have the right bits."""
        try:
            self._warm_up()
            self._break_things()
        finally:
            self._faults.end_all()
        return self._finish()

    def _warm_up(self) -> None:
        self._cluster.start_trainers()
        self._wait(lambda: self._timeline.read() >= 5, limit_s=_STARTED_AFTER_S)
        self._step_s = self._measure()
        self._begun_s = self._period_begun_s = time.monotonic()
        self._say(f"a step without faults takes {self._step_s * 1e3:.0f} ms; kinds: {', '.join(self._chosen_kinds())}")

    def _measure(self) -> float:
        """Returns the duration of a step without faults, once all processes run and take part."""
        begun_s = time.monotonic()
        self._wait(lambda: all(last_s > begun_s for last_s in self._last_commits()), limit_s=_STARTED_AFTER_S)
        begun_s, first = time.monotonic(), self._timeline.read()
        self._wait(lambda: self._timeline.read() >= first + self._options.warm_up)
        return self._timeline.step_s(begun_s, time.monotonic())

    def _last_commits(self) -> list[float]:
        """Returns when each trainer last reported a commit."""
        self._timeline.read()
        return [self._timeline.last_by_trainer.get(name, 0.0) for name in TRAINERS]

    def _end_period(self) -> None:
        """Measures the duration of a step again, and records the period under faults before."""
        ended_s = time.monotonic()
        step_s = self._measure()
        self._periods.append(Period(self._period_begun_s, ended_s, (self._step_s + step_s) / 2))
        self._say(f"a step without faults takes {step_s * 1e3:.0f} ms; goodput so far {self._goodput():.1%}")
        self._step_s, self._period_begun_s = step_s, time.monotonic()

    def _goodput(self) -> float:
        return self._timeline.goodput(self._periods)

    def _chosen_kinds(self) -> list[str]:
        wanted = [kind.strip() for kind in self._options.kinds.split(",")] if self._options.kinds else []
        if unknown := [kind for kind in wanted if kind not in self._faults.kinds]:
            raise SystemExit(f"unknown kinds {unknown}: expected some of {list(self._faults.kinds)}")
        return wanted or list(self._faults.kinds)

    def _break_things(self) -> None:
        pause_s, kinds = 60 * self._options.minutes / self._options.faults, self._chosen_kinds()
        left_s, next_block = 60 * self._options.minutes, _FAULTS_PER_PERIOD
        while left_s > 0 and len(self.injected) < self._options.faults:
            now = time.monotonic()
            next_s = now + pause_s * self._rng.uniform(0.6, 1.3)
            self._inject(kinds)
            if self._rng.random() < DOUBLE_FAULT:
                self._inject(kinds)
            self._wait(self._has_recovered)
            self._note_recoveries()
            self._wait(lambda due_s=next_s: time.monotonic() >= due_s)  # type: ignore[misc]
            left_s -= time.monotonic() - now
            if len(self.injected) >= next_block:
                self._end_period()
                next_block += _FAULTS_PER_PERIOD
        self._end_period()

    def _inject(self, kinds: list[str]) -> None:
        for _ in range(10):  # some faults are impossible now
            if (fault := self._faults.kinds[self._rng.choice(kinds)]()) is not None:
                self.injected.append(fault)
                return

    def _has_recovered(self) -> bool:
        """True if no fault lasts, and steps have been committed since."""
        over_s = max(fault.until_s for fault in self.injected)
        return not self._faults.lasting and self._timeline.last_s > over_s + 2 * self._step_s

    def _note_recoveries(self) -> None:
        committed, now = self._timeline.read(), time.monotonic()
        for fault in self.injected:
            if fault.recovery_s is None:
                fault.recovery_s = self._timeline.recovery(fault, now, self._step_s)
                current = Period(self._period_begun_s, now, self._step_s)
                goodput = self._timeline.goodput([*self._periods, current])
                self._say(
                    f"step {committed}  fault {self.injected.index(fault) + 1}/{self._options.faults}: {fault.kind}: "
                    f"{fault.what}: {fault.recovery_s:.2f} s without a commit  (goodput {goodput:.1%})"
                )

    def _wait(self, condition: Callable[[], bool], limit_s: float = STALLED_AFTER_S) -> None:
        """Waits for a condition, ends faults that are over, and starts what has ended."""
        moved_s, committed = time.monotonic(), -1
        while not condition():
            now = time.monotonic()
            self._faults.end(now=now)
            self._cluster.start_servers()
            self._cluster.start_trainers()
            if (found := self._timeline.read()) > committed:
                moved_s, committed = now, found
            elif now - moved_s > limit_s:
                raise Stalled(
                    f"no step was committed for {limit_s:.0f} s after step {committed}: {self._cluster.waits_for()}"
                )
            time.sleep(max(0.0, min(0.02, self._faults.next_end_s - now)))

    def _finish(self) -> bool:
        steps = self._timeline.read() + 20
        Plan(steps, is_final=True).write(self._cluster.plan_file)
        deadline = time.monotonic() + STALLED_AFTER_S
        while self._cluster.trainers and time.monotonic() < deadline:
            for name in [name for name, trainer in self._cluster.trainers.items() if not trainer.alive]:
                self._cluster.collect(name)
            self._timeline.read()
            time.sleep(0.05)
        goodput = self._goodput()
        found = [output for output in self._cluster.outputs if "sha256" in output]
        hashes, counts = {output["sha256"] for output in found}, {output["steps"] for output in found}
        failed = [output for output in self._cluster.outputs if self._is_unexpected(output)]
        self._say(f"training {steps} steps with plain PyTorch")
        expected = undisturbed_sha256(dp=DP, steps=steps)
        print(f"\n{summary(self.injected)}\n")
        print(f"faults {len(self.injected)}, steps {steps}, goodput {goodput:.1%}, {len(found)} trainers finished")
        for output in failed:
            tail = " | ".join(output["stderr"].strip().splitlines()[-3:])
            print(f"FAILED: trainer {output['trainer']} ended with {output['returncode']}: {tail}")
        equal = hashes == {expected} and counts == {steps}
        print(f"weights of the run     {', '.join(sorted(hashes)) or 'unknown'}")
        print(f"of plain PyTorch       {expected}: {'equal' if equal else 'DIFFERENT'}")
        return equal and not failed

    @staticmethod
    def _is_unexpected(output: dict[str, object]) -> bool:
        """True if a trainer ended by itself without finishing."""
        killed = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
        return "sha256" not in output and output["returncode"] not in killed

    def _say(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._begun_s if self._begun_s else 0.0
        print(f"[{elapsed_s:6.1f} s] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__.split(": ", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="duration under faults")
    parser.add_argument("--faults", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="decides kinds, targets and durations")
    parser.add_argument("--kinds", default="", help="comma-separated kinds of faults (default: all that work here)")
    parser.add_argument("--lease-s", type=float, default=2.0, help="lease of trainers and shard servers in seconds")
    parser.add_argument("--batch-s", type=float, default=0.05, help="seconds that each batch sleeps")
    parser.add_argument("--warm-up", type=int, default=100, help="steps of each block without faults")
    parser.add_argument("--backups", type=int, default=1, help="copies of every shard on other servers")
    parser.add_argument(
        "--reduction", default="direct", choices=("direct", "hierarchical"), help="gradient_reduction of the trainers"
    )
    parser.add_argument("--no-namespace", action="store_true", help="no network namespace and no firewall rules")
    parser.add_argument("--logs", type=Path, help="folder for logs, kept (default: temporary, kept after a failure)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardwell-chaos-", dir=options.logs))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no process and no firewall rule behind
    network = Network() if Network.is_available() and not options.no_namespace else None
    join: dict[str, Any] = {"host_cache_bytes": 1 << 30, "gradient_reduction": options.reduction}
    trainers = TRAINERS
    if options.reduction != "direct":  # gradients in memory of a server are not added first
        trainers = {name: transports.removeprefix("shm,") for name, transports in TRAINERS.items()}
    cluster = ChaosCluster(
        folder,
        trainers,
        num_shards=3,
        dp=DP,
        lease_s=options.lease_s,
        batch_s=options.batch_s,
        join=join | ({"backups": options.backups} if options.backups else {}),
        network=network,
    )
    succeeded = False
    try:
        with cluster:
            succeeded = ChaosRun(cluster, options).run()
    except Stalled as error:
        print(f"FAILED: {error}")
    finally:
        if succeeded and options.logs is None:
            shutil.rmtree(folder)
        else:
            print(f"logs: {folder}")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
