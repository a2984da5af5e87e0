"""``make fuzz``: sends random messages to the servers of two clusters, and reports what went wrong.

One cluster admits every caller, so every rpc is reached; the cluster is replaced from time to time, because its runs do
not survive. The other one has a key, and the callers have tokens of other runs only. There, a run trains all the time,
and its weights must have the hash of an undisturbed run. All servers are in this process, under a memory limit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.fuzz.cluster import Findings, FuzzedCluster, fuzzed_cluster, record, train

_BATCH = 2000
_PER_CLUSTER = 25_000
"""Messages after which the cluster that admits every caller is replaced."""

_LIMIT_BYTES = 2 << 30
_STEPS = 50
"""Steps of each run that trains during the attack."""


class Victim:
    """Trains one run after the other, in a thread, and compares their weights.

    Args:
        cluster: The cluster with a key.
    """

    def __init__(self, cluster: FuzzedCluster) -> None:
        self._cluster, self._stopping = cluster, threading.Event()
        self.expected = train(cluster, "undisturbed", steps=_STEPS)
        self.results: list[str] = []
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        while not self._stopping.is_set() and set(self.results) <= {self.expected}:
            run = f"victim-{len(self.results)}"
            try:
                result = train(self._cluster, run, steps=_STEPS, pause_s=0.02)
            except Exception as error:  # every failure of the run is a finding
                result = f"{type(error).__name__}: {error}"
            self.results.append(result)
            self._cluster.delete(run)

    def stop(self) -> list[str]:
        """Ends after the current run; returns what differed."""
        self._stopping.set()
        self._thread.join()
        return [result for result in self.results if result != self.expected]


def main() -> int:
    """Runs the fuzzer; returns 1 if something went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())
    print(f"seed {options.seed}, {options.messages} messages", flush=True)
    with TemporaryDirectory(prefix="shardwell-fuzz-", dir=_fast_folder()) as folder:
        os.chdir(folder)  # a request may name a checkpoint folder
        report = fuzz(Path(folder), random.Random(options.seed), options.messages, options.seconds)
    print(json.dumps(report, indent=2))
    return 1 if report["findings"] or report["runs_that_differ"] else 0


def fuzz(folder: Path, rng: random.Random, count: int, seconds: float) -> dict[str, object]:
    """Sends messages; returns the report."""
    process, start_s, findings, guarded_findings, sent = psutil.Process(), time.monotonic(), Findings(), Findings(), 0
    with fuzzed_cluster(folder / "guarded") as guarded:
        record(guarded, folder / "checkpoints-guarded")
        victim = Victim(guarded)
        before_bytes, number, start_sent = 0, 0, 0
        while sent < count and time.monotonic() - start_s < seconds:
            number += 1
            with ExitStack() as stack:
                opened = stack.enter_context(fuzzed_cluster(folder / f"opened-{number}"))
                record(opened, folder / f"checkpoints-{number}")
                if not before_bytes:
                    before_bytes = process.memory_info().rss
                    _limit_memory()
                while sent - start_sent < _PER_CLUSTER and sent < count and time.monotonic() - start_s < seconds:
                    findings.add(opened.fuzz(rng, opened.values, _BATCH, None))
                    guarded_findings.add(guarded.fuzz(rng, guarded.values, _BATCH // 4, guarded.tokens()))
                    sent = findings.statuses.total() + guarded_findings.statuses.total()
            start_sent = sent
            print(
                f"{sent} messages, {sent / (time.monotonic() - start_s):.0f}/s, {process.memory_info().rss >> 20} MiB, "
                f"{len(findings.bad) + len(guarded_findings.bad)} findings, {len(victim.results)} runs trained",
                flush=True,
            )
        different = victim.stop()
    times = process.cpu_times()
    return {
        "messages": sent,
        "wall_s": round(time.monotonic() - start_s),
        "cpu_s": round(times.user + times.system),
        "statuses_of_admitted_callers": dict(findings.statuses.most_common()),
        "statuses_of_strangers": dict(guarded_findings.statuses.most_common()),
        "findings": findings.bad | guarded_findings.bad,
        "runs_trained": len(victim.results),
        "runs_that_differ": different,
        "rss_before_mib": before_bytes >> 20,
        "rss_after_mib": process.memory_info().rss >> 20,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def _limit_memory() -> None:
    """Lets this process allocate 2 GiB more than now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used_kib = int(next(line.split()[1] for line in lines if line.startswith("VmData")))
    resource.setrlimit(resource.RLIMIT_DATA, ((used_kib << 10) + _LIMIT_BYTES,) * 2)


def _fast_folder() -> str | None:
    """Returns a memory file system, because the coordinator waits for its writes to be durable."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
